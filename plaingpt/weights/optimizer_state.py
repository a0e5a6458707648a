"""The part of an optimizer in a checkpoint: its state, and what steps change in its groups.

Each value has a key: the name of a parameter and the name of the value, such as
"transformer.wte.weight.exp_avg". Each parameter of a group saves the values of the group, such as
"transformer.wte.weight.group:k", and the values of self.state that belong to no parameter, such as
"transformer.wte.weight.shared:k".

A value is a tensor of any shape, a number, a text, None, or a list, tuple or dict of these. If the
parameter is split, a tensor must have the shape of the parameter, or be a scalar.
"""

import copy

from plaingpt.base.errors import UserError, explaining
from plaingpt.distributed.parts import map_tensors, slice_like
from plaingpt.ops.dtensors import is_dtensor

import torch

# Values of a group that are not state: flags, model.py and the step determine these values.
NO_STATE = ("params", "param_names", "lr", "peak_lr", "weight_decay", "momentum", "betas")


class OptimizerState:
    """The state of one optimizer, for a checkpoint.

    optimizer: before its first step. model: the GPT of this process. Raises UserError if the
    optimizer is a wrapper whose state_dict also contains the state of another optimizer.
    """

    def __init__(self, optimizer, model):
        self.optimizer = optimizer
        self.kind = type(optimizer).__name__.lower()
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            raise UserError(
                f"{self.kind} has a state_dict of its own, which no checkpoint contains; keep all "
                "of its state in self.state[p], and remove the method"
            )
        self.names = {p: name for name, p in model.named_parameters()}
        self.tp_plan = model.tp_plan
        # What a step changes in a group is state. Flags and model.py determine the other values.
        self.initial_groups = [
            copy.deepcopy(group_values(group)) for group in optimizer.param_groups
        ]

    def parameter_names(self):
        """Returns the names of the parameters of this optimizer."""
        groups = self.optimizer.param_groups
        return [self.names[p] for group in groups for p in group["params"]]

    def values(self):
        """Returns {key: value} for a checkpoint. Raises UserError if a value does not fit there."""
        found = {}
        shared = {}
        for value_name, value in self.optimizer.state.items():
            if not torch.is_tensor(value_name):  # such as state["k"] of MADGRAD
                shared[f"shared:{value_name}"] = value
        for group, initial in zip(self.optimizer.param_groups, self.initial_groups):
            changed = dict(shared)  # all parameters save these: a pipeline stage holds only some
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
        remedy = "keep tensors, Python's numbers, or lists and dicts of them"
        with explaining(f"{self.kind} has {key}, which no checkpoint can hold", remedy, TypeError):
            map_tensors(value, tensors.append)
        is_whole = torch.is_tensor(value) and value.shape in ((), p.shape)
        is_split = is_dtensor(p) and ".group:" not in key and ".shared:" not in key
        if is_split and tensors and not is_whole:
            raise UserError(
                f"{self.kind} has {key}, whose shape differs from its parameter's, so a model that "
                "is split cannot save it; use --parallel ddp without --tp"
            )

    def restore(self, saved):
        """Sets the state to the values of a checkpoint. Raises UserError.

        saved: {name of a parameter: {name of a value: value}}. The flags determine learning rates
        and weight decay.
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
        """Returns a value of a checkpoint on the device of p, split as p is split."""
        key = f"{self.names[p]}.{value_name}"
        self.check(key, value, p)
        is_count = value_name == "step"
        # A fused kernel would write beyond a tensor that is smaller than its parameter.
        if self.kind in ("adamw", "muon") and torch.is_tensor(value):
            if value.shape != (() if is_count else p.shape):
                raise UserError(f"{key} has a wrong shape in the checkpoint; resume from another")
        # As in PyTorch, only fused and capturable kernels need the count of steps on the device.
        on_cpu = is_count and not (group.get("fused") or group.get("capturable"))
        device = "cpu" if on_cpu else p.device
        return map_tensors(value, lambda whole: slice_like(p, key, whole, device, self.tp_plan))


def group_values(group):
    """Returns the values of a parameter group that steps may change: {name: value}."""
    return {name: value for name, value in group.items() if name not in NO_STATE}
