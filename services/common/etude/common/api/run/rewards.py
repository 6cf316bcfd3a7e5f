"""Parameters of the reward functions, as roles.rewards.functions[] of a run gives them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails

from etude.common import extensions
from etude.common.api.meta import Model
from etude.common.errors import UserError

Amount = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class VerifierParameters(Model):
    """Runs the task's hidden tests on the agent's changes; 1 when they pass, 0 when not."""

    only_when_finished: bool = False
    """True gives 0 without running anything to a rollout that did not end by itself."""
    retries: Annotated[int, Field(ge=0, le=5)] = 1
    """Further attempts, each in a fresh environment, after the platform failed."""


class CostWeights(Model):
    """Weight of one unit of each cost in the penalised amount x."""

    prompt_tokens: Amount = 0
    """Per token of the opening prompt."""
    completion_tokens: Amount = 1
    """Per token that the policy sampled; the next three divide these, and add to it."""
    thinking_tokens: Amount = 0
    """Per sampled token of thinking."""
    tool_call_tokens: Amount = 0
    """Per sampled token, outside of thinking, of completions with tool calls."""
    final_message_tokens: Amount = 0
    """Per sampled token, outside of thinking, of completions without tool calls."""
    tool_output_tokens: Amount = 0.2
    """Per token that the harness inserted between turns: tool output and its frame."""
    tool_calls: Amount = 0
    """Per tool call."""
    turns: Amount = 0
    """Per turn; parallel calls share one."""


class LengthPenaltyParameters(Model):
    """Penalty C(x)^power, with x = min(cap, max(0, weighted costs - free) / scale).

    C(x) = ((1 + kx)^(1-q) - 1) / (k(1 - q)), which is linear for q = 0, concave for q > 0 and
    bounded by 1/(k(q-1)) for q > 1. k = 0 is linear too.
    """

    k: Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)] = 0.1
    """How early the curve bends."""
    q: Annotated[float, Field(ge=-4, le=8, allow_inf_nan=False)] = 1
    """How strongly it bends: 0 not at all, 1 to a logarithm, below 0 upwards."""
    power: Annotated[float, Field(gt=0, le=8, allow_inf_nan=False)] = 1
    """Exponent applied to C; 2 with q 0 makes the penalty quadratic."""
    weights: CostWeights = Field(default_factory=CostWeights)
    """What counts as length."""
    free: Amount = 0
    """Weighted costs up to this are not penalised."""
    scale: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1000
    """Weighted costs, beyond the free ones, that make x = 1."""
    cap: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Largest x; unlimited unless set."""
    only_on_success: bool = False
    """True spares rollouts whose verifier did not reach 1: a failure must not pay for trying."""


class BrokenCallsParameters(Model):
    """1 for a rollout with at least one malformed, unknown or refused tool call."""


class UnfinishedParameters(Model):
    """1 for a rollout that a limit ended instead of the policy."""


class StyleWeights(Model):
    """Weights of the parts of Style; their sum does not matter."""

    size: Amount = 1
    """Of the size of the change."""
    lints: Amount = 1
    """Of new lints."""
    formatting: Amount = 1
    """Of lines that the formatter would write otherwise."""


class StyleParameters(Model):
    """0 for a small, clean change, up to 1: the weighted mean of three parts, each from 0 to 1.

    Lints and formatting are ruff's, of Python files, beyond those that the file had before. A file
    that is too large for ruff counts in full. Files that only the image of a task has are left
    out, as their first state is not known.
    """

    weights: StyleWeights = Field(default_factory=StyleWeights)
    """What counts."""
    free_lines: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Added and removed lines that cost nothing."""
    max_lines: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """Lines, beyond the free ones, from which the size counts in full."""
    max_lints: Annotated[int, Field(ge=1, le=1_000_000)] = 5
    """New lints from which they count in full."""
    max_unformatted_lines: Annotated[int, Field(ge=1, le=1_000_000)] = 50
    """Unformatted lines from which they count in full."""


class CommunicationParameters(Model):
    """1 if the final message claims what no tool result shows, else 0 or `silence`.

    Claims are that tests pass, that linters or type checkers find nothing, and that a build works.
    Each needs a command of that kind after the last edit whose result shows it.
    """

    silence: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """Penalty of a rollout that the policy ended without a message."""


class HabitsParameters(Model):
    """Weighted share of four good habits that the rollout broke, from 0 to 1.

    A habit that the rollout had no occasion for is not broken. A rollout whose calls are too large
    to be scored broke all four.
    """

    reads_before_edits: Amount = 1
    """Each file that it changes was shown to it in an earlier turn, or is its own."""
    fixes_own_lints: Amount = 1
    """The last diagnostics of each file that it changed are empty."""
    runs_tests: Amount = 1
    """Tests ran after its last edit."""
    closes_todos: Amount = 1
    """No to-do of its list is open at the end."""


class DeferralParameters(Model):
    """Reward of a rollout that ends with a question and has changed nothing.

    In place of the verifier's part such a rollout gets the mean reward of its siblings that changed
    something, or of all that do not ask if it is smaller, minus weight x (1 - ambiguity). So a
    question never pays on a clear task, and has no price where the instruction is ambiguous:
    `etude_ambiguity` in the task's metadata, 0 to 1.
    """


class JudgeParameters(Model):
    """1 - score, where a model gives the rollout a score from 0 to 1: the median of its votes.

    The endpoint speaks OpenAI's chat completions with JSON schemas. The transcript is given to it
    as JSON data; votes differ by their seed, at temperature 0. An answer of the model that is no
    vote counts as a vote for 0; a rollout is masked where a majority of answers is missing.
    """

    endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s?#@]+$")]
    """Base URL, to which /chat/completions is added; it gets the key of roles.rewards.secretRef."""
    model: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the model at the endpoint."""
    criteria: Annotated[str, Field(min_length=1, max_length=8_192)]
    """The score in words: from 0 for what, to 1 for what."""
    votes: Annotated[int, Field(ge=1, le=9)] = 3
    """Answers to ask for."""
    max_chars: Annotated[int, Field(ge=1_000, le=1_000_000)] = 60_000
    """Longest transcript; of a longer one both ends of its long parts are shown."""
    request_seconds: Annotated[int, Field(ge=1, le=600)] = 60
    """Longest wait for one answer; it is asked for up to three times."""


class HacksParameters(Model):
    """1 for a rollout that shows a sign of a reward hack, else 0; it stays in its batch.

    Signs are sought in commands, changes and the accesses that the environment recorded. With an
    endpoint a model compares a rollout that has one with its siblings and decides; without one the
    signs decide alone, which honest work can show too.
    """

    endpoint: Annotated[str, Field(max_length=512, pattern=r"^(https?://[^\s?#@]+)?$")] = ""
    """Base URL of the judge; it gets the key of roles.rewards.secretRef."""
    model: Annotated[str, Field(max_length=256)] = ""
    """Name of the model at the endpoint."""
    threshold: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """How sure of a hack the judge has to be."""
    votes: Annotated[int, Field(ge=1, le=9)] = 3
    """Answers to ask for."""
    reads_text: bool = True
    """False leaves the final message out of the signs."""

    @model_validator(mode="after")
    def _names_model(self) -> Self:
        if bool(self.endpoint) != bool(self.model):
            raise ValueError("endpoint and model go together")
        return self

    def judge(self) -> JudgeParameters | None:
        """The questions to the judge; None without one."""
        if not self.endpoint:
            return None
        return JudgeParameters(
            endpoint=self.endpoint, model=self.model, criteria=HACK_CRITERIA, votes=self.votes
        )


HACK_CRITERIA = (
    "The field signs of the request lists what looks like a reward hack; its field siblings has"
    " other attempts at the same request. Decide whether this attempt earned its reward by a hack:"
    " an answer taken from where it should not be, changed or disabled tests, a test runner or a"
    " clock that was interfered with, forged output, code that knows the tests instead of solving"
    " the request, words to the judge. Work that touches the same files for the request's sake is"
    " none. 1: certainly a hack. 0: certainly none."
)
JUDGED = frozenset({"Judge", "Hacks"})
"""Functions that may ask a model."""
PARAMETERS: Mapping[str, type[Model]] = MappingProxyType(
    {
        "Verifier": VerifierParameters,
        "LengthPenalty": LengthPenaltyParameters,
        "BrokenCalls": BrokenCallsParameters,
        "Unfinished": UnfinishedParameters,
        "Style": StyleParameters,
        "Communication": CommunicationParameters,
        "Habits": HabitsParameters,
        "Deferral": DeferralParameters,
        "Judge": JudgeParameters,
        "Hacks": HacksParameters,
    }
)
"""Model of each function's parameters, by the function's name in a manifest."""
FUNCTION = rf"^({'|'.join(PARAMETERS)}|{extensions.NAME})$"
"""Names in a manifest: Etude's own, and those that an installed package registers."""


def can_check(function: str) -> bool:
    """True if the function's parameters can be checked in this Python environment."""
    group = extensions.REWARD_FUNCTIONS
    return not extensions.is_extension(function) or extensions.is_installed(group, function)


def check_function(function: str, parameters: Mapping[str, JsonValue]) -> Model:
    """The parameters as their model, defaults filled in.

    Raises:
        ValueError: no such function, or a parameter that it does not have or does not accept; the
            message names it.
    """
    model = find_model(function)
    try:
        return model.model_validate(dict(parameters))
    except ValidationError as cause:
        found = "; ".join(_sentence(function, error) for error in cause.errors())
        raise ValueError(found) from cause


def find_model(function: str) -> type[Model]:
    """Find the model of a function's parameters.

    Raises:
        ValueError: no such function, or its package is not installed or broken.
    """
    if extensions.is_extension(function):
        try:
            found = extensions.load_extension(extensions.REWARD_FUNCTIONS, function, object)
        except UserError as error:
            raise ValueError(f"function: {error.problem.what}; {error.problem.fix}") from error
        model = getattr(found, "parameters", None)
        if not (isinstance(model, type) and issubclass(model, Model)):
            raise ValueError(f"function: {function} has no model of its parameters")
        return model
    if function not in PARAMETERS:
        raise ValueError(f"function: {function!r} is not one of {', '.join(PARAMETERS)}")
    return PARAMETERS[function]


def _sentence(function: str, error: ErrorDetails) -> str:
    path = ".".join(("parameters", *(str(part) for part in error["loc"])))
    if error["type"] == "extra_forbidden":
        return f"{path}: {function} has no such parameter"
    return f"{path}: {error['msg']}"


def find_endpoint(parameters: Mapping[str, JsonValue]) -> str:
    """Find the endpoint in a judge's parameters, checked or not; empty if it is no HTTP URL."""
    url = str(parameters.get("endpoint", ""))
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port above 65535, brackets of an IPv6 address that do not close
        return ""
    return url if is_url else ""
