"""Rollouts: the turn loop over tokens that engines sample, from the first prompt to the end."""

from collections.abc import Callable

from etude.agent.chat import ChatFormat, Conversation, TemplateError
from etude.agent.time_limit import time_limit
from etude.agent.token_policy import RolloutLimits, RolloutTask, Sampler, TokenPolicy
from etude.agent.toolsets import Toolset
from etude.agent.trajectory import (
    LinkDraft,
    RolloutCosts,
    RolloutEnding,
    Trajectory,
)
from etude.agent.turns import (
    RolloutEnvironment,
    TurnLoop,
)
from etude.common.errors import Problem, UserError


def first_prompt(
    chat: ChatFormat, tools: Toolset, instruction: str, *, max_tokens: int
) -> Conversation:
    """Open a rollout's conversation, with its first prompt.

    Raises:
        UserError: the prompt leaves no room for a completion, or the chat template refuses it.
    """
    try:
        conversation = chat.open(tools.system_prompt, instruction, tools.shown)
    except TemplateError as error:
        raise UserError(
            Problem(
                reason="WrongChatTemplate",
                what=f"the chat template refuses the first prompt: {error}",
                where=str(chat.template.path),
                fix="correct the template, or give a model with one that takes instructions",
            )
        ) from error
    if len(conversation.prompt) >= max_tokens:
        raise UserError(
            Problem(
                reason="PromptTooLong",
                what=f"the first prompt has {len(conversation.prompt)} tokens; a context may"
                f" have {max_tokens}",
                where="rollout.maxTokens",
                fix="raise rollout.maxTokens, shorten the instruction, or use the Compact toolset",
            )
        )
    return conversation


async def run_rollout(  # noqa: PLR0913 - the parts of a rollout
    sampler: Sampler,
    environment: RolloutEnvironment,
    chat: ChatFormat,
    tools: Toolset,
    limits: RolloutLimits,
    task: RolloutTask,
    *,
    paused_s: Callable[[], float] = lambda: 0.0,
) -> Trajectory:
    """Run one rollout from the first prompt to its end.

    A turn that reaches its limit of tokens ends the rollout and runs nothing: its calls are
    incomplete. A limit on turns ends it after the calls of the last one were run. The limit on time
    does not count `paused_s`, the seconds that sampler and environment were away.

    Raises:
        PlatformFaultError: the sampler or the environment failed, or answered inconsistently.
        UserError: the first prompt leaves no room for a completion.
    """
    opened = first_prompt(chat, tools, task.instruction, max_tokens=limits.opening_tokens)
    costs = RolloutCosts(prompt_tokens=len(opened.prompt))
    policy = TokenPolicy(
        sampler=sampler,
        conversation=opened,
        tools=tools,
        limits=limits,
        task=task,
        link=LinkDraft.start(opened.prompt),
        costs=costs,
        requests=[task.instruction],
        opening_tokens=len(opened.prompt),
    )
    loop = TurnLoop(policy, environment, tools, limits.max_turns, costs, task.steps)
    try:
        async with time_limit(limits.timeout_s, paused_s=paused_s):
            ending = await loop.run()
    except TimeoutError:
        ending = RolloutEnding.TIME_LIMIT
    return Trajectory(
        links=(*policy.links, policy.link.finish()),
        costs=costs,
        ending=ending,
        final_message=loop.final_message,
        calls=tuple(loop.records),
    )
