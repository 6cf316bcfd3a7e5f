"""Extensions: objects that installed packages register, found by name or refused by name."""

import re
from pathlib import Path

import pytest
from tests.support.installed_package import install_package

from etude.common import extensions
from etude.common.errors import UserError

GROUP = "etude.tests"


def test_an_object_of_an_installed_package_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {GROUP: {"acme.Answer": "acme_answers:ANSWER"}}
    install_package(
        tmp_path, monkeypatch, name="acme_answers", source="ANSWER = 42", entries=entries
    )
    assert extensions.load_extension(GROUP, "acme.Answer", int) == 42
    assert extensions.is_installed(GROUP, "acme.Answer")
    assert not extensions.is_installed(GROUP, "acme.Other")


@pytest.mark.parametrize(
    ("source", "reason", "words"),
    [
        ("ANSWER = 'x'", "ExtensionBroken", "is no int but a str"),
        ("import acme_nothing", "ExtensionBroken", "ModuleNotFoundError: No module named"),
        ("OTHER = 1", "ExtensionBroken", "AttributeError"),
        ("raise SystemError('no licence')", "ExtensionBroken", "SystemError: no licence"),
    ],
)
def test_a_broken_package_is_refused_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str, words: str
) -> None:
    entries = {GROUP: {"acme.Answer": "acme_broken:ANSWER"}}
    install_package(tmp_path, monkeypatch, name="acme_broken", source=source, entries=entries)
    with pytest.raises(UserError) as refused:
        extensions.load_extension(GROUP, "acme.Answer", int)
    assert refused.value.problem.reason == reason
    assert words in refused.value.problem.what


def test_a_name_that_nobody_or_two_packages_register_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="is not installed") as refused:
        extensions.load_extension(GROUP, "acme.Answer", int)
    assert refused.value.problem.reason == "ExtensionNotInstalled"
    for name in ("acme_one", "acme_two"):
        entries = {GROUP: {"acme.Answer": f"{name}:ANSWER"}}
        install_package(tmp_path, monkeypatch, name=name, source="ANSWER = 1", entries=entries)
    with pytest.raises(UserError, match="acme_one:ANSWER, acme_two:ANSWER"):
        extensions.load_extension(GROUP, "acme.Answer", int)


@pytest.mark.parametrize("name", ["acme.Coverage", "acme_rewards.Coverage2"])
def test_a_name_has_a_prefix_and_a_dot(name: str) -> None:
    assert re.fullmatch(extensions.NAME, name)
    assert extensions.is_extension(name)
    assert not extensions.is_extension("Style")
