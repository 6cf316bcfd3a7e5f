"""What node and broker load as they start: a killed node's leases wait for its next process."""

import subprocess
import sys

import pytest

ALWAYS = ("numpy", "yaml", "kubernetes", "torch", "tree_sitter", "opentelemetry.exporter")
DRIVERS = tuple(
    f"etude.envserver.drivers.{name}.driver" for name in ("vm.firecracker", "gvisor", "vm.qemu")
)
"""Of which a pool names one at most."""
MAKING = ("etude.envserver.images.builder", "etude.envserver.images.spec")


def loaded(module: str, watched: tuple[str, ...]) -> str:
    """Those of the watched modules that a module brings along."""
    program = f"import sys, {module}; print([n for n in {watched!r} if n in sys.modules])"
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, check=False, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_host_loads_a_driver_only_once_its_pool_wants_it() -> None:
    assert loaded("etude.envserver.host.server", DRIVERS) == "[]"


@pytest.mark.parametrize("role", ["host", "broker"])
def test_a_role_starts_without_search_exporter_or_what_makes_images(role: str) -> None:
    assert loaded(f"etude.envserver.{role}.server", ALWAYS + MAKING) == "[]"


def test_a_driver_reads_images_without_what_makes_them() -> None:
    assert loaded("etude.envserver.drivers.vm.qemu.driver", MAKING) == "[]"
