"""Saves and restores an optimizer: its state, and the values in its groups that steps change.

Each value has a key, which consists of the name of a parameter and the name of the value, such as
"transformer.wte.weight.exp_avg". The values of a parameter group are saved for each parameter of
the group, such as "transformer.wte.weight.group:k". The values of self.state that belong to no
parameter are saved for each parameter of the optimizer, such as "transformer.wte.weight.shared:k".

A value is a tensor of any shape, a number, a string, None, or a list, tuple or dict of these. If
the parameter is split over processes, a tensor must have the shape of the parameter or be a scalar.
"""

import copy

from plaingpt.base.errors import UserError, explaining
from plaingpt.distributed.parts import map_tensors, slice_like
from plaingpt.ops.dtensors import is_dtensor

import torch

# These values of a group are not state, because flags, model.py and the step determine them.
NO_STATE = ("params", "param_names", "lr", "peak_lr", "weight_decay", "momentum", "betas")


class OptimizerState:
    """The state of one optimizer, for a checkpoint.

    optimizer: an optimizer before its first step. model: the GPT of this process. Raises UserError
    if the optimizer defines its own state_dict, as a wrapper around another optimizer does.
    """

    def __init__(self, optimizer, model):
        self.optimizer = optimizer
        self.kind = type(optimizer).__name__.lower()
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            raise UserError(
                f"{self.kind} defines its own state_dict, but checkpoints do not use it; keep all "
                "of its state in self.state[p], and remove this method"
            )
        self.names = {p: name for name, p in model.named_parameters()}
        self.tp_plan = model.tp_plan
        # If a step changes a value of a group, the value is state. Flags and model.py determine the
        # other values.
        self.initial_groups = [
            copy.deepcopy(group_values(group)) for group in optimizer.param_groups
        ]

    def parameter_names(self):
        """Returns the names of the parameters of this optimizer."""
        groups = self.optimizer.param_groups
        return [self.names[p] for group in groups for p in group["params"]]

    def values(self):
        """Returns {key: value} for a checkpoint. Raises UserError if a value cannot be saved."""
        found = {}
        shared = {}
        for value_name, value in self.optimizer.state.items():
            if not torch.is_tensor(value_name):  # such as state["k"] of the optimizer MADGRAD
                shared[f"shared:{value_name}"] = value
        for group, initial in zip(self.optimizer.param_groups, self.initial_groups):
            # Each parameter saves the shared values, because a pipeline stage holds only some of
            # the parameters.
            changed = dict(shared)
            for value_name, value in group_values(group).items():
                if torch.is_tensor(value) or value != initial.get(value_name):
                    changed[f"group:{value_name}"] = value
            for p in group["params"]:
                own = self.optimizer.state.get(p, {}) | changed
                for value_name, value in own.items():
                    key = f"{self.names[p]}.{value_name}"
                    self.check(key, value, p)
                    found[key] = value
        return found

    def check(self, key, value, p):
        """Raises UserError if a checkpoint cannot hold this value of the parameter p."""
        tensors = []
        remedy = "store only tensors, Python's numbers, or lists and dicts of them"
        with explaining(f"{self.kind} has {key}, which no checkpoint can hold", remedy, TypeError):
            map_tensors(value, tensors.append)
        is_whole = torch.is_tensor(value) and value.shape in ((), p.shape)
        is_split = is_dtensor(p) and ".group:" not in key and ".shared:" not in key
        if is_split and tensors and not is_whole:
            raise UserError(
                f"{self.kind} has {key}, whose shape differs from the shape of its parameter, so "
                "a split model cannot save this value; use --parallel ddp without --tp"
            )

    def restore(self, saved):
        """Sets the state to the values of a checkpoint. Raises UserError.

        saved: {name of a parameter: {name of a value: value}}. Learning rates and weight decay come
        from the flags instead.
        """
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                for value_name, value in saved.get(self.names[p], {}).items():
                    kind, _, name = value_name.partition(":")
                    if kind == "group":
                        group[name] = copy.deepcopy(value)
                    elif kind == "shared":
                        self.optimizer.state[name] = copy.deepcopy(value)
                    else:
                        self.optimizer.state[p][value_name] = self.place(
                            value_name, value, p, group
                        )

    def place(self, value_name, value, p, group):
        """Returns a value of a checkpoint on the device of p, split in the same way as p."""
        key = f"{self.names[p]}.{value_name}"
        self.check(key, value, p)
        is_count = value_name == "step"
        # A fused kernel would write beyond the end of a tensor that is smaller than its parameter.
        if self.kind in ("adamw", "muon") and torch.is_tensor(value):
            if value.shape != (() if is_count else p.shape):
                raise UserError(
                    f"{key} has a wrong shape in the checkpoint; resume from an older checkpoint"
                )
        # As in PyTorch, only fused and capturable kernels need the step count on the device.
        on_cpu = is_count and not (group.get("fused") or group.get("capturable"))
        device = "cpu" if on_cpu else p.device
        return map_tensors(value, lambda whole: slice_like(p, key, whole, device, self.tp_plan))


def group_values(group):
    """Returns the values of a parameter group that steps may change: {name: value}."""
    return {name: value for name, value in group.items() if name not in NO_STATE}
