"""Restores optimizers from the state dicts in a checkpoint."""

from plaingpt.errors import UserError
from plaingpt.terminal import print0

import torch
from torch.utils._pytree import tree_map


def names_of_groups(state):
    """Returns the names of the parameters in each group of an optimizer's state dict: lists."""
    return [group["param_names"] for group in state.get("param_groups", [])]


def check_names(saved, names):
    """Raises UserError unless the optimizers in a checkpoint have these parameters.

    PyTorch identifies the parameters by their order alone. If two layers of the same shape change
    places in model.py, each layer would get the state of the other one.

    saved: the state dict of each optimizer in the checkpoint. names: the names of the parameters in
    each group of each optimizer.
    """
    if [names_of_groups(state) for state in saved] != names:
        raise UserError(
            "--resume: the optimizers of the checkpoint contain other parameters than model.py, or "
            "the same parameters in another order; restore the model.py of that run; its directory "
            "may contain a changes.patch"
        )


def load_optimizer(optimizer, saved):
    """Restores an optimizer from a state dict. Each parameter group keeps what flags determine.

    Every other hyperparameter, such as betas, comes from the checkpoint. A note says so if model.py
    now sets a different value.
    """
    groups = [dict(group) for group in optimizer.param_groups]  # as model.py and the flags set them
    optimizer.load_state_dict(saved)
    notes = {}
    for group, new in zip(optimizer.param_groups, groups):
        group.update({name: new[name] for name in ("peak_lr", "weight_decay") if name in new})
        for name in getattr(optimizer, "defaults", {}).keys() & new.keys() - {"lr"}:
            if repr(group[name]) != repr(new[name]):
                notes[name] = f"is {group[name]!r}, as in the checkpoint, not {new[name]!r}"
    for name, text in sorted(notes.items()):
        print0(f"note: {name} of {type(optimizer).__name__} {text}")
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    # PyTorch's load_state_dict has cast each tensor to the dtype of its parameter, and it has not
    # copied the tensors, which still use the memory of the file.
    for group, old in zip(optimizer.param_groups, saved["param_groups"]):
        for p, i in zip(group["params"], old["params"]):
            if i in saved["state"]:
                values = saved["state"].pop(i)  # frees the memory of the values after their copy
                optimizer.state[p] = tree_map(restore_value, values, optimizer.state[p])


def restore_value(saved, loaded):
    """Returns a copy of a value in a state dict, on the device to which PyTorch has loaded it."""
    return saved.to(loaded.device, copy=True) if torch.is_tensor(saved) else saved
