"""train_gpt2.py with a GPT whose forward adds a second loss.

Checks that ShardedGPT replaces no method or attribute of the model.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt2  # noqa: E402
from model import GPT  # noqa: E402
from plaingpt.cli import run_program  # noqa: E402
from plaingpt.parallel import ShardedGPT  # noqa: E402

init = ShardedGPT.__init__


def forward(self, idx, targets=None):
    x = self.hidden(idx)
    if targets is None:
        return self.logits(x), None
    return None, self.loss(x, targets) + 0.1 * x.square().mean()


def checked_init(self, model, *args):
    methods = dict(vars(GPT))
    before = {module: dict(vars(module)) for module in model.modules()}
    init(self, model, *args)
    assert dict(vars(GPT)) == methods
    for module, attributes in before.items():
        for key, value in vars(module).items():
            # PyTorch may add an attribute to a module, but none may hide a method of its class.
            hides = key not in attributes and hasattr(type(module), key)
            assert not hides and attributes.get(key, value) is value, f"{type(module)}.{key}"


GPT.forward = forward
ShardedGPT.__init__ = checked_init
run_program(train_gpt2.main)
