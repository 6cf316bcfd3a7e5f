"""Tokens that the harness writes in a conversation, for tests that build transcripts."""

from collections.abc import Sequence

from etude.agent.chat import ChatFormat


def encode_opening(chat: ChatFormat, system: str, user: str) -> list[int]:
    """The first prompt."""
    return chat.open(system, user).prompt


def encode_results(chat: ChatFormat, results: Sequence[str]) -> list[int]:
    """What follows a completion that ended its turn with calls."""
    conversation = chat.open("System.", "Instruction.")
    conversation.add_completion("Calls.")
    return conversation.append_results(results)
