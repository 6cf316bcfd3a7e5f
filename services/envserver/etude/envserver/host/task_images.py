"""Images that tasks name by digest: pulled on demand, kept within a budget of the disk.

A pull never holds up an order: the order is answered with ImageNotReadyError and repeated. What a
registry does wrong is a failure of the platform for the leases of that image, and of no other.
"""

import asyncio
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
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
from etude.envserver.images.pull.bounded_program import FillLimits, measure_folder
from etude.envserver.images.pull.pulled_image import ImagePuller

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""A registry that failed an image is not asked for it again for so long."""
_PULLS_PER_SOURCE = 2
"""A registry that stalls holds up the pulls from it alone."""


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
    first_files: Path | None


@dataclass(slots=True, kw_only=True)
class _KeptImage:
    template: TaskTemplate
    built: BuiltImage
    held: int
    """Descriptor that keeps it in the cache."""
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class TaskImages:
    """The images of tasks on one host."""

    driver: Driver
    puller: ImagePuller
    sources: Collection[str]
    """Where images may come from: prefixes of references."""
    budget_bytes: int
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
        kept = self._kept.get(name)
        if kept is None:
            failed_s, error = self._failed.get(name, (0.0, None))
            if error is not None and time.monotonic() - failed_s < RETRY_S:
                raise ImageUnavailableError(str(error)) from error
            self._begin(name, template, image)
            metrics.image_requests.labels("miss").inc()
            raise ImageNotReadyError(f"image {image} is being pulled")
        metrics.image_requests.labels("hit").inc()
        return self._use(kept)

    async def get(self, template: str, reference: str) -> TaskTemplate:
        """The template of an image, after its pull.

        Raises:
            ImageUnavailableError: it cannot be had.
            InvalidFieldError: tasks may not name such an image.
        """
        image = self._parse(reference)
        name = task_template_name(template, image)
        if name not in self._kept:
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
        """Digests of the images that are here or being pulled."""
        return sorted({name.partition("@")[2] for name in (*self._kept, *self._pulling)})

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
            num_bytes = await self.driver.add_image(name, built)
            size = await asyncio.to_thread(measure_folder, built.folder, FillLimits())
        except BaseException:  # a held image is never evicted
            os.close(held)
            raise
        num_bytes += size.num_bytes
        found = TaskTemplate(name, str(image), built.first_files)
        kept = _KeptImage(template=found, built=built, held=held, num_bytes=num_bytes)
        self._kept[name] = kept
        await self._evict(name)
        return kept

    async def _evict(self, newest: str) -> None:
        """Remove the images used least recently, until the others fit into the budget."""
        total = sum(kept.num_bytes for kept in self._kept.values())
        ours = {kept.built.address for kept in self._kept.values()}
        for folder in self.puller.cache.entries(pulled_image.KIND):
            # Left by an earlier process of this host, or held by another one.
            if folder.name not in ours:
                size = await asyncio.to_thread(measure_folder, folder, FillLimits())
                is_over = total + size.num_bytes > self.budget_bytes
                if not is_over or not await self._remove(folder.name):
                    total += size.num_bytes
        for name in list(self._kept):
            if total <= self.budget_bytes:
                break
            if name == newest or self._opening[name] or name in self.in_use():
                continue
            kept = self._kept.pop(name)
            total -= kept.num_bytes
            try:
                await self.driver.remove_image(name, kept.built)
            finally:
                os.close(kept.held)
            await self._remove(kept.built.address)
        metrics.image_bytes.set(total)

    async def _remove(self, address: str) -> bool:
        metrics.image_requests.labels("eviction").inc()
        return await asyncio.to_thread(self.puller.cache.remove, pulled_image.KIND, address)


def require_images(images: TaskImages | None) -> TaskImages:
    """The images of a pool that takes some.

    Raises:
        InvalidFieldError: it takes none.
    """
    if images is None:
        raise InvalidFieldError("image", "spec.images of this pool names no sources of images")
    return images
