"""RLRun.spec.weights: how policy versions travel from the trainer to the engines."""

import json
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import Fraction, Model, Rule, number

Stride = Annotated[int, Field(ge=2, le=4_096)]

# The API server fills in defaults before it asks the rules: a field that was not set is told by
# them from one that was set to no effect.
_KEYFRAME_EVERY_STEPS = 100
_STICKY_LAG = 4
_COMMIT_TIMEOUT_S = 30


class WeightSettings(Model):
    """Settings that seldom need a change; the benches were run with the defaults."""

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
        Rule(
            cel="self.skips.all(s, self.skips.exists_one(t, t == s))",
            holds=lambda s: len(set(s.skips)) == len(s.skips),
            message="skips must not repeat a stride",
            fix="name each stride once, for example [8, 64]",
            field_path=".skips",
        ),
        Rule(
            cel=f"self.prefixCache == 'Sticky' || self.stickyLag == {_STICKY_LAG}",
            holds=lambda s: s.prefix_cache == "Sticky" or s.sticky_lag == _STICKY_LAG,
            message="stickyLag has no effect without prefixCache Sticky",
            fix="remove stickyLag, or set prefixCache: Sticky",
            field_path=".stickyLag",
        ),
        Rule(
            cel=f"self.commit == 'Together' || self.commitTimeoutSeconds == {_COMMIT_TIMEOUT_S}",
            holds=lambda s: s.commit == "Together" or s.commit_timeout_seconds == _COMMIT_TIMEOUT_S,
            message="commitTimeoutSeconds has no effect without commit Together",
            fix="remove commitTimeoutSeconds, or set commit: Together",
            field_path=".commitTimeoutSeconds",
        ),
    )

    codec: Literal["Auto", "L1", "L2", "L2r"] = "Auto"
    """How changes are coded: L1 is the fastest, L2r the smallest. Auto takes L1; for engines of one
    GPU it takes L2r while uploads are so slow that it is worth its time."""
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
    commit_timeout_seconds: Annotated[int, Field(ge=1, le=3_600)] = _COMMIT_TIMEOUT_S
    """Longest wait of Together for an engine, within timeoutSeconds; later ones catch up and get no
    requests meanwhile."""
    recompute_kv: bool = False
    """Whether running requests drop their KV cache at a swap and compute it anew."""
    prefix_cache: Literal["Salted", "Sticky", "Reset"] = "Salted"
    """Which requests share cached prefixes: those of one version; those of one episode, up to
    stickyLag versions; all, but none across a swap, where with Reset running requests, too,
    compute their KV cache anew."""
    sticky_lag: Annotated[int, Field(ge=1, le=1_000)] = _STICKY_LAG
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


_DEFAULTS = WeightSettings()


def _of_changes(path: str, read: Callable[["Weights"], object], default: object) -> Rule:
    """One for a setting of how changes travel, of which encoding Full has none."""
    name = path.rpartition(".")[2]
    literal = json.dumps(default).replace('"', "'")
    return Rule(
        cel=f"self.encoding != 'Full' || self.{path} == {literal}",
        holds=lambda s: s.encoding != "Full" or read(s) == default,
        message=f"{name} has no effect with encoding Full: every version is complete",
        fix=f"remove {name}, or set encoding: Auto",
        field_path=f".{path}",
    )


class Weights(Model):
    """Transfer of policy versions from the trainer to the engines."""

    rules: ClassVar[tuple[Rule, ...]] = (
        _of_changes("keyframeEverySteps", lambda s: s.keyframe_every_steps, _KEYFRAME_EVERY_STEPS),
        Rule(
            # L1 is what stored objects say that were written before there was Auto.
            cel="self.encoding != 'Full' || self.advanced.codec in ['Auto', 'L1']",
            holds=lambda s: s.encoding != "Full" or s.advanced.codec in {"Auto", "L1"},
            message="codec has no effect with encoding Full: every version is complete",
            fix="remove codec, or set encoding: Auto",
            field_path=".advanced.codec",
        ),
        _of_changes("advanced.chainRatio", lambda s: s.advanced.chain_ratio, _DEFAULTS.chain_ratio),
        _of_changes("advanced.skips", lambda s: s.advanced.skips, _DEFAULTS.skips),
        _of_changes(
            "advanced.retainKeyframes",
            lambda s: s.advanced.retain_keyframes,
            _DEFAULTS.retain_keyframes,
        ),
        Rule(
            cel="!self.advanced.recomputeKv || self.pause == 'InFlight'",
            holds=lambda s: not s.advanced.recompute_kv or s.pause == "InFlight",
            message="recomputeKv has no effect with pause Drain or Abort: no request is running"
            " when the weights change",
            fix="remove recomputeKv, or set pause: InFlight",
            field_path=".advanced.recomputeKv",
        ),
        Rule(
            cel=f"self.advanced.commitTimeoutSeconds == {_COMMIT_TIMEOUT_S}"
            " || self.advanced.commitTimeoutSeconds <= self.timeoutSeconds",
            holds=lambda s: (
                s.advanced.commit_timeout_seconds == _COMMIT_TIMEOUT_S
                or s.advanced.commit_timeout_seconds <= s.timeout_seconds
            ),
            message="commitTimeoutSeconds must not be above timeoutSeconds, which ends the wait",
            fix="set commitTimeoutSeconds to timeoutSeconds or less",
            field_path=".advanced.commitTimeoutSeconds",
        ),
    )

    dtype: Literal["Float32", "BFloat16"] = "BFloat16"
    """Number format of published versions and of the engines; training keeps fp32 masters."""
    encoding: Literal["Auto", "Delta", "Full"] = "Auto"
    """Auto sends changes, and whole blocks where those are smaller; Delta also refuses engines
    that would have to load a tensor as a whole; Full sends every block of every version."""
    keyframe_every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = _KEYFRAME_EVERY_STEPS
    """Optimiser steps between two complete copies in the store; one version at least."""
    pause: Literal["InFlight", "Drain", "Abort"] = "InFlight"
    """What a swap does to running requests: they go on with the new weights, end first, or are
    handed back as far as they got."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Longest wait for an engine to serve a published version."""
    advanced: WeightSettings = Field(default_factory=WeightSettings)
    """What seldom needs a change."""

    @property
    def versions_per_keyframe(self) -> int:
        """Versions between two complete copies: no more than keyframe_every_steps lead to."""
        return max(1, self.keyframe_every_steps // self.advanced.steps_per_version)
