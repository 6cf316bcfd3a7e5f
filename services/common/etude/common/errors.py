"""Errors that cross a boundary, each with its reason and gRPC status."""

import contextlib
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import grpc
from typing_extensions import override


class Problem(NamedTuple):
    """One thing that a user can correct, with a suggested fix."""

    reason: str
    what: str
    where: str
    fix: str

    def text(self) -> str:
        """The three parts, as every surface prints them."""
        return f"{self.where}  {self.what}\n  fix: {self.fix}  [{self.reason}]"


class EtudeError(Exception):
    """Base of our errors; the status and reason are what a peer sees."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "Internal"

    @override
    def __reduce__(self) -> tuple[object, ...]:
        # The default calls the class with args, which are not what every __init__ takes: an error
        # that crosses a process would arrive as a TypeError about itself.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(
    kind: type[EtudeError], args: tuple[object, ...], fields: dict[str, object]
) -> EtudeError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class InvalidFieldError(EtudeError, ValueError):
    """A request or a setting is wrong in one named field."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "InvalidArgument"

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"{field}: {what}")
        self.field = field
        self.what = what


class UserError(EtudeError):
    """Something a user did that cannot work, with a suggested fix."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FailedPrecondition"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text())
        self.problem = problem


class UnknownIdError(EtudeError, LookupError):
    """No such lease, version or object, or it belongs to another caller."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NotFound"


class ForbiddenError(EtudeError):
    """The token does not allow this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PermissionDenied"


class WrongStateError(EtudeError):
    """Fenced, ended, or not able to."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FailedPrecondition"


class ReusedIdError(EtudeError):
    """The same id came with other content."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "AlreadyExists"


class FullError(EtudeError):
    """A limit is exceeded for now; retry after the given time."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "ResourceExhausted"

    def __init__(self, what: str, *, retry_after_s: float) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s


class UnavailableError(EtudeError):
    """A platform part is down; retry."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "Unavailable"


class StoreError(UnavailableError):
    """The object store did not do what was asked."""

    reason = "StorageUnavailable"


class CorruptError(EtudeError):
    """Data does not match its digest or format; never retried."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "Corrupt"


class FencedError(WrongStateError):
    """A newer epoch took over."""

    reason = "Fenced"


@contextlib.contextmanager
def crossing(error: type[EtudeError], what: str) -> Iterator[None]:
    """Attribute a system error that escapes the block to one boundary, exactly once.

    Raises:
        EtudeError: of the given type, chained to the system error.
    """
    try:
        yield
    except EtudeError:
        raise
    except (OSError, TimeoutError) as cause:
        raise error(f"{what}: {cause}") from cause
