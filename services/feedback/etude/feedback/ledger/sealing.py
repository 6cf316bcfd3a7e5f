"""Encryption of events with the keys of their users."""

import hmac
import os
from hashlib import sha256
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from etude.common.errors import CorruptError

_NONCE_BYTES = 12


class SealedText(NamedTuple):
    """Text encrypted by AES-256-GCM."""

    nonce: bytes
    ciphertext: bytes


def seal(text: bytes, key: bytes, *, label: bytes) -> SealedText:
    """Encrypt a text that belongs to a label, such as the digest of its event.

    A key seals far fewer than 2³² texts, below which random nonces are safe (NIST SP 800-38D §8.3).
    """
    nonce = os.urandom(_NONCE_BYTES)
    return SealedText(nonce, AESGCM(key).encrypt(nonce, text, label))


def unseal(sealed: SealedText, key: bytes, *, label: bytes) -> bytes:
    """Decrypt a text.

    Raises:
        CorruptError: text, key or label is another.
    """
    try:
        return AESGCM(key).decrypt(sealed.nonce, sealed.ciphertext, label)
    except (InvalidTag, ValueError):
        raise CorruptError("an event does not decrypt with the key of its user") from None


def content_digest(text: bytes, key: bytes) -> bytes:
    """Digest of a content, to know it again; worthless without the key.  [N] -> [16]."""
    return hmac.digest(key, text, sha256)[:16]
