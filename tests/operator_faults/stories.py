"""A workload under faults, and the end that it must come to all the same."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.operator_faults import crash_plans
from tests.operator_faults.lab import LIMIT_S, Lab, Running, Scene
from tests.operator_faults.oracles import Reference
from tests.operator_faults.proxy import EventFault, Fault, Proxy
from tests.operator_faults.workloads import Workload

References = dict[str, Reference]


@dataclass(slots=True)
class Story:
    """One workload in one scene."""

    scene: Scene
    operator: Running
    reference: Reference

    @property
    def proxy(self) -> Proxy:
        return self.operator.proxy

    async def reaches_the_reference(self, *, excess: Sequence[str] = ()) -> None:
        """Wait for the state that there is without faults; nothing was made once too often.

        Raises:
            AssertionError: something is different, or was broken on the way.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                await self.scene.scenery.until(
                    lambda: not self.reference.differences(self.scene.scenery.objects)
                )
        assert not self.reference.differences(self.scene.scenery.objects), self.scene.log()[-3000:]
        found = self.reference.excess(self.scene.scenery.ordered())
        assert not [each for each in found if not each.startswith(tuple(excess))]
        problems = self.scene.problems()
        assert not problems, (problems[:5], self.scene.log()[-3000:])


async def reference_of(lab: Lab, workload: Workload, known: References) -> Reference:
    """What a workload comes to without a fault; recorded once."""
    if workload.name not in known:
        known[workload.name] = await crash_plans.record(lab, workload)
    return known[workload.name]


@contextlib.asynccontextmanager
async def told(
    lab: Lab,
    workload: Workload,
    known: References,
    event_faults: Sequence[EventFault] = (),
    *,
    faults: Sequence[Fault] = (),
    constants: Mapping[str, Any] | None = None,
) -> AsyncIterator[Story]:
    """A scene that is prepared for a workload, with faults from its beginning on."""
    reference = await reference_of(lab, workload, known)
    async with lab.scene() as scene:
        scene.constants |= constants or {}
        async with lab.acting(scene, faults=faults, event_faults=event_faults) as operator:
            await workload.prepare(scene)
            yield Story(scene, operator, reference)
