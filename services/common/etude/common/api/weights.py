"""RLRun.spec.weights: how policy versions travel from the trainer to the engines."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import Fraction, Model, Rule, number

Stride = Annotated[int, Field(ge=2, le=4_096)]


class WeightSettings(Model):
    """What seldom needs a change; the defaults are what the benches were run with."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="double(self.chainRatio) > 0.0",
            holds=lambda s: number(s.chain_ratio) > 0,
            message="chainRatio must be above 0: at 0 every version would need a keyframe",
            fix='give a share of a keyframe\'s size, for example "0.5"',
            field_path=".chainRatio",
        ),
        Rule(
            cel="self.skips.all(s, s in [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096])",
            holds=lambda s: all(stride & (stride - 1) == 0 for stride in s.skips),
            message="skips must be powers of two, so that one stride divides the next",
            fix="for example [8, 64]",
            field_path=".skips",
        ),
        Rule(
            cel="!self.recomputeKv || self.prefixCache != 'Sticky'",
            holds=lambda s: not (s.recompute_kv and s.prefix_cache == "Sticky"),
            message="recomputeKv drops at each version what prefixCache Sticky keeps over versions",
            fix="set prefixCache: Salted, or recomputeKv: false",
            field_path=".recomputeKv",
        ),
    )

    codec: Literal["L1", "L2", "L2r"] = "L1"
    """How changes are coded: L1 is the fastest, L2r the smallest, worth its time on slow links."""
    tile_grid: Literal[1, 2, 4, 8, 16] = 8
    """Largest tensor-parallel degree whose ranks fetch only their own slice."""
    steps_per_version: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Optimiser steps from one published version to the next."""
    allow_non_finite: bool = False
    """Whether a version with NaN or infinite weights is published."""
    chain_ratio: Fraction = "0.5"
    """A keyframe is also due when the deltas since the last one exceed this share of its size."""
    skips: Annotated[tuple[Stride, ...], Field(max_length=8)] = (8, 64)
    """Strides of folded deltas, for engines that join late or were away."""
    commit: Literal["AsReady", "Together"] = "AsReady"
    """Whether an engine swaps as soon as it is prepared, or all of them at once."""
    commit_timeout_seconds: Annotated[int, Field(ge=1, le=3_600)] = 30
    """Longest wait of Together for an engine; later ones catch up and get no requests meanwhile."""
    recompute_kv: bool = False
    """Whether running requests drop their KV cache at a swap and compute it anew."""
    prefix_cache: Literal["Salted", "Sticky", "Reset"] = "Salted"
    """Which requests share cached prefixes: those of one version; those of one episode, up to
    stickyLag versions; all, but none across a swap."""
    sticky_lag: Annotated[int, Field(ge=1, le=1_000)] = 4
    """Versions after which an episode's cached prefixes are given up."""
    backlog: Annotated[int, Field(ge=0, le=8)] = 2
    """Encoded versions that may be on their way to the store and the engines while the trainer
    goes on with its next steps; 0 waits for each, as Sync always does."""
    undo_depth: Annotated[int, Field(ge=1, le=64)] = 1
    """Versions that an engine can take back without reading the store."""
    audit_every: Annotated[int, Field(ge=1, le=1_000_000)] = 50
    """Versions between two full scans of an engine's live weights."""
    retain_keyframes: Annotated[int, Field(ge=1, le=1_000)] = 2
    """Newest keyframes that are kept."""
    retain_versions: Annotated[int, Field(ge=2, le=100_000)] = 200
    """Newest versions that are kept, beside all that checkpoints and engines need."""


class Weights(Model):
    """How policy versions travel from the trainer to the engines."""

    dtype: Literal["Float32", "BFloat16"] = "BFloat16"
    """Number format of published versions and of the engines; training keeps fp32 masters."""
    encoding: Literal["Auto", "Delta", "Full"] = "Auto"
    """Auto sends changes, and whole blocks where those are smaller; Delta also refuses engines
    that would have to load a tensor as a whole; Full sends every block of every version."""
    keyframe_every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Versions between two complete copies in the store."""
    pause: Literal["InFlight", "Drain", "Abort"] = "InFlight"
    """What a swap does to running requests: they go on with the new weights, end first, or are
    handed back as far as they got."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Longest wait for an engine to serve a published version."""
    advanced: WeightSettings = Field(default_factory=WeightSettings)
    """What seldom needs a change."""
