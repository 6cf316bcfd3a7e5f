"""Memory and CPU time of process trees."""

import json
import os
import subprocess
import sys
from pathlib import Path

from etude.cli.process_usage import ResourceLog, process_tree, read_measurements
from etude.common.run_folder.state import LocalPod, LocalState, write_state


def test_a_tree_holds_the_children_of_children() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '30']); print('on', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = process_tree(child.pid)
        assert len(found) == 2
        assert found[0] == child.pid
    finally:
        for pid in process_tree(child.pid):
            os.kill(pid, 9)
        child.wait()


def test_each_role_is_written_down_with_its_memory_and_cpu_time(tmp_path: Path) -> None:
    pod = LocalPod(name="demo-trainer-0", role="trainer", state="Ready", pid=os.getpid())
    write_state(tmp_path, LocalState(pid=os.getpid(), updated_unix_ms=1, run={}, pods=(pod,)))
    log = ResourceLog(tmp_path, os.getpid())
    log.measure()
    row = json.loads((tmp_path / "resources.jsonl").read_text())
    assert row["roles"]["trainer"]["pss_bytes"] > 1_000_000
    assert row["roles"]["trainer"]["cpu_s"] > 0
    assert row["total"]["pss_bytes"] > 1_000_000
    log.measure()
    with (tmp_path / "resources.jsonl").open("a") as file:
        file.write('{"time_s": 1')
    assert len(read_measurements(tmp_path)) == 2
