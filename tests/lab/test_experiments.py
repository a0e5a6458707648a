"""Tests each patch in experiments/: trains the changed model, resumes, generates text, and scores.

The tests also train the changed model with the layouts of train_large.py.
"""

import re
import runpy
import shutil

from plaingpt.scoring.score import Row, forward

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    apply_patch,
    checkpoint,
    randomise,
    read_log,
)
from edited import WAYS, assert_split_run_matches, copy_program, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# {name of a patch: maximum number of changed lines}
LIMITS = {
    "attention-gate": 7,
    "document-mask": 19,  # 1 of these lines is in plaingpt/settings.py
    "dyt": 19,
    "gradient-noise": 7,
    "group-schedule": 14,  # 2 of these lines are in model.py
    "grouped-query": 25,
    "inverse-sqrt": 8,
    "lion": 25,
    "mixture-of-experts": 45,
    "modern": 57,
    "multi-token": 25,
    "muon-joint": 2,
    "no-bias": 8,
    "no-residual-scaling": 5,
    "qknorm": 5,
    "relu2": 2,
    "rmsnorm": 6,
    "rotary": 25,
    "sliding-window": 25,
    "soft-cap": 4,
    "swiglu": 12,
    "untied": 1,
    "value-residual": 20,
    "x0": 9,
    "z-loss": 21,  # 3 of these lines are in model.py, and log the size of the z-loss
}
HEADS = ("+++", "---")  # lines that contain the name of a file begin with these characters
# {name of a patch: layouts with which the patch could fail}. The test runs every other patch with
# all layouts.
LAYOUTS = {
    "attention-gate": ["fsdp"],
    "document-mask": ["tp", "fsdp"],
    "dyt": ["pp"],  # only the last stage has the final norm
    "gradient-noise": ["tp"],  # with FSDP, the first micro-batches contain more sequences
    "group-schedule": [],  # weight decay depends on --max_steps, which is different in split runs
    "grouped-query": ["fsdp"],
    "inverse-sqrt": [],
    "lion": ["fsdp"],  # with FSDP, the optimizer updates shards
    "mixture-of-experts": ["fsdp"],  # each of two processes holds four of the eight experts
    "modern": ["tp", "pp"],  # with PP, the stage with the untied head has no embedding
    "multi-token": ["fsdp", "pp"],  # the additional block is not in transformer.h
    "muon-joint": ["fsdp"],
    "no-bias": [],  # covered by modern, which also removes the biases
    "no-residual-scaling": [],
    "qknorm": ["tp"],  # each process applies the norms only to its own heads
    "relu2": [],
    "rmsnorm": [],  # covered by dyt, which replaces the same norms
    "rotary": ["tp"],  # each process has only some of the heads
    "sliding-window": ["pp"],  # each stage has only some of the block indices
    "soft-cap": ["tp"],
    "swiglu": ["pp"],
    "untied": [],  # covered by modern, which also unties the head
    "value-residual": ["tp"],
    "x0": ["fsdp"],
    "z-loss": ["pp", "fsdp"],  # with PP, only the last stage computes a loss
}
DIFFERENT = "the parts of this model.py compute a different loss from the whole"
NOT_SMALL = "a small test GPT of this model.py fails"
# {(name of a patch, layout with which the patch fails): a part of the error message}
REFUSED = {
    ("attention-gate", "tp"): NOT_SMALL,
    ("document-mask", "pp"): "model.py cannot run in stages",
    ("grouped-query", "tp"): NOT_SMALL,
    ("mixture-of-experts", "pp"): DIFFERENT,
    ("mixture-of-experts", "tp"): "transformer.h.0.mlp.c_fc is not in a layer",
    ("swiglu", "tp"): NOT_SMALL,
    ("value-residual", "pp"): DIFFERENT,
    ("x0", "pp"): DIFFERENT,
    ("z-loss", "tp"): NOT_SMALL,
}
FLAGS = {
    "group-schedule": ["--optimizer", "muon"],
    "inverse-sqrt": ["--schedule", "inverse-sqrt"],
    "muon-joint": ["--optimizer", "muon"],
}
# {name of a patch: the metrics that the patch adds to the log}
FIGURES = {
    "gradient-noise": ["norm_small"],
    "mixture-of-experts": ["balance", "cross_entropy"],
    "multi-token": ["ahead", "next"],
    "z-loss": ["z"],
}
ENTROPY = "attention-entropy"  # this patch only logs a metric; no test runs it with --pp
# The sample and a passage of LAMBADA are longer than the context of 16 bytes.
SCORED = "--eval_every 2 --evals lambada=words.txt --sample_every 2 --sample_tokens 17".split()
# Split runs with these patches also generate samples and run a benchmark.
SCORED_SPLIT = ("grouped-query", "rotary", "sliding-window")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Trains the unchanged program. Returns its log."""
    directory = tmp_path_factory.mktemp("plain")
    copy_program(directory)
    run(directory, "run", 6, *SCORED)
    return read_log(directory / "run")


def test_every_patch_is_here_and_short():
    patches = {path.stem: path.read_text() for path in ROOT.glob("experiments/*.patch")}
    rows = re.findall(r"^\| (?:\*\*)?`([\w-]+)`", (ROOT / "docs/experiments.md").read_text(), re.M)
    assert sorted(rows) == sorted(patches)  # docs/experiments.md lists all patches
    assert patches.pop(ENTROPY).count("\n+") < 10
    assert patches.keys() == LIMITS.keys()
    for name, patch in patches.items():
        hunks = patch[patch.index("@@") :].splitlines()
        changed = [line for line in hunks if line.startswith(("+", "-")) and line[:3] not in HEADS]
        assert len(changed) <= LIMITS[name], name
        n_files = 2 if name in ("document-mask", "group-schedule", "z-loss") else 1
        assert patch.count("diff --git") == n_files, name
        assert all(len(line) <= 101 for line in changed), name


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_experiment(tmp_path, plain, name):
    copy_program(tmp_path)
    apply_patch(name, tmp_path)
    flags = FLAGS.get(name, [])
    out, _ = run(tmp_path, "run", 6, *flags, *SCORED)
    log = read_log(tmp_path / "run")
    own = {(step, figure) for step in range(6) for figure in FIGURES.get(name, [])}
    assert log.keys() == plain.keys() | own
    changes_loss = name != "gradient-noise"  # this patch only logs a metric
    assert (log[6, "val"] != plain[6, "val"]) == changes_loss
    assert float(log[6, "val"]) < float(log[0, "val"]) - 0.05
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    (tmp_path / "again/model_000006.pt").unlink()
    again, _ = run(tmp_path, "again", 6, *flags, *SCORED, "--resume")
    assert "resumed from step 4" in again and read_log(tmp_path / "again") == log
    for way in LAYOUTS.get(name, WAYS):
        scored = SCORED if name in SCORED_SPLIT else []
        assert_split_run_matches(tmp_path, way, (log, out), *flags, *scored)
    for (patch, way), message in REFUSED.items():
        if patch == name:
            _, err = run(tmp_path, way, 5, *WAYS[way], processes=2, status=2)
            assert f"error: --{way}: {message}" in err
    if name == "document-mask":
        assert checkpoint(tmp_path / "run", 6)["model_config"]["end_of_text"] == 10
    run(tmp_path, "short", 1, "--init_from", "run", "--block_size", 8, *flags)
    module = runpy.run_path(tmp_path / "model.py")
    check_positions(module)
    # check_flops does not work with four patches. z-loss also changes plaingpt/loss.py, but this
    # process imports the unchanged file. document-mask and sliding-window choose the kernel of
    # attention themselves, and PyTorch does not count the FLOPs of the fast kernel. PyTorch also
    # does not count the FLOPs of F.grouped_mm, which computes the experts of mixture-of-experts.
    if name not in ("document-mask", "mixture-of-experts", "sliding-window", "z-loss"):
        check_flops(module, name)


@pytest.mark.slow
def test_a_stream_of_ones_own(tmp_path):
    copy_program(tmp_path)
    apply_patch(ENTROPY, tmp_path)
    run(tmp_path, "run", 2)
    log = read_log(tmp_path / "run")
    # At initialization, a position attends almost equally to itself and all earlier positions.
    uniform = np.mean([np.log(n) for n in range(1, 17)])
    assert float(log[0, "entropy_0"]) == pytest.approx(uniform, rel=1e-3)
    assert float(log[2, "entropy_1"]) < uniform
    for way, rel in dict(tp=1e-5, fsdp=1e-3).items():  # with FSDP, the mean is over more sequences
        run(tmp_path, way, 2, *WAYS[way], processes=2)
        for key, value in read_log(tmp_path / way).items():
            assert float(value) == pytest.approx(float(log[key]), rel=rel), (way, key)


def check_flops(module, name):
    """Compares GPT.flops_per_token with PyTorch's count of a forward and a backward pass."""
    config = module["GPTConfig"](2, 2, 64, 64, 256)
    model = module["GPT"](config)
    idx = torch.randint(256, (2, 64))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    expected = model.flops_per_token()
    if name == "soft-cap":
        expected += 2 * 256 * 64  # the backward pass computes the logits once more
    if name == "value-residual":
        expected += 6 * 2 * (2 - 1) * 32**2  # flops_per_token counts mix once, not once per head
    assert counter.get_total_flops() / idx.numel() == expected


def check_positions(module):
    """Generation with a KV cache yields the same tokens as without a cache.

    Endings that share a row get the same scores as endings in rows of their own.
    """
    model = randomise(module["GPT"](module["GPTConfig"](2, 2, 16, 16, 256)))
    model.requires_grad_(False).eval()
    idx = out = torch.randint(256, (3, 5))
    for _ in range(20):  # the text becomes longer than the context
        out = torch.cat([out, model(out[:, -16:])[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(idx, 20, temperature=0), out)
    endings = [(np.array(ids), i, True) for i, ids in enumerate(([7, 8, 9], [5, 6]))]
    rows = [Row(np.arange(9), ending) for ending in (endings, endings[:1], endings[1:])]
    together, *alone = (forward(model, [row], 12, idx.device)[1] for row in rows)
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), rtol=1e-4)
