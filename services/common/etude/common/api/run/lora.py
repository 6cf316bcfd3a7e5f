"""Low-rank adapters (LoRA): what a run trains instead of all weights."""

from typing import Annotated

from pydantic import Field

from etude.common.api.meta import Model


class Lora(Model):
    """Low-rank adapters of linear layers, which alone are trained.

    Source: LoRA: Low-Rank Adaptation of Large Language Models, https://arxiv.org/abs/2106.09685.
    """

    rank: Annotated[int, Field(ge=1, le=1_024)] = 16
    """Rank of each adapter's product B A."""
    alpha: Annotated[int, Field(ge=1, le=65_536)] = 32
    """The product is scaled by alpha / rank."""
    target_modules: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=64)
    ] = ()
    """Layers with an adapter, by the ends of their names, for example q_proj or mlp.down_proj; all
    linear layers of the blocks unless given."""

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank
