"""Every pod that the operator would make of objects, each kind of pod once."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.harness.mutations import cases, schema
from tests.harness.mutations.walls import pods

from etude.common.api.kinds import Checkpoint
from etude.common.api.schema import crd
from etude.operator.actions import Apply, ClockReading
from etude.operator.builders.platform import Platform
from etude.operator.checkpoints.decide import ObservedCheckpoint, decide
from etude.operator.commands.render import render_children

Manifest = dict[str, Any]
IMAGES = dict.fromkeys(("trainer", "inference", "rewards", "envserver", "operator"), "a/b:1")
PLATFORMS = (
    Platform(images=IMAGES, namespace="etude-system", allows_weak_isolation=True),
    Platform(
        images=IMAGES,
        namespace="etude-system",
        allows_weak_isolation=True,
        host_seccomp_profile="etude/environment-node.json",
        kvm_resource="devices.kubevirt.io/kvm",
    ),
)
NOW = ClockReading(wall_s=1_700_000_000.0, monotonic_s=1.0)
THEIRS = "podTemplate"
"""What users lay over pods themselves, and a namespace may refuse."""


def bodies(seed: int) -> Iterator[Manifest]:
    """The bases of all kinds and every change of them."""
    for kind in crd.KINDS:
        yield schema.base(kind)
        for mutation in cases.mutations(kind, seed):
            if THEIRS not in mutation.path and mutation.top:
                yield json.loads(cases.dumped(mutation.body()))


def made(bodies: Iterable[Manifest]) -> list[Manifest]:
    """What becomes of those that are valid, without two whose pods differ in words only."""
    found: dict[str, Manifest] = {}
    for body in bodies:
        for platform in PLATFORMS:
            for child in _children(body, platform):
                for _, template in pods([child]):
                    found.setdefault(_walls(template), child)
    return list(found.values())


def _children(body: Manifest, platform: Platform) -> Iterator[Manifest]:
    try:
        if body["kind"] == "Checkpoint":
            yield from _jobs(body, platform)
        else:
            yield from render_children(body, platform)
    except ValueError:
        return  # the API server refuses it


def _jobs(body: Manifest, platform: Platform) -> Iterator[Manifest]:
    going = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": _held(body)}
    for metadata in ({"finalizers": _held(body)}, going):
        whole = {**body, "metadata": {**body["metadata"], "uid": "u", **metadata}}
        checkpoint = Checkpoint.model_validate(whole)
        actions = decide(checkpoint, ObservedCheckpoint(manifest=whole), NOW, platform).actions
        yield from (each.manifest for each in actions if isinstance(each, Apply))


def _held(body: Mapping[str, Any]) -> list[str]:
    is_held = body["spec"].get("deletionPolicy", "Delete") == "Delete"
    return ["etude.dev/checkpoint-data"] if is_held else []


def _walls(template: Mapping[str, Any]) -> str:
    """A pod without what no wall is made of."""
    spec = template["spec"]
    kept = {
        key: value
        for key, value in spec.items()
        if key not in {"containers", "nodeSelector", "tolerations", "terminationGracePeriodSeconds"}
    }
    containers = [
        {key: value for key, value in each.items() if key in {"name", "securityContext", "ports"}}
        for each in spec["containers"]
    ]
    return json.dumps([kept, containers], sort_keys=True)
