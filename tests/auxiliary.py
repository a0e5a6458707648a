"""Runs train_gpt2.py, or train_large.py with --large, on a GPT whose forward adds a second loss.

Also checks that the methods and attributes of a GPT are still the same after the GPT was split. The
only exception is `hidden`, which PyTorch's register_fsdp_forward_method wraps.
"""

from plaingpt.errors import run_program
from plaingpt.large import split

from either import choose_main

from model import GPT

cut_model = split.cut_model


def forward(self, idx, targets=None):
    x = self.hidden(idx)
    if targets is None:
        return self.logits(x), None
    return None, self.loss(x, targets) + 0.1 * x.square().mean()


def checked_split(model, *args):
    methods = dict(vars(GPT))
    before = {module: dict(vars(module)) for module in model.modules()}
    whole = cut_model(model, *args)
    assert dict(vars(GPT)) == methods
    for module, attributes in before.items():
        for key, value in vars(module).items():
            # PyTorch may add an attribute to a module, but this attribute must not hide a method of
            # the module's class.
            hides = (module, key) != (model, "hidden") and (
                key not in attributes and hasattr(type(module), key)
            )
            assert not hides and attributes.get(key, value) is value, f"{type(module)}.{key}"
    return whole


GPT.forward = forward
split.cut_model = checked_split
run_program(choose_main())
