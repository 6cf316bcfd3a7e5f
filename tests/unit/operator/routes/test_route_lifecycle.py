"""A route from its creation to its end."""

from dataclasses import replace
from typing import Any

import pytest

from etude.common.api.kinds import PolicyRoute, RLRun
from etude.operator.builders.certificates import CertificateMode, PlatformTls
from etude.operator.builders.platform import Platform
from etude.operator.manifests import Ref
from etude.operator.routes.acceptance import route_problem

KEY = Ref("PolicyRoute", "lab", "coder")


def status(lab: Any) -> Any:
    return PolicyRoute.parse_known_fields(lab.cluster.objects()[KEY]).status


def condition(lab: Any, kind: str) -> tuple[str, str]:
    found = next(each for each in status(lab).conditions if each.type == kind)
    return found.status, found.reason


def of_route(lab: Any) -> set[Ref]:
    return {key for key in lab.cluster.objects() if key.name.startswith("coder")}


@pytest.fixture
async def served(lab: Any, run_body: Any, route_body: Any) -> Any:
    """A lab with a route of a run."""
    lab.cluster.upsert(run_body())
    lab.cluster.upsert(route_body())
    await lab.settle()
    return lab


async def test_a_route_starts_its_parts_and_counts_them(served: Any) -> None:
    found = status(served)
    assert (found.phase, found.gateways, found.run_uid) == ("Ready", "2/2", "uid-run")
    assert (found.stable.engines, found.canary.engines) == ("2/2", "1/1")
    assert condition(served, "Available") == ("True", "Serving")


async def test_a_steady_route_is_not_written_again(served: Any) -> None:
    before = len(served.writes)
    await served.advance(3600)
    assert served.writes[before:] == []


async def test_a_route_waits_for_its_run(lab: Any, run_body: Any, route_body: Any) -> None:
    lab.cluster.upsert(route_body())
    await lab.settle()
    assert condition(lab, "Accepted") == ("False", "RunNotFound")
    assert of_route(lab) == {KEY}
    lab.cluster.upsert(run_body())
    await lab.settle()
    assert status(lab).phase == "Ready"


async def test_what_serves_goes_on_without_the_run_and_never_with_another_of_its_name(
    served: Any, run_body: Any
) -> None:
    before = of_route(served)
    served.cluster.purge(Ref("RLRun", "lab", "demo"))
    await served.settle()
    assert condition(served, "Accepted") == ("False", "RunNotFound")
    assert (condition(served, "Available"), of_route(served)) == (("True", "Serving"), before)
    another = run_body(storage={"uri": "s3://runs/another"})
    another["metadata"]["uid"] = "uid-another"
    served.cluster.upsert(another)
    await served.settle()
    assert condition(served, "Accepted") == ("False", "RunNotFound")
    config = served.cluster.objects()[Ref("ConfigMap", "lab", "coder-stable")]
    assert "s3://runs/another" not in config["data"]["run.json"]


async def test_a_channel_that_leaves_the_spec_takes_its_engines_along(
    served: Any, route_body: Any
) -> None:
    served.cluster.upsert(route_body(channels={"stable": {"replicas": 2}}))
    await served.settle()
    left = {key.kind for key in served.cluster.objects() if key.name.startswith("coder-canary")}
    assert left == {"ConfigMap"}
    assert status(served).canary is None
    assert status(served).phase == "Ready"


async def test_users_are_served_while_feedback_is_away(served: Any) -> None:
    pod = next(k for k in served.cluster.objects() if k.name.startswith("coder-feedback-"))
    served.cluster.set_status(pod, {"phase": "Pending"})
    await served.settle()
    assert condition(served, "FeedbackAvailable") == ("False", "NotServing")
    assert condition(served, "Available") == ("True", "Serving")


async def test_without_an_engine_of_the_stable_channel_nobody_is_served(served: Any) -> None:
    for number in range(2):
        pod = Ref("Pod", "lab", f"coder-stable-{number}")
        served.cluster.set_status(pod, {"phase": "Pending"})
    await served.settle()
    assert condition(served, "Available") == ("False", "NotServing")
    assert status(served).stable.engines == "0/2"


async def test_a_gateway_that_crashes_is_named(served: Any) -> None:
    served.end("coder-gateway-0", exit_code=78, message="no such key file")
    await served.settle()
    assert condition(served, "Degraded") == ("True", "CrashLooping")
    assert status(served).phase == "Degraded"
    assert status(served).gateways == "1/2"


async def test_a_route_converges_whatever_write_the_operator_dies_at(
    lab_of: Any, run_body: Any, route_body: Any
) -> None:
    whole = lab_of()
    whole.cluster.upsert(run_body())
    whole.cluster.upsert(route_body())
    await whole.settle()
    for write in range(1, len(whole.writes) + 1, 3):
        lab = lab_of(is_lagging=True, seed=write)
        lab.kill_at = write
        lab.cluster.upsert(run_body())
        lab.cluster.upsert(route_body())
        await lab.settle()
        assert of_route(lab) == of_route(whole), write
        assert status(lab).phase == "Ready"


PROBLEMS = {
    "the key store lies in the run's": (
        {"keyStoreUri": "s3://runs/demo/keys"},
        "spec.feedback.keyStoreUri: lies in s3://runs/demo",
    ),
    "folders are not shared": ({"keyStoreUri": "file:///keys"}, "pods share no folders"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_feedback_service_that_could_not_work_is_refused_by_its_field(
    case: str, run: RLRun, route_body: Any, platform: Platform
) -> None:
    change, message = PROBLEMS[case]
    body = route_body()
    body["spec"]["feedback"] |= change
    found = route_problem(PolicyRoute.model_validate(body), run, platform)
    assert found is not None
    assert (found.reason, message in found.message) == ("InvalidParameters", True)


def test_users_texts_never_travel_unencrypted_where_the_installation_encrypts(
    run: RLRun, route_body: Any, platform: Platform
) -> None:
    def problem(mode: CertificateMode, *, is_named: bool) -> str:
        body = route_body()
        for part in ("gateway", "feedback"):
            body["spec"][part] |= {"tlsRef": {"name": "cert"}} if is_named else {}
        tls = PlatformTls(mode=mode, secret="wire")
        found = route_problem(PolicyRoute.model_validate(body), run, replace(platform, tls=tls))
        return "" if found is None else found.message

    assert problem(CertificateMode.SECRET, is_named=False).startswith("spec.gateway.tlsRef: is")
    assert problem(CertificateMode.SECRET, is_named=True) == ""
    assert problem(CertificateMode.PLAINTEXT, is_named=False) == ""


def test_engines_that_the_run_cannot_have_are_refused_by_their_channel(
    run: RLRun, route_body: Any, platform: Platform
) -> None:
    body = route_body(channels={"stable": {"maxModelLen": 64}})
    found = route_problem(PolicyRoute.model_validate(body), run, platform)
    assert found is not None
    assert found.message.startswith("spec.channels.stable: engines of this kind cannot serve")
    assert "maxModelLen" in found.message


def test_a_variable_of_the_operator_is_not_set_by_a_channel(
    run: RLRun, route_body: Any, platform: Platform
) -> None:
    env = [{"name": "ETUDE_CHANNEL", "value": "stable"}]
    body = route_body(channels={"stable": {}, "canary": {"env": env}})
    found = route_problem(PolicyRoute.model_validate(body), run, platform)
    assert found is not None
    assert (
        found.message == "spec.channels.canary.env: ETUDE_CHANNEL is set by the operator; remove it"
    )


@pytest.mark.parametrize(
    "model",
    [{"uri": "hf://organisation/name@main"}, {"uri": "s3://m", "addTokens": ["<think>"]}],
    ids=["of a hub", "with further tokens"],
)
def test_a_model_whose_folder_is_not_known_is_refused(
    model: dict[str, Any], run_body: Any, route_body: Any, platform: Platform
) -> None:
    run = RLRun.model_validate(run_body(model=model))
    found = route_problem(PolicyRoute.model_validate(route_body()), run, platform)
    assert found is not None
    assert "model" in found.message


def test_the_local_runtime_says_how_to_serve_without_secrets(
    run: RLRun, route_body: Any, platform: Platform
) -> None:
    local = replace(platform, has_shared_files=True)
    found = route_problem(PolicyRoute.model_validate(route_body()), run, local)
    assert found is not None
    assert "`etude-gateway`" in found.message
