"""Save and resume: 5 steps and 5 more steps are the same as 10 steps.

This checkpoint is a dict in memory, not a file. Later training must not change it.

Check it with: python lesson/check.py 08
"""

import copy

import torch


def save_checkpoint(model, optimizer, step):
    """Returns a dict with everything that the next steps depend on.

    model: an nn.Module. optimizer: a torch.optim.AdamW, which has taken `step` steps. Both have
    state_dict() and load_state_dict(). The learning rate and the data of a step depend only on its
    number. After this call, the run continues, and must not change the dict.
    """
    raise NotImplementedError


def load_checkpoint(checkpoint, model, optimizer):
    """Loads a checkpoint into a model and its optimizer. Returns the number of completed steps.

    checkpoint: from save_checkpoint. The caller may load it several times, so training after this
    call must not change it. model, optimizer: new ones, with the same shapes and other values.

    Example: load_checkpoint(save_checkpoint(model, optimizer, 5), other, other_optimizer) is 5.
    """
    raise NotImplementedError
