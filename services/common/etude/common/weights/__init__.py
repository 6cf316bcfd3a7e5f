"""Policy versions in the object store: epochs, manifests, the accepted chain, who needs what."""

from etude.common.weights.protocol.chain import accepted_chain, is_accepted, lineage, newest_version
from etude.common.weights.protocol.epochs import EpochRecord, is_fenced, read_epoch
from etude.common.weights.protocol.folded import (
    Keyframe,
    Skip,
    publish_folded,
    publish_keyframe_part,
    publish_skip_part,
    read_keyframe,
    read_skip,
)
from etude.common.weights.protocol.garbage_collector import GarbageCollector
from etude.common.weights.protocol.manifest import (
    PayloadObject,
    Stats,
    VersionRef,
    WeightManifest,
    read_manifest,
)
from etude.common.weights.protocol.plan import Edge, is_reachable, plan_path
from etude.common.weights.protocol.publication import (
    claim_epoch,
    publish_manifest,
    publish_payload,
    put_schema,
    read_schema_bytes,
)
from etude.common.weights.protocol.quarantine import (
    QuarantinedVersionError,
    Suspect,
    is_quarantined,
    list_quarantined,
    list_suspects,
    mark_suspect,
    quarantine,
)
from etude.common.weights.protocol.reader_leases import ReaderLease
from etude.common.weights.protocol.retention import Retention
from etude.common.weights.protocol.versions import MAX_LAG, VersionId
from etude.common.weights.tensors.safetensors import Tensor

__all__ = [
    "MAX_LAG",
    "Edge",
    "EpochRecord",
    "GarbageCollector",
    "Keyframe",
    "PayloadObject",
    "QuarantinedVersionError",
    "ReaderLease",
    "Retention",
    "Skip",
    "Stats",
    "Suspect",
    "Tensor",
    "VersionId",
    "VersionRef",
    "WeightManifest",
    "accepted_chain",
    "claim_epoch",
    "is_accepted",
    "is_fenced",
    "is_quarantined",
    "is_reachable",
    "lineage",
    "list_quarantined",
    "list_suspects",
    "mark_suspect",
    "newest_version",
    "plan_path",
    "publish_folded",
    "publish_keyframe_part",
    "publish_manifest",
    "publish_payload",
    "publish_skip_part",
    "put_schema",
    "quarantine",
    "read_epoch",
    "read_keyframe",
    "read_manifest",
    "read_schema_bytes",
    "read_skip",
]
