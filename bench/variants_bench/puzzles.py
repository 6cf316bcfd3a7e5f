"""Tasks that do not fit a context: a colour in one of the first files, an animal in the last.

Every file is eighty words of filler, and all of them are longer than a context. A policy that
cannot sum up has to guess the animal.
"""

from random import Random
from typing import NamedTuple

from etude.agent.tools.compact import ReadFile
from etude.agent.toolsets import ToolLimits, Toolset

PARTS = 6
WORDS = 80
"""Of a file."""
COLOURS = ("red", "blue", "green", "white", "black", "brown", "pink", "grey")
ANIMALS = ("cat", "dog", "cow", "horse", "sheep", "goat", "mouse", "duck")
FILLER = (
    *("road", "river", "hill", "stone", "field", "wall", "gate", "bridge", "tower", "market"),
    *("harbour", "garden", "roof", "window", "door", "table", "chair", "lamp", "paper", "ink"),
    *("rope", "wheel", "cart", "boat", "sail", "wind", "rain", "snow", "cloud", "leaf", "seed"),
)
INSTRUCTION = "Find both."
READER = Toolset(
    name="Reader",
    system_prompt="Tools: read_file(path)",
    native_prompt="",
    tools={"read_file": ReadFile},
    limits=ToolLimits(max_calls=1),
    bad_call="Error: bad call",
)


class Puzzle(NamedTuple):
    """One task."""

    files: dict[str, bytes]
    colour: str
    animal: str

    def score(self, answer: str) -> float:
        """Share of colour and animal that an answer names, and no other of its kind."""
        words = set(answer.replace(".", " ").split())
        right = (words & set(COLOURS) == {self.colour}) + (words & set(ANIMALS) == {self.animal})
        return right / 2


def draw(random: Random) -> Puzzle:
    """Draw a task."""
    colour, animal = random.choice(COLOURS), random.choice(ANIMALS)
    texts = [[random.choice(FILLER) for _ in range(WORDS)] for _ in range(PARTS)]
    _insert(texts[random.randrange(2)], f"colour {colour}", random)
    _insert(texts[PARTS - 1], f"animal {animal}", random)
    files = {f"p{i}": f"p{i}: {' '.join(words)}".encode() for i, words in enumerate(texts)}
    return Puzzle(files, colour, animal)


def _insert(words: list[str], fact: str, random: Random) -> None:
    words.insert(random.randrange(len(words)), fact)
