"""Pools by a local run or by the address of a broker."""

import re
from typing import NamedTuple

from etude.cli import runs
from etude.common.errors import Problem, UserError
from etude.common.run_folder.lock import is_running
from etude.common.run_folder.state import LocalPod, LocalState, read_state

_ADDRESS = re.compile(r"[A-Za-z0-9][-A-Za-z0-9.]*:[0-9]{1,5}|\[[0-9A-Fa-f:]+\]:[0-9]{1,5}")


class PoolBroker(NamedTuple):
    """A broker and the names of its templates."""

    broker: str
    templates: tuple[str, ...]
    """Empty if only the broker's address is known."""


def find_pool(where: str, name: str = "") -> PoolBroker:
    """The pool behind a run's name or folder, or behind host:port.

    Args:
        where: a run, or an address.
        name: of the pool, where a run has several.

    Raises:
        UserError: there is no such run, it does not run, or has no such pool.
    """
    if _ADDRESS.fullmatch(where):
        return PoolBroker(where, ())
    folder = runs.folder_of(where)
    state = read_state(folder)
    if state is None or not is_running(folder):
        fix = f"start it: etude run {folder / 'run.yaml'} --dir {folder}"
        raise UserError(Problem("Unreachable", "this run is not running", str(folder), fix))
    ready = [pod for pod in state.pods if pod.role == "broker" and "grpc" in pod.ports]
    found = [pod for pod in ready if pod.name.startswith(name)]
    if len(found) != 1:
        names = ", ".join(pod.name for pod in ready) or "none yet"
        fix = f"give --pool: there is {names}"
        raise UserError(Problem("NotFound", f"no pool {name!r} to choose", str(folder), fix))
    return PoolBroker(f"127.0.0.1:{found[0].ports['grpc']}", _templates(state, found[0]))


def _templates(state: LocalState, broker: LocalPod) -> tuple[str, ...]:
    for pool in state.pools:
        match pool:
            case {"metadata": {"name": str(name)}, "spec": {"templates": list(templates)}} if (
                broker.name.startswith(name)
            ):
                return tuple(str(each["name"]) for each in templates if isinstance(each, dict))
    return ()
