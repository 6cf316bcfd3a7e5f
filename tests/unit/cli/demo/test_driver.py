"""What the demo's environments are, from what the machine can do."""

import pytest

from etude.cli.demo import inputs
from etude.cli.demo.driver import DemoDriver, choose_settings, last_line
from etude.common.api import yaml_documents
from etude.common.api.kinds import RLRun
from etude.common.api.pool.spec import DriverName
from etude.operator.local import localize

IMAGE = "0" * 32
KVM = {"image": IMAGE, "accelerator": "kvm", "why": "the guest answered"}
TCG = {"image": IMAGE, "accelerator": "tcg", "why": "/dev/kvm cannot be opened"}


@pytest.mark.parametrize(
    ("driver", "found", "takes_machines"),
    [
        (DemoDriver.AUTO, KVM, True),
        (DemoDriver.AUTO, TCG, False),
        (DemoDriver.QEMU_MICRO_VM, TCG, True),
        (DemoDriver.PROCESS, KVM, False),
    ],
)
def test_the_demo_takes_vms_where_they_are_fast_or_asked_for(
    driver: DemoDriver, found: dict[str, str], *, takes_machines: bool
) -> None:
    assert bool(choose_settings(driver, found)) is takes_machines


def test_the_settings_make_the_manifest_one_of_vms() -> None:
    value = yaml_documents.parse_documents(inputs.find_manifest().read_bytes())[0].value
    assert isinstance(value, dict)
    run = RLRun.model_validate(
        localize.apply_settings(value, choose_settings(DemoDriver.AUTO, KVM))
    )
    pool = run.spec.roles.environments[0].pool_template
    assert pool is not None
    assert pool.isolation.driver is DriverName.QEMU_MICRO_VM
    assert [template.image for template in pool.templates] == [IMAGE]


@pytest.mark.parametrize("words", ["denied", "could not access KVM\n-accel kvm: denied\n"])
def test_why_there_are_no_vms_is_one_line(words: str) -> None:
    assert last_line(words).endswith("denied")
    assert "\n" not in last_line(words)
