"""Which kinds of other projects an API server serves now."""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from etude.operator.cluster.replies import answered
from etude.operator.cluster.rest import Rest
from etude.operator.manifests import RESOURCES

EVERY_S = 600.0
"""What was installed or removed is noticed after this, if nobody asks."""
LEAST_S = 10.0
"""However often somebody asks, the API server is not asked again before this."""


@dataclass(slots=True)
class Discovery:
    """Kinds that the operator would use, and those of them that it can use."""

    kinds: tuple[str, ...] = ()
    """What may be there."""
    _served: frozenset[str] = frozenset()
    _asked: asyncio.Event = field(default_factory=asyncio.Event)

    def among(self, kinds: Collection[str]) -> frozenset[str]:
        """Which of these are served, with their objects in the cache.

        The others are looked for, but for those that the operator would not use.
        """
        usable = self._served & frozenset(kinds)
        if usable < frozenset(kinds) & frozenset(self.kinds):
            self._asked.set()
        return usable

    def found(self, kinds: Iterable[str]) -> None:
        """Take over what is served, once its objects are known."""
        self._served = frozenset(kinds)

    async def wait(self) -> None:
        """Return when it is time for another look."""
        await asyncio.sleep(LEAST_S)
        try:
            async with asyncio.timeout(EVERY_S - LEAST_S):
                await self._asked.wait()
        except TimeoutError:
            return
        finally:
            self._asked.clear()

    async def look(self, rest: Rest) -> set[str]:
        """Ask the API server.

        Raises:
            ClusterError: it does not say.
        """
        wanted = {RESOURCES[kind].api_version for kind in self.kinds}
        if not wanted:
            return set()
        # A version that is not served is answered with words, and not with a status.
        groups = answered(await rest.request("GET", "/apis"), "discover groups")["groups"]
        served = {version["groupVersion"] for group in groups for version in group["versions"]}
        found: set[str] = set()
        for version in wanted & served:
            reply = await rest.request("GET", f"/apis/{version}")
            listed = answered(reply, f"discover {version}").get("resources") or ()
            plurals = {each["name"] for each in listed}
            found |= {
                kind
                for kind in self.kinds
                if RESOURCES[kind].api_version == version and RESOURCES[kind].plural in plurals
            }
        return found
