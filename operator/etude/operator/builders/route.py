"""Children of a route: engines by channel, gateways, the feedback service, and their policies."""

from collections.abc import Mapping
from typing import NamedTuple

from etude.common.api.kinds import PolicyRoute, RLRun
from etude.common.api.route.release import RouteGate
from etude.common.api.route.spec import ServicePods
from etude.common.api.run.role_spec import EngineRole
from etude.common.api.run.spec import RLRunSpec
from etude.common.role_inputs import ResolvedRun
from etude.common.tls.targets import named_target
from etude.operator import names
from etude.operator.builders import certificates, network_policies, pod_overrides
from etude.operator.builders.addresses import PORTS
from etude.operator.builders.platform import COMMANDS, Platform
from etude.operator.builders.pod import (
    KEYS_FOLDER,
    SPEC_FOLDER,
    PodCertificate,
    PodFiles,
    PodPlacement,
    PodResources,
    RolePod,
    SecretFolder,
    TemplateOverrides,
    base_env,
    env,
    toleration,
)
from etude.operator.builders.run_spec import resolved_spec
from etude.operator.builders.workload import (
    config_map,
    deployment,
    disruption_budget,
    rolling_set,
    service,
)
from etude.operator.manifests import Manifest, digest, stamp_digest

LEDGER_SECRET = "/etc/etude-ledger"  # noqa: S105 - a folder
CONFIG = "etude.dev/config"
"""Annotation of pods with the digest of the file that they read once: another file, other pods."""
ENGINE_HTTP_PORT = 7011
"""Of an engine's own endpoint, which asks for no key: nobody is let in there."""

GATEWAY_GRACE_S = 165
"""Running turns end within 120 s and their records are written within 30 s."""
FEEDBACK_GRACE_S = 60
LEAVE_S = 5
"""Load balancers send requests to a pod for some seconds after it was told to go."""

READ_BY_ENGINES = frozenset(("model", "storage", "phases", "weights", "observability"))
"""Parts of a run's spec that its engines read, roles.inference apart."""


def _gate_rules(gate: RouteGate) -> dict[str, object]:
    """The gate as the feedback service reads it: of the evaluation, the names of the suites."""
    rules = {key: value for key, value in gate.to_json().items() if key != "evaluation"}
    if gate.evaluation is None:
        return rules
    suites = gate.evaluation.suites
    return rules | {
        "suites": [suite.name for suite in suites if not suite.attacks],
        "attackSuites": [suite.name for suite in suites if suite.attacks],
    }


class _Builder(NamedTuple):
    """One pass over the parts of one route."""

    route: PolicyRoute
    run: RLRun
    images: Mapping[str, str]
    platform: Platform

    @property
    def labels(self) -> dict[str, str]:
        return {names.MANAGED_BY: names.MANAGER, names.ROUTE: self.route.metadata.name}

    def child(self, role: str) -> str:
        return names.child(self.route.metadata.name, role)

    def engine_objects(self, channel: str, engines: EngineRole) -> list[Manifest]:
        """The engines of a channel, each behind an address of its own."""
        labels, name = {**self.labels, names.ROLE: channel}, self.child(channel)
        config = config_map(
            self.route,
            name,
            labels,
            {"run.json": served_run(self.route, self.run, engines).to_json()},
        )
        pod = self._engine_pod(channel, engines, config)
        return [
            config,
            service(self.route, name, labels, PORTS[channel]),
            rolling_set(self.route, name, labels, pod, replicas=engines.replicas),
            disruption_budget(self.route, name, labels, {"maxUnavailable": 1}),
        ]

    def gateway_objects(self) -> list[Manifest]:
        """The gateways behind one address, which clients know."""
        labels, name = {**self.labels, names.ROLE: names.GATEWAY}, self.child(names.GATEWAY)
        config = config_map(self.route, name, labels, {"route.json": self._served_route()})
        pod = self._gateway_pod(config)
        return [
            config,
            service(self.route, name, labels, PORTS[names.GATEWAY], is_headless=False),
            deployment(self.route, name, labels, pod, replicas=self.route.spec.gateway.replicas),
            disruption_budget(self.route, name, labels, {"maxUnavailable": 1}),
        ]

    def feedback_objects(self) -> list[Manifest]:
        """The feedback service. A second one would take the ledger from it."""
        labels, name = {**self.labels, names.ROLE: names.FEEDBACK}, self.child(names.FEEDBACK)
        spec = self.route.spec
        rules = {
            "policy": spec.policy,
            "gate": _gate_rules(spec.gate),
            "canary": spec.canary.to_json(),
        }
        config = config_map(self.route, name, labels, {"release.json": rules})
        return [
            config,
            service(self.route, name, labels, PORTS[names.FEEDBACK], is_headless=False),
            deployment(self.route, name, labels, self._feedback_pod(config)),
        ]

    def _served_route(self) -> dict[str, object]:
        """The route as gateways read it."""
        spec, storage = resolved_spec(self.run), self.run.spec.storage
        targets = {
            channel: [
                names.address(self.child(channel), PORTS[channel]["grpc"], ordinal)
                for ordinal in range(engines.replicas)
            ]
            for channel, engines in self.route.spec.channels.by_name.items()
        }
        found: dict[str, object] = {
            "model": self.route.spec.model or self.route.metadata.name,
            "modelUri": spec.model.folder,
            "modelAccess": {k: v for k, v in storage.to_json().items() if k != "uri"},
            "channels": storage.to_json(),
            **targets,
        }
        if (lending := self.route.spec.channels.lending) is not None:
            found["lending"] = lending.to_json()
        if self.route.spec.gateway.record_turns:
            service, port = self.child(names.FEEDBACK), PORTS[names.FEEDBACK]["grpc"]
            feedback = named_target(service, f"{service}:{port}")
            found |= {"storage": storage.to_json(), "feedback": feedback}
        return found

    def _engine_pod(self, channel: str, engines: EngineRole, config: Manifest) -> RolePod:
        return RolePod(
            role=channel,
            image=engines.image or self.images[names.INFERENCE],
            command=COMMANDS[channel],
            ports=PORTS[channel],
            env=[
                *base_env(PORTS[channel], attempt=0),
                env("ETUDE_RUN_FILE", f"{SPEC_FOLDER}/run.json"),
                env("ETUDE_HTTP_PORT", str(ENGINE_HTTP_PORT)),
                env("ETUDE_CHANNEL", channel),
                *self._lending_env(channel),
                *(env(item.name, item.value) for item in engines.env),
            ],
            secret=self._store_secret(),
            grace_s=engines.grace_s,
            certificate=self._certificate(channel),
            resources=PodResources(
                cpu=engines.cpu,
                memory=engines.memory,
                gpus=engines.gpus_per_replica,
                gpu_resource=engines.gpu_resource,
                claims=engines.resource_claims,
            ),
            files=PodFiles(spec_map=self.child(channel), shared_memory=True),
            placement=PodPlacement(
                node_selector=engines.node_selector,
                tolerations=[toleration(each) for each in engines.tolerations],
                classes=pod_overrides.named_classes(
                    engines.priority_class_name, engines.runtime_class_name
                ),
            ),
            overrides=TemplateOverrides(
                annotations={CONFIG: digest(config)},
                patch=pod_overrides.template_patch(engines.pod_template),
            ),
        )

    def _lending_env(self, channel: str) -> list[Manifest]:
        lending = self.route.spec.channels.lending
        if lending is None or channel != names.STABLE:
            return []
        return [
            env("ETUDE_LENDING_RUN", self.run.metadata.name),
            env("ETUDE_LENDING_WINDOW_S", str(lending.window_seconds)),
        ]

    def _gateway_pod(self, config: Manifest) -> RolePod:
        gateway = self.route.spec.gateway
        limits = gateway.limits
        variables = {
            "ETUDE_GATEWAY_ROUTE": f"{SPEC_FOLDER}/route.json",
            "ETUDE_GATEWAY_KEYS": f"{KEYS_FOLDER}/keys",
            # They share the quotas, wherever they run.
            "ETUDE_GATEWAY_PROCESSES": str(gateway.replicas),
            "ETUDE_GATEWAY_BODY_MIB": str(limits.body_mib),
            "ETUDE_GATEWAY_SESSION_TOKENS": str(limits.session_tokens),
            "ETUDE_GATEWAY_WAITING_MIB": str(limits.waiting_mib),
            "ETUDE_GATEWAY_OUTAGE_S": str(limits.outage_seconds),
            "ETUDE_GATEWAY_TURN_S": str(limits.turn_seconds),
        }
        if gateway.tls_ref is not None:
            variables["ETUDE_GATEWAY_TLS"] = certificates.SERVING_TLS
        return self._service_pod(
            names.GATEWAY,
            gateway,
            variables,
            grace_s=GATEWAY_GRACE_S,
            files=PodFiles(
                spec_map=self.child(names.GATEWAY),
                keys_secret=gateway.keys_ref.name,
                folders=certificates.serving_tls(gateway.tls_ref),
            ),
            annotations={CONFIG: digest(config)},
        )

    def _feedback_pod(self, config: Manifest) -> RolePod:
        feedback, storage = self.route.spec.feedback, self.run.spec.storage
        windows = feedback.windows
        variables = {
            "ETUDE_FEEDBACK_LEDGER": self.route.metadata.name,
            "ETUDE_FEEDBACK_STORE": storage.uri,
            "ETUDE_FEEDBACK_KEY_STORE": feedback.key_store_uri,
            "ETUDE_FEEDBACK_STORE_ENDPOINT": storage.endpoint or "",
            "ETUDE_FEEDBACK_STORE_REGION": storage.region or "",
            "ETUDE_FEEDBACK_SECRET_FILE": f"{LEDGER_SECRET}/secret",
            "ETUDE_FEEDBACK_API_KEYS": f"{KEYS_FOLDER}/keys",
            "ETUDE_FEEDBACK_RELEASE": f"{SPEC_FOLDER}/release.json",
            "ETUDE_FEEDBACK_RELEASE_PORT": str(PORTS[names.FEEDBACK]["grpc"]),
            "ETUDE_FEEDBACK_WINDOW_ROLLOUTS": str(windows.rollouts),
            "ETUDE_FEEDBACK_WINDOW_MIN_ROLLOUTS": str(windows.min_rollouts),
            "ETUDE_FEEDBACK_WINDOW_AGE_S": str(windows.max_age_seconds),
            "ETUDE_FEEDBACK_HORIZON_S": str(windows.horizon_seconds),
            "ETUDE_FEEDBACK_OUTCOME_S": str(windows.outcome_seconds),
            "ETUDE_FEEDBACK_WINDOW_TENANT": windows.tenant or "",
        }
        if feedback.turn_retention_seconds is not None:
            retention = str(feedback.turn_retention_seconds)
            variables["ETUDE_FEEDBACK_TURN_RETENTION_S"] = retention
        if feedback.tls_ref is not None:
            variables["ETUDE_FEEDBACK_TLS"] = certificates.SERVING_TLS
        if self._is_network_trusted:
            variables["ETUDE_FEEDBACK_RELEASE_CALLERS"] = "Network"
        secret = SecretFolder("ledger", LEDGER_SECRET, feedback.secret_ref.name, ("secret",))
        return self._service_pod(
            names.FEEDBACK,
            feedback,
            variables,
            grace_s=FEEDBACK_GRACE_S,
            files=PodFiles(
                spec_map=self.child(names.FEEDBACK),
                keys_secret=feedback.keys_ref.name,
                folders=(*certificates.serving_tls(feedback.tls_ref), secret),
            ),
            annotations={CONFIG: digest(config)},
        )

    def _service_pod(
        self,
        role: str,
        spec: ServicePods,
        variables: Mapping[str, str],
        *,
        grace_s: int,
        files: PodFiles,
        annotations: Mapping[str, str],
    ) -> RolePod:
        return RolePod(
            role=role,
            image=spec.image or self.images[role],
            command=COMMANDS[role],
            ports=PORTS[role],
            env=[
                *base_env(PORTS[role], attempt=0),
                *(env(name, value) for name, value in variables.items()),
            ],
            secret=self._store_secret(),
            grace_s=grace_s,
            delay_s=LEAVE_S,
            certificate=self._certificate(role),
            resources=PodResources(cpu=spec.cpu, memory=spec.memory),
            files=files,
            placement=PodPlacement(
                node_selector=spec.node_selector,
                tolerations=[toleration(each) for each in spec.tolerations],
                classes=pod_overrides.named_classes(spec.priority_class_name, None),
            ),
            overrides=TemplateOverrides(annotations=annotations),
        )

    @property
    def has_policies(self) -> bool:
        """True if NetworkPolicies of the run say who reaches the parts."""
        return self.platform.namespace is not None and self.run.spec.network.policy == "Managed"

    @property
    def _is_network_trusted(self) -> bool:
        """True if there are no certificates, and NetworkPolicies in their place."""
        tls = self.platform.tls
        is_plaintext = tls is not None and tls.mode is certificates.CertificateMode.PLAINTEXT
        return is_plaintext and self.has_policies

    def _store_secret(self) -> str | None:
        secret = self.run.spec.storage.secret_ref
        return None if secret is None else secret.name

    def _certificate(self, role: str) -> PodCertificate | None:
        tls = self.platform.tls
        if tls is None:
            return None
        return certificates.pod_certificate(tls, certificates.route_identity(tls, self.route, role))


def served_run(route: PolicyRoute, run: RLRun, engines: EngineRole) -> ResolvedRun:
    """The run as engines of a route read it: with their settings in place of its own.

    Nothing else of it is kept: suspending the run must not restart engines that serve users.

    Raises:
        ValidationError: the run cannot have such engines.
    """
    spec, about = resolved_spec(run), run.metadata
    kept = {name: value for name, value in spec.to_json().items() if name in READ_BY_ENGINES}
    roles = spec.roles.to_json() | {"inference": engines.to_json()}
    return ResolvedRun(
        name=route.spec.model or route.metadata.name,
        namespace=about.namespace,
        uid=about.uid,
        spec=RLRunSpec.parse_known_fields(kept | {"roles": roles}),
    )


def route_children(
    route: PolicyRoute, run: RLRun, images: Mapping[str, str], platform: Platform
) -> list[Manifest]:
    """Everything that a route owns, in the order to apply it.

    Args:
        route: the route.
        run: the run that it serves.
        images: by their names.
        platform: configuration of the operator.
    """
    parts = _Builder(route, run, images, platform)
    channels = route.spec.channels.by_name
    children = [
        manifest
        for channel, engines in channels.items()
        for manifest in parts.engine_objects(channel, engines)
    ]
    children += [*parts.feedback_objects(), *parts.gateway_objects()]
    if platform.tls is not None:
        identities = [
            certificates.route_identity(platform.tls, route, role)
            for role in (*channels, names.FEEDBACK, names.GATEWAY)
        ]
        children += certificates.certificate_objects(route, platform.tls, identities)
    if platform.namespace is not None and parts.has_policies:
        asks = certificates.asks_issuer(platform.tls)
        children += network_policies.route_policies(
            route, run, platform.namespace, asks_issuer=asks
        )
    return [stamp_digest(child) for child in children]
