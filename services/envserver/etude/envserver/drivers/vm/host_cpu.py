"""Host CPU: identity of the processor and rate of its time stamp counter (TSC)."""

import ctypes
import mmap
import time
from pathlib import Path
from typing import NamedTuple

_RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")
"""rdtsc; shl rdx, 32; or rax, rdx; ret"""
_SPAN_S = 0.1
_TRIES = 32
_CLOSE = 5e-4
"""Allowed relative difference of the kernel's and the measured rate; a guest's exceeds 1e-3."""


class _Sample(NamedTuple):
    """One reading of the counter."""

    ticks: int
    clock_ns: int
    doubt_ns: int


def host_tsc_khz(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """TSC rate in kHz: the kernel's figure where the measurement agrees, else the measured MHz.

    It is part of the compatibility key of snapshots, so it must not differ from call to call.
    """
    measured = measured_khz()
    for figure in _figures(cpuinfo.read_text(encoding="ascii", errors="replace")):
        if abs(figure - measured) <= measured * _CLOSE:
            return figure
    return round(measured / 1000) * 1000


def measured_khz() -> float:
    """TSC rate in kHz, measured over 0.1 s."""
    with mmap.mmap(
        -1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    ) as page:
        page.write(_RDTSC)
        anchor = ctypes.c_char.from_buffer(page)
        counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(anchor))
        try:
            first = _best(counter)
            time.sleep(_SPAN_S)
            last = _best(counter)
        finally:
            del counter, anchor  # the page cannot be closed before
    return (last.ticks - first.ticks) * 1e6 / (last.clock_ns - first.clock_ns)


def _best(counter: "ctypes._CFunctionType") -> _Sample:
    """Take the most precise sample: on a busy machine a clock is sometimes read late."""
    return min((_sample(counter) for _ in range(_TRIES)), key=lambda sample: sample.doubt_ns)


def _sample(counter: "ctypes._CFunctionType") -> _Sample:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    ticks = counter()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    return _Sample(ticks, (before + after) // 2, after - before)


def _figures(text: str) -> list[int]:
    """Frequencies by the kernel; without frequency scaling one is the counter's rate."""
    lines = [line.partition(":") for line in text.splitlines() if line.startswith("cpu MHz")]
    return [round(float(value) * 1000) for _, _, value in lines if _is_number(value)]


def _is_number(text: str) -> bool:
    return text.strip().replace(".", "", 1).isdecimal()


_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "microcode")


def processor_identity() -> list[str]:
    """Identify the host processor by the fields that snapshots depend on."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    found = {name.strip(): value.strip() for name, _, value in lines}
    return [found.get(name, "") for name in _CPU_FIELDS]
