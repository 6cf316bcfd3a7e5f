"""What a container of gVisor may take."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.drivers.gvisor import bundle


@given(memory_mib=st.integers(64, 65_536))
def test_folders_in_memory_take_no_more_than_they_are_said_to(memory_mib: int) -> None:
    sizes = {
        mount["destination"]: int(option.removeprefix("size=").removesuffix("m"))
        for mount in bundle.spec(Path("/root"), memory_mib=memory_mib)["mounts"]
        for option in mount.get("options", ())
        if option.startswith("size=")
    }
    assert sizes.pop("/workspace") == memory_mib
    assert len(sizes) == 5
    assert all(size <= memory_mib / 4 for size in sizes.values())
