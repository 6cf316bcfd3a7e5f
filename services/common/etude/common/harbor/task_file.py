"""Schema of task.toml, Harbor's 1.0 to 1.4: keys that are read, ignored, or refused.

A key that changes what a task does is honoured, or refused with the reason; sizes, build limits
and descriptions are for other harnesses; keys that Harbor does not know either are reported.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

WORKSPACE = "/workspace"
"""Folder of the files of environment/ in every sandbox."""

SchemaVersion = Literal["1.0", "1.1", "1.2", "1.3", "1.4"]
_STEP_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([GMK])\s*", re.IGNORECASE)
_MB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def _empty(why: str) -> AfterValidator:
    """A key that Harbor knows and that only its empty value can mean here."""

    def check(value: object) -> object:
        if value not in (None, [], {}, ""):
            raise ValueError(f"is not available here: {why}")
        return value

    return AfterValidator(check)


def _literal(values: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in values.items():
        if "${" in value:
            raise ValueError(f"{name} takes a value of the host, which no sandbox gets")
        if "\0" in value:
            raise ValueError(f"{name} holds a NUL")
    return values


def _size(value: str) -> str:
    if not _SIZE.fullmatch(value):
        raise ValueError("is no size such as 2G, 512M or 64K")
    return value


def _one_reward(value: object) -> object:
    """The threshold of the one reward that verifiers here write.

    Raises:
        ValueError: it is about another reward.
    """
    if not isinstance(value, Mapping):
        return value
    if set(value) != {"reward"}:
        names = ", ".join(map(str, value))[:200] or "no reward"
        raise ValueError(f"names {names}; a step has the one reward `reward` here")
    return value["reward"]


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


_Absent = Annotated[Any, _empty("it belongs to containers with services")]
_NoUser = Annotated[Any, _empty("every command runs as the sandbox's own user")]
_NoHosts = Annotated[Any, _empty("sandboxes have no network")]
_Env = Annotated[
    dict[Annotated[str, StringConstraints(pattern=_ENV_NAME)], str], AfterValidator(_literal)
]
_Size = Annotated[str, AfterValidator(_size)]
_Command = Annotated[str, StringConstraints(min_length=1, max_length=65_536, pattern=r"^[^\x00]*$")]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NoNetwork = Literal["no-network"] | None


class Section(BaseModel):
    """Base of sections; unknown keys are kept, so that they can be reported."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def unknown_keys(self, path: str = "") -> Iterator[str]:
        """Keys of this section and those in it that neither Harbor nor this program reads."""
        for key in self.model_extra or ():
            yield f"{path}{key}"
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Section) and not isinstance(value, MetadataSection):
                yield from value.unknown_keys(f"{path}{name}.")
            for number, each in enumerate(value if isinstance(value, tuple) else ()):
                if isinstance(each, Section):
                    yield from each.unknown_keys(f"{path}{name}.{number}.")


class MetadataSection(Section):
    """Free for authors; keys that begin with `etude_` are read here."""

    etude_verifier: str | None = Field(default=None, min_length=1, max_length=4096)
    """Runs the verifier in place of tests/test.sh."""
    etude_artefacts: tuple[str, ...] = ()
    """Patterns of paths that the agent may hand in; empty allows all."""
    etude_keeps_history: bool = False
    """True if the workspace's repository may hold commits before the one that is checked out."""
    etude_image: str | None = Field(default=None, min_length=1, max_length=512)
    """Name of the image that the task needs, which `image.yaml` beside task.toml makes, or a
    reference with a digest, which hosts pull."""
    etude_grade: Literal["clean", "fork"] = "clean"
    """Where hidden tests run: in a fresh sandbox, or in a fork of the agent's with its image's
    services, which proves less."""

    etude_setup: tuple[_Command, ...] = Field(default=(), max_length=64)
    """Shell commands that prepare the workspace before the agent starts, in order. A group's
    rollouts, and the hidden tests, start from what they leave in the environment's files."""
    etude_setup_timeout_sec: float = Field(default=600, gt=0, le=3_600, allow_inf_nan=False)
    """Time limit of all set-up commands together."""

    etude_ambiguity: float = Field(default=0, ge=0, le=1, allow_inf_nan=False)
    """How far the instruction leaves open what is wanted: at 1 a question costs nothing."""

    etude_protected: tuple[str, ...] = ()
    """Patterns of paths that grading takes as they were at first, beside the usual ones."""
    etude_allowed: tuple[str, ...] = ()
    """Patterns of usually protected paths that the agent may change."""
    etude_pytest_plugins: tuple[str, ...] | None = None
    """Modules of the only plugins that pytest loads while grading; unset, it loads all that are
    installed."""

    @model_validator(mode="after")
    def _has_services(self) -> Self:
        if self.etude_grade == "fork" and self.etude_image is None:
            raise ValueError("etude_grade = 'fork' needs etude_image: a fork keeps its services")
        return self


class PackageSection(Section):
    """Name of the task where it is published."""

    name: str | None = None
    version: str | None = None
    description: str = ""
    authors: tuple[dict[str, Any], ...] = ()
    keywords: tuple[str, ...] = ()


class VerifierSection(Section):
    """Settings of the hidden tests."""

    timeout_sec: float = Field(default=600.0, gt=0, le=86_400, allow_inf_nan=False)
    env: _Env = Field(default_factory=dict)
    user: _NoUser = None
    environment_mode: Literal["shared", "separate"] | None = None
    """Grading is always in a sandbox of its own; separate hands the artifacts over only."""
    environment: Annotated[Any, _empty("tests run in the task's own image")] = None
    collect: _Absent = ()
    network_mode: _NoNetwork = None
    allowed_hosts: _NoHosts = None


class AgentSection(Section):
    """For other harnesses: here the run limits its rollouts."""

    timeout_sec: _Seconds | None = None
    user: _NoUser = None
    network_mode: _NoNetwork = None
    allowed_hosts: _NoHosts = None


class EnvironmentSection(Section):
    """Sizes are for other harnesses: here the pool decides. What no pool gives is refused."""

    build_timeout_sec: _Seconds = 600.0
    docker_image: Annotated[Any, _empty("import the task: etude tasks import harbor --pin")] = None
    os: Annotated[Literal["linux"], BeforeValidator(_lower)] = "linux"
    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    memory: _Size | None = None
    storage: _Size | None = None
    gpus: Literal[0] | None = None
    gpu_types: Annotated[Any, _empty("environments have no GPU")] = None
    tpu: Annotated[Any, _empty("environments have no TPU")] = None
    allow_internet: Literal[False] | None = None
    network_mode: _NoNetwork = None
    allowed_hosts: _NoHosts = None
    mcp_servers: Annotated[Any, _empty("the agent's tools are those of the toolset")] = ()
    env: Annotated[Any, _empty("commands see a fixed environment")] = None
    skills_dir: Annotated[Any, _empty("the harness installs no skills")] = None
    healthcheck: _Absent = None
    workdir: Literal["/workspace"] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            text, number = getattr(self, old), getattr(self, new)
            if text is not None and number is not None and _megabytes(text) != number:
                raise ValueError(f"{old} = {text!r} is not {new} = {number}")
        return self


class SolutionSection(Section):
    """Settings of the reference solution."""

    env: _Env = Field(default_factory=dict)


class StepVerifierSection(Section):
    """Settings of the hidden tests of one step; unset ones are those of the task."""

    timeout_sec: float | None = Field(default=None, gt=0, le=86_400, allow_inf_nan=False)
    env: _Env = Field(default_factory=dict)
    user: _NoUser = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Annotated[Any, _empty("tests run in the task's own image")] = None
    collect: _Absent = ()
    network_mode: _NoNetwork = None
    allowed_hosts: _NoHosts = None


class StepSection(Section):
    """One step of a task: files in steps/NAME/, and what differs from the task's settings."""

    name: Annotated[str, StringConstraints(pattern=_STEP_NAME, max_length=64)]
    agent: AgentSection = AgentSection()
    verifier: StepVerifierSection = StepVerifierSection()
    min_reward: Annotated[float, BeforeValidator(_one_reward)] | None = Field(
        default=None, ge=0, le=1
    )
    """With a lower reward the steps behind it do not count."""
    healthcheck: _Absent = None
    artifacts: tuple[str | dict[str, Any], ...] = ()


class TaskFile(Section):
    """A whole task.toml."""

    schema_version: SchemaVersion = "1.0"
    version: SchemaVersion | None = None
    """Its name before schema_version."""
    task: PackageSection = PackageSection()
    metadata: MetadataSection = MetadataSection()
    verifier: VerifierSection = VerifierSection()
    agent: AgentSection = AgentSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()
    source: str | None = None
    steps: tuple[StepSection, ...] = Field(default=(), max_length=64)
    """Worked through in order, in one environment."""
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    """The reward of several steps: their mean unless set, or that of the last one."""
    artifacts: tuple[str | dict[str, Any], ...] = ()

    @model_validator(mode="after")
    def _has_steps_apart(self) -> Self:
        names = [step.name for step in self.steps]
        if len({*names}) != len(names):
            raise ValueError("steps: two of them have one name")
        if names and self.metadata.etude_grade == "fork":
            raise ValueError("steps: each is graded by its files, so etude_grade = 'fork' is none")
        return self

    def artefacts(self, step: StepSection | None = None) -> tuple[str, ...]:
        """Patterns of paths that the agent may hand in; empty allows all.

        Args:
            step: of several; what it names comes to what the task names.

        Raises:
            ValueError: a separate verifier gets something from outside of the workspace.
        """
        own = None if step is None else step.verifier.environment_mode
        is_separate = (own or self.verifier.environment_mode) == "separate"
        if self.metadata.etude_artefacts or not is_separate:
            return self.metadata.etude_artefacts
        named = (*self.artifacts, *(() if step is None else step.artifacts))
        if not named:
            raise ValueError("artifacts: a separate verifier would get nothing")
        return tuple(pattern for each in named for pattern in _patterns(each))


def parse_task_file(text: str) -> TaskFile:
    """The settings in the text of a task.toml.

    Raises:
        ValueError: it is no TOML, or nested too deeply; pydantic's ValidationError for a key.
    """
    try:
        return TaskFile.model_validate(tomllib.loads(text))
    except RecursionError as cause:
        raise ValueError("nested too deeply") from cause


def export_commands(values: Mapping[str, str]) -> str:
    """A shell command's beginning that sets these variables."""
    return "".join(f"export {name}={_quoted(value)}; " for name, value in values.items())


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _patterns(artifact: str | Mapping[str, Any]) -> list[str]:
    given = artifact if isinstance(artifact, Mapping) else {"source": artifact}
    source = given.get("source")
    extra = sorted(set(given) - {"source", "destination"})
    if not isinstance(source, str) or extra:
        raise ValueError(f"artifacts: give source and destination only, not {', '.join(extra)}")
    path = source.removeprefix(f"{WORKSPACE}/").rstrip("/")
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"artifacts: {source!r} is not below {WORKSPACE}")
    if set(path) & set("*?[]{}\\"):
        raise ValueError(f"artifacts: {source!r} is a pattern; name files and folders")
    return [path, f"{path}/**"]


def _megabytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    # The pattern was checked with the field.
    return int(float(match[1]) * _MB[match[2].upper()]) if match else 0
