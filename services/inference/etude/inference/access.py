"""Whether the role may read the run's versions, asked before minutes go into an engine."""

import logging

from etude.common.blobs import MissingError, NoBucketError, RefusedError, Store
from etude.common.errors import StoreError
from etude.common.weights.protocol.versions import EPOCHS, epoch_key

log = logging.getLogger(__name__)

_NO_BUCKET = "make the bucket with `etude storage init`, or correct the URL"
_NO_RIGHTS = "give this role's credentials GetObject and ListBucket here, and PutObject for leases"


def require_readable(store: Store) -> None:
    """List and read as a replica does, and refuse a store that will not have it.

    A store that does not answer is no reason to end: the replica can wait for it.

    Raises:
        StoreError: the store answered no; it says which call, and the way out.
    """
    call = "list"
    try:
        found = next(iter(store.list(EPOCHS)), None)
        call = "get"
        store.get(epoch_key(1) if found is None else found.key)
    except MissingError:
        return  # no trainer was here yet, or it deleted what was listed
    except RefusedError as error:
        fix = _NO_BUCKET if isinstance(error, NoBucketError) else _NO_RIGHTS
        raise StoreError(f"{store.url}: {call}: {error}; {fix}") from error
    except StoreError as error:
        log.warning("%s: %s: %s; versions are looked for later", store.url, call, error)
