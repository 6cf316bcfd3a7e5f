"""Sessions as trees of token sequences, found again by the messages that clients repeat.

A client sends its whole conversation with every request. The longest beginning of it that ends with
a turn served here decides: the tokens of that turn's branch are kept as they are, and only what
follows is tokenised. A conversation that repeats no such turn starts a branch of its own.
"""

import asyncio
import json
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from etude.agent.chat import Conversation
from etude.gateway.turn_request import Schema, WireMessage


@dataclass(slots=True)
class Branch:
    """One token sequence of a rollout; nothing in it was ever tokenised again."""

    rollout: str
    """As its client names it, or is told to."""
    parent: str = ""
    """Branch that it was split off from."""
    compaction_of: str = ""
    """Branch that it summarises and replaces."""
    branch_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    num_recorded: int = 0
    """Tokens that records hold, from the first one on."""
    is_private: bool = False
    """True once it has a turn that was served without consent, or whose consent is not known: later
    ones repeat it, and have no record."""
    num_clean: int = 0
    """Tokens, from the first one on, in which redaction found nothing."""
    withheld_rules: tuple[str, ...] = ()
    """Redaction rules that found something behind the clean tokens: no later record has tokens."""
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a turn is recorded: in the order of the turns."""

    def split(self, num_tokens: int) -> "Branch":
        """A branch of the same rollout that shares the first tokens of this one; no record yet."""
        return Branch(
            self.rollout,
            self.branch_id,
            token_ids=self.token_ids[:num_tokens],
            is_private=self.is_private,
            num_clean=min(self.num_clean, num_tokens),
            withheld_rules=self.withheld_rules if num_tokens > self.num_clean else (),
        )


@dataclass(slots=True)
class BranchNode:
    """End of one turn of the policy, from which a conversation goes on."""

    branch: Branch
    num_tokens: int
    """Of the branch, up to the end of the turn."""
    conversation: Conversation
    is_continued: bool = False
    """True once a later turn continues the branch; any other is a branch of its own."""

    @property
    def can_continue(self) -> bool:
        """True if the branch ends here, and no turn is about to continue it."""
        return not self.is_continued and len(self.branch.token_ids) == self.num_tokens


class Continuation(NamedTuple):
    """A turn that a conversation continues."""

    node: BranchNode
    num_messages: int
    """Messages of the conversation up to the end of the turn."""


@dataclass(slots=True)
class Sessions:
    """The turns that can be continued, the most recently used ones."""

    max_tokens: int
    """Of all turns together; each counts all tokens before its end, as its texts are kept."""
    num_tokens: int = 0
    _nodes: "OrderedDict[bytes, BranchNode]" = field(default_factory=OrderedDict)

    def find(
        self, digests: Sequence[bytes], messages: Sequence[WireMessage]
    ) -> Continuation | None:
        """Find the last turn of a conversation that was sampled here.

        Args:
            digests: of each beginning of the conversation, as `digest_beginnings` gives them.
            messages: of the conversation.
        """
        for place in range(len(messages) - 1, -1, -1):
            if messages[place].role != "assistant":
                continue
            node = self._nodes.get(digests[place + 1])
            if node is not None:
                self._nodes.move_to_end(digests[place + 1])
                return Continuation(node, place + 1)
        return None

    def remember(self, digest: bytes, node: BranchNode) -> None:
        """Remember a turn by the digest of the conversation that ends with it."""
        replaced = self._nodes.pop(digest, None)
        self.num_tokens += node.num_tokens - (replaced.num_tokens if replaced else 0)
        self._nodes[digest] = node
        while self.num_tokens > self.max_tokens and len(self._nodes) > 1:
            _, oldest = self._nodes.popitem(last=False)
            self.num_tokens -= oldest.num_tokens


def digest_owner(owner: Sequence[str], tools: Sequence[Schema]) -> bytes:
    """Digest of the empty conversation of one owner, with tools."""
    return blake2b(json.dumps([owner, tools]).encode(), digest_size=16).digest()


def digest_beginnings(empty: bytes, messages: Sequence[WireMessage]) -> list[bytes]:
    """Digests of all N + 1 beginnings of a conversation of N messages, the empty one first."""
    digests = [empty]
    for message in messages:
        digests.append(blake2b(digests[-1] + _encode(message), digest_size=16).digest())
    return digests


def _encode(message: WireMessage) -> bytes:
    # Some clients strip the policy's text, and spell JSON in their own way.
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [(call.name, call.arguments) for call in message.calls]
    written = json.dumps(calls, sort_keys=True) if calls else ""
    # The length tells where the content ends: to write it as JSON would take longer than the rest.
    return f"{message.role} {len(content)} {content}{written}".encode("utf-8", "surrogatepass")
