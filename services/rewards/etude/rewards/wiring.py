"""Wiring of one run's reward service from its resolved spec."""

from typing import NamedTuple

from etude.common.api.run.rewards import VerifierParameters
from etude.common.errors import Problem, UserError
from etude.common.role_inputs import ResolvedRun
from etude.rewards.functions.verifier import Verifier
from etude.rewards.grading import BrokerSandboxes
from etude.rewards.judge_client import JudgeClient
from etude.rewards.rubric import Rubric
from etude.rewards.scoring import Scorer
from etude.rewards.service import RewardService
from etude.rewards.settings import Settings


class ServiceParts(NamedTuple):
    """The service, and the clients to close after it."""

    service: RewardService
    sandboxes: BrokerSandboxes


def assemble(run: ResolvedRun, settings: Settings) -> ServiceParts:
    """The service with the run's rubric over the run's pools.

    Raises:
        UserError: the run has no rubric, or an environment without a broker.
    """
    roles = run.spec.roles
    if roles.rewards is None:
        raise UserError(_problem("spec.roles.rewards", "is not set: no rollout can be scored"))
    templates = {entry.name: entry.template for entry in roles.environments}
    missing = sorted(templates.keys() - settings.brokers.keys())
    if missing:
        raise UserError(_problem("ETUDE_BROKERS", f"has no broker for {', '.join(missing)}"))
    rubric = Rubric.from_functions(roles.rewards.functions)
    parameters = rubric.verifier.parameters
    assert isinstance(parameters, VerifierParameters)  # noqa: S101 - the rubric checked it
    sandboxes = BrokerSandboxes(
        brokers=settings.brokers,
        templates=templates,
        run_id=run.uid,
    )
    scorer = Scorer(
        rubric,
        Verifier(parameters, sandboxes),
        run.spec.storage,
        settings.scratch,
        JudgeClient(settings.judge_key),
    )
    return ServiceParts(RewardService(scorer, frozenset(templates)), sandboxes)


def _problem(where: str, what: str) -> Problem:
    return Problem(
        reason="InvalidSpec",
        what=what,
        where=where,
        fix="apply a manifest that passes `etude lint`",
    )
