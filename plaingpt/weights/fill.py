"""Makes a GPT without memory, and fills its parameters with values."""

import math

from plaingpt.base.errors import UserError
from plaingpt.distributed.dtensors import scatter
from plaingpt.distributed.memory import memory_advice

import torch


def make_whole_gpt(GPT, config):
    """Returns the whole GPT of this GPTConfig on the meta device: names and shapes, no memory.

    GPT: the class of model.py.
    """
    with torch.device("meta"):
        return GPT(config)


def load_weights(model, whole_model, weights=None, seed=0, device="cpu"):
    """Allocates the parameters of a meta model on the device, one at a time, and fills them.

    whole_model: from make_whole_gpt; it has the parameters of all processes. weights: a state dict.
    Without it, the parameters get random values. These depend only on the seed, and not on how the
    model is split over processes. Raises UserError if the device has too little memory.
    """
    torch.manual_seed(seed)
    own = dict(model.named_parameters())
    with memory_advice("the model does not fit into memory; choose a smaller one"):
        for name, p in whole_model.named_parameters():
            whole = torch.full(p.shape, math.nan)
            if weights:
                whole.copy_(weights[name])
            else:
                # This also draws the parameters of other stages: all processes must draw the same
                # numbers.
                whole_model.init_weight(name, whole)
                if whole.isnan().any():
                    raise UserError(f"{name} has no first value; add one to GPT.init_weight")
            if name in own:
                part = torch.nn.Parameter(scatter(name, whole, own[name], device))
                torch.utils.swap_tensors(own[name], part)  # keeps tied weights tied
