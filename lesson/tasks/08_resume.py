"""Save and resume: 5 steps and 5 more steps after resuming give the same result as 10 steps.

The checkpoint is a dict in memory, not a file. Later training must not change this dict.

Check it with: python lesson/check.py 08
"""

import copy

import torch


def save_checkpoint(model, optimizer, step):
    """Returns a dict with everything that the next steps depend on.

    model: an nn.Module. optimizer: a torch.optim.AdamW, which has taken `step` steps. Both have the
    methods state_dict() and load_state_dict(). The learning rate and the data of a step depend only
    on the number of the step. Training continues after this call, and must not change the dict.
    """
    raise NotImplementedError


def load_checkpoint(checkpoint, model, optimizer):
    """Loads a checkpoint into a model and its optimizer. Returns the number of completed steps.

    checkpoint: a result of save_checkpoint. The caller may load a checkpoint several times, so
    training after this call must not change the checkpoint. model, optimizer: a new model and its
    new optimizer. Their tensors have the same shapes as the saved tensors, but different values.

    Example: load_checkpoint(save_checkpoint(model, optimizer, 5), new_model, new_optimizer)
    returns 5.
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
