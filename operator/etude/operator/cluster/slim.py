"""Reduction of objects to the part that the cache keeps."""

from etude.operator.manifests import Manifest

POD_SPEC = ("nodeName",)
"""Fields of a pod's spec that the operator reads, with a host name unlike the pod's name. The rest
is most of the memory of ten thousand pods."""


def unmanaged(manifest: Manifest) -> Manifest:
    """The object without managedFields, which every write lengthens."""
    if "managedFields" not in manifest["metadata"]:
        return manifest
    metadata = {k: v for k, v in manifest["metadata"].items() if k != "managedFields"}
    return {**manifest, "metadata": metadata}


def slim(manifest: Manifest) -> Manifest:
    """The object as the cache of a large cluster keeps it."""
    if manifest["kind"] == "Pod" and "spec" in manifest:
        spec = {key: manifest["spec"][key] for key in POD_SPEC if key in manifest["spec"]}
        host = manifest["spec"].get("hostname")
        if host not in {None, manifest["metadata"]["name"]}:
            spec["hostname"] = host
        manifest = {**manifest, "spec": spec}
    return unmanaged(manifest)
