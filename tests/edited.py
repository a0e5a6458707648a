"""Trains with a copy of the program. Tests replace lines of the copied model.py."""

import shutil

import pytest
from conftest import FSDP, PP, ROOT, TINY, TP, checkpoint, program, read_log

# The flags of a run that takes two micro-batches per step on one process.
SMALL = [
    *TINY,
    *(
        "--n_embd 16 --block_size 16 --total_batch_size 256 --min_lr 4e-3 --val_tokens 64 "
        "--val_every 2 --eval_every 0 --sample_tokens 1 --save_every 2 --keep 0"
    ).split(),
]


WAYS = dict(tp=TP, pp=PP, fsdp=FSDP)


def copy_program(directory):
    """Copies the files that a run needs, without the git repository."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("plaingpt/**/*.py")):
        copy = directory / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    # With --tp 2, one process computes the logits of ids below 128, and the other process computes
    # all other logits. Each letter é has two bytes above 128, so both processes have targets.
    text = (ROOT / "input.txt").read_text()[:20_000].replace("e", "é")
    (directory / "input.txt").write_text(text, "utf-8")
    (directory / "words.txt").write_text("The boat came home with the evening tide\nThe end\n")


def run(directory, name, steps, *flags, **options):
    """Runs the copied program in a directory. Returns (stdout, stderr) of rank 0.

    name: the run directory. steps: the value of --max_steps.
    """
    return program(
        *SMALL,
        "--log_dir",
        name,
        "--max_steps",
        steps,
        *flags,
        cwd=directory,
        program=directory / "train_gpt2.py",
        **options,
    )


def assert_split_run_matches(directory, way, whole, *flags):
    """Takes two steps on two processes. Checks that the run matches a run on one process.

    way: a key of WAYS. whole: (log, stdout) of the run on one process, whose log_dir is "run".
    """
    out, _ = run(directory, way, 2, *WAYS[way], *flags, processes=2)
    for key, value in read_log(directory / way).items():
        assert float(value) == pytest.approx(float(whole[0][key]), rel=1e-5), (way, key)
    if "--sample_every" in flags:
        assert out[out.index("--- sample 0") : out.index("done:")].strip() in whole[1]
    split, one = (checkpoint(directory / name, 2) for name in (way, "run"))
    groups, expected = ([o["param_groups"] for o in each["optimizers"]] for each in (split, one))
    assert groups == expected  # so either layout can resume a run of the other layout
    found, expected = split["model"], one["model"]
    # Muon computes in bfloat16 if the CPU supports bfloat16.
    tolerance = 1e-3 if "muon" in flags else 1e-4
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # The exact gradient of a key's bias is 0. The computed gradient is only a rounding error,
        # which an optimizer may scale up to a full step.
        if not name.endswith(("c_attn.bias", "c_k.bias")):
            assert (found[name] - tensor).norm() < tolerance * tensor.norm(), (way, name)


# This edit logs a metric: the mean token id of the targets. The metric depends only on the data, so
# a test can compute the same value.
OWN_FIGURE = (
    "        return None, self.loss(x, targets)\n",
    "        counted = targets != -100\n"
    "        own = (targets * counted).sum() / counted.sum()\n"
    '        return None, self.loss(x, targets), {"own": own}\n',
)


def edit_model(directory, *changes):
    """Replaces strings in the copied model.py.

    changes: pairs (old string, new string). Each old string must occur exactly once.
    """
    path = directory / "model.py"
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


# This edit swaps two layers of the same shape, which changes the order of the parameters. The
# comment changes the size of model.py, so that Python compiles the new version of the file.
SWAPPED = (
    "        self.ln_1 = nn.LayerNorm(config.n_embd)\n"
    "        self.attn = CausalSelfAttention(config, index)\n"
    "        self.ln_2 = nn.LayerNorm(config.n_embd)\n",
    "        self.ln_2 = nn.LayerNorm(config.n_embd)  # changes the size of the file\n"
    "        self.attn = CausalSelfAttention(config, index)\n"
    "        self.ln_1 = nn.LayerNorm(config.n_embd)\n",
)
