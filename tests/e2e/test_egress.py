"""Packages are fetched over the network that a pool lists, and over no other."""

import ensurepip
import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from tests.support import needs
from tests.support.environments import upstreams
from tests.support.environments.upstreams import World
from tests.support.vm import microvms

from etude.agent.workspace import ExecResult
from etude.common.errors import UserError
from etude.common.run_folder.state import images_folder
from etude.demo import image as demo_image
from etude.envserver.drivers.base import Sandbox
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.builder import build
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.storage.trees import File, Tree

LONG_S = 600.0
"""A minute of processor time where instructions are translated, on a busy machine."""
RULES = {
    "egress": "Custom",
    "rules": [
        {"name": "files", "host": "files.example.org"},
        {
            "name": "api",
            "host": "api.example.com",
            "mode": "Https",
            "methods": ["GET"],
            "credential": {"secretRef": {"name": "shop"}},
        },
    ],
}
INSTALL = (
    "PYTHONPATH=pip.whl python3 -m pip --no-cache-dir --disable-pip-version-check install --quiet"
    " --target here --retries 0 --cert ca.pem etude-greeting --index-url"
)
FETCH = b"""import hashlib, re, ssl, sys, urllib.request
from urllib.parse import urljoin
trust = ssl.create_default_context(cafile="ca.pem")
def get(url):
    return urllib.request.urlopen(url, timeout=300, context=trust).read()
index = sys.argv[1] + "/etude-greeting/"
link = re.search('href="([^#"]+)#sha256=([0-9a-f]+)"', get(index).decode())
data = get(urljoin(index, link[1]))
assert hashlib.sha256(data).hexdigest() == link[2]
open("greeting.whl", "wb").write(data)
"""
"""What pip does, without the minutes that pip takes where instructions are translated."""
GREET = "python3 -c 'import etude_greeting; print(etude_greeting.SAYS)'"


@pytest.fixture
def image() -> BuiltImage:
    """Debian's Python with the agent of this tree."""
    needs.machines()
    try:
        return build(
            demo_image.spec(), agent=microvms.guest_agent(), cache=BuildCache(images_folder())
        )
    except (RuntimeError, UserError) as error:
        needs.skip(f"no image: {error}", "qemu")


def pip() -> bytes:
    """The installer that comes with this interpreter; it runs where its archive is a path."""
    (wheel,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    return wheel.read_bytes()


def wheel() -> bytes:
    """A package of one line."""
    packed = io.BytesIO()
    info = "etude_greeting-1.0.dist-info"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("etude_greeting.py", "SAYS = 'hello from the index'\n")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: etude-greeting\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return packed.getvalue()


async def nothing(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError((command, timeout_s))


@pytest.fixture
def name(world: World) -> str:
    """A package that the listed host has."""
    packed, found = wheel(), "etude_greeting-1.0-py3-none-any.whl"
    link = f"/files/{found}#sha256={hashlib.sha256(packed).hexdigest()}"
    world.files = {
        "/simple/etude-greeting/": f'<a href="{link}">{found}</a>'.encode(),
        f"/files/{found}": packed,
    }
    return found


async def begun(driver: QemuDriver | ProcessDriver, tree: Tree) -> Sandbox:
    await driver.start()
    (driver.leases / "a").mkdir(parents=True)
    sandbox = driver.sandbox(driver.leases / "a", nothing, template="t")
    await sandbox.initialize(tree)
    return sandbox


@pytest.mark.timeout(1800)
async def test_a_vm_fetches_a_package_from_a_listed_index_and_from_no_other(
    image: BuiltImage, world: World, name: str, tmp_path: Path
) -> None:
    driver = QemuDriver(
        scratch=tmp_path / "scratch",
        images={"t": image},
        machine=microvms.small_machine(),
        egress=world.egress(RULES),
    )
    try:
        sandbox = await begun(
            driver, {"fetch.py": File(FETCH), "ca.pem": File(world.ca.read_bytes())}
        )
        foreign = await sandbox.run("python3 fetch.py https://evil.example.net/simple", LONG_S)
        listed = await sandbox.run(
            f"python3 fetch.py https://files.example.org/simple && PYTHONPATH=greeting.whl {GREET}",
            LONG_S,
        )
        asked = await sandbox.run(
            "python3 -c 'import urllib.request as u;"
            ' print(u.urlopen("http://api.example.com/v1").read())\'',
            LONG_S,
        )
        await sandbox.close()
    finally:
        await driver.stop()

    assert foreign.exit_code != 0
    assert "403" in foreign.output.decode()
    assert (listed.output, listed.exit_code) == (b"hello from the index\n", 0)
    assert asked.output == b"b'hello from the shop\\n'\n"
    assert [(seen.target, seen.headers.get("authorization")) for seen in world.seen] == [
        ("/simple/etude-greeting/", None),
        (f"/files/{name}", None),
        ("/v1", upstreams.SECRET),
    ]


async def test_pip_installs_from_a_listed_index_and_from_no_other(
    world: World, name: str, tmp_path: Path
) -> None:
    driver = ProcessDriver(tmp_path / "scratch", egress=world.egress(RULES))
    (tmp_path / "scratch").mkdir()
    try:
        sandbox = await begun(
            driver, {"pip.whl": File(pip()), "ca.pem": File(world.ca.read_bytes())}
        )
        foreign = await sandbox.run(f"{INSTALL} https://evil.example.net/simple 2>&1", LONG_S)
        listed = await sandbox.run(
            f"{INSTALL} https://files.example.org/simple 2>&1 && PYTHONPATH=here {GREET}", LONG_S
        )
        await sandbox.close()
    finally:
        await driver.stop()

    assert foreign.exit_code != 0
    assert (listed.output, listed.exit_code) == (b"hello from the index\n", 0)
    assert {seen.target for seen in world.seen} == {"/simple/etude-greeting/", f"/files/{name}"}
