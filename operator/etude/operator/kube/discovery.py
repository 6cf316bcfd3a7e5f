"""Discovery of the kinds of other projects that an API server serves."""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from etude.operator.kube.rest import RestClient, parse_read_reply
from etude.operator.manifests import RESOURCES

INTERVAL_S = 600.0
"""Interval of discovery while no reader misses a kind."""
MIN_INTERVAL_S = 10.0
"""Least time between two discoveries, however many readers miss a kind."""


@dataclass(slots=True)
class Discovery:
    """The kinds that the operator may use, and the usable ones of them."""

    kinds: tuple[str, ...] = ()
    """Kinds to look for."""
    _served: frozenset[str] = frozenset()
    _requested: asyncio.Event = field(default_factory=asyncio.Event)

    def usable_kinds(self, kinds: Collection[str]) -> frozenset[str]:
        """The usable ones of these kinds: served, with their objects in the cache.

        A missing one triggers discovery, if the operator may use it.
        """
        usable = self._served & frozenset(kinds)
        if usable < frozenset(kinds) & frozenset(self.kinds):
            self._requested.set()
        return usable

    def set_usable_kinds(self, kinds: Iterable[str]) -> None:
        """Record the served kinds, once their objects are cached."""
        self._served = frozenset(kinds)

    async def wait_until_due(self) -> None:
        await asyncio.sleep(MIN_INTERVAL_S)
        try:
            async with asyncio.timeout(INTERVAL_S - MIN_INTERVAL_S):
                await self._requested.wait()
        except TimeoutError:
            return
        finally:
            self._requested.clear()

    async def discover_kinds(self, rest: RestClient) -> set[str]:
        """Ask the API server for the served kinds.

        Raises:
            ClusterError: no answer.
        """
        wanted = {RESOURCES[kind].api_version for kind in self.kinds}
        if not wanted:
            return set()
        # The answer for a version that is not served is text, not a Status object.
        groups = parse_read_reply(await rest.request("GET", "/apis"), "discover groups")["groups"]
        served = {version["groupVersion"] for group in groups for version in group["versions"]}
        found: set[str] = set()
        for version in wanted & served:
            reply = await rest.request("GET", f"/apis/{version}")
            listed = parse_read_reply(reply, f"discover {version}").get("resources") or ()
            plurals = {each["name"] for each in listed}
            found |= {
                kind
                for kind in self.kinds
                if RESOURCES[kind].api_version == version and RESOURCES[kind].plural in plurals
            }
        return found
