"""Children of a run and of a pool."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from etude.common.api.kinds import EnvPool, RLRun
from etude.common.api.pool.spec import DriverName
from etude.common.role_inputs import ResolvedPool, ResolvedRun
from etude.operator import names
from etude.operator.builders import pool as desired_pools
from etude.operator.builders import run as desired
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape
from etude.operator.commands.render import main as render_main
from etude.operator.commands.render import render_children
from etude.operator.manifests import RESOURCES

CORE = [kind for kind in RESOURCES if kind not in {"RLRun", "EnvPool", "Checkpoint"}]


@pytest.fixture
def platform(platform: Platform) -> Platform:
    """Without NetworkPolicies, which test_network_policies is about."""
    return replace(platform, namespace=None)


def children_of(run: RLRun, platform: Platform, **shape: Any) -> dict[tuple[str, str], Any]:
    made = desired.run_children(run, RunShape(images=platform.images, **shape), platform)
    return {(m["kind"], m["metadata"]["name"]): m for m in made}


def variables(workload: dict[str, Any]) -> dict[str, str]:
    spec = workload["spec"].get("template", workload)["spec"]
    return {item["name"]: item.get("value", "") for item in spec["containers"][0]["env"]}


def test_a_run_becomes_a_map_a_pool_a_budget_and_a_service_and_set_per_role(
    run: RLRun, platform: Platform
) -> None:
    assert list(children_of(run, platform)) == [
        ("ConfigMap", "demo-run"),
        ("EnvPool", "demo-repos"),
        ("PodDisruptionBudget", "demo-inference"),
        ("Service", "demo-trainer"),
        ("StatefulSet", "demo-trainer"),
        ("Service", "demo-inference"),
        ("StatefulSet", "demo-inference"),
        ("Service", "demo-rewards"),
        ("StatefulSet", "demo-rewards"),
    ]


def test_a_pool_becomes_a_map_a_broker_and_one_pod_per_ordinal(
    pool: EnvPool, platform: Platform
) -> None:
    made = desired_pools.pool_children(pool, (0, 2), platform.images, platform)
    assert [(m["kind"], m["metadata"]["name"]) for m in made] == [
        ("ConfigMap", "repos-pool"),
        ("Service", "repos-broker"),
        ("StatefulSet", "repos-broker"),
        ("Pod", "repos-node-0"),
        ("Pod", "repos-node-2"),
    ]


def test_everything_made_passes_the_strict_kubernetes_schema(
    run: RLRun, pool: EnvPool, platform: Platform
) -> None:
    made = [*children_of(run, platform).values()]
    made += desired_pools.pool_children(pool, (0, 1), platform.images, platform)
    core = [manifest for manifest in made if manifest["kind"] in CORE]
    assert len(core) == len(made) - 1
    for manifest in core:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_a_mistyped_key_would_not_pass_that_schema(run: RLRun, platform: Platform) -> None:
    manifest = children_of(run, platform)["StatefulSet", "demo-trainer"]
    manifest["spec"]["replcias"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_every_pod_meets_the_restricted_pod_security_standard(
    run: RLRun, pool: EnvPool, platform: Platform
) -> None:
    made = [*children_of(run, platform).values()]
    made += desired_pools.pool_children(pool, (0,), platform.images, platform)
    specs = [
        m["spec"]["template"]["spec"] if m["kind"] == "StatefulSet" else m["spec"]
        for m in made
        if m["kind"] in {"StatefulSet", "Pod"}
    ]
    assert len(specs) == 5
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        # The account `default` of the namespace, and with it the Secrets that images are pulled by.
        assert not {"serviceAccountName", "serviceAccount", "imagePullSecrets"} & spec.keys()
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all({"emptyDir", "configMap"} & volume.keys() for volume in spec["volumes"])
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_each_role_is_probed_and_told_who_it_is(run: RLRun, platform: Platform) -> None:
    trainer = children_of(run, platform)["StatefulSet", "demo-trainer"]
    container = trainer["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["etude-trainer"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 8080}
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": 8080}
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {
        "grpc": 7000,
        "probe": 8080,
    }
    told = variables(trainer)
    assert told["ETUDE_RUN_FILE"] == "/etc/etude/run.json"
    assert told["ETUDE_PORT"] == "7000"
    assert told["ETUDE_PROBE_PORT"] == "8080"


def test_the_trainer_knows_every_engine_the_brokers_and_the_rewards(
    run: RLRun, platform: Platform
) -> None:
    told = variables(children_of(run, platform)["StatefulSet", "demo-trainer"])
    assert told["ETUDE_INFERENCE_TARGETS"].split(",") == [
        "demo-inference-0.demo-inference:7010",
        "demo-inference-1.demo-inference:7010",
    ]
    assert json.loads(told["ETUDE_BROKERS"]) == {"repos": "demo-repos-broker:7020"}
    assert told["ETUDE_REWARDS_TARGET"] == "demo-rewards-0.demo-rewards:7040"


def test_a_pool_of_somebody_else_is_found_by_its_own_name(
    run_body: Any, platform: Platform
) -> None:
    body = run_body()
    role = {"name": "repos", "template": "python", "poolRef": {"name": "shared"}}
    body["spec"]["roles"]["environments"] = [role]
    children = children_of(RLRun.model_validate(body), platform)
    assert not [kind for kind, _ in children if kind == "EnvPool"]
    told = variables(children["StatefulSet", "demo-rewards"])
    assert json.loads(told["ETUDE_BROKERS"]) == {"repos": "shared-broker:7020"}


def test_a_supervised_run_has_a_trainer_only(run_body: Any, platform: Platform) -> None:
    body = run_body()
    body["spec"]["phases"] = body["spec"]["phases"][:1]
    body["spec"]["roles"] = {}
    children = children_of(RLRun.model_validate(body), platform)
    assert [kind for kind, _ in children] == ["ConfigMap", "Service", "StatefulSet"]
    assert "ETUDE_INFERENCE_TARGETS" not in variables(children["StatefulSet", "demo-trainer"])


def test_a_run_that_is_not_running_keeps_its_objects_and_holds_no_pods(
    run: RLRun, platform: Platform
) -> None:
    children = children_of(run, platform, is_running=False)
    assert children.keys() == children_of(run, platform).keys()
    sets = [m for (kind, _), m in children.items() if kind == "StatefulSet"]
    assert [m["spec"]["replicas"] for m in sets] == [0, 0, 0]
    assert children["EnvPool", "demo-repos"]["spec"]["replicas"] == 0


def test_a_new_attempt_changes_one_role_only(run: RLRun, platform: Platform) -> None:
    before = children_of(run, platform)
    after = children_of(run, platform, attempts={names.TRAINER: 3})
    changed = [key for key in before if before[key] != after[key]]
    assert changed == [("StatefulSet", "demo-trainer")]
    template = after["StatefulSet", "demo-trainer"]["spec"]["template"]
    assert template["metadata"]["labels"][names.ATTEMPT] == "3"
    assert variables(after["StatefulSet", "demo-trainer"])["ETUDE_ATTEMPT"] == "3"


def test_the_maps_hold_what_the_roles_read_back(
    run: RLRun, pool: EnvPool, platform: Platform
) -> None:
    held = children_of(run, platform)["ConfigMap", "demo-run"]["data"]["run.json"]
    read = ResolvedRun.model_validate_json(held)
    assert (read.name, read.namespace, read.uid, read.spec) == ("demo", "lab", "uid-run", run.spec)
    made = desired_pools.pool_children(pool, (), platform.images, platform)
    assert ResolvedPool.model_validate_json(made[0]["data"]["pool.json"]).uid == "uid-pool"


def test_scaling_a_pool_changes_nothing_that_its_pods_read(
    pool: EnvPool, platform: Platform
) -> None:
    more = pool.model_copy(update={"spec": pool.spec.model_copy(update={"replicas": 7})})
    first = desired_pools.pool_children(pool, (0,), platform.images, platform)
    assert desired_pools.pool_children(more, (0,), platform.images, platform) == first


def test_no_pool_may_run_untrusted_templates_behind_a_weak_wall(
    pool: EnvPool, platform: Platform
) -> None:
    assert platform.allows_weak_isolation
    assert pool.spec.isolation.minimum == "Process"
    node = desired_pools.pool_children(pool, (0,), platform.images, platform)[-1]
    assert "ETUDE_ALLOW_WEAK_ISOLATION" not in variables(node)


@pytest.mark.parametrize(
    ("image", "driver", "is_supervised", "asks"),
    [
        ("python", "Auto", True, True),
        ("python", "GVisor", True, False),
        (None, "Auto", False, False),
        (None, "Process", False, False),
    ],
)
def test_hosts_that_boot_images_are_supervised_and_ask_for_the_device_of_vms(
    pool: EnvPool, image: str | None, driver: str, *, is_supervised: bool, asks: bool
) -> None:
    resource = "devices.kubevirt.io/kvm"
    platform = Platform(images={"envserver": "img"}, kvm_resource=resource)
    template = pool.spec.templates[0].model_copy(update={"image": image})
    isolation = pool.spec.isolation.model_copy(update={"driver": DriverName(driver)})
    changes = {"templates": (template,), "isolation": isolation}
    changed = pool.model_copy(update={"spec": pool.spec.model_copy(update=changes)})

    *_, broker, node = desired_pools.pool_children(changed, (0,), platform.images, platform)

    limits = {resource: "1"} if asks else None
    (container,) = node["spec"]["containers"]
    assert container.get("resources", {}).get("limits") == limits
    # Machines and containers outlive a daemon that dies, and end with their pod.
    assert container["command"] == ["etude-envserver", "supervise" if is_supervised else "node"]
    assert "resources" not in broker["spec"]["template"]["spec"]["containers"][0]


def test_environment_hosts_alone_get_the_seccomp_profile_of_the_platform(pool: EnvPool) -> None:
    profile = "etude/environment-node.json"
    platform = Platform(images={"envserver": "img"}, host_seccomp_profile=profile)
    *_, broker, node = desired_pools.pool_children(pool, (0,), platform.images, platform)
    (container,) = node["spec"]["containers"]
    wanted = {"type": "Localhost", "localhostProfile": profile}
    assert container["securityContext"]["seccompProfile"] == wanted
    (container,) = broker["spec"]["template"]["spec"]["containers"]
    assert "seccompProfile" not in container["securityContext"]


def test_an_own_pool_reaches_the_store_as_its_run_does(run_body: Any, platform: Platform) -> None:
    storage = {
        "uri": "s3://runs/demo",
        "endpoint": "http://minio:9000",
        "secretRef": {"name": "s3"},
    }
    run = RLRun.model_validate(run_body(storage=storage))
    made = children_of(run, platform)["EnvPool", "demo-repos"]
    assert made["spec"]["store"] == {"endpoint": "http://minio:9000", "secretRef": {"name": "s3"}}
    pool = EnvPool.model_validate({**made, "metadata": {**made["metadata"], "uid": "uid-pool"}})
    *_, broker, node = desired_pools.pool_children(pool, (0,), platform.images, platform)
    assert node["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert "envFrom" not in broker["spec"]["template"]["spec"]["containers"][0]


def test_a_pool_traces_to_where_its_run_does(run_body: Any, platform: Platform) -> None:
    endpoint = "http://collector:4317"
    run = RLRun.model_validate(run_body(observability={"otlpEndpoint": endpoint}))
    made = children_of(run, platform)["EnvPool", "demo-repos"]
    pool = EnvPool.model_validate({**made, "metadata": {**made["metadata"], "uid": "uid-pool"}})
    *_, broker, node = desired_pools.pool_children(pool, (0,), platform.images, platform)
    assert variables(broker)["ETUDE_OTLP_ENDPOINT"] == endpoint
    assert variables(node)["ETUDE_OTLP_ENDPOINT"] == endpoint


def test_a_trainer_has_time_for_its_last_checkpoint(run_body: Any, platform: Platform) -> None:
    def grace_s(role: str, **spec: Any) -> int:
        body = run_body(checkpointing={"timeoutSeconds": 900})
        body["spec"]["roles"][role] |= spec
        made = children_of(RLRun.model_validate(body), platform)["StatefulSet", f"demo-{role}"]
        found: int = made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        return found

    assert (grace_s("trainer"), grace_s("rewards")) == (930, 60)
    assert grace_s("trainer", terminationGracePeriodSeconds=20) == 20


def test_the_stores_secret_is_mounted_and_never_read(run: RLRun, platform: Platform) -> None:
    made = children_of(run, platform)
    pod = made["StatefulSet", "demo-trainer"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert "Secret" not in {kind for kind, _ in made}


def test_names_of_own_pools_stay_short_and_apart() -> None:
    first = names.own_pool("a" * 30, "environment-one")
    second = names.own_pool("a" * 30, "environment-two")
    assert names.own_pool("demo", "repos") == "demo-repos"
    assert len(first) == len(second) == names.MAX_NAME
    assert first != second


def test_rendering_a_run_shows_the_children_of_its_pools_too(
    run_body: Any, platform: Platform
) -> None:
    made = list(render_children(run_body(), platform))
    kinds = [(m["kind"], m["metadata"]["name"]) for m in made]
    assert ("StatefulSet", "demo-repos-broker") in kinds
    assert ("Pod", "demo-repos-node-1") in kinds
    with pytest.raises(ValueError, match="has no children"):
        list(render_children({"kind": "Pod"}, platform))


def test_the_demo_renders_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[4] / "examples" / "demo" / "rlrun.yaml"
    monkeypatch.setattr("sys.argv", ["render", "-f", str(example)])
    render_main()
    made = [m for m in yaml.safe_load_all(capsys.readouterr().out) if m]
    assert len(made) == 13
    for manifest in made:
        if manifest["kind"] in CORE:
            version = kubernetes_validate.latest_version()
            kubernetes_validate.validate(manifest, version, strict=True)


def test_only_the_trainer_has_the_token_of_a_hub(run_body: Any, platform: Platform) -> None:
    body = run_body(model={"uri": "hf://org/tiny@main", "secretRef": {"name": "hub"}})
    made = children_of(RLRun.model_validate(body), platform)

    def secrets(role: str) -> list[str]:
        spec = made["StatefulSet", f"demo-{role}"]["spec"]["template"]["spec"]
        return [each["secretRef"]["name"] for each in spec["containers"][0].get("envFrom", ())]

    assert secrets("trainer") == ["s3", "hub"]
    assert secrets("inference") == secrets("rewards") == ["s3"]


def test_only_rewards_have_the_key_of_judges(run_body: Any, platform: Platform) -> None:
    body = run_body()
    judge = {"endpoint": "https://models.example.com/v1", "model": "m", "criteria": "c"}
    rewards = body["spec"]["roles"]["rewards"]
    rewards["functions"].append({"name": "taste", "function": "Judge", "parameters": judge})
    rewards["secretRef"] = {"name": "judge"}
    made = children_of(RLRun.model_validate(body), platform)
    for role, expected in (("rewards", ["s3", "judge"]), ("trainer", ["s3"])):
        spec = made["StatefulSet", f"demo-{role}"]["spec"]["template"]["spec"]
        found = [each["secretRef"]["name"] for each in spec["containers"][0]["envFrom"]]
        assert found == expected
