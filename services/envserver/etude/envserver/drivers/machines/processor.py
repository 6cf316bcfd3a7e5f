"""The processor that runs guests itself, as far as their snapshots depend on it."""

from pathlib import Path

_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "microcode")


def host_processor() -> list[str]:
    """What of the host's processor a snapshot of a guest depends on that it runs."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    found = {name.strip(): value.strip() for name, _, value in lines}
    return [found.get(name, "") for name in _CPU_FIELDS]
