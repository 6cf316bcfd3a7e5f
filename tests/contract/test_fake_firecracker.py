"""What the fake Firecracker promises to the driver's tests: the original's documents, no more.

Each row names where Firecracker 1.13 says so: its swagger file (S), docs/snapshotting (N),
docs/jailer.md (J), or the texts of faults in src/vmm/src/rpc_interface.rs (F).
"""

from typing import Any

import pytest
from tests.support.vm.firecracker import jailer
from tests.support.vm.firecracker.rules import Phase, RefusedError, Rules

from etude.envserver.drivers.vm.firecracker import api_requests, jail
from etude.envserver.drivers.vm.firecracker.api_requests import FirecrackerConfig

LOAD = {
    "snapshot_path": "/vmstate",
    "mem_backend": {"backend_type": "File", "backend_path": "/memory"},
    "track_dirty_pages": True,
    "resume_vm": False,
}
CREATE = {"snapshot_type": "Full", "snapshot_path": "/s", "mem_file_path": "/m"}
AFTER = "not supported after starting"
BEFORE = "not supported before starting"


def started() -> Rules:
    """A machine that was configured as the driver does it, and runs."""
    rules = Rules()
    for path, body in api_requests.boot(FirecrackerConfig()):
        rules.taken("PUT", path, dict(body))
    return rules


def refused(rules: Rules, method: str, path: str, body: object) -> str:
    with pytest.raises(RefusedError) as caught:
        rules.taken(method, path, body)
    return str(caught.value)


def test_a_vm_is_configured_started_stopped_and_saved_in_this_order() -> None:
    rules = started()
    assert str(rules.phase) == str(Phase.RUNNING)
    assert "unavailable while running" in refused(rules, "PUT", "/snapshot/create", CREATE)  # N, F
    rules.taken("PATCH", "/vm", {"state": "Paused"})
    rules.taken("PATCH", "/vm", {"state": "Paused"})  # N: successive calls keep it
    order = rules.taken("PUT", "/snapshot/create", CREATE)
    assert order is not None
    assert order.name == "create"
    assert rules.phase is Phase.PAUSED


@pytest.mark.parametrize(
    ("path", "body"), [(each.path, each.body) for each in api_requests.boot(FirecrackerConfig())]
)
def test_nothing_is_configured_after_the_start(path: str, body: dict[str, Any]) -> None:
    assert AFTER in refused(started(), "PUT", path, dict(body))  # S: "Pre-boot only", F
    assert AFTER in refused(started(), "PUT", "/snapshot/load", LOAD)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("PATCH", "/vm", {"state": "Paused"}), ("PUT", "/snapshot/create", CREATE)],
)
def test_nothing_is_stopped_or_saved_before_the_start(method: str, path: str, body: object) -> None:
    assert BEFORE in refused(Rules(), method, path, body)  # N, F


def test_a_snapshot_is_loaded_into_a_process_that_was_not_configured() -> None:
    rules = Rules()
    rules.taken("PUT", "/snapshot/load", LOAD)
    assert rules.phase is Phase.PAUSED  # N: "now in the Paused state"
    configured = Rules()
    configured.taken("PUT", "/vsock", {"guest_cid": 3, "uds_path": "/v"})
    assert "after configuring" in refused(configured, "PUT", "/snapshot/load", LOAD)  # N, F


def test_a_diff_needs_a_vm_that_tracks_what_is_written() -> None:
    rules = Rules()
    rules.taken("PUT", "/snapshot/load", {**LOAD, "track_dirty_pages": False})
    diff = {**CREATE, "snapshot_type": "Diff"}
    assert "not allowed" in refused(rules, "PUT", "/snapshot/create", diff)  # stricter than N
    tracked = Rules()
    tracked.taken("PUT", "/snapshot/load", LOAD)
    assert tracked.taken("PUT", "/snapshot/create", diff) is not None


@pytest.mark.parametrize(
    ("method", "path", "body", "why"),
    [
        ("PUT", "/nothing", {}, "Invalid request method and/or path"),
        ("POST", "/vm", {"state": "Paused"}, "Invalid request method and/or path"),
        ("PUT", "/vsock", None, "Empty PUT request"),
        ("PUT", "/vsock", [], "expected a map"),
        ("PUT", "/vsock", {"guest_cid": 3}, "missing field `uds_path`"),
        ("PUT", "/vsock", {"guest_cid": 2, "uds_path": "/v"}, "reserved"),
        ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "/v", "port": 1}, "unknown field `port`"),
        ("PUT", "/machine-config", {"vcpu_count": "1", "mem_size_mib": 1}, "invalid type"),
        ("PUT", "/machine-config", {"vcpu_count": 0, "mem_size_mib": 1}, "vCPU"),
        ("PUT", "/drives/a", {"drive_id": "b", "is_root_device": True}, "does not match"),
        ("PUT", "/actions", {"action_type": "Stop"}, "unknown variant"),
        ("PUT", "/actions", {"action_type": "InstanceStart"}, "without kernel configuration"),
        ("PUT", "/snapshot/load", {"snapshot_path": "/s"}, "mem_backend"),
    ],
)
def test_a_wrong_request_is_refused_as_the_original_does(
    method: str, path: str, body: object, why: str
) -> None:
    assert why in refused(Rules(), method, path, body)  # S, F


def words(**changed: str) -> list[str]:
    """A jailer's command line as docs/jailer.md has it."""
    flags = {
        "id": "a-1",
        "exec-file": "/usr/bin/firecracker",
        "uid": "123",
        "gid": "100",
        **changed,
    }
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def test_the_jailer_hands_on_what_follows_two_hyphens() -> None:
    options = jailer.parsed([*words(), "--new-pid-ns", "--", "--api-sock", "/api"])
    assert (options.id, options.new_pid_ns) == ("a-1", True)
    assert options.rest == ["--api-sock", "/api"]


@pytest.mark.parametrize(
    "line",
    [
        words(id="a_1"),
        words(id="a" * 65),
        words(**{"exec-file": "/bin/sh"}),
        words(uid="root"),
        words(**{"cgroup-version": "3"}),
        words(cgroup="memory.max"),
        words(**{"resource-limit": "as=1"}),
        [*words(), "--api-sock", "/api"],
        words()[2:],
    ],
)
def test_the_jailer_refuses_what_the_original_refuses(line: list[str]) -> None:
    with pytest.raises(SystemExit):
        jailer.parsed(line)


def test_the_jailer_takes_the_drivers_command_line(tmp_path: Any) -> None:
    programs = jail.FirecrackerPrograms(
        firecracker=tmp_path / "firecracker", jailer=tmp_path / "jailer"
    )
    cell = jail.FirecrackerJail(programs=programs, folder=tmp_path, vm_id="0f-1")
    line = jail.command(cell, FirecrackerConfig(memory_mib=128), uid=7, gid=8, netns="/proc/1/fd/3")
    assert line[0] == str(programs.jailer)
    options = jailer.parsed(list(line[1:]))
    assert (options.uid, options.gid, options.cgroup_version) == (7, 8, "2")
    assert options.new_pid_ns
    assert options.netns == "/proc/1/fd/3"
    assert options.chroot_base_dir / "firecracker" / "0f-1" / "root" == cell.root
    assert options.rest == ["--api-sock", "/api.sock", "--level", "Error"]
    assert "--no-seccomp" not in line
