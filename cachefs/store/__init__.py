"""The NVMe store: one preallocated file a shard, and the LMDB index over them."""
