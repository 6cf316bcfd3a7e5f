"""Whether KVM works here, asked of a real boot."""

import json
from pathlib import Path

import pytest
from tests.support.vm import microvms

from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import kvm_probe
from etude.envserver.images.built_image import BuiltImage


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_the_verdict_is_that_of_a_boot_and_is_kept(image: BuiltImage, tmp_path: Path) -> None:
    machine = microvms.small_machine()
    verdict = await kvm_probe.probe_kvm(image, machine, jail=Jail(), scratch=tmp_path)
    assert verdict.why
    row = json.loads((tmp_path / "kvm.json").read_text())
    (tmp_path / "kvm.json").write_text(json.dumps({**row, "why": "as it was written"}))
    again = await kvm_probe.probe_kvm(image, machine, jail=Jail(), scratch=tmp_path)
    assert (again.works, again.why) == (verdict.works, "as it was written")
    assert names(tmp_path) == ["kvm.json"]


@pytest.mark.parametrize("damage", ["cut", "another boot", "another shape"])
async def test_a_kept_verdict_that_does_not_fit_is_asked_again(
    image: BuiltImage, tmp_path: Path, damage: str
) -> None:
    machine = microvms.small_machine()
    verdict = await kvm_probe.probe_kvm(image, machine, jail=Jail(), scratch=tmp_path)
    row = json.loads((tmp_path / "kvm.json").read_text())
    lie = json.dumps({**row, "why": "a lie"})
    texts = {
        "cut": lie[:-5],
        "another boot": json.dumps(
            {**row, "why": "a lie", "facts": {**row["facts"], "boot": "other"}}
        ),
        "another shape": json.dumps({**row, "why": 7}),
    }
    (tmp_path / "kvm.json").write_text(texts[damage])
    assert await kvm_probe.probe_kvm(image, machine, jail=Jail(), scratch=tmp_path) == verdict
