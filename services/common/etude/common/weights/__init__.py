"""Policy versions in the object store: epochs, manifests, tensors, the accepted chain."""

from etude.common.weights.chain import accepted_chain, is_accepted, newest, prune
from etude.common.weights.epochs import EpochRecord, claim_epoch, is_fenced, read_epoch
from etude.common.weights.full import FullManifest, FullObject, read_full_manifest
from etude.common.weights.safetensors import Tensor
from etude.common.weights.transfer import Fetched, fetch, publish
from etude.common.weights.versions import VersionId

__all__ = [
    "EpochRecord",
    "Fetched",
    "FullManifest",
    "FullObject",
    "Tensor",
    "VersionId",
    "accepted_chain",
    "claim_epoch",
    "fetch",
    "is_accepted",
    "is_fenced",
    "newest",
    "prune",
    "publish",
    "read_epoch",
    "read_full_manifest",
]
