"""Compares runs of several processes with a run of one process.

The runs use DDP, or the layouts of train_large.py. The processes communicate with gloo, on the CPU.
"""

import re

import pytest
import torch
from conftest import (
    FSDP,
    PP,
    ROOT,
    TINY,
    TP,
    assert_close_logs,
    checkpoint,
    forget_steps_after,
    optimizer_values,
    program,
    read_log,
)

pytestmark = pytest.mark.slow  # each test starts a program

# 3 blocks and a vocabulary size of 257 cannot be split evenly. The gradient norm is always above
# 0.5, so clipping is active. A step has 16 sequences, so each process computes at least two
# micro-batches of 4 sequences. Between steps, the run computes a validation loss and a benchmark.
SMALL = [
    *TINY,
    *(
        "--n_layer 3 --vocab_size 257 --batch_size 4 --max_steps 2 --val_tokens 640 --val_every 1 "
        "--sample_tokens 3 --grad_clip 0.5 --evals lambada=examples.jsonl --keep_best"
    ).split(),
]
RECOMPUTE = ["--activation_checkpointing"]
WAYS = {
    "ddp": (2, []),
    "fsdp x pp": (4, PP),
    "tp": (2, TP),
    "recompute, fsdp": (2, RECOMPUTE + FSDP),
}


def run_small(directory, processes, *flags, **options):
    """Trains a small model on text.txt.

    With --tp 2, rank 0 has the part of the vocabulary up to id 128, and rank 1 has the larger ids.
    The text contains ids of both parts.
    """
    text = (ROOT / "input.txt").read_text()[:100_000].replace("e", "é")  # é has the ids 195, 169
    (directory / "text.txt").write_text(text, "utf-8")
    example = '{"text": "The boat came home with the evening tide"}\n'
    (directory / "examples.jsonl").write_text(example * 3)
    data = ["--data", "text.txt"]
    return program(*SMALL, *data, *flags, cwd=directory, processes=processes, **options)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Trains the reference run, with one process. Returns (run directory, output)."""
    directory = tmp_path_factory.mktemp("alone")
    out, _ = run_small(directory, 1, "--log_dir", "run", "--save_every", 1, "--keep", 0)
    return directory / "run", out


def largest_difference(a, b):
    """Returns the largest value of norm(a - b) / norm(b) over the tensors of two dicts."""
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in b)


def assert_same_run(run, reference, steps=2):
    assert_close_logs(reference, run, rel=1e-5)
    a, b = checkpoint(run, steps), checkpoint(reference, steps)
    # Adam divides a gradient by its size, so a gradient that consists only of rounding errors
    # changes a weight as much as any other gradient. The tolerance for weights is therefore larger.
    assert largest_difference(a["model"], b["model"]) < 1e-4
    for key in ("step", "position", "tokenizer", "model_config", "scaler"):
        assert a[key] == b[key]
    assert largest_difference(optimizer_values(a), optimizer_values(b)) < 1e-4
    groups, expected = ([state["param_groups"] for state in s["optimizers"]] for s in (a, b))
    assert groups == expected  # parameters have the same numbers, names and settings
    # The run saves model_best.pt after a validation, when FSDP has not resharded all parameters.
    a, b = (torch.load(each / "model_best.pt", weights_only=True) for each in (run, reference))
    assert a["step"] == b["step"] and largest_difference(a["model"], b["model"]) < 1e-4


def sample(out):
    return out[out.index("--- sample 0") : out.index("done:")]


@pytest.mark.parametrize("way", WAYS)
def test_parallel_runs_match_the_run_of_one_process(tmp_path, alone, way):
    processes, flags = WAYS[way]
    out, _ = run_small(tmp_path, processes, *flags, "--log_dir", "run")
    assert_same_run(tmp_path / "run", alone[0])
    norms = [float(v) for (_, stream), v in read_log(alone[0]).items() if stream == "norm"]
    assert min(norms) > 0.5  # clipping was active
    assert sample(out) == sample(alone[1])


def test_a_checkpoint_can_be_resumed_in_another_layout(tmp_path):
    """Four layouts take one step each, and resume from the checkpoint of the previous layout.

    The layouts are FSDP x TP, one process, TP x PP with activation checkpointing, and DDP. The log
    and the checkpoint are the same as in a run of one process.
    """
    short = "--max_steps 4 --val_every 4 --save_every 1 --keep 0".split()
    expected, _ = run_small(tmp_path, 1, "--log_dir", "one", *short)
    run = tmp_path / "run"
    ways = ((0, 4, TP), (1, 1, []), (2, 4, RECOMPUTE + TP + PP[1:]), (3, 2, []))
    for start, processes, flags in ways:
        # Each run trains up to step 4. The next run resumes from the first checkpoint of this run.
        forget_steps_after(run, start)
        flags = [*flags, *short, "--log_dir", "run", "--resume"]
        out, _ = run_small(tmp_path, processes, *flags)
        assert f"resumed from step {start} " in out or start == 0
        assert_same_run(run, tmp_path / "one", steps=4)
        assert sample(out) == sample(expected)


def test_compiled_tensor_parallelism(tmp_path):
    """Compiles the blocks and the loss. The model has one block, because compilation takes long."""
    flags = "--n_layer 1 --eval_every 0 --val_every 0".split()
    run_small(tmp_path, 1, *flags, "--log_dir", "one")
    run_small(tmp_path, 2, *flags, *TP, "--compile", "--log_dir", "tp")
    assert_close_logs(tmp_path / "one", tmp_path / "tp", rel=1e-5)


def test_batch_size_rampup_in_a_pipeline(tmp_path):
    """A step has 8 sequences during the ramp-up, and 16 sequences after the ramp-up.

    With two stages, each step consists of two micro-batches: of 4 sequences, and later of 8.
    """
    flags = "--max_steps 4 --rampup_steps 2 --rampup_batch_size 256 --batch_size 8".split()
    flags += ["--eval_every", 0]
    for name, processes, way in (("one", 1, []), ("two", 2, PP)):
        run_small(tmp_path, processes, *flags, *way, "--log_dir", name)
    assert_same_run(tmp_path / "two", tmp_path / "one", steps=4)


def test_all_processes_skip_a_float16_overflow(tmp_path, alone):
    """The loss scale is too large for three steps.

    In each of these steps, all processes skip the update, and halve the loss scale.
    """
    saved = checkpoint(alone[0], 2)
    saved["scaler"] = dict(
        scale=2.0**35,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        _growth_tracker=0,
    )
    for way, flags in dict(fsdp=FSDP, pp=PP).items():
        (tmp_path / way).mkdir()
        torch.save(saved, tmp_path / way / "model_000002.pt")
        out, _ = run_small(
            tmp_path,
            2,
            *flags,
            "--log_dir",
            way,
            "--resume",
            "--dtype",
            "float16",
            "--max_steps",
            5,
        )
        after = checkpoint(tmp_path / way, 5)
        assert "| 3 skipped" in out and after["scaler"]["scale"] == 2.0**32
        torch.testing.assert_close(after["model"], saved["model"], rtol=0, atol=0)


def test_parallel_muon_with_bfloat16(tmp_path):
    """Muon and autocast compute in bfloat16, so the layouts agree only up to rounding errors."""

    def state(name):
        saved = checkpoint(tmp_path / name, 2)["optimizers"]
        return [(state["param_groups"], state["state"].keys()) for state in saved]

    muon = ["--optimizer", "muon", "--muon_lr", 4e-3, "--dtype", "bfloat16"]
    run_small(tmp_path, 1, *muon, "--log_dir", "one")
    assert ["n_stacked" in groups[0] for groups, _ in state("one")] == [True, False]  # Muon, AdamW
    for name, processes, flags in (("fsdp", 2, FSDP), ("pp", 3, ["--large", "--pp", 3])):
        run_small(tmp_path, processes, *muon, *flags, "--log_dir", name)
        assert_close_logs(tmp_path / "one", tmp_path / name, rel=2e-2)
        assert state(name) == state("one")


def test_fsdp_uses_the_calculated_memory(tmp_path):
    """Trains a model with 21.8M parameters in float32 on two processes.

    With DDP, each process would keep 16 bytes per parameter: weight, gradient and two moments. With
    FSDP, each process keeps half of these 16 bytes. Two unsharded blocks, their gradients and send
    buffers add at most 2 bytes per parameter. During initialization, each process keeps half of the
    weights and one whole layer.
    """
    flags = (
        "--n_layer 16 --n_head 6 --n_embd 336 --vocab_size 256 --block_size 8 --eval_every 0 "
        "--batch_size 1 --total_batch_size 16 --max_steps 2 --val_tokens 8 "
        "--sample_tokens 1"
    ).split()
    out, _ = program(*SMALL, *FSDP, *flags, cwd=tmp_path, processes=2, program="tests/memory.py")
    start, whole = map(float, re.search(r"MEMORY (\S+) (\S+)\n", out).groups())
    assert 1 < start < 3 and 8 < whole < 8 + 2 + 2, (start, whole)


def test_the_methods_of_a_sharded_model_give_the_results_of_gpt(tmp_path):
    """On all processes, the methods return the same results as with a GPT that is not split.

    The test calls the methods before and after a training step. All processes return the same loss
    and gradient norm of this step.
    """

    def results(way, processes):
        program(*way, "results", cwd=tmp_path, processes=processes, program="tests/methods.py")
        return [torch.load(tmp_path / f"results.{rank}") for rank in range(processes)]

    (alone,) = results([1, 1], 1)  # the values of --tp and --pp
    for way, processes in (
        ([1, 1], 2),
        ([2, 1], 2),
        ([1, 3], 3),  # the stage in the middle has no embedding and no head
    ):
        found = results(way, processes)
        for result in found:
            torch.testing.assert_close(result, alone, rtol=1e-4, atol=1e-5)
            for step in (0, 1):
                assert result[step]["trained"] == found[0][step]["trained"]


def test_an_auxiliary_loss_in_forward_is_trained(tmp_path, alone):
    """With FSDP, TP and PP, the program calls the edited GPT.forward of tests/auxiliary.py.

    tests/auxiliary.py also checks that splitting replaces no method or attribute of the model.
    """

    def run(processes, *flags):
        return run_small(tmp_path, processes, *flags, program="tests/auxiliary.py")[0]

    expected = run(1, "--log_dir", "one")
    for way, flags in dict(fsdp=FSDP, tp=TP, pp=PP).items():
        out = run(2, *flags, "--log_dir", way)
        assert_same_run(tmp_path / way, tmp_path / "one")
        assert sample(out) == sample(expected)
    first, plain = (float(read_log(run)[0, "train"]) for run in (tmp_path / "one", alone[0]))
    # tests/auxiliary.py adds 0.1 x the mean square of the hidden states. After the final norm, this
    # mean square is about 1.
    assert first > plain + 0.05


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            TP,
            "--tp 2: must be a divisor of --n_head, which is 3",
        ),
        (PP, "--pp 2: is above --n_layer 1; give fewer stages"),
    ],
    ids=["tp", "pp"],
)
def test_a_model_that_cannot_be_split(tmp_path, flags, message):
    shape = ["--n_head", 3, "--n_layer", 1, "--n_embd", 33]
    _, err = run_small(tmp_path, 2, *flags, *shape, "--eval_every", 0, "--log_dir", "run", status=2)
    assert err.splitlines()[-1] == f"error: {message}"
    assert not (tmp_path / "run").exists()
