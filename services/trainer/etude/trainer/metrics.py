"""Prometheus metrics of the trainer."""

from prometheus_client import Counter, Gauge, Histogram

LOSS = Gauge("etude_trainer_loss", "Loss of the last optimiser step.")
HELD_OUT_LOSS = Gauge(
    "etude_trainer_held_out_loss",
    "Mean loss of a trained token of held-out data, in nats.",
    ["dataset"],
)
ENTROPY = Gauge("etude_trainer_entropy", "Nats per trained token in the last policy step.")
GRAD_NORM = Gauge("etude_trainer_grad_norm", "Gradient norm of the last step, before clipping.")
MISMATCH = Gauge(
    "etude_trainer_mismatch_mean",
    "Mean absolute gap between sampler and trainer log-probs in the last policy step.",
)
MISMATCH_P99 = Gauge(
    "etude_trainer_mismatch_p99",
    "99th percentile of that gap: alert on this one, because a mean hides few bad tokens.",
)
MISMATCH_KL = Gauge(
    "etude_trainer_mismatch_kl",
    "Estimate of the divergence of trainer and sampler in nats per token of the last policy step.",
)
REPLAYED_FRACTION = Gauge(
    "etude_trainer_replayed_fraction",
    "Share of the tokens of the last policy step whose recorded experts were replayed.",
)
UNRECORDED_ROLLOUTS = Counter(
    "etude_trainer_unrecorded_rollouts_total",
    "Rollouts that were trained by live routers because their recorded experts were not usable.",
)
EXPERT_LOAD_RATIO = Gauge(
    "etude_trainer_expert_load_ratio",
    "Tokens of the busiest expert over the mean of its layer in the last step, as the mean of all"
    " layers and in the worst one; 1 where all experts have as many.",
    ["layers"],
)
EXPERT_LOAD_ENTROPY = Gauge(
    "etude_trainer_expert_load_entropy",
    "Entropy of the tokens by expert over that of equal loads in the last step, as the mean of all"
    " layers and in the worst one; 1 where all experts have as many.",
    ["layers"],
)
CLIP_FRACTION = Gauge(
    "etude_trainer_clip_fraction",
    "Share of tokens whose importance ratio was clipped in the last policy step.",
)
MASKED_FRACTION = Gauge(
    "etude_trainer_masked_fraction",
    "Share of tokens that a correction or mask left out of the last policy step.",
)
EFFECTIVE_SAMPLE_SIZE = Gauge(
    "etude_trainer_effective_sample_size",
    "Share of the tokens of the last policy step that weigh as much as all do by importance.",
)
TOKENS_PER_SECOND = Gauge(
    "etude_trainer_tokens_per_second", "Tokens through the model per second of the last step."
)
STEP = Gauge("etude_trainer_step", "Optimiser steps over all phases.")
ROLLOUTS = Counter("etude_rollouts_total", "Rollouts by outcome.", ["state", "reason"])
DAMAGED_ROLLOUTS = Counter(
    "etude_rollout_damaged_total",
    "Finished rollouts that were left out of their batch because their tokens were gone from the"
    " store or damaged.",
)
READ_SECONDS = Gauge(
    "etude_trainer_read_seconds",
    "Time that the last policy step waited for the tokens of its rollouts.",
)
FETCHED_FRACTION = Gauge(
    "etude_trainer_fetched_fraction",
    "Share of the stored rollouts of the last policy step that were fetched ahead of it.",
)
CONTENT_REPEATS = Counter(
    "etude_rollout_content_repeats_total",
    "Writes of the tokens of finished rollouts that workers repeated while the store was away.",
)
INFLIGHT = Gauge("etude_rollout_inflight", "Rollouts under way.", ["kind"])
TOKEN_SLOTS = Gauge(
    "etude_rollout_token_slots",
    "Completions that rollouts may have open at a time, by the load of engines; 0 for no limit.",
)
ENVIRONMENTS = Counter(
    "etude_rollout_environments_total",
    "Environments lost under a rollout, by whether a replacement took over.",
    ["end"],
)
REPLAYED = Counter(
    "etude_rollout_replayed_calls_total", "Calls replayed in replacement environments."
)
GROUP_SETUPS = Counter(
    "etude_rollout_group_setups_total",
    "Set-ups of a task for all rollouts of a group, by outcome.",
    ["outcome"],
)
STARTS = Counter(
    "etude_rollout_starts_total",
    "Rollouts by start: forked from a group's set-up, set up separately, or without a set-up.",
    ["start"],
)
RESUMES = Counter(
    "etude_rollout_resumes_total",
    "Rollouts that lost their worker or an attempt: continued in their environments, replayed in"
    " others, or redrawn; by cause.",
    ["resume", "cause"],
)
LOST_LENGTH_RATIO = Gauge(
    "etude_lost_work_length_ratio",
    "Mean length of dropped and redrawn rollouts over that of trained ones; 0 without any.",
)
COMPLETIONS = Counter(
    "etude_rollout_completions_total",
    "Completions, by whether an engine's end interrupted them.",
    ["interrupted"],
)
INTERRUPTED_LENGTH_RATIO = Gauge(
    "etude_rollout_interrupted_completion_length_ratio",
    "Mean length of interrupted completions over the mean length of all; 0 without any.",
)
STALENESS = Histogram(
    "etude_policy_staleness",
    "Versions between the oldest token of a group and the trainer at its batch.",
    buckets=(0, 1, 2, 4, 8, 16, 32, 64),
)
SLOW_GROUPS = Counter(
    "etude_rollout_slow_groups_total",
    "Groups that a full batch waited for, by what asyncLimits.onStale did with them.",
    ["action"],
)
BEHAVIOUR = Gauge(
    "etude_rollout_behaviour",
    "Behaviour of the rollouts of the last batch: calls_per_turn, tool_error_rate, edit_rate,"
    " looks_before_edit; NaN where no rollout has the figure.",
    ["figure"],
)
ROLLOUT_TOKENS = Gauge(
    "etude_rollout_tokens",
    "Mean tokens of a rollout of the last batch, by kind: thinking, call, final_message, summary,"
    " tool_output.",
    ["kind"],
)
REWARD = Gauge("etude_trainer_reward_mean", "Mean reward of the last batch.")
MONITOR_FIGURE = Gauge(
    "etude_monitor_figure", "Figure of each monitor in the last window of rollouts.", ["monitor"]
)
MONITOR_LIMIT = Gauge("etude_monitor_limit", "Limit of that figure.", ["monitor"])
MONITOR_RAISED = Counter(
    "etude_monitor_raised_total",
    "Times that a monitor began to raise windows, by the action that it asks for.",
    ["monitor", "action"],
)
MONITOR_PENALISED = Counter(
    "etude_monitor_penalised_total",
    "Rollouts whose reward a monitor lowered, as phases[].monitors says.",
    ["monitor"],
)
MONITOR_FROZEN = Counter(
    "etude_monitor_frozen_total", "Times that a monitor suspended the run.", ["monitor"]
)
WINDOWS = Counter(
    "etude_feedback_windows_total",
    "Windows of production rollouts, by what became of them.",
    ["outcome"],
)
WINDOW_MASKED = Counter(
    "etude_feedback_masked_total", "Rollouts of trained windows that were masked.", ["reason"]
)
WINDOW_AGE = Gauge(
    "etude_feedback_window_age_seconds", "Age of the last trained window when its turn came."
)
WINDOW_KL = Gauge(
    "etude_feedback_kl",
    "Divergence from the version that served the last window, in nats per token.",
)
PUBLISH = Histogram("etude_weights_publish_seconds", "Publishing one policy version.")
IN_FLIGHT = Gauge(
    "etude_weights_in_flight", "Versions that are encoded and not yet published and served."
)
PUBLISHED_BYTES = Counter("etude_weights_publish_bytes_total", "Payload of published versions.")
CHANGED = Gauge("etude_weights_changed_ratio", "Share of the weights that the last delta changed.")
BITS_PER_CHANGE = Gauge(
    "etude_weights_bits_per_change", "Payload of the last delta per changed weight."
)
FOLDED = Histogram(
    "etude_weights_keyframe_seconds",
    "Writing one keyframe or skip.",
    ["kind"],
    buckets=(0.05, 0.2, 1, 5, 20, 60, 300, 1_200),
)
FOLDED_BYTES = Counter(
    "etude_weights_keyframe_bytes_total", "Payload of keyframes and skips.", ["kind"]
)
CHAIN_VERSIONS = Gauge("etude_weights_chain_versions", "Versions since the last complete one.")
CHAIN_BYTES = Gauge(
    "etude_weights_chain_bytes", "Payload of the versions since the last complete one."
)
COLLECTED = Counter("etude_weights_collected_total", "Objects of old versions that were deleted.")
COMPACTOR_FAILURES = Counter(
    "etude_weights_keeper_failures_total",
    "Failed stages of the compactor, which it retries.",
    ["stage"],
)
LOG_DEPTH = Gauge("etude_log_depth", "Records that are not durable yet.", ["log"])
CHECKPOINT = Histogram(
    "etude_checkpoint_seconds",
    "Writing one checkpoint; copy is the part that steps wait for.",
    ["stage"],
    buckets=(0.05, 0.2, 1, 5, 20, 60, 300),
)
SILENCE = Gauge("etude_watchdog_silence_seconds", "Time since the last progress.", ["what"])
