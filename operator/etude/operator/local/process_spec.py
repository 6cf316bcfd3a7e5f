"""Process spec of a pod: command, environment, files, ports and probes on this host."""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.operator.local.ports import LOOPBACK, PortRegistry, pod_of_address, rewrite_addresses
from etude.operator.manifests import Manifest, labels
from etude.operator.names import ATTEMPT

HOST_MOUNTS = {"/tmp", "/dev/shm"}  # noqa: S108 - mount points, not files of ours
"""Mounts of the host itself: shared by all processes, and short enough for socket paths."""

TERMINATION_MESSAGE = "/dev/termination-log"
"""Default terminationMessagePath: file for the last words of a container."""
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpProbe:
    """An HTTP probe of a container on its loopback port."""

    path: str
    port: int
    period_s: float
    timeout_s: float
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A container as a process of this host."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[Path, str]
    """Content of mounted ConfigMaps by path."""
    folder: Path
    """Folder of its volumes, deleted with the pod."""
    volumes: tuple[Path, ...]
    """Folders of its mounts."""
    log: Path
    message: Path
    """File with its termination message, if it writes one."""
    ports: Mapping[str, int]
    """Loopback port of each named container port."""
    startup: HttpProbe | None
    liveness: HttpProbe | None
    readiness: HttpProbe | None
    grace_s: float
    restarts: bool
    """Whether it is restarted after it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHost:
    """Resources of pods of this runtime: folder, ports, ConfigMaps, Services."""

    folder: Path
    """The run folder."""
    ports: PortRegistry
    config_map: Callable[[str], Mapping[str, str]]
    """Content of a ConfigMap by name.

    Raises KeyError if it does not exist yet.
    """
    is_service: Callable[[str], bool]
    base_env: Mapping[str, str] = field(default_factory=dict)
    """Environment that every process inherits, like that of an image."""


def process_spec(pod: Manifest, local_host: LocalHost) -> ProcessSpec:
    """The process of a pod.

    Raises:
        KeyError: a ConfigMap that it mounts does not exist yet.
    """
    name = pod["metadata"]["name"]
    container = pod["spec"]["containers"][0]
    folder = local_host.folder / "scratch" / name
    mounts = {
        mount["mountPath"]: folder / mount["name"]
        for mount in container.get("volumeMounts", ())
        if mount["mountPath"] not in HOST_MOUNTS
    }
    ports = {
        port.get("name", str(port["containerPort"])): port["containerPort"]
        for port in container.get("ports", ())
    }
    local = {number: local_host.ports.port(name, number) for number in ports.values()}
    return ProcessSpec(
        command=(_executable(container["command"][0], local_host), *container["command"][1:]),
        env={
            **local_host.base_env,
            **_environment(
                pod,
                container,
                local_host,
                {**mounts, TERMINATION_MESSAGE: folder / "termination-log"},
            ),
        },
        files=_files(pod, folder, local_host),
        folder=folder,
        volumes=tuple(mounts.values()),
        log=local_host.folder / "logs" / f"attempt-{labels(pod).get(ATTEMPT, '0')}" / f"{name}.log",
        message=folder / "termination-log",
        ports={label: local[number] for label, number in ports.items()},
        startup=_probe(container.get("startupProbe"), local),
        liveness=_probe(container.get("livenessProbe"), local),
        readiness=_probe(container.get("readinessProbe"), local),
        grace_s=pod["spec"].get("terminationGracePeriodSeconds", 30),
        restarts=pod["spec"].get("restartPolicy", "Always") == "Always",
    )


def _environment(
    pod: Manifest, container: Manifest, local_host: LocalHost, mounts: Mapping[str, Path]
) -> dict[str, str]:
    """The container's variables, with ports, addresses and paths of this host."""
    name = pod["metadata"]["name"]
    own = {port["containerPort"] for port in container.get("ports", ())}

    def resolve(host: str, port: int) -> str | None:
        target = pod_of_address(host, is_service=local_host.is_service)
        if host == LOOPBACK and port in own:
            target = name
        return None if target is None else f"{LOOPBACK}:{local_host.ports.port(target, port)}"

    given: dict[str, str] = {}
    env: dict[str, str] = {}
    for item in container.get("env", ()):
        value = _VARIABLE.sub(lambda match: given.get(match[1], match[0]), _value(item, pod))
        given[item["name"]] = value
        if item["name"].endswith("_PORT") and value.isdigit() and int(value) in own:
            env[item["name"]] = str(local_host.ports.port(name, int(value)))
        else:
            env[item["name"]] = rewrite_addresses(_localize_path(value, mounts), resolve)
    return env


def _value(item: Mapping[str, Any], pod: Manifest) -> str:
    source = item.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    facts = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"].get("namespace", "default"),
        "metadata.uid": pod["metadata"].get("uid", ""),
        "status.podIP": LOOPBACK,
    }
    return str(facts[source] if source else item.get("value", ""))


def _localize_path(value: str, mounts: Mapping[str, Path]) -> str:
    """The value with a mount path replaced by the folder behind it."""
    if value == "0.0.0.0":  # noqa: S104 - only this host may connect
        return LOOPBACK
    for path, folder in mounts.items():
        if value == path or value.startswith(f"{path}/"):
            return str(folder) + value[len(path) :]
    return value


def _files(pod: Manifest, folder: Path, local_host: LocalHost) -> dict[Path, str]:
    return {
        folder / volume["name"] / key: text
        for volume in pod["spec"].get("volumes", ())
        if "configMap" in volume
        for key, text in local_host.config_map(volume["configMap"]["name"]).items()
    }


def _probe(probe: Manifest | None, ports: Mapping[int, int]) -> HttpProbe | None:
    if probe is None:
        return None
    return HttpProbe(
        path=probe["httpGet"]["path"],
        port=ports[probe["httpGet"]["port"]],
        period_s=probe.get("periodSeconds", 10),
        timeout_s=probe.get("timeoutSeconds", 1),
        failures=probe.get("failureThreshold", 3),
    )


def _executable(name: str, local_host: LocalHost) -> str:
    return shutil.which(name, path=local_host.base_env.get("PATH")) or name
