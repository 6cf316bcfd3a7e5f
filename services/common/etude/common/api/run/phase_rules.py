"""Rules of a phase: which fields its type needs, and which it has not."""

from etude.common.api.meta import Rule

GROUP_SIZE = 8
PROMPTS_PER_STEP = 16
"""Defaults of an algorithm. An API server fills them in: no rule can tell them from none."""

NO_WINDOWS = (
    *("data", "tasks", "batch_size", "batch_tokens", "validation"),
    *("async_limits", "rollout", "context_extension", "success_policy", "gate", "monitors"),
)
"""Fields that a phase of type Feedback has not."""

PHASE_RULES: tuple[Rule, ...] = (
    Rule(
        cel="self.type != 'ReinforcementLearning' || (has(self.tasks) && has(self.algorithm))",
        holds=lambda s: not s.is_rl or (s.tasks is not None and s.algorithm is not None),
        message="a phase of type ReinforcementLearning needs tasks and algorithm",
        fix="add tasks: [{name, uri, environment}] and algorithm: {name: DrGRPO}",
    ),
    Rule(
        cel="self.type != 'ReinforcementLearning' || (!has(self.data) && !has(self.batchSize))",
        holds=lambda s: not s.is_rl or (s.data is None and s.batch_size is None),
        message="a phase of type ReinforcementLearning has no data and no batchSize:"
        " use tasks and algorithm.promptsPerStep",
        fix="remove data and batchSize",
    ),
    Rule(
        cel="self.type in ['ReinforcementLearning', 'Feedback']"
        " || (has(self.data) && !has(self.tasks) && !has(self.algorithm)"
        " && !has(self.asyncLimits) && !has(self.rollout) && !has(self.monitors))",
        holds=lambda s: (
            s.is_rl
            or s.is_feedback
            or (
                s.data is not None
                and s.tasks is None
                and s.algorithm is None
                and s.async_limits is None
                and s.rollout is None
                and s.monitors is None
            )
        ),
        message="a phase of a supervised type needs data"
        " and has no tasks, algorithm, asyncLimits, rollout or monitors",
        fix="add data: [{name, uri}] and remove the others",
    ),
    Rule(
        cel="self.type != 'ReinforcementLearning' || (!has(self.batchTokens)"
        " && !has(self.validation))",
        holds=lambda s: not s.is_rl or (s.batch_tokens is None and s.validation is None),
        message="a phase of type ReinforcementLearning has no batchTokens and no validation",
        fix="remove them; evaluation measures such a phase",
    ),
    Rule(
        cel="!has(self.batchSize) || !has(self.batchTokens)",
        holds=lambda s: s.batch_size is None or s.batch_tokens is None,
        message="batchSize and batchTokens exclude each other",
        fix="keep batchTokens for data of any size, batchSize for a small file",
        field_path=".batchTokens",
    ),
    Rule(
        cel="!has(self.sequenceTokens) || (has(self.batchTokens)"
        " && self.sequenceTokens <= self.batchTokens)",
        holds=lambda s: (
            s.sequence_tokens is None
            or (s.batch_tokens is not None and s.sequence_tokens <= s.batch_tokens)
        ),
        message="sequenceTokens needs batchTokens, and is at most as large",
        fix="set batchTokens to a multiple of sequenceTokens",
        field_path=".sequenceTokens",
    ),
    Rule(
        cel="!has(self.successPolicy) || (self.type == 'ReinforcementLearning')"
        " == (self.successPolicy.metric != 'Loss')",
        holds=lambda s: s.success_policy is None or s.is_rl == (s.success_policy.metric != "Loss"),
        message="successPolicy.metric is Reward or Success where type is"
        " ReinforcementLearning, and Loss in a supervised phase",
        fix="use a metric that the phase has",
        field_path=".successPolicy.metric",
    ),
    Rule(
        cel="!has(self.routerReplay) || self.type == 'ReinforcementLearning'",
        holds=lambda s: s.router_replay is None or s.is_rl,
        message="routerReplay is for phases of type ReinforcementLearning: others have no recorded"
        " experts and one pass per batch",
        fix="remove it",
        field_path=".routerReplay",
    ),
    Rule(
        cel="!has(self.curriculum) || self.type == 'ReinforcementLearning'",
        holds=lambda s: s.curriculum is None or s.is_rl,
        message="curriculum is for phases of type ReinforcementLearning: others have no tasks",
        fix="remove it",
        field_path=".curriculum",
    ),
    Rule(
        cel="!has(self.profile) || self.profile.firstStep <= self.maxSteps",
        holds=lambda s: s.profile is None or s.profile.first_step <= s.max_steps,
        message="profile.firstStep must not be above maxSteps: the phase ends before it",
        fix="give a step of the phase",
        field_path=".profile.firstStep",
    ),
    Rule(
        cel="(self.type == 'Feedback') == has(self.feedback)"
        " && (self.type != 'Feedback' || has(self.algorithm))",
        holds=lambda s: (
            s.is_feedback == (s.feedback is not None)
            and (not s.is_feedback or s.algorithm is not None)
        ),
        message="a phase of type Feedback needs feedback and algorithm, and no other has feedback",
        fix="add feedback: {uri} and algorithm: {name: DrGRPO}, or change the type",
    ),
    Rule(
        cel="self.type != 'Feedback' || (!has(self.data) && !has(self.tasks)"
        " && !has(self.batchSize) && !has(self.batchTokens) && !has(self.validation)"
        " && !has(self.asyncLimits) && !has(self.rollout) && !has(self.contextExtension)"
        " && !has(self.successPolicy) && !has(self.gate) && !has(self.monitors))",
        holds=lambda s: not s.is_feedback or not any(getattr(s, n) is not None for n in NO_WINDOWS),
        message="a phase of type Feedback trains windows that others wrote: it has no data, tasks,"
        " batchSize, batchTokens, validation, asyncLimits, rollout, contextExtension,"
        " successPolicy, gate or monitors",
        fix="remove them",
    ),
    Rule(
        cel="self.type != 'Feedback' || !has(self.algorithm)"
        f" || (self.algorithm.groupSize == {GROUP_SIZE}"
        f" && self.algorithm.promptsPerStep == {PROMPTS_PER_STEP})",
        holds=lambda s: (
            not s.is_feedback
            or s.algorithm is None
            or (s.algorithm.group_size, s.algorithm.prompts_per_step)
            == (GROUP_SIZE, PROMPTS_PER_STEP)
        ),
        message="a phase of type Feedback has no groups: algorithm.groupSize and promptsPerStep"
        " would be ignored",
        fix="remove them; feedback.stepsPerWindow cuts a window into steps",
        field_path=".algorithm",
    ),
)
