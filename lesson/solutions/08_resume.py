"""A solution of task 08: save and resume."""

import copy


def save_checkpoint(model, optimizer, step):
    """Returns a dict with everything that the next steps depend on."""
    checkpoint = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step)
    return copy.deepcopy(checkpoint)  # the next step changes the tensors of state_dict()


def load_checkpoint(checkpoint, model, optimizer):
    """Loads a checkpoint into a model and its optimizer. Returns the number of completed steps."""
    # load_state_dict of an optimizer does not copy the tensors, so later steps would change the
    # checkpoint.
    checkpoint = copy.deepcopy(checkpoint)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"]
