"""Owners of leases: the run, or the environment API, of the certificate that asked for each."""

from etude.common.errors import ForbiddenError, InvalidFieldError
from etude.common.pools import run_ids
from etude.common.tls import metrics
from etude.common.tls.identity import EDGE
from etude.common.tls.policy import AuthenticatedCall, caller_of


def owner_of(call: AuthenticatedCall) -> str:
    """Owner that the caller's certificate names.

    It is empty without TLS, and for a certificate of a whole namespace, which cannot tell its
    holders apart.
    """
    caller = caller_of(call)
    if caller is None or not caller.role:
        return ""
    return f"pool/{caller.pool}" if caller.role == EDGE else f"run/{caller.run}"


def owned_run_id(call: AuthenticatedCall, run_id: str) -> str:
    """The caller's run id: what it sent, as that of the owner in its certificate.

    Raises:
        InvalidFieldError: it would be taken for an id of another owner.
    """
    if run_ids.SEPARATOR in run_id:
        raise InvalidFieldError("run_id", f"must not have {run_ids.SEPARATOR}")
    return run_ids.owned_id(owner_of(call), run_id) if run_id else run_id


def require_owner(call: AuthenticatedCall, lease_id: str, run_id: str) -> None:
    """Refuse a call on a lease of another owner.

    Args:
        call: with the caller's certificate.
        lease_id: of the lease.
        run_id: that it was granted to.

    Raises:
        ForbiddenError: the lease belongs to another owner.
    """
    refuse_other_owner(owner_of(call), lease_id, run_id)


def refuse_other_owner(caller: str, lease_id: str, run_id: str) -> None:
    """Refuse a lease to a caller that is not its owner; an empty caller is anyone.

    Raises:
        ForbiddenError: the lease belongs to another owner.
    """
    if caller and caller != run_ids.owner_part(run_id):
        metrics.REFUSED.labels("server").inc()
        raise ForbiddenError(f"lease {lease_id!r} is not one of {caller}")
