"""An edited copy of the program: the tests replace lines of its model.py, and train it."""

import shutil

import pytest
from conftest import FSDP, PP, ROOT, TINY, TP, checkpoint, program, read_log

# Two micro-batches a step.
SMALL = [
    *TINY,
    *(
        "--n_embd 16 --block_size 16 --total_batch_size 256 --min_lr 4e-3 --val_tokens 64 "
        "--val_every 2 --eval_every 0 --sample_tokens 1 --save_every 2 --keep 0"
    ).split(),
]


WAYS = dict(tp=TP, pp=PP, fsdp=FSDP)


def copy_program(directory):
    """Copies what a run needs, without the git repository."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("plaingpt/**/*.py")):
        copy = directory / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    # Each process of --tp has some of the targets: ids below 128, or larger ids, as in é.
    text = (ROOT / "input.txt").read_text()[:20_000].replace("e", "é")
    (directory / "input.txt").write_text(text, "utf-8")
    (directory / "words.txt").write_text("The boat came home with the evening tide\nThe end\n")


def run(directory, name, steps, *flags, **options):
    """Trains with the copied program -> (stdout, stderr) of rank 0."""
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
    """Two steps on two processes. whole: (log, stdout) of the run of one process."""
    out, _ = run(directory, way, 2, *WAYS[way], *flags, processes=2)
    for key, value in read_log(directory / way).items():
        assert float(value) == pytest.approx(float(whole[0][key]), rel=1e-5), (way, key)
    if "--sample_every" in flags:
        assert out[out.index("--- sample 0") : out.index("done:")].strip() in whole[1]
    split, one = (checkpoint(directory / name, 2) for name in (way, "run"))
    groups, expected = ([o["param_groups"] for o in each["optimizers"]] for each in (split, one))
    assert groups == expected  # so either of them can resume the other
    found, expected = split["model"], one["model"]
    tolerance = 1e-3 if "muon" in flags else 1e-4  # Muon computes in bfloat16 if the CPU can
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # The gradient of a key's bias is only rounding error, of which an optimizer makes a step.
        if not name.endswith(("c_attn.bias", "c_k.bias")):
            assert (found[name] - tensor).norm() < tolerance * tensor.norm(), (way, name)


# The mean id of the targets. It depends on the data alone, so the test can compute it.
OWN_FIGURE = (
    "        return None, self.loss(x, targets)\n",
    "        counted = targets != -100\n"
    "        own = (targets * counted).sum() / counted.sum()\n"
    '        return None, self.loss(x, targets), {"own": own}\n',
)


def edit_model(directory, *changes):
    """Replaces texts of the copied model.py. changes: (old, new); each old one occurs once."""
    path = directory / "model.py"
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


# Two layers of the same shape, whose parameters are then in another order.
SWAPPED = (
    "        self.ln_1 = nn.LayerNorm(config.n_embd)\n"
    "        self.attn = CausalSelfAttention(config, index)\n"
    "        self.ln_2 = nn.LayerNorm(config.n_embd)\n",
    "        self.ln_2 = nn.LayerNorm(config.n_embd)  # Python notices that the size has changed.\n"
    "        self.attn = CausalSelfAttention(config, index)\n"
    "        self.ln_1 = nn.LayerNorm(config.n_embd)\n",
)
