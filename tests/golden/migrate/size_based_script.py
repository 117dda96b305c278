from functools import partial

from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

policy = partial(size_based_auto_wrap_policy, min_num_params=int(2e7))
model = FullyShardedDataParallel(model, auto_wrap_policy=policy, cpu_offload=CPUOffload(offload_params=True))  # noqa: F821
