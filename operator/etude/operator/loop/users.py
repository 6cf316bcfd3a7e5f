"""Which runs refer to which pools and checkpoints of somebody else."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from etude.operator.manifests import Manifest, Ref, ref
from etude.operator.runs import model


@dataclass(slots=True)
class Users:
    """An index by what is referred to.

    A pool changes more often than anybody could ask every run about it.

    A run stays in it after its end; looking at one that is gone costs nothing.
    """

    _runs: defaultdict[Ref, set[Ref]] = field(default_factory=lambda: defaultdict(set))

    def see(self, run: Manifest) -> None:
        """Note what a run refers to now."""
        for about in _named(run):
            self._runs[about].add(ref(run))

    def of(self, about: Ref) -> Sequence[Ref]:
        """Runs that refer to a pool or a checkpoint, or once did."""
        return sorted(self._runs.get(about, ()))


def _named(run: Manifest) -> Iterator[Ref]:
    namespace = ref(run).namespace
    for role in run["spec"].get("roles", {}).get("environments") or ():
        pool = (role.get("poolRef") or {}).get("name")
        if pool:
            yield Ref("EnvPool", namespace, pool)
    for name in model.names_in(run):
        yield Ref("Checkpoint", namespace, name)
