"""Parameters of the algorithms, as phases[].algorithm of a run gives them."""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, core_schema
from typing_extensions import override

from etude.common.api.meta import Model


class Between:
    """A number or its decimal text within a range, which a refusal names."""

    def __init__(self, low: float, high: float, *, or_zero: bool = False) -> None:
        self.low, self.high, self.or_zero = low, high, or_zero

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        low = 0 if self.or_zero else self.low
        return {"type": "number", "minimum": low, "maximum": self.high}

    def _checked(self, value: object) -> float:
        number = math.nan
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):  # refused below, with the range
                number = float(value)
        if self.low <= number <= self.high or (self.or_zero and number == 0):
            return number
        zero = "0 or " if self.or_zero else ""
        raise ValueError(f"{value!r} is not {zero}a number from {self.low:g} to {self.high:g}")


ClipLow = Annotated[float, Between(1e-4, 1)]
ClipHigh = Annotated[float, Between(1e-4, 1e3)]
LossScale = Annotated[float, Between(1e-3, 1e7)]
Bound = Annotated[float, Between(1e-3, 1e3)]
UpdatesPerBatch = Annotated[int, Field(ge=1, le=64)]
Temperature = Annotated[float, Between(1e-2, 1e2)]


NO_KL_LOSS = (
    "a divergence is subtracted from the reward and never a loss of its own: as a loss k1 has a"
    " gradient of mean 0, and k3 one of wrong size and direction"
)
"""Why there is no parameter for it; bench/oracles.py enumerates both."""


def _check_credit(value: object) -> object:
    if isinstance(value, str) and value not in get_args(KLCredit):
        raise ValueError(f"{value!r} is not {' or '.join(get_args(KLCredit))}: {NO_KL_LOSS}")
    return value


KLCredit = Literal["Token", "Sequence"]


class Correction(Model):
    """Correction of tokens that older weights, or other arithmetic, sampled.

    rho is exp(trainer - sampler log-prob), with the trainer's weights before the batch's updates.
    """

    kind: Literal["None", "TIS", "IcePop", "SequenceMaskTIS"] = "None"
    """None takes the importance ratio to the sampler itself, so that the clip bounds it. TIS
    multiplies by min(rho, high); IcePop by rho within [low, high], and by 0 elsewhere.
    SequenceMaskTIS multiplies by rho where the rollout's geometric mean of rho is within [low,
    high], and all of the rollout's other tokens by 0."""
    low: Bound | None = None
    """Lower bound, for IcePop and SequenceMaskTIS."""
    high: Bound | None = None
    """Upper bound, for every kind but None."""

    @model_validator(mode="after")
    def _bounds_fit_kind(self) -> Self:
        needed = {"None": (), "TIS": ("high",)}.get(self.kind, ("low", "high"))
        for name, value in (("low", self.low), ("high", self.high)):
            if (value is not None) != (name in needed):
                verb = "needs" if name in needed else "ignores"
                raise ValueError(f"kind {self.kind} {verb} {name}")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        return self


class AlgorithmParameters(Model):
    """Parameters of every algorithm."""

    trust_region: ClassVar[tuple[str, ...]] = ()
    """Fields that bound the importance ratio, or what a token counts by it."""

    updates_per_batch: UpdatesPerBatch = 1
    """Updates from the groups of one step, each from an equal share of them; one version comes of
    all. With more than 1, log-probs are computed once more before the first update."""
    kl_coefficient: Annotated[float, Between(1e-9, 10, or_zero=True)] = 0.0
    """Weight of the divergence from the weights at the start of the phase, which is subtracted
    from rewards or advantages, as klCredit says."""
    kl_credit: Annotated[KLCredit, BeforeValidator(_check_credit)] = "Token"
    """Token subtracts the log-ratio of each token from the token's own advantage, which has the
    gradient of the divergence at each state. Sequence subtracts the sum over a rollout from its
    reward, before the group mean: the gradient of the divergence of whole rollouts, with a variance
    that grows with their length."""
    kl_limit: Annotated[float, Between(1e-6, 1e2)] | None = None
    """Largest mean divergence of the policy from the sampler over the tokens of an update, in nats
    a token. An update beyond it is not applied. None unless set."""
    on_kl_limit: Literal["Skip", "Stop"] = "Skip"
    """An update beyond klLimit: Skip leaves it out, and the run goes on with the next; Stop ends
    the run. The weights stay in both."""
    opsm_delta: Annotated[float, Between(1e-4, 1e2)] | None = None
    """Off-policy sequence mask: a rollout of negative advantage is left out if its tokens are less
    likely by more than this, in nats on average, than where they were sampled. None unless set."""
    log_ratio_penalty: Annotated[float, Between(1e-9, 10, or_zero=True)] = 0.0
    """Weight of the squared log-ratio of trainer and sampler, which is added to the loss of each
    trained token."""
    group_filter: Literal["None", "NonZeroAdvantage"] = "NonZeroAdvantage"
    """NonZeroAdvantage leaves groups of equal rewards out of the update, but not out of any total;
    with klCoefficient, their divergence is not counted."""
    filtered_sample_tokens: Annotated[int, Field(ge=1, le=1_000_000_000)] = 2_048
    """Tokens of filtered rollouts that each step scores without a gradient, so that figures and
    the mismatch guard cover them too. Whole rollouts are drawn until they have so many tokens; a
    large number scores all of them."""

    @model_validator(mode="after")
    def _sample_has_effect(self) -> Self:
        if "filtered_sample_tokens" in self.model_fields_set and self.group_filter == "None":
            raise ValueError("filteredSampleTokens is ignored with groupFilter None")
        return self

    @model_validator(mode="after")
    def _limit_has_effect(self) -> Self:
        if "on_kl_limit" in self.model_fields_set and self.kl_limit is None:
            raise ValueError("onKlLimit is ignored without klLimit")
        return self

    @model_validator(mode="after")
    def _credit_has_effect(self) -> Self:
        if "kl_credit" in self.model_fields_set and not self.kl_coefficient:
            raise ValueError("klCredit is ignored with klCoefficient 0")
        return self

    @property
    def token_correction(self) -> Correction:
        """Correction of each token; None where the algorithm has a weight of its own."""
        return Correction()


class CorrectedParameters(AlgorithmParameters):
    """Parameters of algorithms whose tokens may be corrected."""

    correction: Correction = Field(default_factory=Correction)
    """What to do about tokens that older weights sampled. Unless it is set, a phase whose
    maxStalenessVersions is above 0 has kind TIS with high 2; with updatesPerBatch 1, one that
    gives a clip or temperature keeps that instead."""

    @property
    @override
    def token_correction(self) -> Correction:
        return self.correction

    @model_validator(mode="after")
    def _trust_region_has_effect(self) -> Self:
        given = self.model_fields_set & set(self.trust_region)
        if given and self.correction.kind != "None" and self.updates_per_batch == 1:
            names = " and ".join(to_camel(name) for name in self.trust_region)
            raise ValueError(
                f"{names} {_verb(self.trust_region)} ignored with correction"
                f" {self.correction.kind}: with one update per batch the ratio to the trainer's own"
                " weights is 1"
            )
        return self


def _verb(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


class _Clipped(CorrectedParameters):
    trust_region: ClassVar = ("clip_low", "clip_high")


class DrGRPOParameters(_Clipped):
    """Advantage R - group mean; clipped ratio; constant denominator."""

    clip_low: ClipLow = 0.2
    """The importance ratio is clipped below 1 - clipLow."""
    clip_high: ClipHigh = 0.28
    """The importance ratio is clipped above 1 + clipHigh."""
    loss_scale: LossScale | None = None
    """What the summed loss of a rollout is divided by. Unless set, the most tokens that a rollout
    may train: the smaller of rollout.maxTokens and maxTurns times maxTurnTokens."""


class GRPOParameters(_Clipped):
    """Advantage (R - group mean) / standard deviation; clipped ratio; mean over rollouts."""

    clip_low: ClipLow = 0.2
    """The importance ratio is clipped below 1 - clipLow."""
    clip_high: ClipHigh = 0.2
    """The importance ratio is clipped above 1 + clipHigh."""


class RLOOParameters(CorrectedParameters):
    """Advantage R - mean of the siblings; plain policy gradient; constant denominator."""

    loss_scale: LossScale | None = None
    """What the summed loss of a rollout is divided by. Unless set, the most tokens that a rollout
    may train: the smaller of rollout.maxTokens and maxTurns times maxTurnTokens."""


class PPOParameters(_Clipped):
    """PPO without a critic: advantage R - group mean; clipped ratio; mean over tokens."""

    clip_low: ClipLow = 0.2
    """The importance ratio is clipped below 1 - clipLow."""
    clip_high: ClipHigh = 0.2
    """The importance ratio is clipped above 1 + clipHigh."""


class DAPOParameters(_Clipped):
    """Advantage (R - group mean) / standard deviation; clipped ratio; mean over tokens."""

    clip_low: ClipLow = 0.2
    """The importance ratio is clipped below 1 - clipLow."""
    clip_high: ClipHigh = 0.28
    """The importance ratio is clipped above 1 + clipHigh."""


class GSPOParameters(_Clipped):
    """Advantage R - group mean; one clipped ratio for a whole rollout; mean over rollouts."""

    updates_per_batch: UpdatesPerBatch = 4
    """Updates from the groups of one step, each from an equal share of them; one version comes of
    all. With more than 1, log-probs are computed once more before the first update."""
    clip_low: ClipLow = 3e-4
    """The ratio of the rollout, a geometric mean over its tokens, is clipped below 1 - clipLow."""
    clip_high: ClipHigh = 4e-4
    """The ratio of the rollout is clipped above 1 + clipHigh."""


class CISPOParameters(CorrectedParameters):
    """Advantage R - group mean; capped ratio as a constant, so that no token loses its gradient."""

    trust_region: ClassVar = ("clip_high",)

    clip_high: ClipHigh = 0.28
    """The importance ratio is capped at 1 + clipHigh."""


class SAPOParameters(CorrectedParameters):
    """Advantage R - group mean; a sigmoid of the ratio instead of a clip; mean over rollouts."""

    trust_region: ClassVar = ("temperature_positive", "temperature_negative")

    temperature_positive: Temperature = 1.0
    """Steepness of the sigmoid for advantages above 0."""
    temperature_negative: Temperature = 1.05
    """Steepness for others: the larger, the sooner a token loses its gradient."""


class DPPOParameters(AlgorithmParameters):
    """Advantage R - group mean; tokens whose probability moved too far are left out.

    The ratio is to the sampler: there is no correction.
    """

    divergence: Annotated[float, Between(1e-4, 1)] = 0.2
    """Largest change of the probability of a sampled token, from sampler to trainer, in the
    direction of its advantage."""


class DecoupledPPOParameters(AlgorithmParameters):
    """PPO whose clip is about the weights before the batch, corrected for the sampler's.

    There is no other correction.
    """

    updates_per_batch: UpdatesPerBatch = 4
    """Updates from the groups of one step, each from an equal share of them; one version comes of
    all. With more than 1, log-probs are computed once more before the first update."""
    clip_low: ClipLow = 0.2
    """The importance ratio is clipped below 1 - clipLow."""
    clip_high: ClipHigh = 0.2
    """The importance ratio is clipped above 1 + clipHigh."""

    @model_validator(mode="after")
    def _clip_has_effect(self) -> Self:
        if self.model_fields_set & {"clip_low", "clip_high"} and self.updates_per_batch == 1:
            raise ValueError(
                "clipLow and clipHigh are ignored with updatesPerBatch 1: the ratio to the"
                " trainer's own weights is 1"
            )
        return self


PARAMETERS: Mapping[str, type[AlgorithmParameters]] = MappingProxyType(
    {
        "DrGRPO": DrGRPOParameters,
        "GRPO": GRPOParameters,
        "RLOO": RLOOParameters,
        "PPO": PPOParameters,
        "DAPO": DAPOParameters,
        "GSPO": GSPOParameters,
        "CISPO": CISPOParameters,
        "DPPO": DPPOParameters,
        "SAPO": SAPOParameters,
        "DecoupledPPO": DecoupledPPOParameters,
    }
)
"""Model of each algorithm's parameters, by the algorithm's name in a manifest."""


def check_algorithm(
    name: str, parameters: Mapping[str, JsonValue], *, prompts_per_step: int | None = None
) -> AlgorithmParameters:
    """The parameters as their model, defaults filled in.

    Args:
        name: of the algorithm.
        parameters: as the phase gives them.
        prompts_per_step: groups that the updates of a step share, if it is made of groups.

    Raises:
        ValueError: no such algorithm, or parameters that it does not have, ignores or does not
            accept; the message names them all, and the range of each.
    """
    model = PARAMETERS.get(name)
    if model is None:
        raise ValueError(f"algorithm.name: {name!r} is not one of {', '.join(PARAMETERS)}")
    try:
        checked = model.model_validate(dict(parameters))
    except ValidationError as cause:
        known = [field.alias or key for key, field in model.model_fields.items()]
        found = "; ".join(_sentence(name, known, error) for error in cause.errors())
        raise ValueError(found) from cause
    given, most = checked.model_fields_set, prompts_per_step
    if most is not None and "updates_per_batch" in given and checked.updates_per_batch > most:
        raise ValueError(
            f"algorithm.parameters.updatesPerBatch: {checked.updates_per_batch} updates cannot"
            f" share {most} groups; promptsPerStep must be as large"
        )
    return checked


def _sentence(name: str, known: Iterable[str], error: ErrorDetails) -> str:
    path = ".".join(("algorithm.parameters", *(str(part) for part in error["loc"])))
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        reason = f" ({NO_KL_LOSS})" if str(error["loc"][0]).lower().startswith("kl") else ""
        return f"{path}: {name} has no such parameter{reason}; it has {', '.join(known)}"
    return f"{path}: {error['msg'].removeprefix('Value error, ')}"
