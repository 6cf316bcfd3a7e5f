"""Encryption of recorded turns, which ends with the key of their user.

    turn key of a user     X25519; the private half is derived from the user's key in the ledger
    writer key             X25519, made by a gateway for one user, and kept in its memory
    data key               HKDF-SHA256 of what the two agree on, for one user and one writer key
    sealed tokens          AES-256-GCM under the data key, bound to the turn's id

Gateways know public halves alone: they write what only the feedback service reads, and only until
it destroys the user's key.
"""

import hmac
import os
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from google.protobuf.message import DecodeError

from etude.common.errors import CorruptError
from etude.v1 import turns_pb2

_NONCE_BYTES = 12
_DATA_KEY_BYTES = 32
_INFO = b"etude turns 1"


class TurnKey(NamedTuple):
    """Public key of a user, under which turns are sealed."""

    user_digest: str
    """Name of the user in the feedback ledger."""
    generation: int
    public_key: bytes
    """X25519.  [32]"""


@dataclass(frozen=True, slots=True)
class TurnSealer:
    """Seals the turns of one user."""

    key: TurnKey
    writer_key: bytes
    data_key: bytes = field(repr=False)

    @classmethod
    def make(cls, key: TurnKey) -> "TurnSealer":
        """Agree on a data key with the holder of a user's key.

        Raises:
            ValueError: the public key is none.
        """
        writer = X25519PrivateKey.generate()
        public = writer.public_key().public_bytes_raw()
        secret = writer.exchange(X25519PublicKey.from_public_bytes(key.public_key))
        return cls(key, public, _derive(secret, public, key.public_key))

    def seal(self, record: turns_pb2.TurnRecord) -> None:
        """Replace the tokens and the user's name in a record.

        A data key seals far fewer than 2³² turns, below which random nonces are safe
        (NIST SP 800-38D §8.3).
        """
        tokens = turns_pb2.TurnTokens(
            prompt_token_ids=record.prompt_token_ids,
            token_ids=record.token_ids,
            logprobs=record.logprobs,
        )
        nonce = os.urandom(_NONCE_BYTES)
        sealed = turns_pb2.SealedTokens(
            key_generation=self.key.generation,
            writer_key=self.writer_key,
            nonce=nonce,
            ciphertext=AESGCM(self.data_key).encrypt(
                nonce, tokens.SerializeToString(), record.turn_id.encode()
            ),
            num_tokens=len(record.token_ids),
        )
        for name in ("prompt_token_ids", "token_ids", "logprobs", "user"):
            record.ClearField(name)
        record.user_digest = self.key.user_digest
        record.sealed.CopyFrom(sealed)


def open_turn(record: turns_pb2.TurnRecord, user_key: bytes) -> turns_pb2.TurnRecord:
    """The record with its tokens.

    The data key is agreed on again for each turn, which takes 0.1 ms: kept ones would outlive the
    key of their user.

    Args:
        record: with sealed tokens.
        user_key: of its user, of the generation that it names.  [32]

    Raises:
        CorruptError: it is damaged, or was sealed under another key.
    """
    sealed = record.sealed
    try:
        data_key = _agree(sealed.writer_key, user_key)
        text = AESGCM(data_key).decrypt(sealed.nonce, sealed.ciphertext, record.turn_id.encode())
        tokens = turns_pb2.TurnTokens.FromString(text)
    except (InvalidTag, ValueError, DecodeError):
        what = "does not decrypt with the key of its user"
        raise CorruptError(f"turn {record.turn_id}: {what}") from None
    opened = turns_pb2.TurnRecord()
    opened.CopyFrom(record)
    opened.ClearField("sealed")
    opened.prompt_token_ids.extend(tokens.prompt_token_ids)
    opened.token_ids.extend(tokens.token_ids)
    opened.logprobs.extend(tokens.logprobs)
    return opened


def derive_public_key(user_key: bytes) -> bytes:
    """Public half of a user's turn key.  [32] -> [32]."""
    return _private_key(user_key).public_key().public_bytes_raw()


def _agree(writer_key: bytes, user_key: bytes) -> bytes:
    """Data key of one user and one writer.  [32], [32] -> [32]."""
    private = _private_key(user_key)
    secret = private.exchange(X25519PublicKey.from_public_bytes(writer_key))
    return _derive(secret, writer_key, private.public_key().public_bytes_raw())


def _private_key(user_key: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(hmac.digest(user_key, _INFO, sha256))


def _derive(secret: bytes, writer_key: bytes, public_key: bytes) -> bytes:
    info = _INFO + writer_key + public_key
    return HKDF(hashes.SHA256(), _DATA_KEY_BYTES, salt=None, info=info).derive(secret)
