"""Optimizers of all kinds: a checkpoint contains their state, or saving raises an error."""

from plaingpt.optimizers import load_optimizer

import pytest
import torch
from conftest import ALONE, MODEL, checkpoint, names, read_log
from edited import copy_program, edit_model
from other_optimizers import OPTIMIZERS, assert_equal, copy_with, resume, run

from model import GPT
from train_gpt2 import TrainConfig, Training, train_step


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
@pytest.mark.parametrize("name", ["Adafactor", "Shampoo"])
def test_a_state_of_another_shape_is_whole_with_ddp(tmp_path, name):
    copy_with(tmp_path, name)
    run(tmp_path, "run")
    expected = read_log(tmp_path / "run")
    run(tmp_path, "ddp", processes=2)
    again = resume(tmp_path, "ddp", processes=2)
    for key, value in read_log(tmp_path / again).items():
        assert float(value) == pytest.approx(float(expected[key]), rel=1e-3), key


class Wrapper(torch.optim.SGD):
    """An optimizer whose state_dict contains the state of an inner optimizer.

    The class Lookahead of the package torch_optimizer is such an optimizer.
    """

    def state_dict(self):
        return dict(slow=super().state_dict(), fast=dict(k=3))

    def load_state_dict(self, state):
        super().load_state_dict(state["slow"])
        self.k = state["fast"]["k"]


def test_an_optimizer_with_a_state_dict_of_its_own(monkeypatch):
    """The methods state_dict and load_state_dict of the optimizer save and load its state."""

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
    """torch.load would refuse a checkpoint that contains a Python object or a NumPy number.

    Therefore, the run must not save such a checkpoint.
    """
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
    saved = ["model_000002.pt"] if step > 2 else []
    refused = "model_000004.pt" if step > 2 else "model_000002.pt"
    assert err == (
        f"error: run/{refused}: the optimizers contain a value that cannot be read back "
        f"(torch.load refuses the type {kind}); store only tensors, Python's numbers and strings, "
        "and lists and dicts of them\n"
    )
    assert names(tmp_path / "run", "*.pt") == saved  # the previous checkpoint, for --resume


def test_a_note_names_hyperparameters_that_a_resumed_run_takes_from_the_checkpoint(capsys):
    before, after = (torch.optim.AdamW(GPT(MODEL).parameters(), 0.1) for _ in range(2))
    load_optimizer(after, before.state_dict())
    assert capsys.readouterr().out == ""
    after = torch.optim.AdamW(GPT(MODEL).parameters(), 0.2, (0.8, 0.9), weight_decay=0.3)
    load_optimizer(after, before.state_dict())
    assert after.param_groups[0]["weight_decay"] == 0.3
    note = "note: betas of AdamW is (0.9, 0.999), as in the checkpoint, not (0.8, 0.9)\n"
    assert capsys.readouterr().out == note


def test_a_hyperparameter_that_the_checkpoint_lacks():
    """For example, an edit of model.py adds the hyperparameter to its optimizer."""
    parameters = list(GPT(MODEL).parameters())
    before = torch.optim.AdamW(parameters, 0.1).state_dict()
    for group in before["param_groups"]:
        del group["betas"]
    after = torch.optim.AdamW(parameters, 0.1, (0.8, 0.9))
    load_optimizer(after, before)
    assert after.param_groups[0]["betas"] == (0.8, 0.9)
