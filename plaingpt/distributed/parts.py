"""Creates and initializes the parts of a split model, and gathers the parts for checkpoints.

The parameters of a split model are DTensors: each process holds a part of each tensor.
"""

from plaingpt.distributed.memory import memory_advice
from plaingpt.distributed.pipeline import Pipeline, from_stage, own_gpt
from plaingpt.ops.dtensors import count_tp, is_dtensor, reorder_rows

import torch


def slice_like(p, name, whole, device, tp_plan):
    """Returns this process's part of a whole tensor, split in the same way as parameter p.

    name: the name of p, or the name of an optimizer's value for p, which begins with the name of p.
    device: the device of the result. tp_plan: GPT.tp_plan. The processes do not communicate.
    """
    if whole.shape != p.shape or not is_dtensor(p):  # AdamW's step count has shape ()
        return whole.to(device, copy=True)  # a copy, so that Python can close the checkpoint file
    from torch.distributed.tensor import distribute_tensor

    whole = by_heads(name, whole, count_tp(p), tp_plan)
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).clone()


def by_heads(name, tensor, tp, tp_plan, back=False):
    """Reorders the rows of a "qkv" layer for TP. Returns the tensors of other layers unchanged.

    In the layer, all q come first, then all k, then all v. The result consists of tp parts, each
    with q, k and v of its own heads. back: whether to restore the original order instead.
    """
    is_qkv = any(word == "qkv" and f".{layer}." in name for layer, word in tp_plan.items())
    if not is_qkv or tp == 1:
        return tensor
    return reorder_rows(tensor, 3, tp, back)  # (3C, ...)


def map_tensors(value, function):
    """Replaces each tensor in the value by function(tensor) -> the new value.

    value: a tensor, a number, a string, None, or a list, tuple or dict of these. Raises TypeError
    if the value is, or contains, anything else.
    """
    if torch.is_tensor(value):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(each, function) for each in value)
    if type(value) is dict:
        return {key: map_tensors(each, function) for key, each in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    # NumPy's numbers are also an error: torch.load with weights_only=True cannot read them.
    raise TypeError(f"it is a {type(value).__module__}.{type(value).__qualname__}")


def gather(model, parts, process):
    """Gathers tensors, the inverse of slice_like: {name: part} -> {name: whole tensor}.

    Only rank 0 returns the tensors; other ranks return {}. Instead of a part, the dict may contain
    any value that map_tensors accepts. The tensors in such a value are only moved to the CPU.

    To save memory, gathers one split tensor at a time on the device, and moves this tensor to the
    CPU before it gathers the next tensor. All processes must call this function.
    """
    n_stages, index = (model.n_stages, model.index) if isinstance(model, Pipeline) else (1, 0)
    found = {}
    for stage in range(n_stages):
        # Only this stage knows the names of its parameters.
        for name in from_stage(stage, list(parts), model):
            whole = None
            if stage == index:
                whole = join_parts(name, parts[name], own_gpt(model).tp_plan)
                if not torch.is_tensor(whole):
                    # from_stage pickles such a value, so the tensors in it must be on the CPU.
                    whole = map_tensors(whole, torch.Tensor.cpu)
            whole = from_stage(stage, whole, model)
            if process.rank == 0:
                found[name] = map_tensors(whole, torch.Tensor.cpu)
    return found


def join_parts(name, part, tp_plan):
    """Returns the whole tensor, from the parts on all processes. All processes must call this."""
    if not is_dtensor(part):
        return map_tensors(part, torch.Tensor.detach)
    whole = part.detach().full_tensor()
    if whole.dim() == 0:
        return whole
    return by_heads(name, whole, count_tp(part), tp_plan, back=True)


def make_whole_gpt(GPT, config, activation_checkpointing=False):
    """Creates the whole GPT on the meta device, where tensors need no memory.

    GPT: the class in model.py. config: its GPTConfig.
    """
    with torch.device("meta"):
        return GPT(config, activation_checkpointing)


def whole_gpt(model):
    """For a Pipeline, returns the whole GPT on the meta device. Returns a GPT unchanged."""
    if isinstance(model, Pipeline):
        return make_whole_gpt(type(model.part), model.config)
    return model


def fill_split_model(model, meta_gpt, weights, seed, device):
    """Allocates the parameters and buffers of a split model on the device, and fills them.

    Creates one whole tensor at a time, so no process ever holds the whole model in memory. Each
    process draws the random numbers of all parameters and keeps its own part. Therefore, the
    initialization depends only on the seed, not on the split.

    model: from cut_model, on the meta device. meta_gpt: from make_whole_gpt. weights: a state dict,
    or None for GPT-2's initialization. Raises UserError if the device has too little memory.
    """
    others = make_other_values(meta_gpt, weights, seed, device)
    part = own_gpt(model)
    own = dict(part.named_parameters())
    torch.manual_seed(seed)
    with memory_advice("the model does not fit into memory; choose a smaller model"):
        for name, p in meta_gpt.named_parameters():
            if weights:
                values = weights[name]
            else:
                values = meta_gpt.initial_values(name, p.shape)
                if values is None:
                    values = others[name]
            if name in own:
                filled = torch.nn.Parameter(
                    slice_like(own[name], name, values, device, part.tp_plan)
                )
                torch.utils.swap_tensors(own[name], filled)  # tied weights stay tied
    for name, buffer in list(part.named_buffers()):
        values = (weights or {}).get(name, others[name])
        layer, _, attribute = name.rpartition(".")
        # setattr keeps a tensor as a buffer if the module has a buffer of this name.
        setattr(part.get_submodule(layer), attribute, values.to(device, buffer.dtype, copy=True))


def make_other_values(meta_gpt, weights, seed, device):
    """Returns the parameters and buffers that GPT.initial_values does not initialize.

    Returns {name: tensor}. Only the constructors of modules can initialize these tensors. If there
    are such tensors, this function creates the whole GPT once, as a run with one process does.
    weights: as in fill_split_model.
    """
    names = [name for name, _ in meta_gpt.named_buffers()]
    if not weights:
        for name in dict(meta_gpt.named_parameters()):
            if meta_gpt.initial_values(name, (0,)) is None:
                names.append(name)
    if not names:
        return {}
    with memory_advice(
        f"{names[0]} is not in GPT-2, so each process first creates the whole model, which does "
        "not fit into memory; use one GPU or DDP"
    ):
        torch.manual_seed(seed)
        with torch.device(device):
            model = type(meta_gpt)(meta_gpt.config)
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: values[name].detach() for name in names}
