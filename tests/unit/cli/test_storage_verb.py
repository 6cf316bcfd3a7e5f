"""`etude storage` as a user types it."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support import warm_etude
from tests.support.stores import s3_servers
from tests.support.stores.fault_proxy import fault_proxy
from tests.support.stores.store_faults import Fault, Schedule

from etude.common.blobs import open_store

CLOSED = "http://127.0.0.1:1"


def storage(
    *arguments: str, env: Mapping[str, str] = s3_servers.CREDENTIALS
) -> subprocess.CompletedProcess[str]:
    return warm_etude.etude("storage", *arguments, env={"COLUMNS": "200", **env})


def marks(output: str) -> list[str]:
    """The first word of each row."""
    return re.findall(r"^(pass|fail)", output, re.MULTILINE)


def test_a_folder_is_made_checked_and_found_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a/store"
    absent = storage("check", url)
    assert absent.returncode == 3
    assert f"fix: make it: etude storage init {url}" in absent.stderr
    assert "made folder" in storage("init", url).stderr
    assert "found folder" in storage("init", url).stderr
    good = storage("check", url)
    assert good.returncode == 0, good.stdout + good.stderr
    assert marks(good.stdout) == ["pass"] * 8
    assert list(open_store(url).list("")) == [], "the check cleans up"


@pytest.mark.parametrize(
    ("kind", "cleaning"),
    [("moto", "a lifecycle rule of ours"), ("minio", "it must delete them itself")],
)
def test_a_bucket_is_made_checked_and_found_again(
    kind: str, cleaning: str, request: pytest.FixtureRequest
) -> None:
    endpoint: str = request.getfixturevalue(f"{kind}_endpoint")
    words = (f"s3://made-{kind}/prefix", "--endpoint", endpoint)
    absent = storage("check", *words)
    assert absent.returncode == 1
    assert marks(absent.stdout) == ["fail"]
    assert "the bucket does not exist" in absent.stdout
    assert "etude storage init" in absent.stdout
    made = storage("init", *words)
    assert made.returncode == 0, made.stderr
    assert "made bucket" in made.stderr
    assert cleaning in made.stderr
    again = storage("init", *words, "--no-rule")
    assert "found bucket" in again.stderr
    assert "no lifecycle rule was set" in again.stderr
    good = storage("check", *words)
    assert good.returncode == 0, good.stdout + good.stderr
    assert marks(good.stdout) == ["pass"] * 8


def test_without_credentials_both_verbs_name_the_variables(moto_endpoint: str) -> None:
    words = ("s3://etude", "--endpoint", moto_endpoint)
    made = storage("init", *words, env={})
    assert made.returncode == 4
    assert "AWS_ACCESS_KEY_ID" in made.stderr
    checked = storage("check", *words, env={})
    assert checked.returncode == 1
    assert "AWS_ACCESS_KEY_ID" in checked.stdout


def test_wrong_credentials_are_denied_in_the_stores_own_words(minio_endpoint: str) -> None:
    wrong = {**s3_servers.CREDENTIALS, "AWS_SECRET_ACCESS_KEY": "wrong"}
    words = ("s3://etude", "--endpoint", minio_endpoint)
    made = storage("init", *words, env=wrong)
    assert made.returncode == 4
    assert "fix: set credentials that may CreateBucket" in made.stderr
    checked = storage("check", *words, env=wrong)
    assert checked.returncode == 1
    assert "SignatureDoesNotMatch" in checked.stdout
    assert "give the credentials PutObject" in checked.stdout


def test_an_endpoint_that_nobody_serves_is_unreachable() -> None:
    made = storage("init", "s3://etude", "--endpoint", CLOSED)
    assert made.returncode == 6
    assert "fix: check --endpoint" in made.stderr
    checked = storage("check", "s3://etude", "--endpoint", CLOSED)
    assert checked.returncode == 1
    assert marks(checked.stdout) == ["fail"]
    assert "check endpoint, region and network" in checked.stdout


@pytest.mark.parametrize("url", ["ftp://host/x", "runs", "s3:///prefix", "file://host/x"])
def test_a_url_that_names_no_store_is_refused_with_the_way_out(url: str) -> None:
    for verb in ("init", "check"):
        done = storage(verb, url)
        assert done.returncode == 4
        assert "fix: use" in done.stderr


@pytest.mark.parametrize("bucket", ["E", "has_underscore", "a"])
def test_a_name_that_no_bucket_can_have_is_refused(bucket: str, moto_endpoint: str) -> None:
    done = storage("init", f"s3://{bucket}", "--endpoint", moto_endpoint)
    assert done.returncode == 4
    assert "3 to 63" in done.stderr


@pytest.mark.parametrize("verb", ["init", "check"])
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9000/etude", "notaurl", "http:///x"])
def test_what_is_no_endpoint_is_refused_by_both_verbs(verb: str, endpoint: str) -> None:
    done = storage(verb, "s3://etude", "--endpoint", endpoint)
    assert done.returncode == 4
    assert "give scheme, host and port alone" in done.stderr
    assert "panicked" not in done.stderr


@pytest.mark.parametrize("verb", ["init", "check"])
def test_a_name_that_no_folder_can_have_is_refused(verb: str) -> None:
    done = storage(verb, "file:///t/a%00b")
    assert done.returncode == 4
    assert "leave %00 out" in done.stderr


def test_a_store_that_forbids_one_call_fails_at_that_call(moto_endpoint: str) -> None:
    # Deletions are posted to the bucket.
    faults = Schedule(rates={Fault.DENIED: 1}, hits=lambda method, _path: method == "POST")
    with fault_proxy(moto_endpoint, faults) as endpoint:
        done = storage("check", "s3://etude/forbids", "--endpoint", endpoint)
    assert done.returncode == 1
    assert marks(done.stdout) == ["pass"] * 5 + ["fail"]
    assert "AccessDenied" in done.stdout
