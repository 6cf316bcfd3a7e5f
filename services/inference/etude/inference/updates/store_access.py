"""Early check that the role may read the run's versions: building an engine takes minutes."""

import logging

from etude.common.blobs import MissingError, NoBucketError, Store, StoreRefusedError
from etude.common.errors import StoreError
from etude.common.weights.protocol.versions import EPOCHS, epoch_key

log = logging.getLogger(__name__)

_NO_BUCKET = "make the bucket with `etude storage init`, or correct the URL"
_NO_RIGHTS = "give this role's credentials GetObject and ListBucket here, and PutObject for leases"


def require_readable_store(store: Store) -> None:
    """List and read as a replica does, and refuse a store that denies it.

    A store that does not answer is no error: the replica can wait for it.

    Raises:
        StoreError: the store denied a call; the text names the call and a suggested fix.
    """
    call = "list"
    try:
        found = next(iter(store.list(EPOCHS)), None)
        call = "get"
        store.get(epoch_key(1) if found is None else found.key)
    except MissingError:
        return  # no trainer has published yet, or it deleted the listed object
    except StoreRefusedError as error:
        fix = _NO_BUCKET if isinstance(error, NoBucketError) else _NO_RIGHTS
        raise StoreError(f"{store.url}: {call}: {error}; {fix}") from error
    except StoreError as error:
        log.warning("%s: %s: %s; the replica retries later", store.url, call, error)
