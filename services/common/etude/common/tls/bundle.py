"""Certificates of authorities, from a folder of files."""

from pathlib import Path


def bundle(folder: Path) -> bytes:
    """Every *.crt of a folder as one PEM text, in the order of their names."""
    found = (path.read_bytes().strip() for path in sorted(folder.glob("*.crt")))
    return b"".join(data + b"\n" for data in found if data)
