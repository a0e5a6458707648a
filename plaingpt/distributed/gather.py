"""Gathers the parts of a split model, for checkpoints."""

from plaingpt.distributed.dtensors import by_heads, is_dtensor
from plaingpt.distributed.pipeline import Pipeline

import torch
import torch.distributed as dist


def gather(model, parts, process):
    """The inverse of scatter: {name: part} -> {name: whole tensor} on rank 0, {} on the others.

    Gathers the split tensors on the device one at a time, and moves each to the CPU before the next
    one, to save memory. All processes must call this.
    """
    if isinstance(model, Pipeline):
        return gather_stages(model, parts, process)
    found = {}
    for name, part in parts.items():
        whole = join_parts(name, part)
        if process.rank == 0:
            found[name] = whole.cpu()
    return found


def gather_stages(model, parts, process):
    """Does the same for a Pipeline. One stage after the other broadcasts its tensors."""
    found = {}
    for stage in range(model.n_stages):
        # The other stages do not know the names, shapes and dtypes of these tensors.
        shapes = {name: (part.shape, part.dtype) for name, part in parts.items()}
        message = [shapes]  # the broadcast replaces this element by that of the stage
        dist.broadcast_object_list(message, group=model.group, group_src=stage)
        for name, (shape, dtype) in message[0].items():
            if stage == model.index:
                whole = join_parts(name, parts[name])
            else:
                whole = torch.empty(shape, dtype=dtype)
            whole = whole.to(process.device)  # AdamW's count of steps may be on the CPU
            dist.broadcast(whole, group=model.group, group_src=stage)
            if process.rank == 0:
                found[name] = whole.cpu()
    return found


def join_parts(name, part):
    """Returns the whole tensor of which each process has a part. All processes must call this."""
    part = part.detach()
    if not is_dtensor(part):
        return part
    return by_heads(name, part.full_tensor(), part.device_mesh, back=True)
