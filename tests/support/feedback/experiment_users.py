"""Users of an experiment: a rollout of each, as gateways record it, and their events over HTTP."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
from tests.support.feedback import events as examples
from tests.support.feedback.process import FeedbackProcess
from tests.support.feedback.turns import V1, turn, write_turns

from etude.common.blobs import Store
from etude.common.experiments.assignment import Arm, assign_arm
from etude.common.release.channels import CANARY, newest_record

USERS = [f"u{number}" for number in range(80)]


async def send_work(
    service: FeedbackProcess,
    store: Store,
    keeps: Callable[[Arm], bool],
    complains: Callable[[Arm], bool],
) -> None:
    """Let each exposed user have one rollout, and send what the user does with it."""
    canary = newest_record(store, CANARY)
    assert canary is not None
    assert canary.experiment is not None
    assert canary.served is not None
    name, salt = canary.experiment.name, canary.experiment.salt
    turns, batch = [], []
    for user in USERS:
        arm = assign_arm(name, salt, f"acme/{user}", 5_000)
        assert arm is not None
        version = canary.served.version if arm is Arm.TREATMENT else V1
        record = turn(user, name, started_ms=time.time_ns() // 1_000_000, version=version)
        record.arm, record.experiment = arm.value, name
        turns.append(record)
        alive = 2 if keeps(arm) else 0
        text = "no, undo that" if complains(arm) else "now add a test"
        batch += [
            _event("edit_applied", user, name),
            _event("edit_observed", user, name, ageS=1.0, numAliveLines=alive),
            _event("followup", user, name, text=text, turn=0, afterS=0.5),
        ]
    write_turns(store, turns, writer=name)
    headers = service.headers | {"content-type": "application/cloudevents-batch+json"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        answer = await client.post(f"{service.url}/v1/events", content=json.dumps(batch))
    assert {each["status"] for each in answer.json()["results"]} == {202}


def _event(kind: str, user: str, rollout: str, **payload: Any) -> dict[str, Any]:
    content = examples.event(kind, id=f"{kind}-{user}-{rollout}", user=user, **payload)
    content["data"]["rollout"] = rollout
    return content
