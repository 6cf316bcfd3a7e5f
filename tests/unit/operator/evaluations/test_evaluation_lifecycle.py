"""Evaluations: they wait for what they name, run a Job, take its result, release their pods."""

import json
from dataclasses import replace
from typing import Any

import pytest

from etude.operator.builders.certificates import (
    CertificateMode,
    CertManagerIssuer,
    PlatformTls,
)
from etude.operator.evaluations.decide import POLL_S
from etude.operator.manifests import Ref

JOB = Ref("Job", "lab", "held-out-evaluator")


def kinds(evaluations: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key in evaluations.children():
        found.setdefault(key.kind, []).append(key.name)
    return found


async def test_an_evaluation_runs_engines_rewards_and_a_job(evaluations: Any) -> None:
    await evaluations.add(engines=2)
    made = kinds(evaluations)
    assert sorted(made["StatefulSet"]) == ["held-out-inference", "held-out-rewards"]
    assert sorted(made["Service"]) == ["held-out-inference", "held-out-rewards"]
    assert sorted(made["NetworkPolicy"]) == [
        f"held-out-{role}" for role in ("evaluator", "inference", "rewards")
    ]
    assert made["Job"] == ["held-out-evaluator"]
    assert len([name for name in made["Pod"] if "-inference-" in name]) == 2
    assert evaluations.get().status.phase == "Running"
    assert evaluations.reason("Complete")[:2] == ("False", "Evaluating")


async def test_the_job_knows_its_partners_and_the_checkpoint(evaluations: Any) -> None:
    await evaluations.add(engines=2)
    job = evaluations.children()[JOB]
    container = job["spec"]["template"]["spec"]["containers"][0]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env["ETUDE_INFERENCE_TARGETS"].split(",") == [
        f"held-out-inference-{n}.held-out-inference:7010" for n in range(2)
    ]
    # Its phases name the run's own environment of that name, which the evaluation replaces.
    assert json.loads(env["ETUDE_BROKERS"]) == {"repos": "shared-broker:7020"}
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
    files = evaluations.children()[Ref("ConfigMap", "lab", "held-out-evaluation")]["data"]
    order = json.loads(files["evaluation.json"])
    assert order["checkpoint"]["manifestDigest"] == f"{10:064x}"
    assert order["results"] == "s3://runs/demo/evaluations/held-out-uid-held"
    engine, rewards = (json.loads(files[f"{role}.json"]) for role in ("inference", "rewards"))
    assert engine["uid"] == "uid-run"  # versions are the run's
    assert rewards["uid"] == "uid-held-out"  # leases are the evaluation's
    assert [each["poolRef"] for each in rewards["spec"]["roles"]["environments"]] == [
        {"name": "shared"}
    ]


async def test_the_result_of_the_job_becomes_the_status(evaluations: Any) -> None:
    await evaluations.add()
    await evaluations.end()
    status = evaluations.get().status
    assert (status.phase, status.policy, status.manifest_digest) == ("Complete", "1.7", "ab" * 32)
    assert (status.summary.mean, status.summary.best_of) == ("0.612", "0.743@4")
    assert (status.summary.suites, status.summary.lost) == ("held-out", 2)
    assert evaluations.reason("Complete")[:2] == ("True", "Evaluated")
    assert status.results is not None
    assert status.results.secret_ref is not None


async def test_a_finished_evaluation_releases_its_engines_and_stays_finished(
    evaluations: Any, lab: Any
) -> None:
    await evaluations.add()
    await evaluations.end()
    assert "StatefulSet" not in kinds(evaluations)
    lab.cluster.purge(JOB)  # by its time to live
    await lab.advance(POLL_S)
    assert "Job" not in kinds(evaluations)
    assert evaluations.get().status.phase == "Complete"


async def test_an_evaluation_without_a_job_holds_no_engines_while_it_waits(
    evaluations: Any, lab: Any
) -> None:
    await evaluations.add()
    lab.cluster.purge(JOB)
    lab.cluster.purge(Ref("EnvPool", "lab", "shared"))
    await lab.advance(POLL_S)
    assert evaluations.get().status.phase == "Pending"
    assert "StatefulSet" not in kinds(evaluations)


async def test_a_job_whose_pod_is_gone_is_run_again_for_its_result(
    evaluations: Any, lab: Any
) -> None:
    await evaluations.add()
    first = evaluations.children()[JOB]["metadata"]["uid"]
    status = {"conditions": [{"type": "Complete", "status": "True"}]}
    for pod in evaluations.job_pods():
        lab.cluster.purge(pod)
    lab.cluster.set_status(JOB, status)
    await lab.settle()
    assert evaluations.children()[JOB]["metadata"]["uid"] != first
    await evaluations.end()
    assert evaluations.get().status.phase == "Complete"


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [(1, "EvaluationFailed"), (65, "Corrupt"), (75, "EvaluationFailed"), (78, "InvalidParameters")],
)
async def test_a_failed_job_says_why_and_releases_the_engines(
    evaluations: Any, exit_code: int, reason: str
) -> None:
    await evaluations.add()
    for _ in range(3):
        await evaluations.end("the suite has no task\n", exit_code=exit_code)
    assert evaluations.reason("Failed") == ("True", reason, "the suite has no task")
    assert evaluations.get().status.phase == "Failed"
    assert "StatefulSet" not in kinds(evaluations)


async def test_a_job_that_took_too_long_says_so(evaluations: Any, lab: Any) -> None:
    await evaluations.add(timeoutSeconds=60)
    assert evaluations.children()[JOB]["spec"]["activeDeadlineSeconds"] == 60
    late = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "60 s"}
    lab.cluster.set_status(JOB, {"conditions": [late]})
    await lab.settle()
    assert evaluations.reason("Failed") == ("True", "DeadlineExceeded", "60 s")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[" * 5000,
        '{"suites": [{"name": "x", "mean": "much"}]}',
        '{"suites": [{"name": "x", "lost": 1e30}]}',
        '{"policy": "' + "9" * 999 + '"}',
        '{"suites": [{"name": "x"}, {"name": "x"}]}',
    ],
)
async def test_a_message_that_is_no_result_fails_the_evaluation(
    evaluations: Any, text: str
) -> None:
    await evaluations.add()
    await evaluations.end(text)
    assert evaluations.reason("Failed")[:2] == ("True", "EvaluationFailed")


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"checkpointRef": {"name": "none"}}, "CheckpointNotReady", "none does not exist"),
        (
            {"environments": [{"name": "repos", "poolRef": {"name": "no"}, "template": "python"}]},
            "PoolNotFound",
            "no EnvPool no",
        ),
        (
            {
                "environments": [
                    {"name": "repos", "poolRef": {"name": "shared"}, "template": "rust"}
                ]
            },
            "InvalidParameters",
            "rust is not in EnvPool shared.templates: python",
        ),
        (
            {
                "environments": [
                    {"name": "repos", "poolRef": {"name": "demo-repos"}, "template": "python"}
                ]
            },
            "InvalidParameters",
            "belongs to run demo",
        ),
        (
            {"comparison": {"baselineRef": {"name": "served"}}},
            "WaitingForBaseline",
            "no EvalRun served",
        ),
    ],
)
async def test_an_evaluation_waits_for_what_it_names(
    evaluations: Any, spec: dict[str, Any], reason: str, words: str
) -> None:
    await evaluations.add(**spec)
    status, given, message = evaluations.reason("Accepted")
    assert (status, given) == ("False", reason)
    assert words in message
    assert evaluations.get().status.phase == "Pending"
    assert evaluations.children() == {}


async def test_an_evaluation_does_not_share_the_name_of_a_run(evaluations: Any) -> None:
    await evaluations.add("demo")
    assert evaluations.reason("Accepted", "demo")[:2] == ("False", "NameConflict")
    assert evaluations.children("demo") == {}


async def test_a_run_does_not_share_the_name_of_an_evaluation_that_has_begun(
    evaluations: Any, lab: Any, run_body: Any
) -> None:
    await evaluations.add()
    body = run_body()
    body["metadata"] |= {"name": "held-out", "uid": "uid-held-run"}
    lab.cluster.upsert(body)
    await lab.settle()

    def accepted() -> dict[str, str]:
        found = lab.cluster.objects()[Ref("RLRun", "lab", "held-out")]
        facts = found["status"]["conditions"]
        return next(each for each in facts if each["type"] == "Accepted")

    assert accepted()["reason"] == "NameConflict"
    assert "there is an EvalRun held-out in this namespace" in accepted()["message"]
    assert Ref("ConfigMap", "lab", "held-out-run") not in lab.cluster.objects()
    assert evaluations.get().status.phase == "Running"
    await evaluations.end()
    assert evaluations.get().status.phase == "Complete"
    for key in [Ref("EvalRun", "lab", "held-out"), *evaluations.children()]:
        lab.cluster.purge(key)
    await lab.settle()
    assert accepted()["status"] == "True"


async def test_a_comparison_starts_once_the_baseline_has_its_result(evaluations: Any) -> None:
    await evaluations.add("next", comparison={"baselineRef": {"name": "served"}})
    await evaluations.add("served")
    assert evaluations.children("next") == {}
    await evaluations.end(name="served")
    files = evaluations.children("next")[Ref("ConfigMap", "lab", "next-evaluation")]["data"]
    order = json.loads(files["evaluation.json"])
    assert order["baseline"] == "s3://runs/demo/evaluations/served-uid-serv"


ENDPOINT: dict[str, Any] = {
    "checkpointRef": None,
    "endpoint": {
        "url": "https://models.example.com:8443/v1",
        "model": "others-7b",
        "secretRef": {"name": "others-key"},
    },
    "rollout": {"toolFormat": "Native"},
}


async def test_an_endpoint_is_evaluated_without_engines(evaluations: Any) -> None:
    await evaluations.add(**ENDPOINT, runRef={"name": "demo"})
    children = evaluations.children()
    assert [key.name for key in children if key.kind == "StatefulSet"] == ["held-out-rewards"]
    files = children[Ref("ConfigMap", "lab", "held-out-evaluation")]["data"]
    assert set(files) == {"rewards.json", "evaluation.json"}
    order = json.loads(files["evaluation.json"])
    assert order["spec"]["endpoint"]["model"] == "others-7b"
    assert "checkpoint" not in order
    driver = children[Ref("NetworkPolicy", "lab", "held-out-evaluator")]["spec"]["egress"]
    assert [{"port": 8443, "protocol": "TCP"}] in [rule.get("ports") for rule in driver]
    assert Ref("NetworkPolicy", "lab", "held-out-inference") not in children
    job = children[Ref("Job", "lab", "held-out-evaluator")]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {"secretRef": {"name": "others-key"}} in container["envFrom"]
    await evaluations.end(json.dumps({"suites": [{"name": "held-out", "mean": "0.6120"}]}))
    status, _, sentence = evaluations.reason("Complete")
    assert status == "True"
    assert sentence == "held-out: mean 0.612 of others-7b"


async def test_an_endpoint_waits_for_the_run_whose_rewards_grade_it(evaluations: Any) -> None:
    await evaluations.add(**ENDPOINT, runRef={"name": "none"})
    assert evaluations.reason("Accepted") == (
        "False",
        "RunNotFound",
        "spec.runRef.name: no RLRun none in this namespace whose spec is valid",
    )
    assert evaluations.children() == {}


async def test_what_has_begun_goes_on_without_its_checkpoint(evaluations: Any, lab: Any) -> None:
    await evaluations.add()
    lab.cluster.purge(Ref("Checkpoint", "lab", evaluations.get().spec.checkpoint_ref.name))
    await lab.advance(POLL_S)
    assert evaluations.get().status.phase == "Running"
    await evaluations.end()
    assert evaluations.get().status.phase == "Complete"


async def test_a_pod_that_does_not_start_is_named(evaluations: Any, lab: Any) -> None:
    await evaluations.add()
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    status = {
        "phase": "Pending",
        "containerStatuses": [{"name": "inference", "state": {"waiting": waiting}}],
    }
    lab.cluster.set_status(Ref("Pod", "lab", "held-out-inference-0"), status)
    await lab.settle()
    assert evaluations.reason("Complete")[2] == "held-out-inference-0: no such image"


async def test_a_checkpoint_stays_while_it_is_evaluated(
    lab: Any, run_body: Any, prepare: Any
) -> None:
    evaluations = await prepare(lab, run_body(checkpointing={"keepLast": 1}))
    await evaluations.add()
    for step in (20, 30):
        await lab.tell_checkpoint(step)
        await lab.finish_jobs()
    name = evaluations.get().spec.checkpoint_ref.name
    assert name in lab.names("Checkpoint")
    await evaluations.end()
    for step in (40, 50):
        await lab.tell_checkpoint(step)
        for _ in range(3):
            await lab.finish_jobs()
    assert name not in lab.names("Checkpoint")


@pytest.mark.parametrize("seed", range(3))
async def test_an_operator_killed_after_any_write_comes_to_the_same_end(
    lab_of: Any, run_body: Any, prepare: Any, seed: int
) -> None:
    lab = lab_of(is_lagging=True, seed=seed)
    evaluations = await prepare(lab, run_body())
    for number in range(40):
        name = f"e{number}"
        before = len(lab.writes)
        lab.kill_at = before + 1 + number
        await evaluations.add(name)
        await evaluations.end(name=name)
        killed = len(lab.writes) > before + number
        assert evaluations.get(name).status.phase == "Complete"
        assert {k.kind for k in evaluations.children(name)} <= {
            *("ConfigMap", "Service", "NetworkPolicy", "Job", "Pod"),
        }
        if not killed:
            break
    else:
        pytest.fail("every evaluation was killed")
    assert lab.kills >= 12


async def test_an_evaluation_waits_for_cert_manager_where_that_issues_certificates(
    evaluations: Any, lab: Any
) -> None:
    issuer = CertManagerIssuer(name="ca")
    tls = PlatformTls(mode=CertificateMode.CERT_MANAGER, issuer=issuer)
    lab.reconciler.platform = replace(lab.platform, tls=tls)
    await evaluations.add()
    assert evaluations.reason("Accepted")[:2] == ("False", "CertManagerNotInstalled")
    lab.cluster.integrations = frozenset({"Certificate"})
    await lab.advance(POLL_S)
    made = kinds(evaluations)
    roles = ("evaluator", "inference", "rewards")
    assert sorted(made["Certificate"]) == [f"held-out-{role}-tls" for role in roles]
    uris = [m["spec"]["uris"] for k, m in evaluations.children().items() if k.kind == "Certificate"]
    assert ["spiffe://etude.dev/ns/lab/run/held-out/role/evaluator"] in uris


async def test_a_pool_that_cannot_read_the_suite_is_named_with_what_it_lacks(
    evaluations: Any, lab: Any
) -> None:
    pool = lab.cluster.objects()[Ref("EnvPool", "lab", "shared")]
    without = {key: value for key, value in pool["spec"].items() if key != "store"}
    lab.cluster.upsert({**pool, "spec": without})
    await evaluations.add()
    status, reason, message = evaluations.reason("Accepted")
    assert (status, reason) == ("False", "InvalidParameters")
    assert "EnvPool shared has no spec.store" in message
    assert "s3://inputs/held-out" in message
    lab.cluster.upsert(pool)
    await lab.advance(60)
    assert evaluations.reason("Accepted")[0] == "True"
