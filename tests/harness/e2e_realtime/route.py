"""From an empty cluster to a policy that is served: the run, its store, the route and its keys."""

import ipaddress
import json
import tempfile
from pathlib import Path
from typing import Any

from cryptography import x509
from tests.harness.e2e_cluster import bed, install
from tests.harness.e2e_cluster.scene import (
    BUCKET,
    ENDPOINT,
    LAB,
    PREFIX,
    RUN,
    Object,
    Scene,
    condition,
)
from tests.harness.e2e_realtime.users import HORIZON_S, Users
from tests.support import pki

from etude.demo.realtime import serving, warm_up
from etude.feedback.simulate.user_tasks import read_tasks
from etude.feedback.simulate.users import draw_users

ROUTE = "coder"
NUM_USERS, NUM_TASKS = 120, 24
"""Two in five of the users get an edit, and those of an arm must be enough to compare."""
WINDOW = 80
"""Rollouts of a window: two thirds of a round of users."""
ENVIRONMENT = {"name": "repos", "poolRef": {"name": "held-out"}, "template": "python"}
STORAGE = {
    "uri": f"s3://{BUCKET}/{PREFIX}",
    "endpoint": ENDPOINT,
    "region": "us-east-1",
    "secretRef": {"name": "s3"},
}
METRIC = {"relevant": "0.2"}

POOL: Object = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "EnvPool",
    "metadata": {"name": "held-out"},
    "spec": {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "isolation": {"minimum": "Process"},
        "replicas": 1,
        "slotsPerReplica": 24,
        "store": {key: value for key, value in STORAGE.items() if key != "uri"},
    },
}
ENGINES: Object = {
    "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    "maxModelLen": 1024,
    "maxConcurrent": 32,
    "kvCacheMib": 128,
}
RLRUN: Object = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "RLRun",
    "metadata": {"name": RUN},
    "spec": {
        "model": {"uri": f"s3://{BUCKET}/realtime/policy"},
        "storage": STORAGE,
        "phases": [
            {
                "name": "users",
                "type": "Feedback",
                "maxSteps": 64,
                "optimizer": {"learningRate": "1e-5"},
                "algorithm": {"name": "DrGRPO", "parameters": {"lossScale": 64}},
                "feedback": {
                    "uri": STORAGE["uri"],
                    "minRollouts": WINDOW // 4,
                    "klBudget": "0.2",
                    "stepsPerWindow": 1,
                    "maxTokens": 1024,
                },
            }
        ],
        # Engines, rewards and environments are those of evaluations: the phase needs none.
        "roles": {
            "trainer": {"learnerRanks": 1, "threadsPerRank": 1, "microBatchTokens": 4096},
            "inference": ENGINES,
            "environments": [ENVIRONMENT],
            "rewards": {
                "functions": [
                    {
                        "name": "success",
                        "function": "Verifier",
                        "parameters": {"onlyWhenFinished": True},
                    }
                ]
            },
        },
        "weights": {"dtype": "Float32"},
        "checkpointing": {"everySeconds": 3600, "keepLast": 12},
        "failurePolicy": {"maxRestarts": install.PATIENCE},
    },
}
POLICY_ROUTE: Object = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "PolicyRoute",
    "metadata": {"name": ROUTE},
    "spec": {
        "runRef": {"name": RUN},
        "channels": {"stable": ENGINES, "canary": ENGINES},
        "gateway": {
            "keysRef": {"name": "keys"},
            "tlsRef": {"name": "serving"},
            "replicas": 1,
            "recordTurns": True,
        },
        "feedback": {
            "keysRef": {"name": "keys"},
            "tlsRef": {"name": "serving"},
            "secretRef": {"name": "ledger"},
            "keyStoreUri": f"s3://{BUCKET}/user-keys/{ROUTE}",
            "windows": {
                "rollouts": WINDOW,
                "minRollouts": WINDOW // 4,
                "maxAgeSeconds": 20,
                "horizonSeconds": HORIZON_S,
            },
        },
        "gate": {
            "minTasks": NUM_TASKS // 2,
            # With so few tasks a smaller loss would not be told from chance.
            "margins": [{"metric": "success", "margin": "0.3"}],
            "evaluation": {
                "suites": [
                    {
                        "name": "held-out",
                        "uri": f"s3://{BUCKET}/realtime/held-out",
                        "environment": "repos",
                    }
                ],
                "environments": [ENVIRONMENT],
                "greedy": True,
                "rollout": {
                    "toolset": "Compact",
                    "maxConcurrent": 24,
                    "maxTurns": 8,
                    "maxTurnTokens": 80,
                    "maxTokens": 480,
                    "timeoutSeconds": 300,
                },
            },
        },
        "canary": {
            "steps": [5000],
            "stepSeconds": 0,
            "usersPerArm": 20,
            "minUsers": 8,
            "primary": {"name": "edit persistence", "signal": "edit_persistence", **METRIC},
            "guardrails": [
                {
                    "name": "complaints",
                    "signal": "dissatisfied_followup",
                    "isHigherBetter": False,
                    **METRIC,
                }
            ],
            "signals": [],
        },
    },
}


def fill_the_store(scene: Scene) -> None:
    """The policy of the real-time demo and held-out tasks in MinIO; a namespace with Secrets."""
    policy = warm_up.prepare_policy(bed.ROOT / "runs" / "realtime", seed=0)
    tasks = sorted(policy.held_out.iterdir())[:NUM_TASKS]
    files = {f"policy/{each.name}": each for each in policy.model.iterdir()}
    for task in tasks:
        for each in task.rglob("*"):
            if each.is_file():
                files[f"held-out/{each.relative_to(policy.held_out)}"] = each
    install.upload(scene, "realtime", files)
    install.prepare_namespace(scene)
    with tempfile.TemporaryDirectory() as name:
        _make_secrets(scene, Path(name))


def _make_secrets(scene: Scene, folder: Path) -> None:
    """The keys of users, the certificate of what they call, and the secret of the ledger."""
    names = [f"{ROUTE}-gateway.{LAB}.svc", f"{ROUTE}-feedback.{LAB}.svc"]
    authority = pki.Authority("serving")
    pki.write(folder / "serving", authority.certify([x509.DNSName(each) for each in names]))
    users = [each.name for each in draw_users(NUM_USERS, seed=0)]
    keys = serving.make_keys(folder / "keys", users)
    (scene.folder / "keys.json").write_text(json.dumps(dict(keys.users)))
    (scene.folder / "ca.crt").write_bytes(authority.pem)
    (folder / "secret").write_text("0123456789abcdef" * 4)
    create = ("-n", LAB, "create", "secret")
    tls = ("--cert", f"{folder}/serving/tls.crt", "--key", f"{folder}/serving/tls.key")
    scene.bed.kubectl(*create, "generic", "keys", f"--from-file={folder}/keys")
    scene.bed.kubectl(*create, "generic", "ledger", f"--from-file={folder}/secret")
    scene.bed.kubectl(*create, "tls", "serving", *tls)


def apply_the_run(scene: Scene) -> None:
    """A run that trains on feedback alone; its first version waits for users."""
    apply(scene, POOL, RLRUN)
    scene.wait_for_run("a wait for windows", _is_waiting_for_window)
    scene.wait("a Ready Checkpoint", lambda: bool(ready_checkpoints(scene)))
    scene.shell(f"kubectl -n {LAB} get rlr,envp,ckpt")


def _is_waiting_for_window(run: Object) -> bool:
    return condition(run, "Progressing").get("reason") == "WaitingForWindow"


def ready_checkpoints(scene: Scene) -> list[Object]:
    """Checkpoints of the run that are verified, oldest first."""
    return [each for each in scene.checkpoints() if each["status"].get("phase") == "Ready"]


def apply_the_route(scene: Scene) -> None:
    """Engines, gateway and feedback service; everybody gets the first version."""
    apply(scene, POLICY_ROUTE)
    scene.wait("feedback is taken", lambda: _is_true(scene, "FeedbackAvailable"))
    promote = f"kubectl etude promote {ROUTE} -n {LAB} --version 1.0 --without-gate"
    scene.shell(f"{promote} --reason 'first version' 2>&1")
    scene.wait("users are served", lambda: _is_true(scene, "Available"))
    scene.shell(f"kubectl -n {LAB} get pods")
    scene.shell(f"kubectl -n {LAB} get policyroute")


def _is_true(scene: Scene, kind: str) -> bool:
    return bool(condition(route(scene), kind).get("status") == "True")


def route(scene: Scene) -> Object:
    """The route."""
    return scene.bed.get("-n", LAB, "policyroute", ROUTE)


def apply(scene: Scene, *objects: Object) -> None:
    """Apply objects as a user does, from files."""
    for each in objects:
        manifest = scene.folder / f"{each['kind'].lower()}.json"
        manifest.write_text(json.dumps(each, indent=1), encoding="utf-8")
        scene.shell(f"kubectl -n {LAB} apply -f {manifest.relative_to(bed.ROOT)}")


def find_users(scene: Scene) -> Users:
    """Users who have keys, and the addresses that they call."""
    policy = warm_up.prepare_policy(bed.ROOT / "runs" / "realtime", seed=0)
    keys = json.loads((scene.folder / "keys.json").read_text())
    return Users(
        users=draw_users(len(keys), seed=0),
        keys=keys,
        tasks=read_tasks(policy.tasks),
        gateway=_address(scene, "gateway", 7080),
        feedback=_address(scene, "feedback", 7090),
        authority=scene.folder / "ca.crt",
        model=ROUTE,
    )


def _address(scene: Scene, part: str, port: int) -> str:
    service: Any = scene.bed.get("-n", LAB, "service", f"{ROUTE}-{part}")
    return f"https://{ipaddress.ip_address(service['spec']['clusterIP'])}:{port}"
