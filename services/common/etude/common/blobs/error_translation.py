"""Translation of obstore's errors into our error classes."""

import contextlib
import re
from collections.abc import Iterator

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from etude.common.blobs.store import (
    DeniedError,
    ExistsError,
    MissingError,
    NoBucketError,
    ShortReadError,
    StoreRefusedError,
)
from etude.common.errors import EtudeError, InvalidFieldError, StoreError

LONGEST = 10_000
"""Characters of a message that are looked at: a server may send any amount."""
NO_CREDENTIALS = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


class ConflictError(StoreError):
    """Two conditional writes met, and the store does not say which one won.

    S3 answers so when a concurrent delete succeeds first; obstore calls it "already exists".
    """


class LostUploadError(StoreError):
    """The store knows no such upload in parts: it is finished, or was aborted.

    The client is told so when the reply to its last request was lost, and it sent that again.
    """


_BY_TEXT: tuple[tuple[str, type[EtudeError], str], ...] = (
    # Where the client looks for credentials when the environment has none.
    (r"169\.254\.169\.254", DeniedError, NO_CREDENTIALS),
    (r"NoSuchBucket", NoBucketError, "the bucket does not exist"),
    (r"NoSuchUpload", LostUploadError, "the upload is gone before its end was confirmed"),
    (
        r"status code: 416|Requested range was invalid",
        ShortReadError,
        "the object ends before the range starts",
    ),
    (r"status code: 40[13]", DeniedError, ""),  # of a listing, which has no type of its own
    (r"status code: 409", ConflictError, ""),
    # A folder's: EPERM, EACCES and EROFS; ENOTDIR, EISDIR, ENAMETOOLONG and ELOOP.
    (r"LocalFileSystem.*\(os error (1|13|30)\)", DeniedError, ""),
    (r"LocalFileSystem.*\(os error (20|21|36|40)\)", StoreRefusedError, ""),
    # 404 and 412 have types of their own; 408 and 429 pass.
    (r"status code: 4(?!04|08|12|29)\d\d", StoreRefusedError, ""),
)
"""What obstore's types do not tell: pattern, our error, and better words."""


@contextlib.contextmanager
def translate_errors(where: str) -> Iterator[None]:
    """Run one call of obstore.

    Raises:
        EtudeError: the error of the call in our names, chained to it.
    """
    try:
        yield
    except EtudeError:
        raise
    except (BaseError, OSError, ValueError) as cause:
        error = translate_error(cause, where)
        raise error from cause


def translate_error(error: Exception, where: str) -> EtudeError:
    """Our error for an error of obstore; `where` names the object."""
    text = str(error)[:LONGEST]
    for pattern, kind, what in _BY_TEXT:
        if re.search(pattern, text, re.DOTALL):
            return kind(f"{where}: {what or readable_message(text)}")
    match error:
        case AlreadyExistsError():
            return ExistsError(where)
        case FileNotFoundError():
            return MissingError(f"{where}: missing")
        case PermissionDeniedError() | UnauthenticatedError():
            return DeniedError(f"{where}: {readable_message(text)}")
        case ValueError():
            return InvalidFieldError("key", readable_message(text))
        case _:
            return StoreError(f"{where}: {readable_message(text)}")


def readable_message(text: str) -> str:
    """The part of a message that a person can use: the store's own words, on one line."""
    text = text[:LONGEST].partition("Debug source")[0]
    words = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    code = re.search(r"<Code>(.*?)</Code>", text, re.DOTALL)
    if words and code:
        text = f"{code[1]}: {words[1]}"
    return " ".join(text.split())[:500]
