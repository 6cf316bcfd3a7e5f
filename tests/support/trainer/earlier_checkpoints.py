"""Learner states as earlier releases stored them."""

from typing import Any

from blake3 import blake3

from etude.common.blobs import Store
from etude.common.weights.protocol import records
from etude.common.weights.tensors import safetensors
from etude.trainer.learner.checkpoint.index import read_indexes


def rewrite_in_format_1(store: Store, prefix: str) -> None:
    """Store a state as earlier releases did: complete tensors in two safetensors files."""
    saved = read_indexes(store, prefix)
    [stream] = saved.streams
    data = b"".join(store.get(key) for key in stream.keys)
    tensors = [
        safetensors.Tensor(
            name=shard.name,
            dtype=shard.dtype,
            shape=shard.shape,
            data=data[shard.offset : shard.offset + shard.num_bytes],
        )
        for shard in stream.shards
    ]
    store.delete([info.key for info in store.list(f"{prefix}/")])
    parts: list[Any] = []
    for number, part in enumerate((tensors[::2], tensors[1::2])):
        content = safetensors.encode(part)
        digest = blake3(content).hexdigest()
        parts.append({"name": f"{number:04d}-{digest[:16]}.safetensors", "blake3": digest})
        parts[-1]["size"] = len(content)
        store.put(f"{prefix}/{parts[-1]['name']}", content)
    index: dict[str, Any] = {
        "format": 1,
        "parts": parts,
        "tensors": len(tensors),
        "state": saved.state,
    }
    store.put(f"{prefix}/index.json", records.seal(index))
