"""Messages of the client library, as it wrote them, in our names."""

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError

from etude.common.blobs import (
    DeniedError,
    ExistsError,
    MissingError,
    NoBucketError,
    ShortReadError,
    StoreRefusedError,
)
from etude.common.blobs.error_translation import (
    ConflictError,
    LostUploadError,
    readable_message,
    translate_error,
)
from etude.common.errors import EtudeError, StoreError

NON_2XX = "Error performing PUT http://h/b/k in 2ms - Server returned non-2xx status code: "
LOCAL = "Generic LocalFileSystem error: Unable to open file /store/k: {} (os error {})"
XML = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{}</Code><Message>{}</Message><RequestId>x</RequestId></Error>

Debug source:
Generic {{ … }}"""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GenericError(NON_2XX + "503 Slow Down: "), StoreError),
        (GenericError(NON_2XX + "429 Too Many Requests: "), StoreError),
        (GenericError(NON_2XX + "400 Bad Request: "), StoreRefusedError),
        (GenericError(NON_2XX + "416 Range Not Satisfiable: "), ShortReadError),
        (GenericError(NON_2XX + "403 Forbidden: "), DeniedError),
        (PermissionDeniedError(NON_2XX + "403 Forbidden: "), DeniedError),
        (GenericError("PUT http://169.254.169.254/latest/api/token: timed out"), DeniedError),
        (GenericError(NON_2XX + "404 Not Found: <Code>NoSuchBucket</Code>"), NoBucketError),
        (FileNotFoundError(NON_2XX + "404 Not Found: <Code>NoSuchBucket</Code>"), NoBucketError),
        (FileNotFoundError(NON_2XX + "404 Not Found: "), MissingError),
        (FileNotFoundError(NON_2XX + "404 Not Found: <Code>NoSuchUpload</Code>"), LostUploadError),
        (AlreadyExistsError(NON_2XX + "412 Precondition Failed: "), ExistsError),
        (AlreadyExistsError(NON_2XX + "409 Conflict: "), ConflictError),
        (GenericError(LOCAL.format("Permission denied", 13)), DeniedError),
        (GenericError(LOCAL.format("Operation not permitted", 1)), DeniedError),
        (GenericError(LOCAL.format("Read-only file system", 30)), DeniedError),
        (GenericError(LOCAL.format("Not a directory", 20)), StoreRefusedError),
        (GenericError(LOCAL.format("File name too long", 36)), StoreRefusedError),
        (GenericError(LOCAL.format("No space left on device", 28)), StoreError),
        (GenericError(LOCAL.format("Input/output error", 5)), StoreError),
        (GenericError("error sending request: Permission denied (os error 13)"), StoreError),
        (GenericError("error sending request"), StoreError),
        (OSError("No space left on device"), StoreError),
    ],
)
def test_each_error_of_the_client_has_one_name_of_ours(
    error: Exception, kind: type[EtudeError]
) -> None:
    ours = translate_error(error, "s3://b/k")
    assert type(ours) is kind
    assert str(ours).startswith("s3://b/k")


def test_a_message_is_the_stores_own_sentence_on_one_line() -> None:
    text = NON_2XX + "403 Forbidden: " + XML.format("AccessDenied", "Access\nDenied.")
    assert readable_message(text) == "AccessDenied: Access Denied."
    assert readable_message("first\n  second\n\nDebug source:\nX { }") == "first second"


def test_a_message_of_a_hostile_store_is_kept_short() -> None:
    assert len(readable_message("<Code>" + "x" * 100_000)) <= 500
