"""Files of a Hugging Face model folder that describe its tokenizer, read with named errors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from etude.common.errors import Problem, UserError

MAX_FILE_BYTES = 256 << 20
"""Largest file that is read: the tokenizers of 2026 have at most 40 MB."""


def read_json(path: Path) -> Mapping[str, Any]:
    """Read one JSON object; a missing file is an empty one.

    Raises:
        UserError: the file is no JSON object, is too large or cannot be read.
    """
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse_folder(path, f"is not JSON: {error}", "restore the file of the model's publisher")
    if not isinstance(value, dict):
        refuse_folder(path, "is not a JSON object", "restore the file of the model's publisher")
    return value


def read_text(path: Path) -> str | None:
    """Read one text file; None if it is missing.

    Raises:
        UserError: the file is no text, is too large or cannot be read.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            what = f"has {size} bytes; at most {MAX_FILE_BYTES} are read"
            refuse_folder(path, what, "give the folder of a model")
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        refuse_folder(path, f"cannot be read: {error}", "restore the file of the model's publisher")


def refuse_folder(path: Path, what: str, fix: str, reason: str = "WrongTokenizer") -> NoReturn:
    """Refuse a model folder because of one of its files.

    Raises:
        UserError: always.
    """
    raise UserError(Problem(reason=reason, what=what, where=str(path), fix=fix))
