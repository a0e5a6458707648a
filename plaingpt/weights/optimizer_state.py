"""What a checkpoint has of an optimizer: its state, and what steps have changed in its groups.

Each value has a key: the name of a parameter, and that of the value, such as
"transformer.wte.weight.exp_avg". A value of a group of parameters has the key of the first of them,
such as "transformer.wte.weight.group:k".

A value is a tensor of any shape, a number, a text, None, or a list, tuple or dict of these.
"""

import contextlib
import copy
import re
from typing import NamedTuple

from plaingpt.base.errors import UserError, explaining
from plaingpt.base.terminal import print0
from plaingpt.distributed.parts import is_dtensor, map_tensors, scatter

import torch

# Values of a group that are no state. The rates come from the flags.
NO_STATE = ("params", "param_names", "lr", "peak_lr")


class Expected(NamedTuple):
    """What a step makes of a value that is a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def name_optimizers(optimizers):
    """Returns {name: optimizer}: the class in lower case, and "adamw_2" for a second AdamW."""
    named = {}
    for optimizer in optimizers:
        kind = kind_of(optimizer)
        number = 1 + sum(kind_of(other) == kind for other in named.values())
        named[kind if number == 1 else f"{kind}_{number}"] = optimizer
    return named


def kind_of(optimizer):
    """Returns the name of an optimizer's class, in lower case."""
    return type(optimizer).__name__.lower()


def kind_of_name(name):
    """Returns the kind of an optimizer by its name in a checkpoint: "adamw" for "adamw_2"."""
    return re.sub(r"_\d+$", "", name)


class OptimizerState:
    """The state of one optimizer, for a checkpoint.

    A trial step, which changes nothing, says which values the optimizer makes. So an optimizer that
    cannot be saved ends a run before its first step. And a checkpoint with other values is not
    loaded, because a fused kernel would write beyond a tensor that is too small.

    optimizer: before its first step. model: the GPT of this process, which has its parameters. All
    processes must make it, because a step may communicate. Raises UserError.
    """

    def __init__(self, optimizer, model):
        names = {p: name for name, p in model.named_parameters()}
        self.optimizer = optimizer
        self.tp_plan = model.tp_plan
        self.kind = kind_of(optimizer)
        self.named = {}  # {name: parameter} of this optimizer
        self.first_values = []  # of each group, as the constructor has set them
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p not in names:
                    raise UserError(
                        f"{self.kind} has a parameter of shape {tuple(p.shape)}, which the model "
                        "does not have; give it only parameters of the model"
                    )
                self.named[names[p]] = p
            values = {name: value for name, value in group.items() if name not in NO_STATE}
            self.first_values.append(copy.deepcopy(values))
        self.names = names
        self.expected = {}  # {name of a parameter: {name of a value: Expected, or None}}
        self.try_step()

    @property
    def has_state(self):
        """Whether a step makes any value of a parameter. SGD without momentum makes none."""
        return any(self.expected.values())

    def values(self):
        """Returns what a checkpoint needs: {key: value}."""
        found = {}
        for group, first in zip(self.optimizer.param_groups, self.first_values):
            for p in group["params"]:
                for value_name, value in self.optimizer.state.get(p, {}).items():
                    found[f"{self.names[p]}.{value_name}"] = value
            for value_name, value in changed_values(group, first).items():
                found[f"{self.names[group['params'][0]]}.group:{value_name}"] = value
        return found

    @torch.no_grad()
    def try_step(self):
        """Makes a step with gradients of zero, looks at the values, and takes the step back.

        It does this for one parameter after the other, which needs little memory.
        """
        optimizer = self.optimizer
        groups = optimizer.param_groups
        for group, first in zip(groups, self.first_values):
            for i, p in enumerate(group["params"]):
                alone = dict(copy.deepcopy(first), lr=group["lr"], params=[p])
                if "param_names" in group:
                    alone["param_names"] = [group["param_names"][i]]
                before = p.clone()
                p.grad = torch.zeros_like(p)
                optimizer.param_groups = [alone]
                with (
                    torch.random.fork_rng(range(torch.cuda.device_count())),
                    self.explaining_split(p),
                ):
                    optimizer.step()
                name = self.names[p]
                self.expected[name] = {}
                for value_name, value in optimizer.state.get(p, {}).items():
                    self.check(f"{name}.{value_name}", value)
                    self.expected[name][value_name] = describe(value)
                for value_name, value in changed_values(alone, first).items():
                    self.check(f"{name}.group:{value_name}", value)
                optimizer.state.clear()
                p.copy_(before)
                p.grad = None
        optimizer.param_groups = groups

    def explaining_split(self, p):
        """Returns a context that turns errors into a UserError if the parameter p is split."""
        if not is_dtensor(p):
            return contextlib.nullcontext()
        remedy = "use --parallel ddp without --tp"
        return explaining(f"{self.kind} makes no step with split parameters", remedy)

    def check(self, key, value):
        """Raises UserError if a checkpoint cannot have this value."""
        tensors = []
        try:
            map_tensors(value, tensors.append)
        except TypeError as error:
            raise UserError(
                f"{self.kind} has {key}, which no checkpoint can hold ({error}); "
                "keep numbers, tensors, or lists and dicts of them"
            ) from error
        p = self.named[key.rpartition(".")[0]]
        if not is_dtensor(p) or key.rpartition(".")[2].startswith("group:"):
            return
        is_tensor = torch.is_tensor(value)
        is_whole = is_tensor and (value.shape == p.shape or value.dim() == 0)
        if tensors and not is_whole:
            raise UserError(
                f"{self.kind} has {key}, which has not the shape of its parameter, so a model that "
                "is split cannot save it; use --parallel ddp without --tp"
            )

    def restore(self, saved):
        """Takes the values of this optimizer from those of a checkpoint, {key: value}.

        Learning rates and weight decay come from the flags, not from here. Raises UserError if a
        value is missing, or if it is none that this optimizer makes.
        """
        by_parameter = {}  # {name of a parameter: {name of a value: value}}
        for key, value in saved.items():
            name, _, value_name = key.rpartition(".")
            by_parameter.setdefault(name, {})[value_name] = value
        for name, p in self.named.items():
            own = {}
            for value_name, value in by_parameter.get(name, {}).items():
                if not value_name.startswith("group:"):
                    own[value_name] = value
            expected = self.expected[name]
            if expected and not own:  # no gradient has reached it
                print0(f"note: the checkpoint has no state of {name}, so its state is new")
                continue
            for value_name in sorted(expected.keys() ^ own.keys()):
                word = "lacks" if value_name in expected else "has"
                raise UserError(f"the checkpoint {word} {name}.{value_name}; resume from another")
            for value_name, value in own.items():
                key = f"{name}.{value_name}"
                placed = place(key, value, p, expected[value_name], self.tp_plan)
                self.optimizer.state[p][value_name] = placed
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                for value_name, value in by_parameter.get(self.names[p], {}).items():
                    if value_name.startswith("group:"):
                        group[value_name.removeprefix("group:")] = copy.deepcopy(value)


def changed_values(group, first):
    """Returns the values of a parameter group that steps have changed: {name: value}.

    first: the values that the constructor has set.
    """
    changed = {}
    if group["params"]:
        for name, value in group.items():
            if name not in NO_STATE and not equal(value, first.get(name)):
                changed[name] = value
    return changed


def describe(value):
    """Returns what a step makes of a value: Expected for a tensor, otherwise None."""
    if torch.is_tensor(value):
        return Expected(value.shape, value.dtype, value.device)
    return None


def place(key, value, p, expected, tp_plan):
    """Returns a value of a checkpoint as an optimizer needs it: on its device, split as p is.

    expected: what a step makes of it. tp_plan: that of GPT. Raises UserError if the value has
    another shape.
    """
    if expected is None:  # it is no tensor
        return map_tensors(value, lambda tensor: tensor.to(p.device, copy=True))
    if not torch.is_tensor(value) or value.shape != expected.shape:
        raise UserError(f"{key} has a wrong shape in the checkpoint; resume from another")
    value = value.to(expected.dtype).contiguous()  # fused kernels need both
    return scatter(key, value, p, expected.device, tp_plan)


def equal(value, other):
    """Returns whether two values of a group are certainly equal."""
    if torch.is_tensor(value) and torch.is_tensor(other):
        return torch.equal(value, other)
    try:
        return type(value) is type(other) and bool(value == other)
    except (RuntimeError, ValueError):  # such as lists of tensors
        return False
