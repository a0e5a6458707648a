"""A solution of task 08: save and resume."""

import copy


def save_checkpoint(model, optimizer, step):
    """Returns a dict with everything that the next steps depend on."""
    checkpoint = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step)
    return copy.deepcopy(checkpoint)  # state_dict() has tensors that the next step would change


def load_checkpoint(checkpoint, model, optimizer):
    """Loads a checkpoint into a model and its optimizer. Returns the number of completed steps."""
    checkpoint = copy.deepcopy(checkpoint)  # the optimizer would change tensors of the checkpoint
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"]
