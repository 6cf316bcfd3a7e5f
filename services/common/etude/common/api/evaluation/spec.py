"""EvalRun: one policy on suites of tasks, and its comparison with another EvalRun's result."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import NAMED, Fraction, Model, Name, NameRef, Rule, UniqueBy, Uri, number
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.store_urls import BASE_URL

MAX_SUITES = 8
"""The figures of all suites fit the message with which a container ends."""
METRIC_NAMES = {
    "Success": "success",
    "Reward": "reward",
    "Seconds": "seconds",
    "ReadTokens": "read_tokens",
    "SampledTokens": "sampled_tokens",
    "EditsWithoutEvidence": "edits_without_evidence",
}
"""Figures of the rows of rollouts, by the names of the API."""


ATTACKS = "Attacks"
"""Name of the rate of successful attacks among the comparisons of a suite of attacks."""


class EvaluationSuite(Model):
    """A set of tasks that no training sees."""

    name: Name
    """Prefix of its figures."""
    uri: Uri
    """A folder of task folders in Harbor layout, in the store of the checkpoint's run."""
    environment: Name
    """Entry of environments in which its tasks run."""
    limit: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Tasks at most, the first ones by name; all of them unless set."""
    attacks: bool = False
    """Its tasks are attacks, and success means that one succeeded: less is better. It has a rate
    with bounds in place of a comparison, which the gate of a route judges by its attackLevel."""


class EvaluationEnvironment(Model):
    """Environments of an evaluation, from a pool."""

    name: Name
    """Name that suites refer to."""
    pool_ref: NameRef
    """An EnvPool of the same namespace; a pool that a run owns serves that run alone."""
    template: Name
    """Template of the pool in which the tasks start."""


class EvaluatedEndpoint(Model):
    """A model that others serve, over OpenAI's chat completions with tools.

    Its answers have text and no tokens: figures of tokens are absent where it counts none. No
    digest proves which weights answer.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.secretRef) || self.url.startsWith('https://')",
            holds=lambda s: s.secret_ref is None or s.url.startswith("https://"),
            message="secretRef needs an https url: a key is not sent in the clear",
            fix="give the https address, or remove secretRef where the endpoint needs no key",
            field_path=".secretRef",
        ),
    )

    url: Annotated[str, Field(max_length=512, pattern=BASE_URL)]
    """Base URL, to which /chat/completions is added."""
    model: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the model at the endpoint."""
    secret_ref: NameRef | None = None
    """Secret with ENDPOINT_API_KEY, which the endpoint gets as bearer token."""
    request_seconds: Annotated[int, Field(ge=1, le=3_600)] = 600
    """Longest wait for one turn."""


class EvaluationMargin(Model):
    """Largest loss in one metric that the evaluated checkpoint may have."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="double(self.largestLoss) > 0.0",
            holds=lambda s: number(s.largest_loss) > 0,
            message="largestLoss must be above 0: no number of tasks proves that nothing is lost",
            fix='give a loss that is acceptable, for example "0.02"',
            field_path=".largestLoss",
        ),
    )

    metric: Literal[
        "Success", "Reward", "Seconds", "ReadTokens", "SampledTokens", "EditsWithoutEvidence"
    ]
    """Success and Reward are better when larger, the others when smaller."""
    largest_loss: Fraction
    """In the metric's unit; "0.02" of Success is two points."""


class EvaluationComparison(Model):
    """Comparison with another EvalRun's result, paired by task, as an evaluation gate decides."""

    baseline_ref: NameRef
    """An EvalRun of this namespace, which is awaited; its suites of the same names are compared."""
    margins: Annotated[
        tuple[EvaluationMargin, ...], Field(min_length=1, max_length=6), UniqueBy("metric")
    ] = (EvaluationMargin(metric="Success", largest_loss="0.02"),)
    """All of them must hold in every suite."""
    min_tasks: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Fewer common tasks of a suite decide nothing."""


class EvaluationPlan(Model):
    """Suites of tasks, and the rollouts on them."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.suites.all(s, self.environments.exists(e, e.name == s.environment))",
            holds=lambda s: {x.environment for x in s.suites} <= {e.name for e in s.environments},
            message="environment of each of suites must be the name of one of environments",
            fix="add the environment, with poolRef and template, or name another",
            field_path=".suites",
        ),
        Rule(
            cel="!self.greedy || self.samples == 1",
            holds=lambda s: not s.greedy or s.samples == 1,
            message="greedy needs samples 1: the likeliest tokens are the same in every sample",
            fix="set samples: 1, or greedy: false",
            field_path=".samples",
        ),
    )

    suites: Annotated[
        tuple[EvaluationSuite, ...], Field(min_length=1, max_length=MAX_SUITES), NAMED
    ]
    """Tasks, in the order in which they are run."""
    environments: Annotated[
        tuple[EvaluationEnvironment, ...], Field(min_length=1, max_length=16), NAMED
    ]
    """Pools of the tasks."""
    samples: Annotated[int, Field(ge=1, le=64)] = 1
    """Rollouts of each task, for the mean and the best of several."""
    greedy: bool = False
    """Take the likeliest token, instead of sampling at temperature 1."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seeds of all rollouts follow from it."""
    rollout: RolloutPolicy = Field(default_factory=RolloutPolicy)
    """Limits of a rollout."""
    engines: Annotated[int, Field(ge=1, le=64)] = 1
    """Engines, each as the run's role inference describes it."""
    timeout_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 86_400
    """Longest time of the Job, with its repetitions."""


class EvalRunSpec(EvaluationPlan):
    """A policy, the suites to evaluate it on, and its comparison; immutable."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *EvaluationPlan.rules,
        Rule(
            cel="has(self.checkpointRef) != has(self.endpoint)",
            holds=lambda s: (s.checkpoint_ref is None) != (s.endpoint is None),
            message="give exactly one of checkpointRef and endpoint",
            fix="keep checkpointRef for a run's checkpoint, endpoint for a model of others",
        ),
        Rule(
            cel="has(self.runRef) == has(self.endpoint)",
            holds=lambda s: (s.run_ref is None) == (s.endpoint is None),
            message="runRef goes with endpoint: a checkpoint names its run itself",
            fix="name the run whose rewards and store are used, or remove runRef",
            field_path=".runRef",
        ),
        Rule(
            cel="!has(self.endpoint) || self.rollout.toolFormat == 'Native'",
            holds=lambda s: s.endpoint is None or s.rollout.tool_format == "Native",
            message="endpoint needs rollout.toolFormat Native: the protocol has tools of its own",
            fix="set rollout: {toolFormat: Native}",
            field_path=".rollout",
        ),
        Rule(
            cel="!has(self.endpoint) || !has(self.rollout.summaries)",
            holds=lambda s: s.endpoint is None or s.rollout.summaries is None,
            message="endpoint has no rollout.summaries: its contexts are not counted in tokens",
            fix="remove rollout.summaries",
            field_path=".rollout",
        ),
    )

    checkpoint_ref: NameRef | None = None
    """A Ready Checkpoint of this namespace that a run wrote; its policy version is served. It is
    not superseded while the evaluation is not over. Engine, rewards and store are its run's."""
    endpoint: EvaluatedEndpoint | None = None
    """A model that others serve, in place of a checkpoint; engines are not used."""
    run_ref: NameRef | None = None
    """With endpoint: the run of this namespace whose rewards and store are used."""
    comparison: EvaluationComparison | None = None
    """Comparison with another checkpoint; none unless set."""
