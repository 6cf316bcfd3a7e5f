"""Reference index: the runs that name a pool or a checkpoint."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from etude.operator.manifests import Manifest, Ref, ref
from etude.operator.runs.checkpoints import start_weights


@dataclass(slots=True)
class Users:
    """Runs by the objects that they name.

    Pools change too often to search all runs each time.
    """

    _runs: defaultdict[Ref, set[Ref]] = field(default_factory=lambda: defaultdict(set))
    _named: dict[Ref, frozenset[Ref]] = field(default_factory=dict)
    """Objects that each run names."""

    def see(self, run: Manifest) -> None:
        """Index the objects that a run names now."""
        self.forget(ref(run))
        named = frozenset(_named(run))
        if named:
            self._named[ref(run)] = named
        for about in named:
            self._runs[about].add(ref(run))

    def forget(self, run: Ref) -> None:
        """Drop a deleted run."""
        for about in self._named.pop(run, frozenset()):
            self._runs[about].discard(run)
            if not self._runs[about]:
                del self._runs[about]

    def of(self, about: Ref) -> Sequence[Ref]:
        """Runs that name a pool or a checkpoint."""
        return sorted(self._runs.get(about, ()))


def _named(run: Manifest) -> Iterator[Ref]:
    namespace = ref(run).namespace
    for role in run["spec"].get("roles", {}).get("environments") or ():
        pool = (role.get("poolRef") or {}).get("name")
        if pool:
            yield Ref("EnvPool", namespace, pool)
    for name in start_weights.names_in(run):
        yield Ref("Checkpoint", namespace, name)
