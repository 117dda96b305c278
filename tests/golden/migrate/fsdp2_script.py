import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def shard(model):
    kwargs = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}
    kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True, **kwargs)
        layer.set_modules_to_forward_prefetch([layer, layer])
    fully_shard(model, reshard_after_forward=False, **kwargs)
    compiled = torch.compile(model, mode="reduce-overhead")
    return get_model_state_dict(compiled, options=StateDictOptions(full_state_dict=False))
