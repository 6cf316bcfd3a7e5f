"""What addresses a store is judged once, for the command line, manifests and roles alike."""

import ipaddress
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.cli.buckets import make_bucket
from etude.common.api.storage import StoreAccess
from etude.common.blobs import open_store
from etude.common.errors import UserError
from etude.common.store_urls import ENDPOINT, bucket_of, endpoint_of, folder_of, region_of

GOOD = (
    "http://127.0.0.1:9000",
    "https://minio",
    "https://s3.eu-central-1.amazonaws.com/",
    "http://etude-minio.store.svc.cluster.local.:9000",
    "http://my_minio:65535",
    "http://[::1]:9000",
    "http://[2001:db8:0:0:0:0:0:5]",
    "http://[fd00::5]",
)
BAD = (
    *(
        "",
        "notaurl",
        "127.0.0.1:9000",
        "http://",
        "http:///x",
        "http://h/x",
        "http://a b",
        "ftp://h",
    ),
    *("http://u:p@h", "http://h:0", "http://h:99999", "http://h?x", "http://h\n", "http://[:]"),
    *("http://[::1.2]", "http://[1:2:3]", "http://-h", "http://h\0", "HTTP://h"),
)


@pytest.mark.parametrize("text", GOOD)
def test_scheme_host_and_port_are_an_endpoint(text: str) -> None:
    assert endpoint_of(text) == text.rstrip("/")
    assert StoreAccess(endpoint=text).endpoint == text
    open_store("s3://bucket/x", endpoint=text)


@pytest.mark.parametrize("text", BAD)
def test_no_door_takes_what_is_no_endpoint(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError):
        StoreAccess(endpoint=text)
    for door in (open_store, make_bucket):
        with pytest.raises(UserError, match="give scheme, host and port alone"):
            door("s3://bucket/x", endpoint=text)
    if text and "\0" not in text:
        monkeypatch.setenv("AWS_ENDPOINT_URL", text)
        with pytest.raises(UserError, match="AWS_ENDPOINT_URL"):
            open_store("s3://bucket/x")


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_line_break_in_a_credential_is_found_without_telling_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "secret-word\n")
    for door in (open_store, make_bucket):
        with pytest.raises(UserError, match=rf"{name} [\s\S]*line break") as caught:
            door("s3://bucket/x")
        assert "secret-word" not in str(caught.value)


@given(st.from_regex(ENDPOINT, fullmatch=True))
def test_an_address_in_brackets_is_one_that_can_be_reached(text: str) -> None:
    inside = re.search(r"\[(.*)\]", text)
    if inside is not None:
        ipaddress.IPv6Address(inside[1])


@pytest.mark.parametrize("text", ["", "a b", "eu/1", "eu\n", "-"])
def test_no_door_takes_what_is_no_region(text: str) -> None:
    assert region_of("eu-central-1") == "eu-central-1"
    with pytest.raises(ValidationError):
        StoreAccess(region=text)
    for door in (open_store, make_bucket):
        with pytest.raises(UserError, match="is no region"):
            door("s3://bucket/x", region=text)


def test_a_folder_is_named_by_its_url() -> None:
    assert folder_of("file:///a/b%20c") == Path("/a/b c")
    for url in ("file://host/x", "s3://bucket/x", "/a/b"):
        assert folder_of(url) is None


@pytest.mark.parametrize(
    "url",
    [
        *("file:///a%00b", "s3://a", "s3://[x", "file://[x", "s3://a b/c", "s3://bucket/a//b"),
        *("s3://bucket/../x", "s3://bucket/a\x01"),
    ],
)
def test_a_url_that_no_client_takes_is_refused_with_the_way_out(url: str) -> None:
    with pytest.raises(UserError, match="fix:"):
        open_store(url)


def test_a_bucket_is_named_by_its_url() -> None:
    assert bucket_of("s3://Old_Bucket/a/b/") == ("Old_Bucket", "a/b")
    assert bucket_of("s3://bucket") == ("bucket", "")


def test_a_plain_path_is_led_to_its_url() -> None:
    with pytest.raises(UserError, match=r"use file:///tmp/a%20b for a folder"):
        open_store("/tmp/a b")
