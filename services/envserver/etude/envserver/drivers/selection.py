"""Selection of a pool's driver on this machine.

Drivers are imported on demand: a host that was killed adopts its leases as soon as its next process
has loaded what it needs, and of four drivers it needs one.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from etude.common.api.pool.network import EgressPolicy
from etude.common.api.pool.spec import DriverName, EnvPoolSpec, IsolationLevel, Slot, Template
from etude.common.errors import CorruptError, StoreError
from etude.envserver.drivers.base import Driver, DriverUnavailableError, IsolationStrength
from etude.envserver.drivers.vm.disk import DEFAULT_MIB
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.jail import jail_with_kvm
from etude.envserver.drivers.vm.qemu.command_line import Accelerator, QemuConfig
from etude.envserver.images import built_image
from etude.envserver.images.build_cache import BuildCache, hold
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.storage.store_reads import DirectReads, StoreReads

if TYPE_CHECKING:
    from etude.envserver.drivers.gvisor.driver import GvisorDriver
    from etude.envserver.drivers.process.driver import ProcessDriver
    from etude.envserver.drivers.vm.firecracker.driver import FirecrackerDriver
    from etude.envserver.drivers.vm.qemu.driver import QemuDriver
    from etude.envserver.egress.environment_egress import PoolEgress
    from etude.envserver.isolation.sandbox_layout import CommandLimits
    from etude.v1 import guest_pb2

log = logging.getLogger(__name__)

DEFAULT_MEMORY_MIB = 256
_ADDRESS_TIMES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFolders:
    """Folders of a driver on this machine."""

    scratch: Path
    images: Path
    """Image cache, as `etude images build` makes it; images of a store are copied to it."""
    secrets: Path | None = None
    """Folder of the credentials of egress rules."""
    reads: StoreReads = field(default_factory=DirectReads)
    """Of images in a store."""


async def select_driver(spec: EnvPoolSpec, place: DriverFolders) -> Driver:
    """Select the driver that the pool names, or the best one that can run its templates.

    Raises:
        DriverUnavailableError: this machine cannot meet the pool's requirements.
    """
    driver = await _select(spec, place)
    _refuse_foreign_limits(spec, driver)
    threshold = spec.health.crash_loop_threshold
    if threshold is None:
        return driver
    from etude.envserver.drivers.vm.driver import VmDriver
    from etude.envserver.drivers.vm.start.quarantine import StartQuarantine

    if not isinstance(driver, VmDriver):
        raise DriverUnavailableError(
            f"driver {driver.name} starts no VMs that could crash one after the other",
            where="spec.health.crashLoopThreshold",
            fix="remove the field, or set spec.isolation.driver to QemuMicroVM",
        )
    driver.quarantine = StartQuarantine(threshold=threshold)
    return driver


async def _select(spec: EnvPoolSpec, place: DriverFolders) -> Driver:
    match spec.isolation.driver:
        case DriverName.PROCESS:
            return _process(spec, place)
        case DriverName.QEMU_MICRO_VM:
            return await _qemu(spec, place)
        case DriverName.FIRECRACKER:
            return await _firecracker(spec, place)
        case DriverName.GVISOR:
            return await _gvisor(spec, place)
        case DriverName.AUTO:
            return await _select_best(spec, place)


def _egress(spec: EnvPoolSpec, place: DriverFolders) -> "PoolEgress | None":
    if spec.network.egress is EgressPolicy.NONE:
        return None
    from etude.envserver.egress.credentials import SecretFiles
    from etude.envserver.egress.environment_egress import PoolEgress

    templates = {template.name: template.egress for template in spec.templates}
    return PoolEgress(spec.network, templates, secrets=SecretFiles(place.secrets))


async def _select_best(spec: EnvPoolSpec, place: DriverFolders) -> Driver:
    """Select the first of microVMs, gVisor and processes that is available and strong enough.

    Raises:
        DriverUnavailableError: none is.
    """
    minimum = spec.isolation.minimum
    accepts_process = minimum is IsolationLevel.PROCESS
    if accepts_process and not any(template.image for template in spec.templates):
        return _process(spec, place)
    try:
        machines = await _qemu(spec, place)
        if minimum is not IsolationLevel.SANDBOX or machines.strength is not IsolationStrength.WEAK:
            return machines
        error = DriverUnavailableError(
            "QEMU without KVM is not an isolation boundary",
            where="spec.isolation.minimum",
            fix="give it KVM",
        )
    except DriverUnavailableError as refused:
        error = refused
    if minimum is IsolationLevel.MICRO_VM:
        raise error
    try:
        return await _gvisor(spec, place)
    except DriverUnavailableError as refused:
        if not accepts_process:
            raise refused from error
        log.warning("there is no gVisor here either: %s", refused)
    log.warning("environments are processes that see this node's programs: %s", error)
    return _processes(spec, place)


async def _gvisor(spec: EnvPoolSpec, place: DriverFolders) -> "GvisorDriver":
    from etude.envserver.drivers.gvisor import runsc
    from etude.envserver.drivers.gvisor.driver import GvisorDriver

    # Checked here, so that a pool which accepts less is not refused for it.
    if spec.network.egress is not EgressPolicy.NONE:
        raise DriverUnavailableError(
            "environments of driver gvisor have no egress",
            where="spec.network.egress",
            fix="set it to None, or spec.isolation.driver to QemuMicroVM",
        )
    images = await _images(spec, place)
    for index, template in enumerate(spec.templates):
        if images[template.name].has_services:
            raise DriverUnavailableError(
                f"image {images[template.name].name!r} has services, which gVisor does not start",
                where=f"spec.templates[{index}].image",
                fix="set spec.isolation.driver to QemuMicroVM",
            )
    try:
        await runsc.version()
    except runsc.RunscError as error:
        where = "spec.isolation.driver"
        raise DriverUnavailableError(str(error), where=where, fix=runsc.FIX) from error
    memory_mib = spec.slot.memory_mib or DEFAULT_MEMORY_MIB
    return GvisorDriver(
        scratch=place.scratch,
        images=images,
        memory_mib=memory_mib,
        limits=_guest_limits(spec.slot),
    )


def _process(spec: EnvPoolSpec, place: DriverFolders) -> "ProcessDriver":
    fields = [
        f"spec.templates[{index}].image" for index, each in enumerate(spec.templates) if each.image
    ]
    if fields:
        raise DriverUnavailableError(
            "driver Process knows no images",
            where=fields[0],
            fix="remove the field, or set spec.isolation.driver to QemuMicroVM",
        )
    return _processes(spec, place)


def _processes(spec: EnvPoolSpec, place: DriverFolders) -> "ProcessDriver":
    from etude.envserver.drivers.process.driver import ProcessDriver

    limits = _command_limits(spec.slot)
    return ProcessDriver(place.scratch, egress=_egress(spec, place), limits=limits)


def _command_limits(slot: Slot) -> "CommandLimits":
    from etude.envserver.isolation.sandbox_layout import MIB, CommandLimits

    named = {
        "memory_bytes": slot.memory_mib and slot.memory_mib * MIB,
        # Runtimes with their own heap reserve many times what they use.
        "address_bytes": slot.memory_mib and slot.memory_mib * MIB * _ADDRESS_TIMES,
        "processes": slot.processes,
        "open_files": slot.open_files,
        "file_bytes": slot.file_mib and slot.file_mib * MIB,
        "temporary_bytes": slot.temporary_mib and slot.temporary_mib * MIB,
    }
    return CommandLimits(**{name: value for name, value in named.items() if value is not None})


def _guest_limits(slot: Slot) -> "guest_pb2.GuestLimits":
    from etude.envserver.guest.commands import guest_limits

    return guest_limits(
        processes=slot.processes,
        open_files=slot.open_files,
        file_bytes=slot.file_mib and slot.file_mib << 20,
    )


def _refuse_foreign_limits(spec: EnvPoolSpec, driver: Driver) -> None:
    """Refuse a limit that the selected driver does not set.

    Raises:
        DriverUnavailableError: the pool sets it.
    """
    if driver.name in {"process", "gvisor"} and spec.slot.disk_mib is not None:
        raise DriverUnavailableError(
            f"environments of driver {driver.name} share the host's disk without a limit each",
            where="spec.slot.diskMib",
            fix="remove the field, or set spec.isolation.driver to QemuMicroVM",
        )
    if driver.name != "process" and spec.slot.temporary_mib is not None:
        raise DriverUnavailableError(
            "only driver Process sets this limit: /tmp of a guest is part of its disk or memory",
            where="spec.slot.temporaryMib",
            fix="remove the field, or set spec.isolation.driver to Process",
        )


async def _qemu(spec: EnvPoolSpec, place: DriverFolders) -> "QemuDriver":
    from etude.envserver.drivers.vm import host_cpu
    from etude.envserver.drivers.vm.qemu.compatibility import qemu_version

    images = await _bootable_images(spec, place)
    memory_mib = spec.slot.memory_mib or DEFAULT_MEMORY_MIB
    disk_mib = spec.slot.disk_mib or DEFAULT_MIB
    machine = QemuConfig(memory_mib=memory_mib, disk_mib=disk_mib, tsc_khz=host_cpu.host_tsc_khz())
    place.scratch.mkdir(parents=True, exist_ok=True)
    try:
        qemu_version()
        limits = _guest_limits(spec.slot)
        return await _with_accelerator(images, machine, place, _egress(spec, place), limits)
    except VmmError as error:
        raise DriverUnavailableError(
            str(error),
            where="spec.isolation.driver",
            fix="install QEMU on the node (make system-deps), or set it to Process",
        ) from error


async def _firecracker(spec: EnvPoolSpec, place: DriverFolders) -> "FirecrackerDriver":
    from etude.envserver.drivers.vm.firecracker import compatibility
    from etude.envserver.drivers.vm.firecracker.api_requests import FirecrackerConfig
    from etude.envserver.drivers.vm.firecracker.driver import FirecrackerDriver

    images = await _bootable_images(spec, place)
    place.scratch.mkdir(parents=True, exist_ok=True)
    try:
        programs = await asyncio.to_thread(compatibility.find_programs, place.scratch)
    except VmmError as error:
        raise DriverUnavailableError(
            str(error),
            where="spec.isolation.driver",
            fix="install Firecracker and its jailer on a node with KVM, or set it to QemuMicroVM",
        ) from error
    return FirecrackerDriver(
        scratch=place.scratch,
        images=images,
        machine=FirecrackerConfig(
            memory_mib=spec.slot.memory_mib or DEFAULT_MEMORY_MIB,
            disk_mib=spec.slot.disk_mib or DEFAULT_MIB,
        ),
        programs=programs,
        egress=_egress(spec, place),
        limits=_guest_limits(spec.slot),
    )


async def _images(spec: EnvPoolSpec, place: DriverFolders) -> dict[str, BuiltImage]:
    return {
        template.name: await asyncio.to_thread(_image, template, index, place)
        for index, template in enumerate(spec.templates)
    }


async def _bootable_images(spec: EnvPoolSpec, place: DriverFolders) -> dict[str, BuiltImage]:
    """The images of a pool of microVMs.

    Raises:
        DriverUnavailableError: one is missing, or its guests would mount no disk.
    """
    images = await _images(spec, place)
    for index, template in enumerate(spec.templates):
        if images[template.name].guest_version < built_image.GUEST_VERSION:
            raise DriverUnavailableError(
                f"image {images[template.name].name!r} is of a release whose guests have no disk",
                where=f"spec.templates[{index}].image",
                fix="build it again: etude images build SPEC",
            )
    return images


async def _with_accelerator(
    images: Mapping[str, BuiltImage],
    machine: QemuConfig,
    place: DriverFolders,
    egress: "PoolEgress | None",
    limits: "guest_pb2.GuestLimits",
) -> "QemuDriver":
    from etude.envserver.drivers.vm.qemu import kvm_probe
    from etude.envserver.drivers.vm.qemu.driver import QemuDriver

    first, jail = next(iter(images.values())), jail_with_kvm()
    verdict = await kvm_probe.probe_kvm(first, machine, jail=jail, scratch=place.scratch)
    if verdict.works:
        machine = replace(machine, accelerator=Accelerator.KVM)
        return QemuDriver(
            scratch=place.scratch,
            images=images,
            machine=machine,
            jail=jail,
            egress=egress,
            limits=limits,
        )
    log.warning("QEMU translates the guests' instructions, 10 to 30 times slower: %s", verdict.why)
    return QemuDriver(
        scratch=place.scratch, images=images, machine=machine, egress=egress, limits=limits
    )


def _image(template: Template, index: int, place: DriverFolders) -> BuiltImage:
    where = f"spec.templates[{index}].image"
    if template.image is None:
        raise DriverUnavailableError(
            f"template {template.name!r} names no image for a microVM to boot",
            where=where,
            fix="name one of `etude images ls`, or set spec.isolation.driver to Process",
        )
    try:
        found = _hold_image(template.image, BuildCache(place.images), place.reads)
    except CorruptError as error:
        raise DriverUnavailableError(str(error), where=where, fix="build it again") from error
    except StoreError as error:
        fix = "check spec.store and its Secret: etude storage check URL"
        raise DriverUnavailableError(str(error), where=where, fix=fix) from error
    if found is None:
        raise DriverUnavailableError(
            f"there is no image {template.image!r} on this node",
            where=where,
            fix="build it there: etude images build SPEC",
        )
    return found


def _hold_image(name: str, cache: BuildCache, reads: StoreReads) -> BuiltImage | None:
    """Find the image and hold it against removal while this process lives."""
    found = _find_image(name, cache, reads)
    return found if found is not None and hold(found.folder) is not None else None


def _find_image(name: str, cache: BuildCache, reads: StoreReads) -> BuiltImage | None:
    """Find the image in a store or a folder, or the newest one here of this name or address."""
    if name.startswith("s3://"):
        from etude.envserver.images import image_store

        prefix, _, reference = name.rpartition("/")
        return image_store.fetch_image(reference, reads.open(prefix), cache)
    if name.startswith("file://"):
        return built_image.read_image(Path(unquote(urlparse(name).path)))
    return built_image.newest_image(name, cache)
