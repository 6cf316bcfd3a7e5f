"""Who a certificate names, and whom a target means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import UserError
from etude.common.tls import targets
from etude.common.tls.identity import Identity, identities

ROLES = ("operator", "trainer", "inference", "rewards", "broker", "node", "edge")
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
IDENTITIES = st.builds(
    Identity,
    domain=NAMES,
    namespace=NAMES,
    run=st.just("") | NAMES,
    pool=st.just("") | NAMES,
    route=st.just("") | NAMES,
    role=st.just("") | st.sampled_from(ROLES),
)


@given(IDENTITIES)
def test_an_identity_is_read_as_it_was_written(identity: Identity) -> None:
    assert Identity.parse(identity.uri) == identity


@pytest.mark.parametrize(
    "text",
    [
        "",
        "https://etude.dev/ns/lab/role/trainer",
        "spiffe://etude.dev/ns/lab/role/trainer/extra",
        "spiffe://etude.dev/role/trainer",
        "spiffe://etude.dev/ns/lab/role/trainer\n",
        "spiffe://etude.dev/ns/lab/pool/p/run/r/role/trainer",
        "spiffe://etude.dev/ns/Lab/role/trainer",
    ],
)
def test_what_is_not_an_identity_of_ours_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="spiffe://DOMAIN"):
        Identity.parse(text)
    assert identities([text]) == []


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ("spiffe://d/ns/lab/run/demo/role/trainer", "demo-trainer.lab.svc"),
        ("spiffe://d/ns/lab/pool/shared/role/broker", "shared-broker.lab.svc"),
        ("spiffe://d/ns/lab/route/coder/role/stable", "coder-stable.lab.svc"),
        ("spiffe://d/ns/lab/run/demo/pool/demo-repos/role/node", "demo-repos-node.lab.svc"),
        ("spiffe://d/ns/lab", "*.lab.svc"),
    ],
)
def test_a_server_answers_by_the_name_of_its_service(identity: str, name: str) -> None:
    assert Identity.parse(identity).server_name == name


@pytest.mark.parametrize(
    ("target", "address", "name"),
    [
        (
            "demo-trainer-0.demo-trainer:7000",
            "demo-trainer-0.demo-trainer:7000",
            "demo-trainer.lab.svc",
        ),
        ("a-0.a.other.svc:7000", "a-0.a.other.svc:7000", "a.other.svc"),
        ("issuer.system.svc:7060", "issuer.system.svc:7060", "issuer.system.svc"),
        ("p-node@10.1.2.3:7030", "10.1.2.3:7030", "p-node.lab.svc"),
        ("p-node.lab.svc@10.1.2.3:7030", "10.1.2.3:7030", "p-node.lab.svc"),
        ("p-node.lab.svc@[fd00::1]:7030", "[fd00::1]:7030", "p-node.lab.svc"),
    ],
)
def test_a_target_says_where_and_who(target: str, address: str, name: str) -> None:
    assert targets.require_server_name(target, "lab") == (address, name)


@pytest.mark.parametrize("target", ["10.1.2.3:7030", "[fd00::1]:7030", "broker:7020"])
def test_a_target_that_does_not_say_who_answers_is_refused(target: str) -> None:
    with pytest.raises(UserError, match="does not name the server"):
        targets.require_server_name(target, "lab")


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:7000",
        "localhost:7000",
        "[::1]:7000",
        "unix:/run/etude.sock",
        "name.lab.svc@127.0.0.1:7000",
    ],
)
def test_this_machine_is_known_by_its_addresses(target: str) -> None:
    assert targets.is_loopback(target)


@pytest.mark.parametrize(
    "target",
    ["10.0.0.1:7000", "0.0.0.0:7000", "localhost.example.org:7000", "127.0.0.1.example.org:7000"],
)
def test_what_only_looks_like_this_machine_is_another(target: str) -> None:
    assert not targets.is_loopback(target)
