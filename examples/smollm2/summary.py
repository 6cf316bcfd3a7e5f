"""Print what the SmolLM2 run did: rollouts, rewards, versions, and the final model in use.

    python examples/smollm2/summary.py runs/smollm2 [--serve]

The final folder is loaded by transformers; with --serve `etude serve` serves it too, and the openai
client asks it.
"""

import argparse
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from etude.cli.output import escape_controls
from etude.cli.report.rows import Row, evaluations, steps, versions
from etude.cli.verbs.serve import newest_model
from etude.common.run_folder.record import FolderRecord, latest_rows

ROLLOUTS = 3
QUESTION = "What is the capital of France?"
BAR = 40
"""Width of a reward of 1."""


def print_rollouts(record: FolderRecord, count: int) -> None:
    """Print rollouts of the last step, turn by turn; the best comes first."""
    splits = [step for step, name in record.splits() if name == "train"]
    rows = list(record.rollouts(splits[-1], "train")) if splits else []
    rows.sort(key=lambda row: -(row.get("reward") or 0.0))
    for row in rows[:count]:
        print(
            f"--- {row['task_id']}: reward {row.get('reward')}, {row['tokens']} tokens,"
            f" {row['ending']}"
        )
        for turn in row["turns"]:
            print(escape_controls(f"[{turn['role']}] {turn['text']}"))
    print()


def print_steps(rows: Sequence[Row]) -> None:
    """Print a line for each step of reinforcement learning."""
    print("step  reward  success  mismatch   swap ms  delta bytes  rollouts s  update s")
    brought = {row["step"]: row for row in versions(rows)}
    for row in steps(rows, rl=True):
        version = brought.get(row["step"], {})
        reward = float(row["reward_mean"])
        print(
            f"{row['step']:4}  {reward:6.3f}  {row['success_mean']:7.3f}"
            f"  {row['mismatch_mean']:.2e}  {version.get('swap_ms', 0.0):8.1f}"
            f"  {version.get('bytes', 0):11,}  {row['rollout_seconds']:10.1f}"
            f"  {row['update_seconds']:8.1f}  {'#' * round(BAR * max(0.0, reward))}"
        )
    for row in evaluations(rows):
        print(
            f"held-out after step {row['step']}: reward {row['reward_mean']:.3f},"
            f" success {row['success']:.3f} of {row['count']}"
        )
    minutes = (float(rows[-1]["time_s"]) - float(rows[0]["time_s"])) / 60
    print(f"{minutes:.1f} minutes from the first row to the last\n")


def ask_server(folder: Path) -> str:
    """The answer of `etude serve` to the openai client.

    Raises:
        SystemExit: the server ended.
    """
    from openai import OpenAI  # noqa: PLC0415 - only where it is asked for

    command = [sys.executable, "-m", "etude.inference.serve_command"]
    command += ["--model", str(folder), "--port", "0", "--max-model-len", "768"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None  # noqa: S101 - a pipe was asked for
            line = server.stdout.readline().split()
            if not line:
                raise SystemExit("etude serve ended before it listened")
            client = OpenAI(base_url=line[-1], api_key="none")
            answer = client.chat.completions.create(
                model=line[1],
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=24,
                temperature=0,
            )
            return answer.choices[0].message.content or ""
        finally:
            server.terminate()


def main() -> None:
    """Print everything that there is.

    Raises:
        SystemExit: the run has not come so far.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="run folder")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS, help="rollouts to print")
    parser.add_argument("--serve", action="store_true", help="serve the final model too")
    given = parser.parse_args()
    record = FolderRecord(given.folder)
    rows = latest_rows(record.rows())
    if not steps(rows, rl=True):
        raise SystemExit(f"{given.folder} has no step of reinforcement learning yet")
    print_rollouts(record, given.rollouts)
    print_steps(rows)
    model = newest_model(given.folder)
    if model == given.folder:
        raise SystemExit("there is no checkpoint with a model yet")
    ask = runpy.run_path(str(Path(__file__).with_name("convert.py")))["greedy_answer"]
    print(f"{model}\n{QUESTION}\ntransformers: {escape_controls(ask(model, QUESTION))!r}")
    if given.serve:
        print(f"etude serve:  {escape_controls(ask_server(model))!r}")


if __name__ == "__main__":
    main()
