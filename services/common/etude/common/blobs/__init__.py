"""Object store: a folder or any S3, behind one small protocol."""

from etude.common.blobs.conformance import probe
from etude.common.blobs.factory import Deadlines, open_bucket, open_store
from etude.common.blobs.memory import MemoryStore
from etude.common.blobs.obstore_client import ObstoreStore
from etude.common.blobs.range_reader import Range, RangeReader
from etude.common.blobs.retry_policy import TransferLimits
from etude.common.blobs.store import (
    MAX_CREATE_BYTES,
    DeniedError,
    ExistsError,
    MissingError,
    NoBucketError,
    ObjectInfo,
    ShortReadError,
    Store,
    StoreRefusedError,
    is_unavailable,
)

__all__ = [
    "MAX_CREATE_BYTES",
    "Deadlines",
    "DeniedError",
    "ExistsError",
    "MemoryStore",
    "MissingError",
    "NoBucketError",
    "ObjectInfo",
    "ObstoreStore",
    "Range",
    "RangeReader",
    "ShortReadError",
    "Store",
    "StoreRefusedError",
    "TransferLimits",
    "is_unavailable",
    "open_bucket",
    "open_store",
    "probe",
]
