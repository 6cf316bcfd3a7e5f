"""Acceptance of routes: checks beyond the schema, each finding with a suggested fix."""

from collections.abc import Iterator

from pydantic import ValidationError

from etude.common.api.kinds import PolicyRoute, RLRun
from etude.common.api.run.spec import has_changes
from etude.common.hub_uri import is_hub_uri
from etude.operator.builders import pod_overrides
from etude.operator.builders.certificates import CertificateMode
from etude.operator.builders.platform import Platform
from etude.operator.builders.route import served_run
from etude.operator.builders.run_spec import resolved_spec
from etude.operator.conditions import ACCEPTED, ConditionFact, false_condition
from etude.operator.reasons import Reason


def route_problem(
    route: PolicyRoute, run: RLRun | None, platform: Platform
) -> ConditionFact | None:
    """The first finding against a route.

    Args:
        route: the route.
        run: the run that it names; None if it is missing or its spec is invalid.
        platform: configuration of the operator.
    """
    if platform.has_shared_files:
        message = (
            "spec.gateway.keysRef: there are no Secrets on one machine; start `etude-gateway` and"
            " `etude-feedback` with files of keys"
        )
        return false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    name = route.spec.run_ref.name
    if run is None:
        message = (
            f"spec.runRef.name: no RLRun {name} in this namespace whose spec is valid: create it,"
            " or make a route that names another"
        )
        return false_condition(ACCEPTED, Reason.RUN_NOT_FOUND, message)
    if route.status.run_uid not in {"", run.metadata.uid}:
        message = (
            f"spec.runRef.name: RLRun {name} was replaced (uid changed), and its versions are not"
            " those of the route; make a new route"
        )
        return false_condition(ACCEPTED, Reason.RUN_NOT_FOUND, message)
    if resolved_spec(run).model.uri is None:
        message = f"spec.runRef.name: RLRun {name} has not found the model of its checkpointRef yet"
        return false_condition(ACCEPTED, Reason.WAITING_FOR_RUN, message)
    for message in (
        *_wrong_model(run),
        *_wrong_channels(route, run),
        *_missing_tls(route, platform),
        *_wrong_key_store(route, run),
    ):
        return false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    return None


def _wrong_model(run: RLRun) -> Iterator[str]:
    """Models that gateways, which need their tokenizers, cannot read yet."""
    key = resolved_spec(run).model.key
    if is_hub_uri(key) or has_changes(key):
        yield (
            f"spec.runRef.name: RLRun {run.metadata.name} begins with a copy that it makes of its"
            " model (hf://, addTokens or chat.template Plain), which gateways do not look for;"
            " serve a run whose model.uri is a folder"
        )


def _wrong_channels(route: PolicyRoute, run: RLRun) -> Iterator[str]:
    for channel, engines in route.spec.channels.by_name.items():
        at = f"spec.channels.{channel}"
        yield from pod_overrides.override_problems(engines, channel, at)
        try:
            served_run(route, run, engines)
        except ValidationError as error:
            why = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
            yield f"{at}: engines of this kind cannot serve RLRun {run.metadata.name}: {why}"


def _missing_tls(route: PolicyRoute, platform: Platform) -> Iterator[str]:
    if platform.tls is None or platform.tls.mode is CertificateMode.PLAINTEXT:
        return
    for part, spec in (("gateway", route.spec.gateway), ("feedback", route.spec.feedback)):
        if spec.tls_ref is None:
            yield (
                f"spec.{part}.tlsRef: is needed, or what users send would not be encrypted: name a"
                " Secret with tls.crt and tls.key"
            )


def _wrong_key_store(route: PolicyRoute, run: RLRun) -> Iterator[str]:
    keys, storage = route.spec.feedback.key_store_uri, run.spec.storage.uri
    if f"{keys.rstrip('/')}/".startswith(f"{storage.rstrip('/')}/"):
        yield (
            f"spec.feedback.keyStoreUri: lies in {storage}, whose backups would keep erased users"
            " readable; name another bucket or folder"
        )
    if keys.startswith("file://") or storage.startswith("file://"):
        yield "spec.feedback.keyStoreUri: pods share no folders; use s3://bucket/prefix"
