"""task.toml: what is honoured, what has no effect, what is refused and why."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.common.harbor import task_file

WHOLE = """
schema_version = "1.4"
source = "somewhere"
artifacts = ["out.txt", { source = "/workspace/build", destination = "build" }]

[task]
name = "org/name"
version = "2"
description = "words"
authors = [{ name = "A", email = "a@example.org" }]
keywords = ["one"]

[metadata]
difficulty = "easy"
anything = { nested = [1, 2] }

[verifier]
timeout_sec = 30
env = { MODE = "strict" }
environment_mode = "separate"
network_mode = "no-network"

[agent]
timeout_sec = 100.0

[environment]
build_timeout_sec = 10
os = "Linux"
cpus = 0.5
memory_mb = 2048
memory = "2G"
storage_mb = 512
storage = "512M"
gpus = 0
mcp_servers = []
network_mode = "no-network"
workdir = "/workspace"

[solution.env]
FAST = "it's"
"""


def test_a_whole_file_is_read_and_no_key_of_it_is_unknown() -> None:
    found = task_file.parse_task_file(WHOLE)
    assert list(found.unknown_keys()) == []
    assert found.verifier.timeout_sec == 30
    assert found.artefacts() == ("out.txt", "out.txt/**", "build", "build/**")


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_every_schema_is_read_under_both_names_of_its_key(version: str) -> None:
    for key in ("schema_version", "version"):
        assert list(task_file.parse_task_file(f'{key} = "{version}"').unknown_keys()) == []


def test_values_of_variables_reach_the_shell_as_they_are() -> None:
    found = task_file.parse_task_file("[solution.env]\nA = \"it's $HOME\"\nB = ''")
    text = task_file.export_commands(found.solution.env)
    assert text == "export A='it'\\''s $HOME'; export B=''; "


REFUSED = {
    "[environment]\nallow_internet = true": "allow_internet",
    "[environment]\nnetwork_mode = 'public'": "network_mode",
    "[environment]\nallowed_hosts = ['a.org']": "no network",
    "[environment]\ngpus = 1": "gpus",
    "[environment]\ngpu_types = ['H100']": "no GPU",
    "[environment]\ntpu = { type = 'v4', topology = '2x2' }": "no TPU",
    "[environment]\nos = 'windows'": "os",
    "[environment]\nworkdir = '/app'": "workdir",
    "[environment]\ndocker_image = 'ubuntu'": "import the task",
    "[environment]\nskills_dir = '/skills'": "no skills",
    "[environment.env]\nKEY = 'x'": "fixed environment",
    "[environment.healthcheck]\ncommand = 'true'": "services",
    "[[environment.mcp_servers]]\nname = 'a'\nurl = 'http://a'": "toolset",
    "[environment]\nmemory = '2G'\nmemory_mb = 1024": "is not memory_mb",
    "[environment]\nstorage = 'much'": "no size",
    "[environment]\ncpus = nan": "cpus",
    "[environment]\ncpus = 0": "cpus",
    "[agent]\nuser = 'root'": "own user",
    "[agent]\nnetwork_mode = 'allowlist'": "network_mode",
    "[verifier]\nuser = 0": "own user",
    "[verifier]\ntimeout_sec = 0": "timeout_sec",
    "[verifier]\nenvironment_mode = 'other'": "environment_mode",
    "[verifier.environment]\ncpus = 1": "own image",
    "[verifier.env]\nKEY = '${OPENAI_API_KEY}'": "value of the host",
    "[verifier.env]\n'A B' = 'x'": "verifier.env",
    "[[verifier.collect]]\ncommand = 'true'": "services",
    "[[steps]]\nname = 'one'\n[steps.healthcheck]\ncommand = 'true'": "services",
    "[[steps]]\nname = '../one'": "steps.0.name",
    "multi_step_reward_strategy = 'best'": "multi_step_reward_strategy",
    "schema_version = '1.5'": "schema_version",
    "schema_version = 1.1": "schema_version",
    "[task]\nname = 1": "task.name",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_key_that_would_change_the_task_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        task_file.parse_task_file(text)
    first = refusal.value.errors()[0]
    assert REFUSED[text] in f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"


@pytest.mark.parametrize(
    ("artifacts", "why"),
    [
        ("", "would get nothing"),
        ("artifacts = ['/etc/passwd']", "not below /workspace"),
        ("artifacts = ['../x']", "not below /workspace"),
        ("artifacts = ['/workspace/']", "not below /workspace"),
        ("artifacts = ['*.py']", "is a pattern"),
        ("artifacts = [{ source = 'a', exclude = ['b'] }]", "not exclude"),
        ("artifacts = [{ source = 'a', service = 'db' }]", "not service"),
    ],
)
def test_a_separate_verifier_gets_named_files_of_the_workspace_only(
    artifacts: str, why: str
) -> None:
    found = task_file.parse_task_file(f"{artifacts}\n{SEPARATE}")
    with pytest.raises(ValueError, match=why):
        found.artefacts()


def test_artifacts_of_a_shared_verifier_restrict_nothing() -> None:
    assert task_file.parse_task_file("artifacts = ['/var/log/x']").artefacts() == ()


_KEYS = sorted(
    f"{section}.{key}" if section else key
    for section, keys in {
        "": set(tomllib.loads(WHOLE)) | {"steps", "multi_step_reward_strategy", "x"},
        "environment": {*task_file.EnvironmentSection.model_fields, "x"},
        "verifier": {*task_file.VerifierSection.model_fields, "x"},
        "agent": {*task_file.AgentSection.model_fields, "x"},
        "task": {*task_file.PackageSection.model_fields, "x"},
        "metadata": {*task_file.MetadataSection.model_fields, "x"},
    }.items()
    for key in keys
)
_VALUES = st.sampled_from(
    [
        *(
            "0",
            "-1",
            "1.5",
            "nan",
            "inf",
            "true",
            '""',
            '"x"',
            '"1.4"',
            "[]",
            "{}",
            '["a"]',
            "[[]]",
        ),
        *(
            "{ a = 1 }",
            '[{ source = "a" }]',
            "1979-05-27",
            "9" * 400,
            '"\\u0000"',
            '"${A}"',
            "'/etc'",
        ),
    ]
)


@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=4))
def test_no_values_of_known_keys_crash_the_reader(values: dict[str, str]) -> None:
    text = "".join(f"{key} = {value}\n" for key, value in values.items())
    try:
        found = task_file.parse_task_file(text)
        kept: tuple[Any, ...] = (found.artefacts(), list(found.unknown_keys()))
    except ValueError:
        return
    assert len(kept) == 2


def test_depth_is_refused_or_left_alone_and_not_walked_into() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        task_file.parse_task_file("a = " + "[" * 5_000)
    assert list(task_file.parse_task_file("a" + ".a" * 5_000 + " = 1").unknown_keys()) == ["a"]
