"""Settings of an engine: parallelism, memory and number formats."""

from typing import Annotated, ClassVar

from pydantic import Field, JsonValue

from etude.common.api.meta import Fraction, Model, Rule


class EngineSettings(Model):
    """Parallelism, memory and numbers of each engine; the defaults are the engine's own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.memoryShare)"
            " || (double(self.memoryShare) > 0.0 && double(self.memoryShare) <= 1.0)",
            holds=lambda s: s.memory_share is None or 0 < float(s.memory_share) <= 1,
            message="memoryShare must be above 0 and at most 1",
            fix='give a share such as "0.9"',
            field_path=".memoryShare",
        ),
    )

    tensor_parallel: Annotated[int, Field(ge=1, le=64)] | None = None
    """GPUs that share every layer; all that the other two leave, unless set."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Groups of layers, each on GPUs of its own."""
    data_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Copies of the attention layers behind one address, for mixtures of experts; dense models
    take more replicas instead."""
    expert_parallel: bool = False
    """True spreads whole experts over the GPUs instead of cutting each."""
    memory_share: Fraction | None = None
    """Share of each GPU's memory for weights and KV cache, above 0 and at most 1."""
    kv_cache_dtype: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Number format of the KV cache in vLLM's words, for example fp8."""
    max_batched_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 4_096
    """Tokens of one forward pass, of all requests together."""
    quantization: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Method of quantisation in vLLM's words. One that repacks the weights is refused when the
    engine starts, as policy versions could not be written into them."""
    speculative_tokens: Annotated[int, Field(ge=0, le=1)] = 0
    """Tokens that the model's head of multi-token prediction guesses ahead; 0 turns it off. Sampled
    tokens have the same distribution. A model without a head is refused when the engine starts."""
    engine_args: Annotated[dict[str, JsonValue], Field(max_length=64)] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs by name, checked when the engine starts."""

    @property
    def other_ranks(self) -> int:
        """GPUs for each that shares a layer."""
        return self.pipeline_parallel * self.data_parallel

    def uses_gpus(self, gpus: int) -> bool:
        """True if ranks use every GPU of a pod; an engine on the CPU has one rank."""
        present = max(1, gpus)
        if self.tensor_parallel is None:
            return present % self.other_ranks == 0
        return present == self.tensor_parallel * self.other_ranks
