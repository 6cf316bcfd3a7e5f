"""Branches of tenants whose users have other tastes, trained through real windows and gradients.

Simulated: users, who keep an answer of their taste nine times of ten; the policy, a table of logits
by kind of task, with one token to an answer; and the suites, in which an answer is right or wrong.
Real: events through intake and ledger, turn log, signals, windows, credit, the surrogate and its
weights, the paired comparison, and the decision about the release.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests.support.feedback import events as examples
from tests.support.feedback.lives import NOW_MS, SECRET, SERVER, Stores, living
from tests.support.feedback.turns import serve_version, turn, write_turns

from etude.common.api.run.algorithms import DrGRPOParameters
from etude.common.blobs import Store
from etude.common.evaluation.comparison import PairedDifference, compare_by_task
from etude.common.feedback import windows
from etude.common.release.channels import ServedVersion
from etude.common.release.proposal import suite_metric
from etude.common.weights import VersionId
from etude.feedback.ingest.intake import EventIntake
from etude.feedback.release.decide import decide
from etude.feedback.release.decision import ReleaseDecision
from etude.feedback.release.evidence import GateEvidence, ProposeRequest
from etude.feedback.release.rules import GateRules, ReleaseRules
from etude.feedback.release.state import ReleaseState
from etude.feedback.windows.audit import WindowAudit, audit_windows
from etude.feedback.windows.builder import WindowBuilder
from etude.feedback.windows.settings import WindowRules
from etude.trainer.algorithms.drgrpo import DrGRPO
from etude.trainer.algorithms.tokens import TokenLogprobs

GENERAL, OWN = 6, 2
"""Kinds of tasks of everyone, and of one tenant; the latter are the last ones."""
ANSWERS = 3
NUM_USERS = 80
ROLLOUTS = 320
"""Of one window."""
OTHERS = 40
"""Rollouts of another tenant beside it."""
HORIZON_S = 100.0
RULES = WindowRules(
    num_rollouts=ROLLOUTS,
    min_rollouts=ROLLOUTS,
    max_age_s=10 * HORIZON_S,
    horizon_s=HORIZON_S,
    tenant="acme",
)
LEARNING_RATE = 0.5
STEPS = 4
"""Of a window."""
LIKED, DISLIKED = 0.9, 0.1
"""Chance that an answer is kept."""
SUITES: Mapping[str, tuple[range, int]] = {
    "general": (range(GENERAL), 300),
    "own": (range(GENERAL, GENERAL + OWN), 150),
}
"""Kinds and number of the tasks of each suite."""
SAMPLES = 4

Taste = Sequence[int]
"""Answer that a user keeps, by kind of task."""

EVERYONE: Taste = (0,) * (GENERAL + OWN)
PARTICULAR: Taste = (*EVERYONE[:GENERAL], 1, 1)
"""Another taste in the tenant's own tasks alone."""
HURRIED: Taste = (0, 0, 0, 0, 2, 2, 1, 1)
"""Another taste in some tasks of everyone too: what pleases these users is wrong for the others."""


@dataclass(slots=True)
class TablePolicy:
    """A policy without context: logits of each answer by kind of task."""

    logits: torch.Tensor = field(
        # The parent: mostly right for everyone, less so in tasks that only few have.
        default_factory=lambda: torch.tensor([[3.0, 0, 0]] * GENERAL + [[1.0, 0, 0]] * OWN)
    )

    def probabilities(self) -> np.ndarray:
        return torch.softmax(self.logits.double(), -1).numpy()

    def train(self, store: Store, manifest: windows.WindowManifest) -> None:
        """Train a window's rollouts in steps, each on a part of them."""
        rollouts = [windows.read_rollout(store, each).links[0] for each in manifest.rollouts]
        kinds = torch.tensor([link.token_ids[0] for link in rollouts])
        answers = torch.tensor([link.token_ids[1] - GENERAL - OWN for link in rollouts])
        anchors = torch.tensor([link.sampler_logprobs[-1] for link in rollouts])
        advantages = torch.tensor([each.advantage for each in manifest.rollouts])
        algorithm = DrGRPO(parameters=DrGRPOParameters(), loss_scale=1.0)
        logits = self.logits.clone().requires_grad_()
        optimiser = torch.optim.Adam([logits], lr=LEARNING_RATE)
        for part in torch.arange(len(rollouts)).chunk(STEPS):
            weights = torch.tensor(algorithm.token_weights(np.ones(len(part), dtype=np.int64)))
            logprobs = torch.log_softmax(logits[kinds[part]], -1)
            chosen = logprobs.gather(1, answers[part, None]).squeeze(1)
            tokens = TokenLogprobs(
                logprobs=chosen,
                proximal=chosen.detach(),
                sampler=anchors[part],
                is_corrected=False,
                sequence_log_ratio=chosen[:0],
            )
            surrogate = algorithm.surrogate(tokens, advantages=advantages[part])
            optimiser.zero_grad()
            (weights * surrogate.values).sum().backward()
            optimiser.step()
        self.logits = logits.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchResult:
    """A trained branch, and what became of it."""

    own: PairedDifference
    general: PairedDifference
    decision: ReleaseDecision
    audit: WindowAudit


@dataclass(slots=True)
class BranchSimulation:
    """A route of one tenant, whose users have a taste."""

    taste: Taste
    rng: np.random.Generator
    stores: Stores = field(default_factory=Stores)
    policy: TablePolicy = field(default_factory=TablePolicy)
    now_ms: int = NOW_MS

    def run(self, num_windows: int) -> BranchResult:
        """Train a branch, evaluate it beside its parent, and ask for its release."""
        parent = TablePolicy()
        asyncio.run(self._train(num_windows))
        own, general = (self._compare(parent, name) for name in ("own", "general"))
        audit = audit_windows(self.stores.ledger, SECRET, RULES, uid="test")
        return BranchResult(own=own, general=general, decision=propose(own, general), audit=audit)

    async def _train(self, num_windows: int) -> None:
        for number in range(1, num_windows + 1):
            version = VersionId(1, number)
            serve_version(self.stores.ledger, version, number=number)
            async with living(self.stores, now_ms=self.now_ms) as intake:
                await self._serve(intake, number, version)
                self.now_ms += int(2_000 * HORIZON_S)
                builder = WindowBuilder(intake.ledger, RULES, clock_ms=lambda: self.now_ms)
                await asyncio.to_thread(builder.run_pass)
            manifest = windows.read_window(self.stores.ledger, number)
            self.policy.train(self.stores.ledger, manifest)

    async def _serve(self, intake: EventIntake, window: int, version: VersionId) -> None:
        for tenant, count in (("acme", ROLLOUTS), ("other", OTHERS)):
            turns, events = [], []
            taste = self.taste if tenant == "acme" else EVERYONE
            for number in range(count):
                user, name = f"u{number % NUM_USERS}", f"r-{window}-{number}"
                kind = int(self.rng.integers(GENERAL + OWN))
                chances = self.policy.probabilities()[kind]
                answer = int(self.rng.choice(ANSWERS, p=chances))
                is_kept = self.rng.uniform() < (LIKED if answer == taste[kind] else DISLIKED)
                record = turn(
                    user,
                    name,
                    started_ms=self.now_ms,
                    prompt=[kind],
                    sampled=[GENERAL + OWN + answer],
                    version=version,
                    tenant=tenant,
                )
                record.logprobs[:] = [float(np.log(chances[answer]))]
                turns.append(record)
                events += _edit_events(tenant, user, name, is_kept=is_kept)
            owner = SERVER._replace(tenant=tenant)
            for start in range(0, len(events), 500):
                answers = await intake.take(events[start : start + 500], owner)
                assert {each.status for each in answers} == {202}, answers[0]
            write_turns(self.stores.ledger, turns)

    def _compare(self, parent: TablePolicy, suite: str) -> PairedDifference:
        kinds, count = SUITES[suite]
        right = PARTICULAR if suite == "own" else EVERYONE
        tasks = {f"t{n}": int(self.rng.choice(kinds)) for n in range(count)}
        samples = [
            {
                task: [
                    float(self.rng.choice(ANSWERS, p=policy.probabilities()[kind]) == right[kind])
                    for _ in range(SAMPLES)
                ]
                for task, kind in tasks.items()
            }
            for policy in (self.policy, parent)
        ]
        return compare_by_task(*samples, largest_change=1.0)


def _edit_events(tenant: str, user: str, rollout: str, *, is_kept: bool) -> list[bytes]:
    alive = 2 if is_kept else 0
    payloads: dict[str, dict[str, Any]] = {
        "edit_applied": {},
        "edit_observed": {"ageS": HORIZON_S, "numAliveLines": alive},
    }
    found = []
    for kind, payload in payloads.items():
        name = f"{kind}-{rollout}"
        event = examples.event(kind, id=name, tenant=tenant, user=user, **payload)
        event["data"]["rollout"] = rollout
        found.append(json.dumps(event).encode())
    return found


def propose(own: PairedDifference, general: PairedDifference) -> ReleaseDecision:
    """Ask for the release of a branch on its tenant's channel, where its parent is in use."""
    parent, branch = (ServedVersion(run_uid="run-1", epoch=1, number=n) for n in (1, 2))
    rules = ReleaseRules(gate=GateRules(suites=("own", "general"), gain_suites=("own",)))
    comparisons = {suite_metric("success", "own"): own, suite_metric("success", "general"): general}
    request = ProposeRequest(
        caller="operator",
        candidate=branch,
        gate=GateEvidence(compared_with=parent, comparisons=comparisons),
    )
    return decide(ReleaseState(stable=parent), request, rules, now_ms=NOW_MS)
