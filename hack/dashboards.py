"""Writes the Grafana dashboards of the chart: `python hack/dashboards.py`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path("helm") / "etude" / "files" / "dashboards"
COLUMNS = 3
WIDTH, HEIGHT = 24 // COLUMNS, 8
"""Of a panel, on Grafana's grid of 24 columns."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """One diagram over time."""

    title: str
    query: str
    legend: str = "{{run}}"
    unit: str = "short"
    """Grafana's name of a unit: s for seconds, bytes, percentunit for shares of 1."""


class Board(NamedTuple):
    """One dashboard; its queries are about what its variables choose."""

    title: str
    variables: Mapping[str, str]
    """Labels that a reader chooses by, each with the series that knows its values."""
    panels: Sequence[Panel]


def quantile(share: float, series: str, about: str, by: str) -> str:
    """PromQL for a quantile of a histogram over the last five minutes."""
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({series}_bucket{{{about}}}[5m])))"


def rate(series: str, about: str, by: str) -> str:
    """PromQL for how fast a counter grows, per second."""
    return f"sum by ({by}) (rate({series}{{{about}}}[5m]))"


RUN = 'namespace=~"$namespace",run=~"$run"'
POOL = 'namespace=~"$namespace",pool=~"$pool"'
OPERATOR = 'namespace=~"$namespace"'

BOARDS: Mapping[str, Board] = {
    "runs": Board(
        "Etude: runs",
        {"namespace": "etude_run_step", "run": "etude_run_step"},
        (
            Panel("Steps of the active phase", f"etude_run_step{{{RUN}}}"),
            Panel("Mean reward of the last batch", f"etude_trainer_reward_mean{{{RUN}}}"),
            Panel(
                "Time that went into steps that stayed",
                f"etude_run_effective_training_time_ratio{{{RUN}}}",
                unit="percentunit",
            ),
            Panel("Loss", f"etude_trainer_loss{{{RUN}}}"),
            Panel("Gradient norm before clipping", f"etude_trainer_grad_norm{{{RUN}}}"),
            Panel("Entropy of the policy, nats a token", f"etude_trainer_entropy{{{RUN}}}"),
            Panel(
                "Sampler against trainer, mean gap of log-probs",
                f"etude_trainer_mismatch_mean{{{RUN}}}",
            ),
            Panel("Largest staleness of the last step", f"etude_run_staleness{{{RUN}}}"),
            Panel("Tokens through the model a second", f"etude_trainer_tokens_per_second{{{RUN}}}"),
            Panel(
                "Rollouts a second, by outcome",
                rate("etude_rollouts_total", RUN, "run, state, reason"),
                "{{run}} {{state}} {{reason}}",
            ),
            Panel("Rollouts under way", f"sum by (run) (etude_rollout_inflight{{{RUN}}})"),
            Panel(
                "Since anything moved",
                f"max by (run) (etude_watchdog_silence_seconds{{{RUN}}})",
                unit="s",
            ),
            Panel(
                "Checkpoints, 95th percentile by stage",
                quantile(0.95, "etude_checkpoint_seconds", RUN, "run, stage"),
                "{{run}} {{stage}}",
                "s",
            ),
            Panel("Records that are not durable yet", f"sum by (run) (etude_log_depth{{{RUN}}})"),
            Panel(
                "Rollouts that could not be scored, a second",
                rate("etude_reward_faults_total", RUN, "run, kind"),
                "{{run}} {{kind}}",
            ),
            Panel(
                "Scoring a group, 95th percentile",
                quantile(0.95, "etude_reward_seconds", RUN, "run"),
                unit="s",
            ),
        ),
    ),
    "weights": Board(
        "Etude: policy versions",
        {"namespace": "etude_trainer_step", "run": "etude_trainer_step"},
        (
            Panel(
                "Versions that an engine is behind",
                f"max by (run, replica) (etude_weights_lag_versions{{{RUN}}})",
                "{{run}} {{replica}}",
            ),
            Panel(
                "Publishing, 95th percentile",
                quantile(0.95, "etude_weights_publish_seconds", RUN, "run"),
                unit="s",
            ),
            Panel(
                "Fetching and verifying, 95th percentile",
                quantile(0.95, "etude_weights_stage_seconds", RUN, "run"),
                unit="s",
            ),
            Panel(
                "Swapping in, 95th percentile",
                quantile(0.95, "etude_weights_commit_seconds", RUN, "run"),
                unit="s",
            ),
            Panel(
                "Requests frozen, 95th percentile",
                quantile(0.95, "etude_weights_pause_seconds", RUN, "run"),
                unit="s",
            ),
            Panel(
                "Published a second",
                rate("etude_weights_publish_bytes_total", RUN, "run"),
                unit="Bps",
            ),
            Panel(
                "Fetched a second, by kind and codec",
                rate("etude_weights_bytes_total", RUN, "run, kind, codec"),
                "{{run}} {{kind}} {{codec}}",
                "Bps",
            ),
            Panel(
                "Share of the weights that a delta changes",
                f"etude_weights_changed_ratio{{{RUN}}}",
                unit="percentunit",
            ),
            Panel("Versions since the last complete one", f"etude_weights_chain_versions{{{RUN}}}"),
            Panel(
                "Refused, damaged, loaded anew, a second",
                f"{rate('etude_weights_corrupt_total', RUN, 'run')}"
                f" or {rate('etude_weights_reseed_total', RUN, 'run, reason')}",
                "{{run}} {{reason}}",
            ),
            Panel(
                "Audits a second, by result",
                rate("etude_weights_audit_total", RUN, "run, result"),
                "{{run}} {{result}}",
            ),
            Panel(
                "What the keeper could not do, a second",
                rate("etude_weights_keeper_failures_total", RUN, "run, stage"),
                "{{run}} {{stage}}",
            ),
        ),
    ),
    "environments": Board(
        "Etude: environments",
        {"namespace": "etude_pool_slots", "pool": "etude_pool_slots"},
        (
            Panel("Slots by state", f"etude_pool_slots{{{POOL}}}", "{{pool}} {{state}}"),
            Panel(
                "Waiting for a slot", f"sum by (pool) (etude_env_queue_depth{{{POOL}}})", "{{pool}}"
            ),
            Panel("Nodes in rotation", f"sum by (pool) (etude_env_nodes{{{POOL}}})", "{{pool}}"),
            Panel(
                "From request to lease, 95th percentile",
                quantile(0.95, "etude_env_acquire_seconds", POOL, "pool"),
                "{{pool}}",
                "s",
            ),
            Panel(
                "Starts, 95th percentile by how",
                quantile(0.95, "etude_env_start_seconds", POOL, "pool, start"),
                "{{pool}} {{start}}",
                "s",
            ),
            Panel(
                "Leases granted a second, by how they started",
                rate("etude_env_granted_total", POOL, "pool, start"),
                "{{pool}} {{start}}",
            ),
            Panel(
                "Kept ready, by how warm",
                f"sum by (pool, start) (etude_env_stock{{{POOL}}})",
                "{{pool}} {{start}}",
            ),
            Panel("Asked for over forecast", f"etude_env_plan_error_ratio{{{POOL}}}", "{{pool}}"),
            Panel(
                "Tool calls, 95th percentile",
                quantile(0.95, "etude_env_tool_seconds", POOL, "pool, tool"),
                "{{pool}} {{tool}}",
                "s",
            ),
            Panel(
                "Verifiers, 95th percentile",
                quantile(0.95, "etude_env_grade_seconds", POOL, "pool"),
                "{{pool}}",
                "s",
            ),
            Panel(
                "Failed calls a second, by kind",
                rate("etude_env_errors_total", POOL, "pool, kind"),
                "{{pool}} {{kind}}",
            ),
            Panel(
                "Machines that did not start, a second",
                rate("etude_env_stock_failures_total", POOL, "pool"),
                "{{pool}}",
            ),
            Panel(
                "Free below workspaces",
                f'min by (pool, pod) (etude_env_node_free_bytes{{{POOL},role="node"}} > 0)',
                "{{pod}}",
                "bytes",
            ),
            Panel(
                "Connections out a second, by verdict",
                rate("etude_env_egress_attempts_total", POOL, "pool, verdict"),
                "{{pool}} {{verdict}}",
            ),
        ),
    ),
    "operator": Board(
        "Etude: operator",
        {"namespace": "etude_leader"},
        (
            Panel("Who leads", f"etude_leader{{{OPERATOR}}}", "{{pod}}"),
            Panel(
                "Passes a second, by result",
                rate("etude_reconcile_total", OPERATOR, "kind, result"),
                "{{kind}} {{result}}",
            ),
            Panel(
                "A pass, 95th percentile",
                quantile(0.95, "etude_reconcile_duration_seconds", OPERATOR, "kind"),
                "{{kind}}",
                "s",
            ),
            Panel("Keys in line", f"etude_workqueue_depth{{{OPERATOR}}}", "{{pod}}"),
            Panel(
                "Keys added a second",
                rate("etude_workqueue_adds_total", OPERATOR, "pod"),
                "{{pod}}",
            ),
            Panel(
                "Requests to the API server a second, by answer",
                rate("etude_api_requests_total", OPERATOR, "verb, code"),
                "{{verb}} {{code}}",
            ),
            Panel(
                "A request to the API server, 95th percentile",
                quantile(0.95, "etude_api_request_duration_seconds", OPERATOR, "verb"),
                "{{verb}}",
                "s",
            ),
            Panel(
                "Since a watch brought something",
                f"time() - max by (kind) (etude_watch_last_event_timestamp_seconds{{{OPERATOR}}})",
                "{{kind}}",
                "s",
            ),
            Panel(
                "Objects that a watch had missed, in an hour",
                f"sum by (kind) (increase(etude_watch_gap_total{{{OPERATOR}}}[1h]))",
                "{{kind}}",
            ),
        ),
    ),
}


def dashboard(name: str, board: Board) -> dict[str, Any]:
    """A dashboard as Grafana reads it."""
    return {
        "uid": f"etude-{name}",
        "title": board.title,
        "tags": ["etude"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": list(_variables(board))},
        "panels": [_panel(number, panel) for number, panel in enumerate(board.panels)],
    }


def _variables(board: Board) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus"}
    for label, series in board.variables.items():
        yield {
            "name": label,
            "type": "query",
            "datasource": SOURCE,
            "query": f"label_values({series}, {label})",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [{"refId": "A", "expr": panel.query, "legendFormat": panel.legend}],
    }


def files() -> dict[str, str]:
    """Every file of the folder, by name."""
    made = {name: dashboard(name, board) for name, board in BOARDS.items()}
    return {f"{name}.json": json.dumps(each, indent=1) + "\n" for name, each in made.items()}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
