"""train_gpt2.py, or with --large train_large.py, with a GPT whose forward adds a second loss.

Checks that splitting replaces no method or attribute of the model. FSDP wraps hidden: this is
register_fsdp_forward_method.
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
            # PyTorch may add an attribute to a module, but none may hide a method of its class.
            hides = (module, key) != (model, "hidden") and (
                key not in attributes and hasattr(type(module), key)
            )
            assert not hides and attributes.get(key, value) is value, f"{type(module)}.{key}"
    return whole


GPT.forward = forward
split.cut_model = checked_split
run_program(choose_main())
