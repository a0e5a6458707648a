"""Save and resume: 5 steps and 5 more steps are the same as 10 steps.

This checkpoint stays in memory: it is a dict, not a file. Whatever happens after save_checkpoint,
it must still be the checkpoint of that moment.

Check it with: python lesson/check.py 08
"""

import copy

import torch


def save_checkpoint(model, optimizer, step):
    """Returns a dict with all that the next steps depend on.

    model: an nn.Module. optimizer: a torch.optim.AdamW, which has taken `step` steps. Both have
    state_dict() and load_state_dict(). The learning rate and the data of a step depend on its
    number only. After this call, the run goes on, and must not change the dict.
    """
    raise NotImplementedError


def load_checkpoint(checkpoint, model, optimizer):
    """Puts the values of a checkpoint into a model and its optimizer. Returns the steps done.

    checkpoint: from save_checkpoint. It may be loaded several times, so training after this call
    must not change it. model, optimizer: new ones, of the same shapes, with other values.

    Example: load_checkpoint(save_checkpoint(model, optimizer, 5), other, other_optimizer) is 5.
    """
    raise NotImplementedError
