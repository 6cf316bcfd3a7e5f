"""Images that tasks name by digest: pulled, unpacked and converted by kept tools."""
