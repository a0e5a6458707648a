"""Restores optimizers from the state dicts in a checkpoint."""

from plaingpt.errors import UserError
from plaingpt.terminal import print0

import torch
from torch.utils._pytree import tree_map


def names_of_groups(state):
    """Returns a list of parameter names for each group in an optimizer's state dict."""
    return [group["param_names"] for group in state.get("param_groups", [])]


def check_names(saved, names):
    """Raises UserError unless the optimizers in a checkpoint have the parameters in `names`.

    The order of the parameters must be the same, too.

    PyTorch identifies parameters only by their order. If a user swapped two layers of the same
    shape in model.py, PyTorch would give each layer the optimizer state of the other layer.

    saved: the state dict of each optimizer in the checkpoint. names: the names of the parameters in
    each group of each optimizer of the model.
    """
    if [names_of_groups(state) for state in saved] != names:
        raise UserError(
            "--resume: the parameters of the optimizers in the checkpoint differ from model.py, or "
            "have a different order; restore the model.py of that run; the run directory may "
            "contain a changes.patch"
        )


def load_optimizer(optimizer, saved):
    """Restores an optimizer from a state dict.

    Each parameter group keeps its current peak_lr and weight_decay, which the flags determine.
    Every other hyperparameter, such as betas, comes from the checkpoint. If model.py now sets a
    different value, this function prints a note.
    """
    groups = [dict(group) for group in optimizer.param_groups]  # from model.py and the flags
    optimizer.load_state_dict(saved)
    notes = {}
    for group, new in zip(optimizer.param_groups, groups):
        group.update({name: new[name] for name in ("peak_lr", "weight_decay") if name in new})
        for name in getattr(optimizer, "defaults", {}).keys() & new.keys() - {"lr"}:
            old = group.setdefault(name, new[name])  # model.py may have a new hyperparameter
            if repr(old) != repr(new[name]):
                notes[name] = f"is {old!r}, as in the checkpoint, not {new[name]!r}"
    for name, text in sorted(notes.items()):
        print0(f"note: {name} of {type(optimizer).__name__} {text}")
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    # PyTorch's load_state_dict casts each tensor to the dtype of its parameter. If a tensor already
    # has the right dtype and device, PyTorch does not copy the tensor, which then still uses the
    # memory of the file. Therefore, this loop copies each tensor, in the dtype of the checkpoint.
    for group, old in zip(optimizer.param_groups, saved["param_groups"]):
        for p, i in zip(group["params"], old["params"]):
            if i in saved["state"]:
                # pop removes the values from `saved`, so their memory is freed after the copy.
                values = saved["state"].pop(i)
                optimizer.state[p] = tree_map(restore_value, values, optimizer.state[p])


def restore_value(saved, loaded):
    """Returns a copy of `saved` on the device of `loaded`, or `saved` itself if it is no tensor.

    saved: a value from a state dict. loaded: what load_state_dict made of this value.
    """
    return saved.to(loaded.device, copy=True) if torch.is_tensor(saved) else saved
