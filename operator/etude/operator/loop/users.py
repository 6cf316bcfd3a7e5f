"""Which runs refer to which pools of somebody else."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.operator.manifests import Manifest, Ref, ref


@dataclass(slots=True)
class Users:
    """An index by pool: a pool changes more often than anybody could ask every run about it.

    A run stays in it after its end; looking at one that is gone costs nothing.
    """

    _runs: defaultdict[tuple[str, str], set[Ref]] = field(default_factory=lambda: defaultdict(set))

    def see(self, run: Manifest) -> None:
        """Note what a run refers to now."""
        key = ref(run)
        roles = run["spec"].get("roles", {}).get("environments") or ()
        for role in roles:
            pool = (role.get("poolRef") or {}).get("name")
            if pool:
                self._runs[key.namespace, pool].add(key)

    def of(self, namespace: str, pool: str) -> Sequence[Ref]:
        """Runs that refer to a pool, or once did."""
        return sorted(self._runs.get((namespace, pool), ()))
