"""Optimizers of any kind: their state is saved, and a resumed run equals one without a break."""

import shutil

import pytest
import torch
from conftest import ALONE, MODEL, TINY, checkpoint, forget_steps_after, names, program, read_log
from test_experiments import WAYS, copy_program, edit_model

from model import GPT
from train_gpt2 import TrainConfig, Training, train_step

# What model.py has, and what a reader writes instead.
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
    \"\"\"Lists, matrices of another shape, a number and None in the state.\"\"\"

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
    \"\"\"Numbers in the groups that steps change (Defazio et al. 2024, arXiv:2405.15682).

    Also a number that belongs to no parameter and no group, as in MADGRAD (arXiv:2101.11075).
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
    \"\"\"The slow weights appear in the second step (Zhang et al. 2019, arXiv:1907.08610).\"\"\"

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
    "SGD": "        optimizers.append(torch.optim.SGD(groups, learning_rate, momentum=0.9))\n",
    "plain SGD": "        optimizers.append(torch.optim.SGD(groups, learning_rate))\n",
    "NAdam": "        optimizers.append(torch.optim.NAdam(groups, learning_rate))\n",
    "ASGD": "        optimizers.append(torch.optim.ASGD(groups, learning_rate))\n",
    "Adafactor": "        optimizers.append(torch.optim.Adafactor(groups, learning_rate))\n",
    "Shampoo": "        optimizers.append(Shampoo(groups, dict(lr=learning_rate)))\n",
    "schedule-free": "        optimizers.append(ScheduleFree(groups, dict(lr=learning_rate)))\n",
    "Lookahead": "        optimizers.append(Lookahead(groups, learning_rate))\n",
    "SGD for positions": (
        "        wpe = [p for name, p in self.named_parameters() if 'wpe' in name]\n"
        "        # A later stage of a pipeline has none. PyTorch accepts an empty group.\n"
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
    """Copies the program, with another optimizer in its model.py."""
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
    """Continues a copy of a run from its checkpoint of step 2. Returns the name of the copy."""
    again = f"{name}-again"
    shutil.copytree(directory / name, directory / again)
    (directory / again / "model_000004.pt").unlink()
    run(directory, again, "--resume", *flags, **options)
    return again


def assert_equal(a, b, where):
    """Compares values of a checkpoint: tensors, lists, dicts, numbers."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_another_optimizer_resumes_bit_for_bit(tmp_path, name):
    copy_with(tmp_path, name)
    run(tmp_path, "run")
    again = resume(tmp_path, "run")
    assert read_log(tmp_path / again) == read_log(tmp_path / "run")
    whole, resumed = (checkpoint(tmp_path / place, 4) for place in ("run", again))
    for part in ("model", "optimizers"):
        assert_equal(whole[part], resumed[part], part)
    if name == "schedule-free":
        (found,) = whole["optimizers"]
        assert found["state"]["calls"] == 4 and found["param_groups"][1]["k"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ways",
    [
        ("schedule-free", ["tp", "pp", "fsdp", "ddp", "tp"]),
        ("two AdamWs", ["fsdp", "one", "fsdp"]),
        ("Lookahead", ["one", "fsdp", "fsdp", "one"]),  # its state appears in the second step
        ("SGD for positions", ["pp", "one", "pp"]),  # a stage has no parameter of it
    ],
)
def test_a_run_with_another_optimizer_resumes_in_every_layout(tmp_path, name, ways):
    """Each layout resumes the run of the one before it, a step later."""
    copy_with(tmp_path, name)
    every_step = ["--max_steps", len(ways), "--save_every", 1]
    run(tmp_path, "one", *every_step)
    expected = read_log(tmp_path / "one")
    for start, way in enumerate(ways):
        forget_steps_after(tmp_path / "run", start)
        flags = [*WAYS.get(way, []), *every_step, "--resume"]
        out, _ = run(tmp_path, "run", *flags, processes=1 if way == "one" else 2)
        assert f"resumed from step {start} " in out or start == 0
        log = read_log(tmp_path / "run")
        assert log.keys() == expected.keys()
        for key, value in log.items():
            assert float(value) == pytest.approx(float(expected[key]), rel=1e-4), (start, way, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adafactor", "Shampoo"])
def test_a_state_of_another_shape_is_whole_with_ddp(tmp_path, name):
    copy_with(tmp_path, name)
    run(tmp_path, "run")
    expected = read_log(tmp_path / "run")
    run(tmp_path, "ddp", processes=2)
    again = resume(tmp_path, "ddp", processes=2)
    for key, value in read_log(tmp_path / again).items():
        assert float(value) == pytest.approx(float(expected[key]), rel=1e-3), key


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp", "tp"])
def test_an_optimizer_that_cannot_step_split_parameters_ends_the_run(tmp_path, way):
    """With PyTorch's own error, in the first step."""
    copy_with(tmp_path, "Adafactor")
    _, err = run(tmp_path, "run", *WAYS[way], processes=2, status=1)
    assert "Error" in err and "_adafactor.py" in err
    assert not names(tmp_path / "run", "*.pt")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp", "tp", "pp"])
def test_a_state_of_another_shape_that_is_equal_on_all_processes(tmp_path, way):
    """A split model saves the tensor of rank 0, and gives it to all processes."""
    copy_with(tmp_path, "schedule-free")
    start = 'self.state[p]["z"] = p.clone()'
    edit_model(tmp_path, (start, f"self.state[p]['seen'] = torch.zeros(3); {start}"))
    edit_model(
        tmp_path,
        (
            "z = self.state[p]",
            "self.state[p]['seen'][group['k'] % 3] = 1\n                z = self.state[p]",
        ),
    )
    run(tmp_path, "run", *WAYS[way], processes=2)
    again = resume(tmp_path, "run", *WAYS[way], processes=2)
    whole, resumed = (checkpoint(tmp_path / place, 4) for place in ("run", again))
    assert_equal(whole["optimizers"], resumed["optimizers"], way)
    assert whole["optimizers"][0]["state"][0]["seen"].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_stages_with_different_optimizers_are_refused(tmp_path):
    copy_with(tmp_path, "SGD for positions")
    edit_model(
        tmp_path,
        ("        optimizers.append(sgd)\n", "        optimizers += [sgd] if wpe else []\n"),
    )
    _, err = run(tmp_path, "run", *WAYS["pp"], processes=2, status=2)
    assert err.splitlines()[-1].startswith("error: --pp: configure_optimizers must return the same")
    assert not (tmp_path / "run").exists()


class Wrapper(torch.optim.SGD):
    """As torch_optimizer's Lookahead, whose state_dict contains the inner optimizer's state."""

    def state_dict(self):
        return dict(slow=super().state_dict(), fast=dict(k=3))

    def load_state_dict(self, state):
        super().load_state_dict(state["slow"])
        self.k = state["fast"]["k"]


def test_an_optimizer_with_a_state_dict_of_its_own(monkeypatch):
    """Its own methods save and load the state."""

    def make():
        monkeypatch.setattr(
            GPT, "configure_optimizers", lambda self, *_: [Wrapper(self.parameters(), 0.1, 0.9)]
        )
        return Training(MODEL, TrainConfig(), ALONE)

    before, after = make(), make()
    x = torch.zeros((2, 8), dtype=torch.long)
    train_step(before, [(x, x)])
    after.load_state_dict(before.state_dict())
    assert after.optimizers[0].k == 3
    assert_equal(before.state_dict()["optimizers"], after.state_dict()["optimizers"], "wrapper")


@pytest.mark.slow
def test_another_optimizer_does_not_take_the_state(tmp_path):
    copy_program(tmp_path)
    run(tmp_path, "run", "--max_steps", 3)
    _, err = run(tmp_path, "run", "--resume", "--optimizer", "muon", status=2)
    assert "used a different --optimizer; give all flags of that run again" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "value, kind",
    [("object()", "object"), ("math.sqrt(2) * np.ones(())", "numpy._core.multiarray.scalar")],
)
@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_optimizer_that_cannot_be_saved_is_refused(tmp_path, value, kind, step):
    """When a checkpoint is saved: torch.load reads no file with a number of NumPy."""
    copy_with(tmp_path, "Lookahead")
    edit_model(
        tmp_path,
        ("import math\n", "import math\nimport numpy as np\n"),
        (
            '                if state["step"] == 1:\n',
            f'                if state["step"] == {step}:\n'
            f'                    state["own"] = {value}\n'
            '                if state["step"] == 1:\n',
        ),
    )
    _, err = run(tmp_path, "run", status=2)
    saved = ["model_000002.pt", "model_000004.pt"][: 1 + (step > 2)]
    assert err == (
        f"error: run/{saved[-1]}: the optimizers contain a value that cannot be read back "
        f"(torch.load refuses the type {kind}); store only tensors, Python's numbers and strings, "
        "and lists and dicts of them\n"
    )
    # The weights are not lost, and the checkpoint before stays.
    assert names(tmp_path / "run", "*.pt") == saved
    assert torch.load(tmp_path / "run" / saved[-1], weights_only=False)["step"] == 2 * len(saved)
