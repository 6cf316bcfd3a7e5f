"""Numbers and lengths of completions, and of those that an engine's end interrupted."""

from dataclasses import dataclass


@dataclass(slots=True)
class CompletionCounts:
    """Numbers and lengths of completions, and of those that an engine's end interrupted."""

    completions: int = 0
    tokens: int = 0
    interrupted: int = 0
    interrupted_tokens: int = 0

    def add(self, num_tokens: int, *, is_interrupted: bool) -> None:
        """Count one completion."""
        self.completions += 1
        self.tokens += num_tokens
        if is_interrupted:
            self.interrupted += 1
            self.interrupted_tokens += num_tokens

    def merge(self, other: "CompletionCounts") -> None:
        """Add the counts of another worker or group."""
        self.completions += other.completions
        self.tokens += other.tokens
        self.interrupted += other.interrupted
        self.interrupted_tokens += other.interrupted_tokens

    @property
    def interrupted_length_ratio(self) -> float:
        """Mean length of interrupted completions over the mean length of all; 0 without any.

        Long completions meet more interruptions, so it is above 1 wherever there are some. If
        interruptions lost tokens, it would say by how much longer than usual the lost work is.
        """
        if not self.interrupted or not self.tokens:
            return 0.0
        return (self.interrupted_tokens / self.interrupted) / (self.tokens / self.completions)
