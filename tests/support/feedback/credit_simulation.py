"""Simulated edits and users with a known truth, for the estimates and the caps of credit."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from etude.common.feedback.payloads import EditAppliedPayload, EditObservedPayload
from etude.feedback.credit import MEDIAN_USERS, USER_SHARE, credit_rewards, reward_rollouts
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.history import RolloutEvent, RolloutHistory, ServedTurn, TurnPlace
from etude.feedback.signals.outcome import RolloutOutcome, SignalValue
from etude.feedback.signals.registry import measure_rollouts

HORIZON_S = 3_600.0
LOOKS_S = (60.0, 300.0, 900.0, 1_800.0, 3_600.0)
"""Ages at which a client looks at an edit."""
SIGNAL = "edit_persistence"
APPLIED = {"turn": 0, "edit": "e", "numLines": 10, "lineHashes": []}
NUM_FEATURES = 32
LARGEST = 5.0
"""Value of the best signal, in spreads of the honest ones."""


class Persistence(NamedTuple):
    """Share of edits alive at the horizon: in truth, and by three estimates."""

    truth: float
    estimate: float
    complete_cases: float
    """Among edits that were looked at up to the horizon."""
    no_news: float
    """Edits of which no loss was seen count as alive."""


def simulate_persistence(
    num_edits: int, *, censored: float, leave_after_loss: float, seed: int
) -> Persistence:
    """Simulate edits of ten lines, each alive or lost as a whole.

    Args:
        num_edits: one to a rollout.
        censored: share of edits whose user leaves at a random time before the horizon.
        leave_after_loss: chance that a user whose edit was bad leaves before the next look; above 0
            the censoring tells about the fate.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    lost_s = rng.exponential(4_500.0, num_edits)
    leaves_s = np.where(
        rng.uniform(size=num_edits) < censored, rng.uniform(0, HORIZON_S, num_edits), np.inf
    )
    is_driven_away = rng.uniform(size=num_edits) < leave_after_loss
    leaves_s = np.where(is_driven_away, np.minimum(leaves_s, lost_s), leaves_s)
    histories = [
        _history(number, float(lost), float(leaves))
        for number, (lost, leaves) in enumerate(zip(lost_s, leaves_s, strict=True))
    ]
    outcomes = measure_rollouts(histories, horizon_s=HORIZON_S, now_ms=10**13)
    values = [each.values[SIGNAL] for each in outcomes]
    looked = [_last_look(float(leaves)) for leaves in leaves_s]
    alive = [last < lost for last, lost in zip(looked, lost_s, strict=True)]
    complete = [a for a, last in zip(alive, looked, strict=True) if last >= HORIZON_S or not a]
    return Persistence(
        truth=float(np.mean(lost_s > HORIZON_S)),
        estimate=sum(v.numerator for v in values) / sum(v.denominator for v in values),
        complete_cases=float(np.mean(complete)),
        no_news=float(np.mean(alive)),
    )


def _last_look(leaves_s: float) -> float:
    return max((age for age in LOOKS_S if age <= leaves_s), default=0.0)


def _history(number: int, lost_s: float, leaves_s: float) -> RolloutHistory:
    name = f"{number:032x}"
    history = RolloutHistory(name, UserId("acme", name), [_turn()])
    applied = EditAppliedPayload.model_validate(APPLIED)
    history.add_event(RolloutEvent("edit_applied", 0, applied))
    for age_s in LOOKS_S:
        if age_s <= leaves_s:
            alive = 10 if age_s < lost_s else 0
            fields = {"edit": "e", "ageS": age_s, "isFileSeen": True, "numAliveLines": alive}
            look = EditObservedPayload.model_validate(fields)
            history.add_event(RolloutEvent("edit_observed", 0, look))
    return history


def _turn() -> ServedTurn:
    return ServedTurn(
        place=TurnPlace("turns/w/0", 0),
        started_ms=0,
        received_ms=0,
        policy=None,
        arm="",
        experiment="",
        config="",
        num_tokens=1,
        num_calls=0,
        num_broken_calls=0,
        asks_question=False,
        is_side=False,
    )


class Poisoning(NamedTuple):
    """Part of a window's update that colluding users have.

    Per absolute advantage, the gradient g is a mixture: g = (1 - weight) * others + weight * d for
    the direction d that they push. From the gradient g0 of a window without them it is
    displaced by g - g0 = weight * (d - others) + (others - g0).
    """

    num_users: int
    weight: float
    """Share of the absolute advantages."""
    displacement: float
    """|g - g0| of a linear policy in the direction d."""
    distance: float
    """|d - others| in that direction: 1 if the others are indifferent to it."""
    shift: float
    """|others - g0|: what other means and spreads change in the part of the others."""
    pull: float
    """Change of the others' mean advantage, as a part of their mean absolute one."""
    uncapped: float
    """The same displacement without weights of users."""
    cap: float
    """Largest share that as many users may have."""


def simulate_poisoning(
    *, num_users: int, num_colluding: int, rollouts_each: int, seed: int, num_signals: int = 1
) -> Poisoning:
    """Simulate a window in which some users praise one direction of the policy as much as they can.

    The gradient of a linear policy is the sum of advantage times feature. Honest users' rollouts
    have random features, and signals with noise; colluding ones have one feature, and the best
    value of every signal.
    """
    rng = np.random.default_rng(seed)
    honest = np.repeat(np.arange(num_colluding, num_users), 5)
    colluding = np.repeat(np.arange(num_colluding), rollouts_each)
    users = [UserId("acme", f"{n:032x}") for n in [*honest, *colluding]]
    features = rng.normal(size=(len(honest), NUM_FEATURES))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    direction = np.zeros(NUM_FEATURES)
    direction[0] = 1.0
    features = np.vstack([features, np.tile(direction, (len(colluding), 1))])
    noise = rng.normal(size=(len(honest), num_signals))
    values = np.vstack([noise, np.full((len(colluding), num_signals), LARGEST)])
    with_all = _advantages(users, values)
    without = _advantages(users[: len(honest)], values[: len(honest)])
    total = np.abs(with_all).sum()
    gradient = (with_all @ features / total)[0]
    own = with_all[: len(honest)]
    others = (own @ features[: len(honest)] / np.abs(own).sum())[0]
    alone = (without @ features[: len(honest)] / np.abs(without).sum())[0]
    masses = _user_masses(users, with_all)
    share = min(USER_SHARE, MEDIAN_USERS * float(np.median(masses)) / total)
    raw = np.concatenate([without, np.full(len(colluding), 3.0)])
    return Poisoning(
        num_users=num_colluding,
        weight=float(np.abs(with_all[len(honest) :]).sum() / total),
        displacement=float(abs(gradient - alone)),
        distance=float(abs(1 - others)),
        shift=float(abs(others - alone)),
        pull=float(abs(own.mean() - without.mean()) / np.abs(without).mean()),
        uncapped=float(3.0 * len(colluding) / np.abs(raw).sum()),
        cap=num_colluding * share,
    )


def _advantages(users: Sequence[UserId], values: "np.ndarray") -> "np.ndarray":
    outcomes = [
        RolloutOutcome(
            rollout=f"{place:032x}",
            tenant=each.tenant,
            user=each.digest,
            policy=None,
            arm="",
            experiment="",
            started_ms=0,
            values={f"s{n}": SignalValue(float(value), 1.0) for n, value in enumerate(row)},
        )
        for place, (each, row) in enumerate(zip(users, values, strict=True))
    ]
    rewards = reward_rollouts(outcomes, {f"s{n}": 1.0 for n in range(values.shape[1])})
    credited = credit_rewards(rewards, users, [""] * len(users))
    return np.array([each.advantage for each in credited])


def _user_masses(users: Sequence[UserId], advantages: "np.ndarray") -> list[float]:
    masses: dict[UserId, float] = {}
    for each, advantage in zip(users, advantages, strict=True):
        masses[each] = masses.get(each, 0.0) + abs(float(advantage))
    return sorted(masses.values())
