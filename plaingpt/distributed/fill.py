"""Makes a GPT without memory, and gives the parts of a split one their values."""

from plaingpt.distributed.dtensors import scatter
from plaingpt.distributed.memory import memory_advice
from plaingpt.distributed.pipeline import own_gpt

import torch
from torch.overrides import TorchFunctionMode


class SkipNormal(TorchFunctionMode):
    """A context in which nn.init.normal_, which nn.Embedding calls, does nothing.

    Without memory, there are no values to draw. But for this call, PyTorch would import its
    compiler, which takes as long as the import of torch itself.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.init.normal_:
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def make_whole_gpt(GPT, config, activation_checkpointing=False):
    """Returns the whole GPT of this GPTConfig on the meta device: names and shapes, no memory.

    GPT: the class of model.py.
    """
    with torch.device("meta"), SkipNormal():
        return GPT(config, activation_checkpointing)


def fill_split_model(model, whole_gpt, weights, seed, device):
    """Allocates the parameters and buffers of a split model on the device, and fills them.

    Whole tensors are made one at a time, so no process ever has the whole model in memory. All
    processes draw the numbers of all parameters, and each keeps its part. So the values depend only
    on the seed, and not on how the model is split.

    model: from cut_model, on the meta device. whole_gpt: from make_whole_gpt. weights: a state
    dict, or None for random values. Raises UserError if the device has too little memory.
    """
    others = make_other_values(whole_gpt, weights, seed, device)
    part = own_gpt(model)
    own = dict(part.named_parameters())
    torch.manual_seed(seed)
    with memory_advice("the model does not fit into memory; choose a smaller one"):
        for name, p in whole_gpt.named_parameters():
            if weights:
                values = weights[name]
            else:
                values = whole_gpt.first_values(name, p.shape)
                if values is None:
                    values = others[name]
            if name in own:
                filled = torch.nn.Parameter(scatter(name, values, own[name], device))
                torch.utils.swap_tensors(own[name], filled)  # keeps tied weights tied
    for name, buffer in list(part.named_buffers()):
        values = (weights or {}).get(name, others[name])
        layer, _, attribute = name.rpartition(".")
        # A module keeps a tensor as a buffer if it has a buffer of this name.
        setattr(part.get_submodule(layer), attribute, values.to(device, buffer.dtype, copy=True))


def make_other_values(whole_gpt, weights, seed, device):
    """Returns the values of what GPT-2 does not have: {name of a parameter or buffer: tensor}.

    Only their constructors know them. So if there are any, this makes the whole GPT once, as one
    process does. weights: as in fill_split_model.
    """
    names = [name for name, _ in whole_gpt.named_buffers()]
    if not weights:
        for name in dict(whole_gpt.named_parameters()):
            if whole_gpt.first_values(name, (0,)) is None:
                names.append(name)
    if not names:
        return {}
    with memory_advice(f"{names[0]} is not in GPT-2; on one GPU and with DDP it needs less memory"):
        torch.manual_seed(seed)
        with torch.device(device):
            model = type(whole_gpt)(whole_gpt.config)
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: values[name].detach() for name in names}
