"""Templates of Firecracker on the disk: believed again only if this node wrote them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from etude.envserver.drivers.vm.firecracker.template_cache import FirecrackerTemplateCache

FILES = {
    "memory": bytes(4096) + b"m" * 4096,
    "vmstate": b"devices",
    "root.sqsh": b"root",
    "disk": bytes(4096) + b"d" * 4096,
}


def kept(folder: Path, key: bytes = bytes(32)) -> FirecrackerTemplateCache:
    return FirecrackerTemplateCache(folder=folder, key=key)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with kept(tmp_path).add("k") as made:
        for name, content in FILES.items():
            (made / name).write_bytes(content)
    return tmp_path


def test_what_a_host_wrote_it_finds_again_and_nothing_else(folder: Path) -> None:
    address = kept(folder).find("k")
    assert address is not None
    assert kept(folder).find("k") == address
    assert kept(folder).find("other") is None
    assert kept(folder, b"other key".ljust(32)).find("k") is None
    assert [path.name for path in folder.iterdir()] == ["k"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda at: (at / "memory").write_bytes(FILES["memory"][:-1] + b"x"),
        lambda at: (at / "vmstate").write_bytes(b"others"),
        lambda at: (at / "seal").write_bytes(bytes(32)),
        lambda at: (at / "seal").unlink(),
        lambda at: (at / "memory").unlink(),
        lambda at: (at / "root.sqsh").unlink(),
        lambda at: (at / "disk").write_bytes(FILES["disk"][:-1] + b"x"),
        lambda at: (at / "disk").unlink(),
    ],
)
def test_a_damaged_template_is_none(folder: Path, damage: Callable[[Path], object]) -> None:
    damage(folder / "k")
    assert kept(folder).find("k") is None


def test_a_template_that_was_not_finished_is_none(folder: Path) -> None:
    def fail() -> None:
        with kept(folder).add("new") as made:
            (made / "memory").write_bytes(FILES["memory"])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert kept(folder).find("new") is None
    assert [path.name for path in folder.iterdir()] == ["k"]
