"""Reference index: the objects that name a pool or a checkpoint."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from etude.operator.manifests import Ref


@dataclass(slots=True)
class ReferenceIndex:
    """Objects by the objects that they name.

    Pools change too often to search all runs each time.
    """

    _referrers: defaultdict[Ref, set[Ref]] = field(default_factory=lambda: defaultdict(set))
    _references: dict[Ref, frozenset[Ref]] = field(default_factory=dict)
    """Objects that each object names."""

    def index(self, key: Ref, references: Iterable[Ref]) -> None:
        self.forget(key)
        targets = frozenset(references)
        if targets:
            self._references[key] = targets
        for target in targets:
            self._referrers[target].add(key)

    def forget(self, key: Ref) -> None:
        for target in self._references.pop(key, frozenset()):
            self._referrers[target].discard(key)
            if not self._referrers[target]:
                del self._referrers[target]

    def referrers(self, target: Ref) -> Sequence[Ref]:
        return sorted(self._referrers.get(target, ()))
