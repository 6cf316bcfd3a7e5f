"""Host processor, as far as snapshots of guests that it runs depend on it."""

from pathlib import Path

_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "microcode")


def host_processor() -> list[str]:
    """Identify the host processor by the fields that snapshots depend on."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    found = {name.strip(): value.strip() for name, _, value in lines}
    return [found.get(name, "") for name in _CPU_FIELDS]
