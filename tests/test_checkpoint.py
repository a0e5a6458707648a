"""Checkpoints of older versions still resume. tests/checkpoints has one of each."""

import shutil

import pytest
import torch
from conftest import ROOT, program, read_log

from model import GPT, GPTConfig
from plaingpt.checkpoint import get_moments, moments_by_name, set_moments

# Files of commits e2d0309 and df748ca, after 4 of 8 steps of these flags. Both have the state
# dicts of the optimizers.
FLAGS = ("--preset baby --n_layer 2 --n_head 2 --n_embd 8 --block_size 8 --total_batch_size 64 "
         "--batch_size 4 --max_steps 8 --warmup_steps 2 --val_tokens 256 --val_every 4 "
         "--sample_every 0 --sample_tokens 4 --log_every 1 --dtype float32 --device cpu "
         "--optimizer muon --max_lr 4e-3 --min_lr 4e-4 --schedule cosine --log_dir run "
         f"--resume --data {ROOT}/input.txt").split()
# What the run of df748ca logged itself.
LOSSES = {4: 5.3947124, 5: 5.343708, 6: 5.3463945, 7: 5.3205452}


def place(directory, name):
    (directory / "run").mkdir()
    shutil.copy(ROOT / f"tests/checkpoints/{name}.pt", directory / "run" / "model_000004.pt")


@pytest.mark.parametrize("flags", [[], ["--parallel", "fsdp"], ["--tp", 2], ["--pp", 2]],
                         ids=["one", "fsdp", "tp", "pp"])
def test_a_run_goes_on_from_a_file_of_df748ca(tmp_path, flags):
    place(tmp_path, "df748ca")
    out, _ = program(*FLAGS, *flags, cwd=tmp_path, processes=2 if flags else 1)
    assert "resumed from step 4" in out
    log = read_log(tmp_path / "run")
    for step, loss in LOSSES.items():
        assert float(log[step, "train"]) == pytest.approx(loss, rel=1e-5), step


@pytest.mark.parametrize("has_names", [True, False])
def test_a_file_of_e2d0309_has_the_same_moments_for_torch_and_for_us(has_names):
    """Since then, the order of the data has changed, so the losses cannot be compared."""
    saved = torch.load(ROOT / "tests/checkpoints/e2d0309.pt", weights_only=True)
    model = GPT(GPTConfig(**saved["model_config"]))
    for reference, optimizer, part in zip(
            model.configure_optimizers(0.1, 1e-3, "muon"),
            model.configure_optimizers(0.1, 1e-3, "muon"), saved["optimizer"].values()):
        reference.load_state_dict(part)
        for group in part["param_groups"] if not has_names else []:
            del group["param_names"]  # as older versions of torch wrote them
        set_moments(optimizer, moments_by_name(part, optimizer))
        found, expected = get_moments(optimizer), get_moments(reference)
        assert found.keys() == expected.keys() and len(found) >= 8
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_of_e2d0309_goes_on(tmp_path):
    """With one process and with a pipeline alike."""
    losses = []
    for flags, processes in (([], 1), (["--pp", 2], 2)):
        place(tmp_path, "e2d0309")
        program(*FLAGS, *flags, cwd=tmp_path, processes=processes)
        log = read_log(tmp_path / "run")
        losses.append([float(log[step, "train"]) for step in range(4, 8)])
        assert float(log[4, "val"]) == pytest.approx(5.389914, rel=1e-5)  # of its own log
        shutil.rmtree(tmp_path / "run")
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
