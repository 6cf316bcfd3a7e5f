"""What commands of the process driver reach through their pool's proxy, and what they do not."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from tests.support import needs
from tests.support.environments import upstreams
from tests.support.environments.upstreams import World
from tests.support.vm import guests

from etude.agent.workspace import ExecResult
from etude.common.api.pool.network import Network
from etude.envserver.drivers.base import DriverUnavailableError, Sandbox, Verification
from etude.envserver.drivers.process.driver import ProcessDriver

RULES: Mapping[str, object] = {
    "egress": "Custom",
    "maxMib": 8,
    "rules": [
        {"name": "shop", "host": "shop.example.com", "port": 80, "mode": "Http"},
        {"name": "files", "host": "*.example.org"},
        {
            "name": "api",
            "host": "api.example.com",
            "mode": "Https",
            "methods": ["GET", "POST"],
            "paths": ["/v1", "/headers", "/header-echo", "/packed", "/redirect"],
            "credential": {"secretRef": {"name": "shop"}},
        },
        *(
            {"name": name, "host": f"{name}.example.com", "port": 80, "mode": "Http"}
            for name in ("metadata", "inside", "mixed", "rebinding")
        ),
    ],
}
NO_PROXY = "env -u http_proxy -u https_proxy -u all_proxy -u HTTP_PROXY -u HTTPS_PROXY -u ALL_PROXY"


@pytest.fixture
async def driver(tmp_path: Path, world: World) -> AsyncIterator[ProcessDriver]:
    (tmp_path / "scratch").mkdir()
    made = ProcessDriver(tmp_path / "scratch", egress=world.egress(RULES, t=None, closed=()))
    try:
        await made.start()
    except DriverUnavailableError as error:
        if needs.is_required("sandbox", "qemu"):
            raise
        pytest.skip(str(error))
    yield made
    await made.stop()


async def opened(driver: ProcessDriver, name: str = "a", template: str = "t") -> Sandbox:
    async def never(_command: str, _timeout_s: float) -> ExecResult:
        raise AssertionError

    (driver.leases / name).mkdir(parents=True)
    made = driver.sandbox(driver.leases / name, never, template=template)
    await made.initialize({})
    return made


async def sh(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.run(command, 60)).output.decode()


async def test_a_listed_host_is_reached_and_logged(
    driver: ProcessDriver, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await opened(driver)

    with caplog.at_level(logging.INFO):
        said = await sh(sandbox, "curl -sS http://shop.example.com/hello")
        await guests.until(lambda: "egress" in caplog.text)

    assert said == "hello from the shop\n"
    assert [(seen.method, seen.target) for seen in world.seen] == [("GET", "/hello")]
    assert (
        "egress lease=a verdict=allowed rule=shop method=GET host=shop.example.com" in caplog.text
    )


async def test_tls_goes_from_end_to_end_through_a_tunnel(
    driver: ProcessDriver, world: World
) -> None:
    sandbox = await opened(driver)
    (driver.leases / "a" / "workspace" / "ca.pem").write_bytes(world.ca.read_bytes())

    said = await sh(sandbox, "curl -sS --cacert ca.pem https://files.example.org/hello")

    assert said == "hello from the shop\n"
    assert world.seen[0].is_tls


async def test_the_host_adds_a_credential_that_no_command_sees(
    driver: ProcessDriver, world: World
) -> None:
    sandbox = await opened(driver)

    said = await sh(
        sandbox, "curl -sS -H 'Authorization: mine' -d x=1 http://api.example.com/v1/orders; env"
    )

    assert said.startswith("hello from the shop")
    assert upstreams.SECRET not in said
    (seen,) = world.seen
    assert (seen.is_tls, seen.headers["authorization"]) == (True, upstreams.SECRET)
    assert (seen.method, seen.target, seen.body) == ("POST", "/v1/orders", b"x=1")


@pytest.mark.parametrize("path", ["/headers", "/header-echo", "/packed"])
async def test_a_credential_that_comes_back_ends_the_answer(
    driver: ProcessDriver, path: str
) -> None:
    said = await sh(await opened(driver), f"curl -sS -i http://api.example.com{path} 2>&1")

    assert "tokens-that" not in said


@pytest.mark.parametrize(
    ("request_", "verdict"),
    [
        ("http://evil.example.net/", "not_listed"),
        ("http://shop.example.com:8080/", "not_listed"),
        ("https://evil.example.net/", "not_listed"),
        ("https://shop.example.com/", "not_listed"),
        ("http://169.254.169.254/latest/meta-data/", "address"),
        ("http://[fd00:ec2::254]/", "address"),
        ("http://metadata.google.internal/", "address"),
        ("http://metadata.example.com/", "address"),
        ("http://inside.example.com/", "address"),
        ("http://mixed.example.com/", "address"),
        ("http://2852039166/", "address"),
        ("https://api.example.com/v1", "wrong_mode"),
        ("-X DELETE http://api.example.com/v1", "method"),
        ("--path-as-is http://api.example.com/v1/../admin", "path"),
        ("http://api.example.com/admin", "path"),
    ],
)
async def test_anything_else_is_refused_and_logged(
    driver: ProcessDriver,
    world: World,
    caplog: pytest.LogCaptureFixture,
    request_: str,
    verdict: str,
) -> None:
    sandbox = await opened(driver)

    with caplog.at_level(logging.INFO):
        said = await sh(sandbox, f"curl -sS -i {request_} 2>&1")
        await guests.until(lambda: "egress" in caplog.text)

    assert f"verdict={verdict} " in caplog.text
    assert "hello" not in said
    assert world.seen == []


async def test_a_redirect_is_the_clients_own_and_asked_about_again(
    driver: ProcessDriver, world: World
) -> None:
    sandbox = await opened(driver)
    for there in ("http://evil.example.net/", "http://169.254.169.254/latest/"):
        said = await sh(
            sandbox,
            f"curl -sS -L -o /dev/null -w '%{{http_code}}' 'http://shop.example.com/redirect?{there}'",
        )
        assert said == "403"
    assert {seen.target for seen in world.seen} == {
        "/redirect?http://evil.example.net/",
        "/redirect?http://169.254.169.254/latest/",
    }


async def test_connections_in_a_row_go_to_the_address_that_was_checked(
    driver: ProcessDriver, world: World
) -> None:
    sandbox = await opened(driver)

    said = await sh(
        sandbox,
        "for i in 1 2; do"
        " curl -s -o /dev/null -w '%{http_code} ' http://rebinding.example.com/; done",
    )

    assert said == "200 200 "
    assert world.names.asked == ["rebinding.example.com"]


async def test_past_the_proxy_there_is_no_network(driver: ProcessDriver, world: World) -> None:
    sandbox = await opened(driver)

    said = await sh(
        sandbox,
        f"{NO_PROXY} curl -sS -m 5 http://shop.example.com/ 2>&1;"
        f" {NO_PROXY} curl -sS -m 5 http://{upstreams.SHOP}/ 2>&1",
    )

    assert "hello" not in said
    assert world.seen == []


async def test_a_template_without_rules_has_no_way_out(driver: ProcessDriver, world: World) -> None:
    sandbox = await opened(driver, template="closed")

    said = await sh(sandbox, "env; curl -sS -x http://127.0.0.1:3128 http://shop.example.com/ 2>&1")

    assert "3128\n" not in said.partition("curl")[0]
    assert "proxy" not in said.partition("curl")[0].lower()
    assert world.seen == []


async def test_a_verifier_has_no_way_out(driver: ProcessDriver, world: World) -> None:
    await opened(driver)
    work = Verification(
        template="t",
        workspace={},
        tests={},
        command="env; curl -sS -x http://127.0.0.1:3128 http://shop.example.com/ 2>&1",
        timeout_s=60,
        reward_path="/logs/reward.txt",
    )

    said = (await driver.verify(work)).output.decode()

    assert "proxy" not in said.partition("curl")[0].lower()
    assert world.seen == []


async def test_commands_in_the_background_have_the_same_way_out(
    driver: ProcessDriver, world: World
) -> None:
    sandbox = await opened(driver)
    jobs = sandbox.workspace.jobs

    first = await jobs.start("sleep 60", timeout_s=None)
    second = await jobs.start("curl -sS http://shop.example.com/hello", timeout_s=None)
    state = await jobs.state(second, wait_s=60)
    said = await jobs.output(second, offset=0, size=1000)

    assert (state.is_running, said) == (False, b"hello from the shop\n")
    assert await sh(sandbox, "curl -sS http://shop.example.com/hello") == "hello from the shop\n"
    await jobs.kill(first)


async def test_bytes_of_one_environment_are_bounded(driver: ProcessDriver, world: World) -> None:
    sandbox = await opened(driver)
    big = "curl -s -o /dev/null -w '%{size_download} %{http_code}\\n'"

    said = await sh(
        sandbox,
        f"for i in 1 2 3; do {big} 'http://shop.example.com/big?3145728'; done; {big} http://shop.example.com/hello",
    )

    first, second, third, last = said.splitlines()
    assert (first, second) == ("3145728 200", "3145728 200")
    assert int(third.split()[0]) < 3145728
    assert last.endswith(" 429")


async def test_a_flood_of_connections_waits_for_its_turn(
    driver: ProcessDriver, world: World
) -> None:
    sandbox = await opened(driver)
    flood = (
        "import socket\nheld = []\n"
        "for _ in range(150):\n    s = socket.socket(); s.settimeout(0.2)\n"
        "    try:\n        s.connect(('127.0.0.1', 3128)); held.append(s)\n"
        "    except OSError: pass\n"
        "print(len(held) > 16)\n"
    )
    (driver.leases / "a" / "workspace" / "flood.py").write_text(flood)

    assert await sh(sandbox, "python3 flood.py") == "True\n"
    assert await sh(sandbox, "curl -sS http://shop.example.com/hello") == "hello from the shop\n"


async def test_a_revoked_rule_cuts_what_is_open_and_refuses_what_comes(
    driver: ProcessDriver, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await opened(driver)
    assert await sh(sandbox, "curl -sS http://shop.example.com/hello") == "hello from the shop\n"
    # It would read for an hour, and gives up after seconds.
    slow = "curl -sS --limit-rate 1k --max-time 3 -o /dev/null http://shop.example.com/big?4194304"
    reading = asyncio.create_task(sh(sandbox, slow))
    await guests.until(lambda: any(seen.target.startswith("/big") for seen in world.seen))

    rules = [rule for rule in RULES["rules"] if rule["name"] != "shop"]  # type: ignore[attr-defined]
    network = Network.model_validate({**RULES, "rules": rules})
    with caplog.at_level(logging.INFO):
        cut = driver.replace_network(network, {"t": None})
        await guests.until(lambda: "its rule was revoked" in caplog.text)

    assert cut == 1
    await reading
    refused = await sh(sandbox, "curl -sS -o /dev/null -w '%{http_code}' http://shop.example.com/")
    assert refused == "403"
    other = await sh(sandbox, "curl -sS http://api.example.com/v1")
    assert other == "hello from the shop\n"
