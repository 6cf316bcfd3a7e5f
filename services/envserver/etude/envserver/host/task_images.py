"""Images that tasks name by digest: pulled on demand, kept within a budget of the disk.

A pull never holds up an order: the order is answered with ImageNotReadyError and repeated. What a
registry does wrong is a failure of the platform for the leases of that image, and of no other.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from etude.common.errors import CorruptError, InvalidFieldError, UnavailableError, UserError
from etude.common.pinned_images import PinnedImage, is_within, parse_pinned, task_template_name
from etude.envserver import metrics
from etude.envserver.drivers.base import Driver, SandboxError
from etude.envserver.images.build_cache import hold
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.images.pull import pulled_image
from etude.envserver.images.pull.pulled_image import ImagePuller

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""A registry that failed an image is not asked for it again for so long."""
_PULLS_PER_SOURCE = 2
"""A registry that stalls holds up the pulls from it alone."""
PULLS_AHEAD = 2
"""Pulls ahead of need that run at once: those that orders wait for come first."""


class ImageNotReadyError(UnavailableError):
    """The image is being pulled: the order is to be repeated."""

    reason = "ImageNotReady"


class ImageUnavailableError(SandboxError):
    """The image cannot be had from where it lies: no fault of the policy."""

    reason = "ImageUnavailable"


class TaskTemplate(NamedTuple):
    """A template whose root file system is a task's image."""

    name: str
    """Name for the driver."""
    image: str
    base: Path | None
    """List of the files of its repository."""
    first_files: Path | None
    """Copies of these, the smallest first, within limits."""


class WantedImage(NamedTuple):
    """An image that leases will need."""

    template: str
    """Name of the pool's template that gives the machine."""
    reference: str


@dataclass(slots=True, kw_only=True)
class _KeptImage:
    template: TaskTemplate
    built: BuiltImage
    held: int
    """Descriptor that keeps it in the cache."""
    num_bytes: int
    """On the disk."""
    memory_bytes: int
    """Zero while it rests on the disk."""
    is_resting: bool = False


@dataclass(slots=True, kw_only=True)
class TaskImages:
    """The images of tasks on one host."""

    driver: Driver
    puller: ImagePuller
    sources: Collection[str]
    """Where images may come from: prefixes of references."""
    budget_bytes: int
    """Disk space."""
    memory_bytes: int = 1 << 60
    """Memory of the templates that are ready; others rest on the disk, and load in a moment."""
    in_use: Callable[[], Collection[str]] = tuple
    """Driver's names of the templates that environments use."""
    _kept: dict[str, _KeptImage] = field(default_factory=dict)
    """By the driver's name, the least recently used first."""
    _pulling: dict[str, asyncio.Task[_KeptImage]] = field(default_factory=dict)
    _failed: dict[str, tuple[float, Exception]] = field(default_factory=dict)
    """When the last pull failed, and why."""
    _turns: dict[str, asyncio.Semaphore] = field(
        default_factory=lambda: defaultdict(lambda: asyncio.Semaphore(_PULLS_PER_SOURCE))
    )
    _wanted: Mapping[str, None] = field(default_factory=dict)
    """Driver's names of the images that plans expect, the soonest first."""
    _missed: set[str] = field(default_factory=set)
    """Those that an order found absent and waits for."""
    _opening: Counter[str] = field(default_factory=Counter)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an image is added or others are evicted: one may be both at once."""

    def find(self, template: str, reference: str) -> TaskTemplate:
        """The template of an image that is here; otherwise its pull starts.

        Raises:
            ImageNotReadyError: it is being pulled.
            ImageUnavailableError: it could not be pulled a moment ago.
            InvalidFieldError: tasks may not name such an image.
        """
        image = self._parse(reference)
        name = task_template_name(template, image)
        kept = self._ready(name)
        if kept is None:
            if (error := self._failure(name)) is not None:
                raise ImageUnavailableError(str(error)) from error
            self._begin(name, template, image)
            if name not in self._missed:
                self._missed.add(name)
                metrics.image_requests.labels("miss").inc()
            raise ImageNotReadyError(f"image {image} is being pulled")
        if name not in self._missed:
            metrics.image_requests.labels("hit").inc()
        self._missed.discard(name)
        return self._use(kept)

    def want(self, images: Iterable[WantedImage]) -> None:
        """Pull ahead the images that plans expect, the soonest first, within the budget.

        Replaces what was wanted before; what tasks may not name is ignored.
        """
        wanted = dict[str, tuple[str, PinnedImage]]()
        for each in images:
            with contextlib.suppress(InvalidFieldError):
                image = self._parse(each.reference)
                wanted[task_template_name(each.template, image)] = each.template, image
        self._wanted = dict.fromkeys(wanted)
        present = sum(kept.num_bytes for name, kept in self._kept.items() if name in wanted)
        # One more is as large as those that are here: its size shows only after its pull.
        typical = sum(k.num_bytes for k in self._kept.values()) // max(1, len(self._kept))
        num_pulling = len(self._pulling)
        for name, (template, image) in wanted.items():
            if (
                self._ready(name) is not None
                or name in self._pulling
                or self._failure(name) is not None
            ):
                continue
            room = self.budget_bytes - present - typical * (num_pulling + 1)
            if num_pulling >= PULLS_AHEAD or room < 0:
                break
            num_pulling += 1
            metrics.image_requests.labels("ahead").inc()
            self._begin(name, template, image)

    async def get(self, template: str, reference: str) -> TaskTemplate:
        """The template of an image, after its pull.

        Raises:
            ImageUnavailableError: it cannot be had.
            InvalidFieldError: tasks may not name such an image.
        """
        image = self._parse(reference)
        name = task_template_name(template, image)
        if self._ready(name) is None:
            try:
                await asyncio.shield(self._begin(name, template, image))
            except (UserError, CorruptError, OSError) as cause:
                raise ImageUnavailableError(str(cause)) from cause
        return self._use(self._kept[name])

    @contextmanager
    def opening(self, name: str) -> Iterator[None]:
        """Keep a template while environments of it are being opened."""
        self._opening[name] += 1
        try:
            yield
        finally:
            self._opening[name] -= 1

    async def close(self) -> None:
        """Stop all pulls."""
        self.puller.limits.stop.set()
        for task in self._pulling.values():
            task.cancel()
        await asyncio.gather(*self._pulling.values(), return_exceptions=True)

    @property
    def digests(self) -> list[str]:
        """Digests of the images that are here."""
        return sorted({name.partition("@")[2] for name in self._kept})

    @property
    def pulled_digests(self) -> list[str]:
        """Digests of the images that are being pulled."""
        return sorted({name.partition("@")[2] for name in self._pulling})

    def _ready(self, name: str) -> _KeptImage | None:
        """An image that is here and does not rest."""
        kept = self._kept.get(name)
        return None if kept is None or kept.is_resting else kept

    def _failure(self, name: str) -> Exception | None:
        """Error of its last pull, if that was a moment ago."""
        failed_s, error = self._failed.get(name, (0.0, None))
        return error if time.monotonic() - failed_s < RETRY_S else None

    def _parse(self, reference: str) -> PinnedImage:
        try:
            image = parse_pinned(reference)
        except UserError as cause:
            raise InvalidFieldError("image", str(cause)) from cause
        if not is_within(image, self.sources):
            raise InvalidFieldError("image", f"{image.source} is in none of spec.images.sources")
        return image

    def _use(self, kept: _KeptImage) -> TaskTemplate:
        name = kept.template.name
        self._kept[name] = self._kept.pop(name)
        # The order survives a restart in the cache.
        os.utime(kept.built.folder)
        return kept.template

    def _begin(self, name: str, template: str, image: PinnedImage) -> "asyncio.Task[_KeptImage]":
        if name not in self._pulling:
            task = asyncio.create_task(self._pull(name, template, image), name=f"pull {image}")
            self._pulling[name] = task
            task.add_done_callback(lambda done: self._end(name, done))
        return self._pulling[name]

    def _end(self, name: str, task: "asyncio.Task[_KeptImage]") -> None:
        self._pulling.pop(name, None)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            log.warning("template %s: %s", name, error)
            self._missed.discard(name)
            metrics.image_requests.labels("failure").inc()
            now_s = time.monotonic()
            self._failed = {n: e for n, e in self._failed.items() if now_s - e[0] < RETRY_S}
            self._failed[name] = now_s, error

    async def _pull(self, name: str, template: str, image: PinnedImage) -> _KeptImage:
        machine = self.driver.template_image(template)
        async with self._turns[image.source.partition("/")[0]]:
            began_s = time.monotonic()
            kept = None
            while kept is None:
                built = await asyncio.to_thread(self.puller.pull, image, machine)
                async with self._changing:
                    kept = await self._add(name, image, built)
            metrics.image_pull_seconds.observe(time.monotonic() - began_s)
        return kept

    async def _add(self, name: str, image: PinnedImage, built: BuiltImage) -> _KeptImage | None:
        """Make a pulled image a template of the driver; None if it was evicted meanwhile."""
        held = hold(built.folder)
        if held is None:
            return None
        try:
            size = await self.driver.add_image(name, built)
            own_bytes = await asyncio.to_thread(pulled_image.own_bytes, built.folder)
        except BaseException:  # a held image is never evicted
            os.close(held)
            raise
        found = TaskTemplate(name, str(image), built.base, built.first_files)
        if (rested := self._kept.pop(name, None)) is not None:
            os.close(rested.held)
        self._kept[name] = _KeptImage(
            template=found,
            built=built,
            held=held,
            num_bytes=own_bytes + size.disk,
            memory_bytes=size.memory,
        )
        await self._evict(name)
        await self._rest(name)
        return self._kept[name]

    async def _rest(self, newest: str) -> None:
        """Free the memory of images that nothing uses, until the others fit."""
        total = sum({k.built.address: k.memory_bytes for k in self._kept.values()}.values())
        for name in self._eviction_order():
            if total <= self.memory_bytes:
                break
            if self._ready(name) is None or not self._is_free(name, newest):
                continue
            address = self._kept[name].built.address
            total -= self._kept[name].memory_bytes
            for kept in self._kept.values():
                if kept.built.address == address:
                    kept.memory_bytes, kept.is_resting = 0, True
            await self.driver.rest_image(address)

    async def _evict(self, newest: str) -> None:
        """Remove images that nothing uses, until the others fit into the budget.

        Those left by an earlier process of this host go first, then those used least recently, and
        last those that plans expect.
        """
        mine = {kept.built.address: kept.num_bytes for kept in self._kept.values()}
        left = await asyncio.to_thread(self._left_sizes, mine)
        total = sum(mine.values()) + sum(left.values())
        for address, num_bytes in left.items():
            if total <= self.budget_bytes:
                break
            if await self._remove(address):
                total -= num_bytes
        for name in self._eviction_order():
            if total <= self.budget_bytes:
                break
            if name not in self._kept or not self._is_free(name, newest):
                continue
            total -= await self._forget(self._kept[name].built.address)
        metrics.image_bytes.set(total)

    def _left_sizes(self, mine: Collection[str]) -> dict[str, int]:
        """Sizes of the images that an earlier process left, or another one holds; oldest first."""
        entries = self.puller.cache.entries(pulled_image.KIND)
        left = {
            folder.name: pulled_image.own_bytes(folder)
            for folder in entries
            if folder.name not in mine
        }
        for address, num_bytes in self.driver.left_image_sizes(mine).items():
            left[address] = left.get(address, 0) + num_bytes
        return left

    def _eviction_order(self) -> list[str]:
        """Names of the images here: of those that plans expect, the soonest goes last."""
        places = {name: -place for place, name in enumerate(self._wanted)}
        return sorted(self._kept, key=lambda name: places.get(name, -len(places)))

    def _is_free(self, name: str, newest: str) -> bool:
        """True if no environment uses an image, under this name or another one."""
        address, used = self._kept[name].built.address, {newest, *self.in_use()}
        names = [each for each, kept in self._kept.items() if kept.built.address == address]
        return not any(self._opening[each] or each in used for each in names)

    async def _forget(self, address: str) -> int:
        """Remove an image under all its names; returns its bytes."""
        names = [name for name, kept in self._kept.items() if kept.built.address == address]
        going = [self._kept.pop(name) for name in names]
        for kept in going:
            os.close(kept.held)
        await self._remove(address)
        return going[0].num_bytes

    async def _remove(self, address: str) -> bool:
        """Remove an image from the disk; false if another process holds it."""
        metrics.image_requests.labels("eviction").inc()
        await self.driver.remove_image(address)
        return await asyncio.to_thread(self.puller.cache.remove, pulled_image.KIND, address)


def require_images(images: TaskImages | None) -> TaskImages:
    """The images of a pool that takes some.

    Raises:
        InvalidFieldError: it takes none.
    """
    if images is None:
        raise InvalidFieldError("image", "spec.images of this pool names no sources of images")
    return images
