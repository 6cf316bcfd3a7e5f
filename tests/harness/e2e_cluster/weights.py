"""What the engine serves, held against what is in the store."""

from tests.harness.e2e_cluster.scene import PREFIX, Scene

from etude.common.weights import VersionId, is_accepted, newest_version, read_manifest
from etude.common.weights.protocol.versions import DELTAS
from etude.v1 import weights_pb2


def see_deltas_through_minio(scene: Scene) -> None:
    """Versions are deltas in MinIO, and the engine serves the newest of them."""
    store = scene.store(PREFIX)
    deltas = [each for each in store.list(DELTAS) if each.key.endswith(".dlt")]
    assert deltas, "no delta was published"
    sizes = [each.size for each in deltas]
    scene.say(f"{len(deltas)} deltas in MinIO, {min(sizes)} to {max(sizes)} bytes")
    version = served(scene)
    manifest = read_manifest(store, version)
    assert not manifest.is_complete, f"{version} is whole, not a delta"
    scene.say(
        f"the engine serves {version}, a delta of {manifest.num_bytes} bytes to {manifest.base}"
    )


def served(scene: Scene, at_least: VersionId | None = None) -> VersionId:
    """The version that the engine serves, proved to be one that the trainer published.

    Raises:
        AssertionError: it is older than it may be, or not what the store holds.
    """
    status = scene.engine_status()
    serving = (weights_pb2.REPLICA_STATE_SERVING, weights_pb2.REPLICA_STATE_CATCHING_UP)
    assert status.state in serving, status
    version = VersionId.from_proto(status.live)
    store = scene.store(PREFIX)
    assert is_accepted(store, version), f"{version} is not on the accepted chain"
    assert status.manifest_sha256.hex() == read_manifest(store, version).sha256
    assert at_least is None or version >= at_least, f"{version} is older than {at_least}"
    return version


def published(scene: Scene) -> VersionId:
    """The newest version of the store."""
    version = newest_version(scene.store(PREFIX))
    assert version is not None
    return version
