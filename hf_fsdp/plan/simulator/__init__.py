"""One step on fake tensors: build, shard, run, and read the log of storages."""
