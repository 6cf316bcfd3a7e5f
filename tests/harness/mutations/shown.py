"""Where the fields of our objects must show: the API's promise, said again beside the operator.

`tests/contract/knobs.py` says which module reads a field; here is where a reader of the cluster
finds it. Each function yields what does not agree, in words.
"""

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from tests.harness.mutations.compared import lacking, same_amount, unequal

from etude.common.api.kinds import Checkpoint, EnvPool, RLRun
from etude.operator.manifests import has_fields_of, parse_quantity

Manifest = dict[str, Any]
Children = Mapping[tuple[str, str], Manifest]
"""Objects by kind and name."""
MAIN = ("trainer", "inference", "rewards")


def differences(whole: Manifest, children: Children) -> Iterator[str]:
    """Everything in the spec of an accepted object that does not show at its place.

    Raises:
        ValueError: the object is of no kind of ours.
    """
    match whole["kind"]:
        case "RLRun":
            yield from _of_run(RLRun.model_validate(whole).spec.to_json(), whole, children)
        case "EnvPool":
            yield from _of_pool(EnvPool.model_validate(whole).spec.to_json(), whole, children)
        case "Checkpoint":
            spec = Checkpoint.model_validate(whole).spec.to_json()
            yield from of_checkpoint(spec, whole, children)
        case kind:
            raise ValueError(f"kind {kind} is none of ours")


def _of_run(spec: Manifest, whole: Manifest, children: Children) -> Iterator[str]:
    name = whole["metadata"]["name"]
    said = json.loads(_get(children, "ConfigMap", f"{name}-run")["data"]["run.json"])["spec"]
    yield from unequal("run.json", spec, said)
    roles = spec["roles"]
    replicas = {"trainer": 1, "rewards": 1, "inference": roles.get("inference", {}).get("replicas")}
    # A budget of nothing is spent at once: the run gives its pods back as soon as it has saved.
    is_held = "hold" in whole.get("status", {})
    for role in MAIN:
        live = children.get(("StatefulSet", f"{name}-{role}"))
        yield from unequal(f"StatefulSet {role}", role in roles, live is not None)
        if role in roles and live is not None:
            count = live["spec"]["replicas"]
            wanted = 0 if is_held and count == 0 else replicas[role]
            yield from unequal(f"{role} replicas", wanted, count)
            yield from _of_role(role, roles[role], live["spec"]["template"], spec)
    yield from _budget(name, roles, children)
    yield from _policies(spec["network"]["policy"], children, name, [r for r in MAIN if r in roles])
    yield from _pools(name, spec, children)


def _of_role(role: str, given: Manifest, template: Manifest, spec: Manifest) -> Iterator[str]:
    pod = template["spec"]
    over = given.get("podTemplate", {})
    laid = over.get("spec", {})
    main = next(each for each in pod["containers"] if each["name"] == role)
    if "image" in given and "containers" not in laid:
        yield from unequal(f"{role} image", given["image"], main["image"])
    if "containers" not in laid:
        yield from _of_resources(role, given, main.get("resources", {}))
        variables = {each["name"]: each.get("value", "") for each in main["env"]}
        wanted = {each["name"]: each.get("value", "") for each in given.get("env", ())}
        yield from lacking(f"{role} env", wanted, variables)
    yield from _of_place(role, given, pod, spec["scheduling"])
    claims = [each["name"] for each in given.get("resourceClaims", ())]
    yield from unequal(f"{role} claims", claims, [c["name"] for c in pod.get("resourceClaims", ())])
    metadata = template["metadata"]
    for field in ("labels", "annotations"):
        yield from lacking(f"{role} {field}", over.get(field) or {}, metadata.get(field) or {})
    kept = {key: value for key, value in laid.items() if value is not None}
    if not has_fields_of(pod, kept):
        yield f"{role} podTemplate.spec: {kept} is not in {pod}"
    if "terminationGracePeriodSeconds" not in laid:
        yield from _of_grace(role, given, pod, spec)
    secret = spec["storage"].get("secretRef", {}).get("name")
    from_secrets = [each["secretRef"]["name"] for each in main.get("envFrom", ())]
    yield from unequal(f"{role} secret", [secret] if secret else [], from_secrets)


def _of_place(role: str, given: Manifest, pod: Manifest, scheduling: Manifest) -> Iterator[str]:
    """Which machines it may have."""
    laid = given.get("podTemplate", {}).get("spec", {})
    usual = {"priorityClassName": scheduling.get("priorityClassName")}
    for field in ("nodeSelector", "tolerations", "priorityClassName", "runtimeClassName"):
        if field not in laid:
            asked = given.get(field) or usual.get(field)
            yield from unequal(f"{role} {field}", asked, pod.get(field))
    if "affinity" not in laid:
        yield from unequal(f"{role} topology", *_topologies(scheduling, pod))


def _topologies(scheduling: Manifest, pod: Manifest) -> tuple[object, object]:
    """Which one is asked for, and which one a pod has."""
    near = (pod.get("affinity") or {}).get("podAffinity") or {}
    required = near.get("requiredDuringSchedulingIgnoredDuringExecution") or ()
    preferred = near.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    found = [("required", each["topologyKey"]) for each in required]
    found += [("preferred", each["podAffinityTerm"]["topologyKey"]) for each in preferred]
    return sorted(scheduling.get("topology", {}).items()), found


def _of_grace(role: str, given: Manifest, pod: Manifest, spec: Manifest) -> Iterator[str]:
    saving_s = spec["checkpointing"]["timeoutSeconds"] + 30 if role == "trainer" else 60
    wanted = given.get("terminationGracePeriodSeconds") or saving_s
    yield from unequal(f"{role} grace", wanted, pod["terminationGracePeriodSeconds"])


def _of_resources(role: str, given: Manifest, found: Manifest) -> Iterator[str]:
    requests, limits = found.get("requests", {}), found.get("limits", {})
    if "cpu" in given:
        yield from same_amount(f"{role} cpu", given["cpu"], requests.get("cpu", "-"))
    if "memory" in given:
        for part in (requests, limits):
            yield from same_amount(f"{role} memory", given["memory"], part.get("memory", "-"))
    count = given.get("gpusPerReplica", 0)
    yield from unequal(f"{role} GPUs", str(count), limits.get(given["gpuResource"], "0"))


def _budget(name: str, roles: Manifest, children: Children) -> Iterator[str]:
    live = children.get(("PodDisruptionBudget", f"{name}-inference"))
    yield from unequal("a disruption budget", "inference" in roles, live is not None)
    if live is not None:
        least = max(1, roles["inference"]["replicas"] - 1)
        yield from unequal("minAvailable", least, live["spec"]["minAvailable"])


def _policies(policy: str, children: Children, name: str, parts: list[str]) -> Iterator[str]:
    for part in parts:
        exists = ("NetworkPolicy", f"{name}-{part}") in children
        yield from unequal(f"NetworkPolicy of {part}", policy == "Managed", exists)


def _pools(name: str, spec: Manifest, children: Children) -> Iterator[str]:
    trainer = children[("StatefulSet", f"{name}-trainer")]["spec"]["template"]["spec"]
    main = next(each for each in trainer["containers"] if each["name"] == "trainer")
    variables = {each["name"]: each.get("value", "") for each in main["env"]}
    brokers = json.loads(variables.get("ETUDE_BROKERS", "{}"))
    roles = spec["roles"].get("environments", ())
    yield from unequal("ETUDE_BROKERS", sorted(each["name"] for each in roles), sorted(brokers))
    for role in roles:
        if "poolRef" in role:
            if f"{role['poolRef']['name']}-broker" not in brokers.get(role["name"], ""):
                yield f"poolRef {role['poolRef']['name']} is not in {brokers}"
            continue
        made = [
            pool
            for (kind, _), pool in children.items()
            if kind == "EnvPool" and _broker_of(pool) in brokers.get(role["name"], "-")
        ]
        if len(made) != 1:
            yield f"environment {role['name']} has {len(made)} pools"
            continue
        yield from lacking(f"pool of {role['name']}", role["poolTemplate"], made[0]["spec"])
        yield from differences(made[0], children)


def _broker_of(pool: Manifest) -> str:
    return f"{pool['metadata']['name']}-broker:"


def _of_pool(spec: Manifest, whole: Manifest, children: Children) -> Iterator[str]:
    name = whole["metadata"]["name"]
    said = json.loads(_get(children, "ConfigMap", f"{name}-pool")["data"]["pool.json"])["spec"]
    yield from unequal("pool.json", _unsized(spec), _unsized(said))
    nodes = [
        child
        for (kind, _), child in children.items()
        if kind == "Pod"
        and child["metadata"]["labels"].get("etude.dev/pool") == name
        and child["metadata"]["labels"].get("etude.dev/role") == "node"
    ]
    broker = _get(children, "StatefulSet", f"{name}-broker")["spec"]
    mode, replicas = spec.get("autoscaling", {}).get("mode", "Manual"), spec.get("replicas", 1)
    if not _is_sized(spec):  # else demand says how many
        yield from unequal(f"nodes of {name}", replicas, len(nodes))
    wanted = spec["brokers"] if replicas or mode != "Manual" else 0
    yield from unequal("brokers", wanted, broker["replicas"])
    decides = {"mode": mode} if _is_sized(spec) else None
    yield from unequal("who decides, for brokers", decides, _decides(said))
    parts = ["broker", "node", *(["edge"] if "edge" in spec else [])]
    yield from _policies(spec["network"]["policy"], children, name, parts)
    yield from _of_edge(spec, children, name)
    for node in nodes:
        yield from _of_node(spec, node["spec"], name)


SIZE = {"replicas", "maxReplicas", "minIdle", "overcommitFactor", "autoscaling"}


def _unsized(spec: Manifest) -> Manifest:
    """Without what is the operator's business alone, and must restart no pod."""
    return {key: value for key, value in spec.items() if key not in SIZE}


def _is_sized(spec: Manifest) -> bool:
    """Whether the operator decides how many hosts there are."""
    return spec.get("autoscaling", {}).get("mode", "") in {"Reactive", "Predictive"}


def _decides(said: Manifest) -> Manifest | None:
    """What brokers are told of who decides; for them the mode alone says something."""
    given = said.get("autoscaling")
    return None if given is None else {"mode": given["mode"]}


def _of_edge(spec: Manifest, children: Children, name: str) -> Iterator[str]:
    live = children.get(("StatefulSet", f"{name}-edge"))
    yield from unequal("an edge", "edge" in spec, live is not None)
    if live is None or "edge" not in spec:
        return
    pod, edge = live["spec"]["template"]["spec"], spec["edge"]
    variables = {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}
    wanted = {"ETUDE_EDGE_MAX_SANDBOXES": str(edge["maxSandboxes"])}
    wanted |= {"ETUDE_EDGE_WORKSPACE": edge["workspace"]} if "workspace" in edge else {}
    memory = spec["slot"].get("memoryMib")
    wanted |= {"ETUDE_EDGE_MEMORY_MIB": str(memory)} if memory is not None else {}
    disk = spec["slot"].get("diskMib")
    wanted |= {"ETUDE_EDGE_DISK_MIB": str(disk)} if disk is not None else {}
    yield from lacking("edge env", wanted, variables)
    secrets = [each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each]
    certificate = [edge["tlsRef"]["name"]] if "tlsRef" in edge else []
    wanted_secrets = sorted([edge["keysRef"]["name"], *certificate])
    yield from unequal("secrets of the edge", wanted_secrets, sorted(secrets))


def _of_node(spec: Manifest, pod: Manifest, name: str) -> Iterator[str]:
    placement, (main,) = spec["placement"], pod["containers"]
    selector = placement.get("nodeSelector") or None
    yield from unequal("node selector", selector, pod.get("nodeSelector"))
    tolerations = [each for each in pod.get("tolerations", ()) if not _is_default(each)]
    yield from unequal("tolerations", placement.get("tolerations", []), tolerations)
    apart = "podAntiAffinity" in (pod.get("affinity") or {})
    yield from unequal("one per machine", placement["onePerMachine"], apart)
    if "cpu" in spec["slot"]:
        each = parse_quantity(spec["slot"]["cpu"])
        assert isinstance(each, Decimal)
        asked = parse_quantity(main["resources"]["requests"]["cpu"])
        assert isinstance(asked, Decimal)
        missing = asked - each * spec["slotsPerReplica"]
        if not 0 <= missing < Decimal("0.001"):
            yield f"a node asks for {asked} CPU for slots of {each}"
    secret = spec.get("store", {}).get("secretRef", {}).get("name")
    from_secrets = [item["secretRef"]["name"] for item in main.get("envFrom", ())]
    yield from unequal("node secret", [secret] if secret else [], from_secrets)
    given = {
        rule["credential"]["secretRef"]["name"]
        for rule in spec["network"].get("rules", ())
        if "credential" in rule
    }
    projected = {
        source["secret"]["name"]
        for volume in pod["volumes"]
        if volume["name"] == "egress"
        for source in volume["projected"]["sources"]
    }
    yield from unequal("egress secrets", given, projected)
    variables = {item["name"]: item.get("value", "") for item in main["env"]}
    endpoint = spec["observability"].get("otlpEndpoint")
    yield from unequal("collector", endpoint, variables.get("ETUDE_OTLP_ENDPOINT"))
    service = variables["ETUDE_BROKER_TARGET"].partition(":")[0]
    yield from unequal("brokers that a node knows", f"{name}-broker", service)


def _is_default(toleration: Manifest) -> bool:
    """Whether the API server adds it to every pod."""
    return toleration.get("tolerationSeconds") == 300 and toleration["key"].startswith(
        "node.kubernetes.io/"
    )


def of_checkpoint(spec: Manifest, whole: Manifest, children: Children) -> Iterator[str]:
    """What of a checkpoint's spec its Job lacks."""
    jobs = [child for (kind, _), child in children.items() if kind == "Job"]
    if len(jobs) != 1:
        yield f"{len(jobs)} Jobs"
        return
    (main,) = jobs[0]["spec"]["template"]["spec"]["containers"]
    order = json.loads(main["env"][0]["value"])
    yield from unequal("uri", spec["source"]["uri"], order["uri"])
    yield from unequal("digest", spec["source"]["manifestDigest"], order["digest"])
    yield from unequal("storage", spec["storage"], order["storage"])
    secret = spec["storage"].get("secretRef", {}).get("name")
    from_secrets = [each["secretRef"]["name"] for each in main.get("envFrom", ())]
    yield from unequal("secret", [secret] if secret else [], from_secrets)
    held = "etude.dev/checkpoint-data" in (whole["metadata"].get("finalizers") or ())
    yield from unequal("finalizer", spec["deletionPolicy"] == "Delete", held)


def _get(children: Children, kind: str, name: str) -> Manifest:
    return children.get((kind, name)) or {
        "data": {"run.json": '{"spec": {}}', "pool.json": '{"spec": {}}'},
        "spec": {"replicas": None},
    }
