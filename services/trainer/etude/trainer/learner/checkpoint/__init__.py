"""State of the learner in the store: shards that each rank writes, read by any number of ranks.

Layout below the prefix, for each rank: <rank:05d>-<part:05d>.bin, the bytes of its shards one after
the other, then <rank:05d>.json, sealed, which names every shard with its place in its tensor and in
those bytes, has a BLAKE3 of each block, and carries what is no tensor.

(torch.distributed.checkpoint keeps its index as a pickle, which a store that others can write to
must not be trusted with.)
"""
