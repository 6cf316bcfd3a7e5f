"""Certificates of authorities, from a folder of files."""

import datetime
from pathlib import Path

from cryptography import x509


def bundle(folder: Path) -> bytes:
    """Every *.crt of a folder as one PEM text, in the order of their names."""
    found = (path.read_bytes().strip() for path in sorted(folder.glob("*.crt")))
    return b"".join(data + b"\n" for data in found if data)


def lacks(trust: bytes, told: bytes, now: datetime.datetime) -> bool:
    """Return true if a PEM text lacks an unexpired authority of another one."""
    wanted = {each for each in _authorities(told) if now < each.not_valid_after_utc}
    return not wanted <= _authorities(trust)


def _authorities(pem: bytes) -> set[x509.Certificate]:
    try:
        return set(x509.load_pem_x509_certificates(pem))
    except ValueError:  # there is none, or another's text
        return set()
