"""Trains with a copy of the program, in which model.py uses a different optimizer."""

import shutil

import torch
from conftest import TINY, program
from edited import copy_program, edit_model

# The lines of model.py that create AdamW. A test replaces these lines with a value of OPTIMIZERS.
ADAMW = (
    "        adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, "
    "fused=True)\n        optimizers.append(adamw)\n"
)


FLAGS = [
    *TINY,
    *(
        "--n_embd 16 --block_size 16 --total_batch_size 128 --max_steps 4 --save_every 2 --keep 0 "
        "--val_every 0 --val_tokens 64 --sample_tokens 1 --max_lr 1e-2 --min_lr 1e-3"
    ).split(),
]


SHAMPOO = """class Shampoo(torch.optim.Optimizer):
    \"\"\"Its state contains a list of square matrices, a bool tensor, a number and None.\"\"\"

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["unused"] = None
                    state["factors"] = [torch.eye(n, dtype=torch.float64) for n in p.shape]
                    state["seen"] = torch.zeros(3, dtype=torch.bool)
                state["count"] += 1
                state["seen"][state["count"] % 3] = True
                g = p.grad.double()
                if p.dim() == 2:
                    left, right = state["factors"]
                    left.add_(g @ g.T)
                    right.add_(g.T @ g)
                    g = torch.linalg.solve(left, torch.linalg.solve(right, g.T).T)
                p.sub_(g.float(), alpha=group["lr"] / state["count"])


class CausalSelfAttention("""


SCHEDULE_FREE = """class ScheduleFree(torch.optim.Optimizer):
    \"\"\"Each step changes numbers in the groups (Defazio et al. 2024, arXiv:2405.15682).

    The state also contains a number that belongs to no parameter and no group, as in MADGRAD
    (arXiv:2101.11075).
    \"\"\"

    @torch.no_grad()
    def step(self):
        self.state["calls"] = self.state.get("calls", 0) + 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["weight_sum"] = group.get("weight_sum", 0.0) + group["lr"] ** 2
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["z"] = p.clone()
                z = self.state[p]["z"]
                z.sub_(p.grad, alpha=group["lr"] * min(1, self.state["calls"] / 5))
                p.lerp_(z, group["lr"] ** 2 / group["weight_sum"])


class CausalSelfAttention("""


LOOKAHEAD = """class Lookahead(torch.optim.AdamW):
    \"\"\"Adds the slow weights in the second step (Zhang et al. 2019, arXiv:1907.08610).\"\"\"

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if state["step"] == 1:
                    continue
                if "slow" not in state:
                    state["slow"] = p.clone()
                p.copy_(state["slow"].lerp_(p, 0.5))


class CausalSelfAttention("""


CLASS = "class CausalSelfAttention("


OPTIMIZERS = {
    "two AdamWs": (
        "        for group in groups:\n"
        "            optimizers.append(torch.optim.AdamW([group], lr=learning_rate, fused=True))\n"
    ),
    "without names": (
        "        optimizers.append(torch.optim.AdamW(self.parameters(), learning_rate))\n"
    ),
    "plain SGD": "        optimizers.append(torch.optim.SGD(groups, learning_rate))\n",
    "ASGD": "        optimizers.append(torch.optim.ASGD(groups, learning_rate))\n",
    "Adafactor": "        optimizers.append(torch.optim.Adafactor(groups, learning_rate))\n",
    "Shampoo": "        optimizers.append(Shampoo(groups, dict(lr=learning_rate)))\n",
    "schedule-free": "        optimizers.append(ScheduleFree(groups, dict(lr=learning_rate)))\n",
    "Lookahead": "        optimizers.append(Lookahead(groups, learning_rate))\n",
    "SGD for positions": (
        "        wpe = [p for name, p in self.named_parameters() if 'wpe' in name]\n"
        "        # Later pipeline stages have no wpe. PyTorch accepts an empty group.\n"
        "        sgd = torch.optim.SGD([dict(params=wpe)], learning_rate, momentum=0.9)\n"
        "        optimizers.append(sgd)\n"
        "        rest = [p for name, p in self.named_parameters() if 'wpe' not in name]\n"
        "        optimizers.append(torch.optim.AdamW(rest, learning_rate, fused=True))\n"
    ),
    "torch's Muon": (
        "        hidden = [p for p in self.transformer.h.parameters() if p.dim() == 2]\n"
        "        rest = [p for p in self.parameters() if all(p is not other for other in hidden)]\n"
        "        optimizers.append(torch.optim.Muon(hidden, learning_rate))\n"
        "        optimizers.append(torch.optim.AdamW(rest, learning_rate, fused=True))\n"
    ),
}


def copy_with(directory, name):
    """Copies the program, and replaces the optimizer in the copied model.py.

    name: a key of OPTIMIZERS.
    """
    copy_program(directory)
    edit_model(directory, (ADAMW, OPTIMIZERS[name]))
    if name == "Shampoo":
        edit_model(directory, (CLASS, SHAMPOO))
    if name == "schedule-free":
        edit_model(directory, (CLASS, SCHEDULE_FREE))
    if name == "Lookahead":
        edit_model(directory, (CLASS, LOOKAHEAD))


def run(directory, name, *flags, **options):
    return program(
        *FLAGS,
        "--log_dir",
        name,
        *flags,
        cwd=directory,
        program=directory / "train_gpt2.py",
        **options,
    )


def resume(directory, name, *flags, **options):
    """Copies a run, and resumes the copy from the checkpoint of step 2. Returns the copy's name."""
    again = f"{name}-again"
    shutil.copytree(directory / name, directory / again)
    (directory / again / "model_000004.pt").unlink()
    run(directory, again, "--resume", *flags, **options)
    return again


def assert_equal(a, b, where):
    """Checks that two values of checkpoints are equal. a, b: tensors, dicts, lists or numbers.

    where: the name of the value, for the message.
    """
    if torch.is_tensor(a):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (one, other) in enumerate(zip(a, b)):
            assert_equal(one, other, f"{where}.{i}")
    else:
        assert a == b, where
