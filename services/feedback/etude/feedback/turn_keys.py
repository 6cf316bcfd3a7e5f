"""Keys of recorded turns: given to gateways for sealing, and used here for reading."""

import re
from dataclasses import dataclass
from typing import Any

import grpc
from typing_extensions import override

from etude.common.errors import CorruptError, InvalidFieldError
from etude.common.turns.turn_sealing import derive_public_key, open_turn
from etude.feedback.ledger.ledger import FeedbackLedger
from etude.feedback.ledger.state import LedgerState
from etude.feedback.ledger.user_keys import LedgerSecret, UserId, UserKeys
from etude.v1 import turns_pb2, turns_pb2_grpc

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True)
class TurnKeyService(turns_pb2_grpc.TurnKeyServiceServicer):
    """Answers gateways by their certificates, and without certificates those on this machine.

    A public key tells nothing that was recorded.
    """

    ledger: FeedbackLedger

    @override
    async def GetTurnKey(
        self,
        request: turns_pb2.GetTurnKeyRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> turns_pb2.GetTurnKeyResponse:
        for name, value in (("tenant", request.tenant), ("user", request.user)):
            if not _NAME.fullmatch(value):
                raise InvalidFieldError(name, "must be 1 to 256 characters, none for control")
        user = self.ledger.secret.user_id(request.tenant, request.user)
        key = await self.ledger.user_key(user)
        return turns_pb2.GetTurnKeyResponse(
            user_digest=user.digest,
            key_generation=key.generation,
            public_key=derive_public_key(key.key),
        )


def read_turn(
    record: turns_pb2.TurnRecord, state: LedgerState, keys: UserKeys
) -> turns_pb2.TurnRecord | None:
    """The record with its tokens; None if its user was erased since; blocks.

    Raises:
        CorruptError: the record or the key of its user is damaged.
        StoreError: the store of keys did not answer.
    """
    if not record.HasField("sealed"):
        return record
    user = find_user(record, keys.secret)
    if user is None:
        raise CorruptError(f"turn {record.turn_id} names no user")
    if record.sealed.key_generation < state.generation(user):
        return None  # also if somebody made a key of that generation while it was destroyed
    key = keys.find(user, record.sealed.key_generation)
    return None if key is None else open_turn(record, key)


def find_user(record: turns_pb2.TurnRecord, secret: LedgerSecret) -> UserId | None:
    """User of a recorded turn, as the ledger knows one; None if a damaged record names none."""
    if not record.HasField("sealed"):
        return secret.user_id(record.tenant, record.user)
    is_known = _DIGEST.fullmatch(record.user_digest)
    return UserId(record.tenant, record.user_digest) if is_known else None
