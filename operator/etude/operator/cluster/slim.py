"""What of an object is worth keeping in memory."""

from etude.operator.manifests import Manifest

POD_SPEC = ("nodeName",)
"""All that anybody here asks of a pod's spec, but for a host name that is not the pod's own name.
The rest is most of what ten thousand pods weigh."""


def unmanaged(manifest: Manifest) -> Manifest:
    """The object without what nobody here reads and every write lengthens."""
    if "managedFields" not in manifest["metadata"]:
        return manifest
    metadata = {k: v for k, v in manifest["metadata"].items() if k != "managedFields"}
    return {**manifest, "metadata": metadata}


def slim(manifest: Manifest) -> Manifest:
    """The object as a cache of a large cluster keeps it."""
    if manifest["kind"] == "Pod" and "spec" in manifest:
        spec = {key: manifest["spec"][key] for key in POD_SPEC if key in manifest["spec"]}
        host = manifest["spec"].get("hostname")
        if host not in {None, manifest["metadata"]["name"]}:
            spec["hostname"] = host
        manifest = {**manifest, "spec": spec}
    return unmanaged(manifest)
