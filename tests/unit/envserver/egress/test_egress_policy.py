"""What the rules of a pool let through, and what no rule does."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.pool.network import EgressMode
from etude.envserver.egress import upstream
from etude.envserver.egress.policy import (
    AllowRule,
    EgressRequest,
    EgressVerdict,
    canonical_host,
    decide,
)

PYPI = AllowRule(name="pypi", host="pypi.org")
FILES = AllowRule(name="files", host="*.pythonhosted.org")
API = AllowRule(
    name="api",
    host="api.example.com",
    mode=EgressMode.HTTPS,
    methods=("GET", "HEAD"),
    paths=("/v1", "/public/"),
)
MIRROR = AllowRule(name="mirror", host="mirror.example.com", port=8080, mode=EgressMode.HTTP)
RULES = (PYPI, FILES, API, MIRROR)

hosts = st.one_of(
    st.sampled_from(["pypi.org", "PyPI.org.", "x.pythonhosted.org", "a.b", "127.1", "[::1]"]),
    st.ip_addresses().map(str),
    st.text(max_size=40),
)


def connect(host: str, port: int = 443) -> EgressRequest:
    return EgressRequest(host=host, port=port, method="CONNECT")


def get(
    path: str, host: str = "api.example.com", port: int = 80, method: str = "GET"
) -> EgressRequest:
    return EgressRequest(host=host, port=port, method=method, path=path)


@given(hosts, st.integers(-1, 70_000), st.sampled_from(["CONNECT", "GET", "X"]), st.text())
def test_nothing_is_reached_without_a_rule(host: str, port: int, method: str, path: str) -> None:
    attempt = EgressRequest(host=host, port=port, method=method, path=path)
    assert decide((), attempt).verdict is not EgressVerdict.ALLOWED


@given(hosts, st.integers(-1, 70_000), st.sampled_from(["CONNECT", "GET"]), st.text())
def test_whatever_is_allowed_has_a_rule_for_its_host_and_port(
    host: str, port: int, method: str, path: str
) -> None:
    found = decide(RULES, EgressRequest(host=host, port=port, method=method, path=path))
    if found.verdict is EgressVerdict.ALLOWED:
        assert found.rule is not None
        suffix = found.rule.host.removeprefix("*")
        assert found.host.endswith(suffix)
        assert found.host == canonical_host(host)
        assert port == found.rule.port or (port == 80 and found.rule.mode is EgressMode.HTTPS)


@pytest.mark.parametrize("host", ["pypi.org", "PYPI.ORG", "pypi.org.", "files.pythonhosted.org"])
def test_one_host_has_one_spelling(host: str) -> None:
    assert decide(RULES, connect(host)).verdict is EgressVerdict.ALLOWED


@pytest.mark.parametrize(
    "host",
    [
        *("pypi.org.evil.com", "evilpypi.org", "pythonhosted.org", ".pythonhosted.org"),
        *(
            "evilpythonhosted.org",
            "pypi.org..",
            "pypi.org/",
            "pypi.org\0.evil.com",
            "pypi.org@e.com",
        ),
        *("pypi。org", "\u0440ypi.org", "pypi.org:443", "", "*", "*.pythonhosted.org"),
    ],
)
def test_a_name_that_only_looks_like_a_listed_one_is_another(host: str) -> None:
    assert decide(RULES, connect(host)).verdict is not EgressVerdict.ALLOWED


@pytest.mark.parametrize(
    "host",
    [
        *(
            "169.254.169.254",
            "127.0.0.1",
            "0x7f.1",
            "2130706433",
            "127.1",
            "1.2.3.0x4",
            "017700000001",
        ),
        *(
            "[::1]",
            "::1",
            "[fd00:ec2::254]",
            "metadata.google.internal",
            "Metadata.Google.Internal.",
        ),
    ],
)
def test_no_rule_reaches_an_address_or_the_metadata_of_a_cloud(host: str) -> None:
    everything = (
        AllowRule(name="all", host="*"),
        AllowRule(name="http", host="*", port=80, mode=EgressMode.HTTP),
    )
    assert decide(everything, connect(host)).verdict is EgressVerdict.ADDRESS
    assert decide(everything, get("/", host=host)).verdict is EgressVerdict.ADDRESS


def test_a_rule_that_reads_requests_opens_no_tunnel() -> None:
    assert decide(RULES, connect("api.example.com")).verdict is EgressVerdict.WRONG_MODE
    assert decide(RULES, connect("mirror.example.com", 8080)).verdict is EgressVerdict.WRONG_MODE


def test_a_tunnels_host_is_asked_for_nothing_in_plain_text() -> None:
    found = decide(RULES, get("/", host="pypi.org", port=443))
    assert found.verdict is EgressVerdict.WRONG_MODE
    assert decide(RULES, get("/", host="pypi.org")).verdict is EgressVerdict.NOT_LISTED


def test_the_host_speaks_tls_for_clients_that_ask_in_plain_text() -> None:
    for port in (80, 443):
        assert decide(RULES, get("/v1/x", port=port)).verdict is EgressVerdict.ALLOWED


@pytest.mark.parametrize(
    "path",
    [
        *("/v1", "/v1/", "/v1/a/b?c=/../d", "/public/", "/public/x"),
        *("/v1/a%20b", "/v1/.hidden", "/v1/a..b", "/v1/a;b", "/v1/%7Euser"),
    ],
)
def test_a_path_below_a_listed_one_is_allowed(path: str) -> None:
    assert decide(RULES, get(path)).verdict is EgressVerdict.ALLOWED


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/v10", "/v1/../admin", "/v1/..", "/v1/%2e%2e/admin", "/v1/%2E./admin", "/v1//x"),
        *("/v1/..%2fadmin", "/v1\\..\\admin", "/v1/./x", "/public", "/V1/x", "/v1%00/x"),
        *("/v1/..;/admin", "/v1/.;/x", "/v1/%252e%252e/admin", "/v1/..%3b/admin", "/v1/..x"),
        *("/v1/%c0%ae%c0%ae/x", "/v1/..%09/admin", "/v1/%7f", "/v1/%u002e/", "/v1/%", "/v1/%2"),
    ],
)
def test_a_path_that_may_lead_elsewhere_is_not(path: str) -> None:
    assert decide(RULES, get(path)).verdict is EgressVerdict.PATH


def test_other_methods_are_refused() -> None:
    assert decide(RULES, get("/v1", method="DELETE")).verdict is EgressVerdict.METHOD
    assert decide(RULES, get("/v1", method="HEAD")).verdict is EgressVerdict.ALLOWED


def test_of_two_rules_for_a_host_the_one_that_allows_counts() -> None:
    rules = (API, AllowRule(name="write", host=API.host, mode=EgressMode.HTTPS, methods=("POST",)))
    found = decide(rules, get("/other", method="POST"))
    assert found.verdict is EgressVerdict.ALLOWED
    assert found.rule is rules[1]


@given(st.ip_addresses())
def test_an_address_is_public_only_where_python_calls_it_global(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if upstream.is_public(str(address)):
        assert address.is_global
        assert not address.is_multicast


@given(st.ip_addresses(v=6))
def test_of_ipv6_only_what_is_handed_out_is_public(address: ipaddress.IPv6Address) -> None:
    unicast, translated = map(ipaddress.IPv6Network, ("2000::/3", "64:ff9b::/96"))
    if upstream.is_public(str(address)):
        assert address in unicast or address in translated


def test_an_ipv4_address_behind_a_gateway_is_as_public_as_it_is_itself() -> None:
    assert upstream.is_public("64:ff9b::1.1.1.1")
    assert not upstream.is_public("64:ff9b::169.254.169.254")
    assert not upstream.is_public("64:ff9b::1.1.1.1%eth0")


@given(st.ip_addresses(v=4))
def test_a_private_address_stays_private_however_it_is_wrapped(
    address: ipaddress.IPv4Address,
) -> None:
    if upstream.is_public(str(address)):
        return
    for wrapped in (
        f"::ffff:{address}",
        f"64:ff9b::{address}",
        f"::{address}",
        f"2002:{int(address) >> 16:x}:{int(address) & 0xFFFF:x}::1",
    ):
        assert not upstream.is_public(wrapped), wrapped


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *(
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "fd00:ec2::254",
            "::1",
            "fe80::1%eth0",
        ),
        *("224.0.0.1", "255.255.255.255", "nothing", "", "1.1.1.1/32"),
        *(
            "fec0::2",
            "feff::1",
            "3fff::1",
            "2001:db8::1",
            "2001:20::1",
            "2001::1",
            "2002:101:101::",
        ),
        *("4000::1", "5f00::1", "100::1", "::1.1.1.1", "::ffff:0:101:101", "64:ff9b:1::101:101"),
    ],
)
def test_these_are_never_public(address: str) -> None:
    assert not upstream.is_public(address)


def test_one_private_answer_spoils_the_others() -> None:
    assert upstream.public_addresses(["1.1.1.1", "2606:4700::1111"]) == (
        "1.1.1.1",
        "2606:4700::1111",
    )
    assert upstream.public_addresses(["1.1.1.1", "169.254.169.254"]) == ()
