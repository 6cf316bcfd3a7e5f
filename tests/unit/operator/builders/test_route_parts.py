"""Children of a route: engines by channel, gateways, the feedback service, policies."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from etude.common.api.kinds import PolicyRoute, RLRun
from etude.common.api.run.checkpointing import Checkpointing
from etude.common.errors import UserError
from etude.common.role_inputs import read_run
from etude.feedback.release.rules import ReleasePolicy, ReleaseRules, read_rules
from etude.feedback.settings import Settings as FeedbackSettings
from etude.feedback.turn_removal import choose_retention_s
from etude.gateway.settings import Route
from etude.gateway.settings import Settings as GatewaySettings
from etude.inference.settings import Settings as EngineSettings
from etude.operator.builders.certificates import CertificateMode, PlatformTls
from etude.operator.builders.platform import Platform
from etude.operator.builders.route import route_children
from etude.operator.builders.run import RunShape, run_children
from etude.operator.manifests import Manifest

Made = dict[tuple[str, str], Manifest]


def children(body: Manifest, run: RLRun, platform: Platform) -> Made:
    route = PolicyRoute.model_validate(body)
    made = route_children(route, run, platform.images, platform)
    for manifest in made:
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(manifest, version, strict=True)
    return {(m["kind"], m["metadata"]["name"].removeprefix("coder-")): m for m in made}


@pytest.fixture
def made(route_body: Any, run: RLRun, platform: Platform) -> Made:
    return children(route_body(), run, platform)


def pod(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def variables(workload: Manifest) -> dict[str, str]:
    (container,) = pod(workload)["containers"]
    return {item["name"]: item.get("value", "") for item in container["env"]}


def route_file(made: Made) -> dict[str, Any]:
    return dict(json.loads(made["ConfigMap", "gateway"]["data"]["route.json"]))


def test_a_route_has_engines_by_channel_gateways_and_one_feedback_service(made: Made) -> None:
    pods = {key: each["spec"]["replicas"] for key, each in made.items() if "Set" in key[0]}
    pods |= {key: each["spec"]["replicas"] for key, each in made.items() if key[0] == "Deployment"}
    assert pods == {
        ("StatefulSet", "stable"): 2,
        ("StatefulSet", "canary"): 1,
        ("Deployment", "gateway"): 2,
        ("Deployment", "feedback"): 1,
    }
    # A second one would take the ledger from the first.
    assert made["Deployment", "feedback"]["spec"]["strategy"] == {"type": "Recreate"}
    rolling = made["Deployment", "gateway"]["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 1, "maxUnavailable": 0}


def test_a_route_without_a_canary_has_one_channel(
    route_body: Any, run: RLRun, platform: Platform
) -> None:
    made = children(route_body(channels={"stable": {}}), run, platform)
    assert [key for key in made if key[1] == "canary"] == []
    assert "canary" not in route_file(made)


def test_engines_read_the_run_with_the_settings_of_their_channel(
    route_body: Any, run: RLRun, platform: Platform, tmp_path: Path
) -> None:
    channels = {"stable": {}, "canary": {"maxConcurrent": 7, "kvCacheMib": 128}}
    made = children(route_body(channels=channels, model="coder-1"), run, platform)
    (tmp_path / "run.json").write_text(made["ConfigMap", "canary"]["data"]["run.json"])
    found = read_run(tmp_path / "run.json")
    assert found.spec.roles.inference is not None
    assert found.spec.roles.inference.max_concurrent == 7
    assert (found.name, found.uid, found.spec.storage) == ("coder-1", "uid-run", run.spec.storage)
    settings = EngineSettings.from_env(variables(made["StatefulSet", "canary"]))
    assert str(settings.run_file) == "/etc/etude/run.json"
    assert variables(made["StatefulSet", "canary"])["ETUDE_CHANNEL"] == "canary"


def test_engines_of_the_stable_channel_are_lent_to_the_run_of_the_route_alone(
    route_body: Any, run: RLRun, platform: Platform
) -> None:
    lending = {"minReplicas": 1, "turnsPerEngine": 8, "windowSeconds": 60}
    channels = {"stable": {"replicas": 3}, "canary": {}, "lending": lending}
    made = children(route_body(channels=channels), run, platform)
    route = Route.parse_known_fields(route_file(made))
    assert route.lending is not None
    assert (route.lending.min_replicas, route.lending.turns_per_engine) == (1, 8)
    engine = variables(made["StatefulSet", "stable"])
    assert (engine["ETUDE_LENDING_RUN"], engine["ETUDE_LENDING_WINDOW_S"]) == ("demo", "60")
    assert EngineSettings.from_env(engine).lending_window_s == 60
    assert "ETUDE_LENDING_RUN" not in variables(made["StatefulSet", "canary"])


def test_more_engines_than_there_are_cannot_be_kept_from_rollouts(route_body: Any) -> None:
    lending = {"minReplicas": 3, "turnsPerEngine": 8}
    with pytest.raises(ValueError, match="minReplicas"):
        PolicyRoute.model_validate(
            route_body(channels={"stable": {"replicas": 2}, "lending": lending})
        )


def test_pods_are_replaced_when_the_file_that_they_read_changes(
    route_body: Any, run: RLRun, platform: Platform
) -> None:
    def templates(body: Manifest) -> dict[str, Any]:
        found = children(body, run, platform)
        kinds = ("StatefulSet", "Deployment")
        return {key[1]: m["spec"]["template"] for key, m in found.items() if key[0] in kinds}

    before = templates(route_body())
    channels = {"stable": {"replicas": 2, "cpu": "4", "maxConcurrent": 7}, "canary": {}}
    after = templates(route_body(channels=channels))
    assert [name for name in before if before[name] != after[name]] == ["stable"]


def test_a_run_that_is_suspended_restarts_no_pod_of_its_route(
    route_body: Any, run: RLRun, platform: Platform
) -> None:
    before = children(route_body(), run, platform)
    spec = run.spec.model_copy(
        update={"suspend": True, "checkpointing": Checkpointing(keep_last=9)}
    )
    metadata = run.metadata.model_copy(update={"generation": 7})
    changed = run.model_copy(update={"spec": spec, "metadata": metadata})
    assert children(route_body(), changed, platform) == before


def test_gateways_read_the_models_folder_and_every_engine_of_the_channels(
    made: Made, run: RLRun
) -> None:
    route = Route.parse_known_fields(route_file(made))
    assert (route.model, route.model_uri) == ("coder", "s3://inputs/model")
    assert route.stable == tuple(f"coder-stable-{n}.coder-stable:7010" for n in range(2))
    assert route.canary == ("coder-canary-0.coder-canary:7010",)
    # The newest record of the canary channel decides who has it.
    assert route.channels == run.spec.storage
    # Nothing is recorded unless that was asked for.
    assert route.storage is None


def test_turns_are_recorded_in_the_runs_store_under_keys_of_the_feedback_service(
    route_body: Any, run: RLRun, platform: Platform
) -> None:
    gateway = {"keysRef": {"name": "keys"}, "recordTurns": True}
    route = Route.parse_known_fields(
        route_file(children(route_body(gateway=gateway), run, platform))
    )
    assert route.storage == run.spec.storage
    assert route.feedback == "coder-feedback@coder-feedback:7091"


def test_the_variables_of_gateways_are_those_that_they_read(
    route_body: Any, run: RLRun, platform: Platform
) -> None:
    gateway = {
        "keysRef": {"name": "keys"},
        "tlsRef": {"name": "cert"},
        "replicas": 3,
        "limits": {
            "bodyMib": 1,
            "sessionTokens": 2,
            "waitingMib": 3,
            "outageSeconds": 4,
            "turnSeconds": 5,
        },
    }
    made = children(route_body(gateway=gateway), run, platform)
    workload = made["Deployment", "gateway"]
    settings = GatewaySettings.from_env(variables(workload))
    limits = (settings.max_body_mib, settings.max_session_tokens, settings.max_waiting_mib)
    assert (*limits, settings.outage_s, settings.turn_s, settings.processes) == (1, 2, 3, 4, 5, 3)
    mounts = {m["mountPath"]: m["name"] for m in pod(workload)["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
    assert volumes[mounts[str(settings.tls_folder)]]["secret"]["secretName"] == "cert"
    assert volumes[mounts[str(settings.keys_file.parent)]]["secret"]["secretName"] == "keys"
    assert volumes[mounts[str(settings.route_file.parent)]]["configMap"]["name"] == "coder-gateway"


def test_the_variables_of_the_feedback_service_are_those_that_it_reads(
    run_body: Any, route_body: Any, platform: Platform
) -> None:
    storage = {"uri": "s3://runs/demo", "endpoint": "http://minio:9000", "region": "eu"}
    run = RLRun.model_validate(run_body(storage=storage))
    body = route_body()
    limits = {"rollouts": 90, "minRollouts": 80, "maxAgeSeconds": 70, "horizonSeconds": 60}
    body["spec"]["feedback"]["windows"] = {**limits, "outcomeSeconds": 500, "tenant": "acme"}
    needed_s = 10 * 60 + 500 + 70 + 7 * 86_400 + 86_400
    body["spec"]["feedback"]["turnRetentionSeconds"] = needed_s - 1
    with pytest.raises(ValueError, match="turnRetentionSeconds"):
        PolicyRoute.model_validate(body)
    body["spec"]["feedback"]["turnRetentionSeconds"] = needed_s
    made = children(body, run, platform)
    workload = made["Deployment", "feedback"]
    settings = FeedbackSettings.from_env(variables(workload))
    windows = settings.windows
    assert settings.turn_retention_s == needed_s
    assert choose_retention_s(needed_s, windows, 7 * 86_400) == needed_s
    with pytest.raises(UserError, match=str(needed_s)):
        choose_retention_s(needed_s - 1, windows, 7 * 86_400)
    assert (windows.num_rollouts, windows.min_rollouts) == (90, 80)
    assert (windows.max_age_s, windows.horizon_s, windows.tenant) == (70, 60, "acme")
    assert windows.outcome_s == 500
    assert (settings.ledger, settings.store) == ("coder", "s3://runs/demo")
    assert settings.key_store == "s3://keys-of-users/coder"
    assert settings.access.to_json() == {"endpoint": "http://minio:9000", "region": "eu"}
    mounts = {m["mountPath"]: m["name"] for m in pod(workload)["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
    secret = volumes[mounts[str(settings.secret_file.parent)]]["secret"]
    assert (secret["secretName"], secret["items"][0]["path"]) == ("ledger", "secret")


def test_the_feedback_service_reads_the_rules_of_releases(
    route_body: Any, run: RLRun, platform: Platform, tmp_path: Path
) -> None:
    def rules(**spec: Any) -> ReleaseRules:
        made = children(route_body(**spec), run, platform)
        file = tmp_path / "release.json"
        file.write_text(made["ConfigMap", "feedback"]["data"]["release.json"])
        settings = FeedbackSettings.from_env(variables(made["Deployment", "feedback"])).release
        assert settings is not None
        assert (str(settings.rules_file), settings.port) == ("/etc/etude/release.json", 7091)
        return read_rules(file)

    assert rules() == ReleaseRules()
    edits = {"name": "edits", "signal": "edit_persistence", "relevant": "0.01"}
    quarrels = {"name": "quarrels", "signal": "dissatisfied_followup", "relevant": "2e-2"}
    found = rules(
        policy="Manual",
        gate={"margins": [{"metric": "success", "margin": "0.05"}], "minTasks": 7},
        canary={
            "steps": [2_500, 5_000],
            "usersPerArm": 400,
            "minUsers": 40,
            "primary": edits,
            "guardrails": [quarrels | {"isHigherBetter": False}],
            "signals": [],
        },
    )
    assert found.policy is ReleasePolicy.MANUAL
    assert (found.gate.margins[0].margin, found.gate.min_tasks) == (0.05, 7)
    assert (found.canary.steps, found.canary.primary.signal) == ((2_500, 5_000), "edit_persistence")
    (guardrail,) = found.canary.guardrails
    assert (guardrail.relevant, guardrail.is_higher_better) == (0.02, False)
    assert found.canary.signals == ()


def test_suites_in_which_a_branch_must_gain_reach_the_gate_and_are_never_left_out(
    route_body: Any, run: RLRun, platform: Platform, tmp_path: Path
) -> None:
    margins = [{"metric": "success", "margin": "0.05"}, {"metric": "seconds", "margin": "3"}]
    body = route_body(gate={"margins": margins, "gainSuites": ["own"]})
    made = children(body, run, platform)
    file = tmp_path / "release.json"
    file.write_text(made["ConfigMap", "feedback"]["data"]["release.json"])
    gate = read_rules(file).gate
    measured = ["success of general", "seconds of general", "success of own", "seconds of own"]
    assert {rule.metric: rule.margin for rule in gate.to_rules(measured)} == {
        "success of own": 0,
        "success of general": 0.05,
        "seconds of general": 3,
        "seconds of own": 3,
    }
    assert "success of own" in {rule.metric for rule in gate.to_rules(["success of general"])}


def test_suites_of_attacks_reach_the_gate_with_their_level(
    route_body: Any, run: RLRun, platform: Platform, tmp_path: Path
) -> None:
    suite = {"uri": "s3://inputs/suite", "environment": "repos"}
    plan = {
        "suites": [{"name": "general", **suite}, {"name": "red", **suite, "attacks": True}],
        "environments": [{"name": "repos", "poolRef": {"name": "shared"}, "template": "python"}],
    }
    made = children(route_body(gate={"evaluation": plan, "attackLevel": "0.25"}), run, platform)
    file = tmp_path / "release.json"
    file.write_text(made["ConfigMap", "feedback"]["data"]["release.json"])
    rules = {rule.metric: rule for rule in read_rules(file).gate.to_rules([])}
    assert set(rules) == {"success of general", "Attacks of red"}
    attacks = rules["Attacks of red"]
    assert (attacks.margin, attacks.is_level, attacks.less_is_better) == (0.25, True, True)


def test_a_pod_that_goes_first_leaves_the_load_balancer_and_has_time_for_its_turns(
    made: Made,
) -> None:
    found = pod(made["Deployment", "gateway"])
    delay_s = found["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    # What a gateway itself may take: its turns 120 s, their records 30 s.
    assert found["terminationGracePeriodSeconds"] >= delay_s + 150


def test_users_reach_services_alone_and_gateways_alone_reach_engines(made: Made) -> None:
    policies = {key[1]: each["spec"] for key, each in made.items() if key[0] == "NetworkPolicy"}
    assert policies.keys() == {"stable", "canary", "gateway", "feedback"}
    probes, calls = policies["stable"]["ingress"]
    assert probes["ports"] == [{"port": 8080, "protocol": "TCP"}]
    (caller,) = calls["from"]
    assert caller["podSelector"]["matchLabels"] == {
        "etude.dev/route": "coder",
        "etude.dev/role": "gateway",
    }
    assert calls["ports"] == [{"port": 7010, "protocol": "TCP"}]
    for service, port in (("gateway", 7080), ("feedback", 7090)):
        public = policies[service]["ingress"][1]
        assert public == {"ports": [{"port": port, "protocol": "TCP"}]}
    # The operator forwards what people ask about releases, and gateways ask for keys of users.
    asked, keys = policies["feedback"]["ingress"][2:]
    (caller,) = keys["from"]
    assert caller["podSelector"]["matchLabels"]["etude.dev/role"] == "gateway"
    (operator,) = asked["from"]
    home = operator["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert (home, asked["ports"]) == ("etude-system", [{"port": 7091, "protocol": "TCP"}])


def test_a_run_without_managed_policies_has_a_route_without_them(
    run_body: Any, route_body: Any, platform: Platform
) -> None:
    run = RLRun.model_validate(run_body(network={"policy": "Unmanaged"}))
    made = children(route_body(), run, platform)
    assert [key for key in made if key[0] == "NetworkPolicy"] == []


def test_each_part_of_a_route_asks_for_a_certificate_of_its_own(
    route_body: Any, run: RLRun, platform: Platform
) -> None:
    tls = PlatformTls(mode=CertificateMode.SELF_MANAGED, target="issuer:7060", trust="PEM")
    made = children(route_body(), run, replace(platform, tls=tls))
    (sidecar,) = pod(made["StatefulSet", "stable"])["initContainers"]
    env = {item["name"]: item["value"] for item in sidecar["env"]}
    assert env["ETUDE_TLS_IDENTITY"] == "spiffe://etude.dev/ns/lab/route/coder/role/stable"
    (trust,) = (
        v for v in pod(made["StatefulSet", "stable"])["volumes"] if v["name"] == "tls-trust"
    )
    assert ("ConfigMap", trust["configMap"]["name"].removeprefix("coder-")) in made


def test_children_of_a_route_never_have_the_names_of_those_of_a_run(
    run_body: Any, route_body: Any, platform: Platform
) -> None:
    tls = PlatformTls(mode=CertificateMode.SELF_MANAGED, target="issuer:7060", trust="PEM")
    everywhere = replace(platform, tls=tls)
    run = RLRun.model_validate(run_body())
    body = route_body()
    body["metadata"]["name"] = "demo"  # the run's
    route = PolicyRoute.model_validate(body)
    of_route = route_children(route, run, platform.images, everywhere)
    of_run = run_children(run, RunShape(images=platform.images), everywhere)
    names = [{(m["kind"], m["metadata"]["name"]) for m in each} for each in (of_route, of_run)]
    assert names[0] & names[1] == set()


@pytest.mark.parametrize(
    ("mode", "policy", "callers"),
    [
        ("Plaintext", "Managed", "Network"),
        ("Plaintext", "Unmanaged", "Keys"),
        ("Secret", "Managed", "Keys"),
    ],
)
def test_only_policies_of_ours_stand_in_for_the_operators_certificate(
    run_body: Any, route_body: Any, platform: Platform, mode: str, policy: str, callers: str
) -> None:
    body = run_body()
    body["spec"]["network"] = {"policy": policy}
    tls = PlatformTls(mode=CertificateMode(mode), secret="wire")
    made = children(route_body(), RLRun.model_validate(body), replace(platform, tls=tls))
    env = variables(made["Deployment", "feedback"])
    assert env.get("ETUDE_FEEDBACK_RELEASE_CALLERS", "Keys") == callers
    assert (("NetworkPolicy", "feedback") in made) == (policy == "Managed")
