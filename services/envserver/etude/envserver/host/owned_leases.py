"""Search for the environment of a lease, for its owner alone."""

from etude.common.tls.lease_owner import require_owner
from etude.common.tls.policy import AuthenticatedCall
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host


def find_owned(host: Host, lease_id: str, call: AuthenticatedCall) -> LeasedEnvironment:
    """The environment of a lease, for a caller that the lease belongs to.

    Tokens are checked as well: an owner's programs do not all hold the same ones.

    Raises:
        UnknownIdError: this host does not hold it, or no longer.
        WrongStateError: it has expired and is kept.
        ForbiddenError: it belongs to another owner.
    """
    environment = host.find(lease_id)
    require_owner(call, lease_id, environment.record.held.run_id)
    return environment
