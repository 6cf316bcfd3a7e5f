"""How a container's environment reads once it is a process of this machine."""

from pathlib import Path
from typing import Any

import pytest

from etude.common.api.kinds import EnvPool, RLRun
from etude.operator.builders import pool as desired_pools
from etude.operator.builders import run as desired
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape
from etude.operator.local.ports import FIRST, LAST, PortRegistry, pod_of_address
from etude.operator.local.process_spec import LocalHost, process_spec
from etude.operator.manifests import Manifest


@pytest.fixture
def machine(tmp_path: Path) -> LocalHost:
    return LocalHost(
        folder=tmp_path,
        ports=PortRegistry(),
        config_map=lambda name: {f"{name.rpartition('-')[2]}.json": name},
        is_service=lambda name: name == "demo-rewards",
        base_env={"PATH": "/bin"},
    )


def pod(**container: Any) -> Manifest:
    body = {"name": "main", "command": ["true"], "ports": [{"name": "grpc", "containerPort": 7000}]}
    return {
        "metadata": {"name": "demo-trainer-0"},
        "spec": {"containers": [{**body, **container}]},
    }


def told(machine: LocalHost, value: str, name: str = "X") -> str:
    env = [{"name": name, "value": value}]
    return process_spec(pod(env=env), machine).env[name]


def test_a_port_variable_gets_the_loopback_port(machine: LocalHost) -> None:
    port = machine.ports.port("demo-trainer-0", 7000)
    assert told(machine, "7000", "ETUDE_PORT") == str(port)
    assert FIRST <= port < LAST


def test_a_number_that_is_no_port_of_the_container_stays(machine: LocalHost) -> None:
    assert told(machine, "7001", "ETUDE_PORT") == "7001"
    assert told(machine, "7000", "ETUDE_STEPS") == "7000"


def test_the_address_of_a_pod_becomes_a_loopback_address(machine: LocalHost) -> None:
    port = machine.ports.port("demo-inference-1", 7010)
    assert told(machine, "demo-inference-1.demo-inference:7010") == f"127.0.0.1:{port}"
    assert told(machine, "demo-inference-1.demo-inference.lab.svc:7010") == f"127.0.0.1:{port}"


def test_addresses_inside_lists_and_json_are_found(machine: LocalHost) -> None:
    port = machine.ports.port("r-broker-0", 7020)
    assert told(machine, '{"r":"r-broker-0.r-broker:7020"}') == f'{{"r":"127.0.0.1:{port}"}}'
    first, second = told(machine, "a-0.a:1234,a-1.a:1234").split(",")
    assert first != second


def test_a_service_means_its_first_pod_and_other_hosts_stay(machine: LocalHost) -> None:
    port = machine.ports.port("demo-rewards-0", 7040)
    assert told(machine, "demo-rewards:7040") == f"127.0.0.1:{port}"
    assert told(machine, "demo-rewards.lab.svc:7040") == f"127.0.0.1:{port}"
    assert told(machine, "http://minio.example.org:9000") == "http://minio.example.org:9000"


def test_mount_paths_become_folders_of_the_run(machine: LocalHost) -> None:
    mounts = [{"name": "scratch", "mountPath": "/scratch"}, {"name": "tmp", "mountPath": "/tmp"}]
    plan = process_spec(
        pod(
            env=[
                {"name": "A", "value": "/scratch"},
                {"name": "B", "value": "/scratch/x"},
                {"name": "C", "value": "/scratchy"},
                {"name": "D", "value": "/tmp/x"},
            ],
            volumeMounts=mounts,
        ),
        machine,
    )
    folder = machine.folder / "scratch/demo-trainer-0/scratch"
    assert plan.volumes == (folder,)
    assert [plan.env[name] for name in "ABCD"] == [
        str(folder),
        f"{folder}/x",
        "/scratchy",
        "/tmp/x",
    ]


def test_a_process_listens_on_loopback_only(machine: LocalHost) -> None:
    assert told(machine, "0.0.0.0", "ETUDE_HOST") == "127.0.0.1"


def test_facts_about_the_pod_and_references_between_variables_are_filled_in(
    machine: LocalHost,
) -> None:
    env = [
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "ADVERTISE", "value": "$(IP):7000"},
        {"name": "UNKNOWN", "value": "$(NOBODY)"},
    ]
    plan = process_spec(pod(env=env), machine)
    assert plan.env["POD"] == "demo-trainer-0"
    assert plan.env["ADVERTISE"] == f"127.0.0.1:{machine.ports.port('demo-trainer-0', 7000)}"
    assert plan.env["UNKNOWN"] == "$(NOBODY)"


def test_every_role_of_a_run_finds_its_peers(
    run: RLRun, pool: EnvPool, platform: Platform, machine: LocalHost
) -> None:
    made = desired.run_children(run, RunShape(images=platform.images), platform)
    plans = {}
    for stateful_set in (m for m in made if m["kind"] == "StatefulSet"):
        for ordinal in range(stateful_set["spec"]["replicas"]):
            name = f"{stateful_set['metadata']['name']}-{ordinal}"
            template = stateful_set["spec"]["template"]
            body = {**template, "metadata": {**template["metadata"], "name": name}}
            plans[name] = process_spec(body, machine)
    trainer = plans["demo-trainer-0"]
    targets = trainer.env["ETUDE_INFERENCE_TARGETS"].split(",")
    assert targets == [f"127.0.0.1:{plans[f'demo-inference-{i}'].ports['grpc']}" for i in (0, 1)]
    rewards = plans["demo-rewards-0"].ports["grpc"]
    assert trainer.env["ETUDE_REWARDS_TARGET"] == f"127.0.0.1:{rewards}"
    assert trainer.env["ETUDE_RUN_FILE"] == str(trainer.folder / "spec/run.json")
    assert list(trainer.files) == [trainer.folder / "spec/run.json"]
    assert trainer.readiness is not None
    assert trainer.readiness.port == int(trainer.env["ETUDE_PROBE_PORT"])
    assert trainer.log == machine.folder / "logs/attempt-0/demo-trainer-0.log"
    ports = [port for plan in plans.values() for port in plan.ports.values()]
    assert len(ports) == len(set(ports)) == 10


def test_names_behind_addresses() -> None:
    def is_service(name: str) -> bool:
        return name == "x"

    assert pod_of_address("x-2.x", is_service=is_service) == "x-2"
    assert pod_of_address("x", is_service=is_service) == "x-0"
    assert pod_of_address("x-2.y", is_service=is_service) is None
    assert pod_of_address("localhost", is_service=is_service) is None


def test_brokers_of_one_machine_know_their_places_and_their_siblings(
    pool: EnvPool, platform: Platform, machine: LocalHost
) -> None:
    several = pool.model_copy(update={"spec": pool.spec.model_copy(update={"brokers": 2})})
    made = desired_pools.pool_children(several, (0,), platform.images, platform)
    brokers = next(m for m in made if m["kind"] == "StatefulSet")
    template = {"spec": brokers["spec"]["template"]["spec"]}
    pods = [{"metadata": {"name": f"repos-broker-{place}"}, **template} for place in (0, 1)]
    env = [process_spec(each, machine).env for each in pods]
    node = process_spec(next(m for m in made if m["kind"] == "Pod"), machine)
    addresses = [f"127.0.0.1:{each['ETUDE_PORT']}" for each in env]
    assert [each["ETUDE_ADVERTISE"] for each in env] == addresses
    assert [each["ETUDE_POD"] for each in env] == ["repos-broker-0", "repos-broker-1"]
    # The first is found by the name of their Service, and tells of the others.
    assert {each["ETUDE_BROKER_TARGET"] for each in [*env, node.env]} == {addresses[0]}
