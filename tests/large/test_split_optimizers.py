"""Tests edited optimizers on split models: each layout loads the state that other layouts saved."""

import pytest
from conftest import checkpoint, forget_steps_after, names, read_log
from edited import SWAPPED, WAYS, copy_program, edit_model
from other_optimizers import assert_equal, copy_with, resume, run


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ways",
    [
        ("schedule-free", ["ddp", "tp", "pp", "fsdp", "one"]),
        ("two AdamWs", ["fsdp", "one", "fsdp"]),
        ("Lookahead", ["one", "fsdp", "one"]),  # Lookahead creates its state in the second step
        ("SGD for positions", ["pp", "one", "pp"]),  # on the second stage, SGD has no parameters
    ],
)
def test_a_run_with_another_optimizer_resumes_in_every_layout(tmp_path, name, ways):
    """The run resumes in one layout after another, from the first checkpoint of the previous."""
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
@pytest.mark.parametrize("way", ["fsdp", "tp"])
def test_an_optimizer_that_cannot_step_split_parameters_ends_the_run(tmp_path, way):
    """PyTorch's Adafactor fails with DTensors. This error ends the run in the first step."""
    copy_with(tmp_path, "Adafactor")
    _, err = run(tmp_path, "run", *WAYS[way], processes=2, status=1)
    assert "Error" in err and "_adafactor.py" in err
    assert not names(tmp_path / "run", "*.pt")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp", "tp"])
def test_a_state_of_another_shape_that_is_equal_on_all_processes(tmp_path, way):
    """A tensor in the optimizer state may have a different shape from its parameter.

    The checkpoint contains the tensor of rank 0. All processes of a resumed run load this tensor.
    """
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


@pytest.mark.slow
def test_layers_that_change_places_do_not_exchange_their_moments(tmp_path):
    """Does the same with --pp as the test of the same name in tests/core/test_checkpoint.py.

    A stage knows only its own parameters, so the stages exchange the names of their parameters.
    """
    copy_program(tmp_path)
    run(tmp_path, "run", *WAYS["pp"], processes=2)
    edit_model(tmp_path, SWAPPED)
    flags = ["--resume", "--max_steps", 5, *WAYS["pp"]]
    _, err = run(tmp_path, "run", *flags, processes=2, status=2)
    assert "differ from model.py, or have a different order; restore the model.py" in err
