"""experiments/*.patch: each applies, trains, resumes, generates, scores, and can be split."""

import json
import re
import runpy
import shutil

from plaingpt.data import Sources
from plaingpt.errors import UserError
from plaingpt.large.check import check_stages
from plaingpt.scoring.score import Row, forward
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pytest
import torch
from conftest import (
    CPU,
    FSDP,
    MODEL,
    PP,
    ROOT,
    TINY,
    TP,
    apply_patch,
    checkpoint,
    program,
    randomise,
    read_log,
    spawn,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model import GPT
from train_gpt2 import DataLoaderLite

# Changed lines.
LIMITS = {
    "attention-gate": 7,
    "document-mask": 19,  # with 1 in plaingpt/settings.py
    "dyt": 19,
    "gradient-noise": 7,
    "group-schedule": 14,  # with 2 in model.py
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
    "z-loss": 21,  # with 3 in model.py, which log its size
}
HEADS = ("+++", "---")  # lines with the name of a file begin so
# The layouts that could break a patch. A patch that is not here is trained on all of them.
LAYOUTS = {
    "attention-gate": ["fsdp"],
    "document-mask": ["tp", "fsdp"],
    "dyt": ["pp"],  # only the last stage has the last norm
    "gradient-noise": ["tp"],  # with FSDP, the first micro-batches contain more sequences
    "group-schedule": [],  # weight decay also depends on --max_steps
    "grouped-query": ["fsdp"],
    "inverse-sqrt": [],
    "lion": ["fsdp"],  # the optimizer has shards
    "mixture-of-experts": ["fsdp"],  # each of two processes has four experts of a matrix
    "modern": ["tp", "pp"],  # also a part of the head, or no embedding where the head is
    "multi-token": ["fsdp", "pp"],  # its block is not in transformer.h
    "muon-joint": ["fsdp"],
    "no-bias": [],  # as modern
    "no-residual-scaling": [],
    "qknorm": ["tp"],  # its parameters are used by the heads of a process
    "relu2": [],
    "rmsnorm": [],  # as dyt
    "rotary": ["tp"],  # a process has some of the heads
    "sliding-window": ["pp"],  # a stage has only some of the indices
    "soft-cap": ["tp"],
    "swiglu": ["pp"],
    "untied": [],  # as modern
    "value-residual": ["tp"],
    "x0": ["fsdp"],
    "z-loss": ["pp", "fsdp"],  # a process has no loss at all
}
# What a layout refuses.
DIFFERENT = "the parts of this model.py compute a different loss from the whole"
NOT_SMALL = "a small test GPT of this model.py fails"
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
# What a patch returns from GPT.forward.
FIGURES = {
    "gradient-noise": ["norm_small"],
    "mixture-of-experts": ["balance", "cross_entropy"],
    "multi-token": ["ahead", "next"],
    "z-loss": ["z"],
}
ENTROPY = "attention-entropy"  # logs a figure; not with --pp
# Two micro-batches a step.
SMALL = [
    *TINY,
    *(
        "--n_embd 16 --block_size 16 --total_batch_size 256 --min_lr 4e-3 --val_tokens 64 "
        "--val_every 2 --eval_every 0 --sample_tokens 1 --save_every 2 --keep 0"
    ).split(),
]
# A sample and a passage are longer than the context of 16 bytes.
SCORED = "--eval_every 2 --evals lambada=words.txt --sample_every 2 --sample_tokens 17".split()
SCORED_SPLIT = ("grouped-query", "rotary", "sliding-window")  # in generation, a cache is used
WAYS = dict(tp=TP, pp=PP, fsdp=FSDP)
# A layer that a reader may add to attention or to the MLP.
SCALE = """class Scale(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return x * self.weight


class CausalSelfAttention("""


def copy_program(directory):
    """Copies what a run needs, without the git repository."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("plaingpt/**/*.py")):
        copy = directory / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (directory / "input.txt").write_bytes((ROOT / "input.txt").read_bytes()[:20_000])
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
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # The gradient of a key's bias is only rounding error, of which an optimizer makes a step.
        if not name.endswith(("c_attn.bias", "c_k.bias")):
            assert (found[name] - tensor).norm() < 1e-4 * tensor.norm(), (way, name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The log of the unchanged program."""
    directory = tmp_path_factory.mktemp("plain")
    copy_program(directory)
    run(directory, "run", 6, *SCORED)
    return read_log(directory / "run")


def test_every_patch_is_here_and_short():
    patches = {path.stem: path.read_text() for path in ROOT.glob("experiments/*.patch")}
    rows = re.findall(r"^\| (?:\*\*)?`([\w-]+)`", (ROOT / "docs/experiments.md").read_text(), re.M)
    assert sorted(rows) == sorted(patches)  # the page lists all of them
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
    changes_loss = name != "gradient-noise"  # this patch only measures
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
    # The other half of z-loss is in plaingpt, of which this process has the unchanged one.
    # sliding-window chooses among the kernels itself, and PyTorch does not count the fast one. Nor
    # does it count the matrix multiplications of experts.
    if name not in ("document-mask", "mixture-of-experts", "sliding-window", "z-loss"):
        check_flops(module, name)


@pytest.mark.slow
def test_a_stream_of_ones_own(tmp_path):
    copy_program(tmp_path)
    apply_patch(ENTROPY, tmp_path)
    run(tmp_path, "run", 2)
    log = read_log(tmp_path / "run")
    uniform = np.mean([np.log(n) for n in range(1, 17)])  # fresh weights attend to all equally
    assert float(log[0, "entropy_0"]) == pytest.approx(uniform, rel=1e-3)
    assert float(log[2, "entropy_1"]) < uniform
    for way, rel in dict(tp=1e-5, fsdp=1e-3).items():  # with FSDP, the mean over more sequences
        run(tmp_path, way, 2, *WAYS[way], processes=2)
        for key, value in read_log(tmp_path / way).items():
            assert float(value) == pytest.approx(float(log[key]), rel=rel), (way, key)


LOGITS = "        return self.lm_head(x)\n"
LOSS = "return self.loss_fn(x, targets, self.lm_head.weight, reduction)\n"
OWN_HEADS = {  # edits of GPT.logits or GPT.loss alone -> a part of the message
    "soft-cap": (
        (LOGITS, "        return 50 * torch.tanh(self.lm_head(x).float() / 50)\n"),
        "GPT.loss and the cross-entropy of GPT.logits differ by ",
    ),
    "bias": (
        ("config.vocab_size, bias=False)", "config.vocab_size)"),
        "GPT.logits uses lm_head.bias, but GPT.loss does not",
    ),
    "scale": (
        (
            LOGITS,
            "        return self.scale(self.lm_head(x))\n\n"
            "    @property\n"
            "    def scale(self):\n"
            "        return self.transformer.scale\n",
        ),
        "GPT.logits uses transformer.scale.weight, but GPT.loss does not",
    ),
    "z-loss": (
        (
            LOSS,
            "loss = self.loss_fn(x, targets, self.lm_head.weight, reduction)\n"
            "        return loss + 1e-4 * self.logits(x).logsumexp(-1).square().mean()\n",
        ),
        "GPT.loss and the cross-entropy of GPT.logits differ by ",
    ),
}
REMEDY = (
    "; in GPT.loss, pass self.logits to loss_fn instead of self.lm_head.weight (an auxiliary "
    "loss that only training uses belongs in GPT.forward)\n"
)


def copy_with_head(directory, name):
    """Copies the program, with a head of one's own -> a part of the message."""
    copy_program(directory)
    change, message = OWN_HEADS[name]
    edit_model(directory, change)
    if name == "scale":
        layer = "                ln_f=nn.LayerNorm(config.n_embd),\n"
        edit_model(
            directory,
            ("class CausalSelfAttention(", SCALE),
            (layer, f"{layer}                scale=Scale(1),\n"),
        )
    return message


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_HEADS)
def test_a_head_that_the_loss_does_not_have_is_refused(tmp_path, name):
    """Otherwise, one model would be trained, and another one scored. A bias begins with zeros."""
    message = copy_with_head(tmp_path, name)
    ways = dict(WAYS, one=[], ddp=[])
    for way in ways if name == "scale" else ["one"]:
        processes = 1 if way == "one" else 2
        _, err = run(tmp_path, way, 1, *ways[way], processes=processes, status=2)
        # With --pp, the check uses a small GPT, whose random scale changes the loss.
        start = OWN_HEADS["z-loss"][1] if way == "pp" else message
        assert err.startswith(f"error: model.py: {start}") and err.endswith(REMEDY), way
        assert not (tmp_path / way).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, parameter, ways",
    [("bias", "lm_head.bias", ["pp"]), ("scale", "transformer.scale.weight", ["tp", "fsdp"])],
)
def test_a_head_of_ones_own(tmp_path, name, parameter, ways):
    """Its parameter is trained, and a run resumes."""
    copy_with_head(tmp_path, name)
    edit_model(tmp_path, (LOSS, LOSS.replace("self.lm_head.weight", "self.logits")))
    run(tmp_path, "run", 4)
    log = read_log(tmp_path / "run")
    first, second = (checkpoint(tmp_path / "run", step)["model"][parameter] for step in (2, 4))
    assert not torch.equal(first, second)
    for way in ways:
        shutil.copytree(tmp_path / "run", tmp_path / way)
        (tmp_path / way / "model_000004.pt").unlink()
        run(tmp_path, way, 4, *WAYS[way], "--resume", processes=2)
        for key, value in read_log(tmp_path / way).items():
            assert float(value) == pytest.approx(float(log[key]), rel=1e-4), (way, key)


EMBEDDING = "        x = t.drop(t.wte(idx) + t.wpe(pos))  # (B, T, C)\n"
STAGES = {  # edits of model.py that no pipeline computes -> a part of the message
    "every stage": (  # a stage begins with this line, too
        (EMBEDDING, f"{EMBEDDING}        x = 4 * x\n"),
        "the parts of this model.py compute a different loss from the whole model: ",
    ),
    "another stage": (
        (
            "        return None, self.loss(x, targets)\n",
            "        norm = self.transformer.h[0].attn.c_attn.weight.square().mean()\n"
            "        return None, self.loss(x, targets), {'size': norm}\n",
        ),
        "model.py cannot run in stages (no field '0'); remove --pp",
    ),
    "a figure": (
        (
            "        return None, self.loss(x, targets)\n",
            "        n = sum(p.square().sum() for p in self.transformer.h.parameters())\n"
            "        return None, self.loss(x, targets), {'size': n}\n",
        ),
        "the parts of this model.py compute a different size from the whole model: ",
    ),
    "one block": (
        (
            "nn.ModuleList([Block(config, i) for i in range(config.n_layer)])",
            "nn.ModuleList([Block(config, 0)] * config.n_layer)",
        ),
        "transformer.h.0.ln_1.weight and transformer.h.1.ln_1.weight are the same parameter",
    ),
    "one MLP": (
        (
            "        self.init_weights(seed)\n",
            "        self.transformer.h[1].mlp = self.transformer.h[0].mlp\n"
            "        self.init_weights(seed)\n",
        ),
        "mlp.c_fc.weight and transformer.h.1.mlp.c_fc.weight are the same parameter",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, way", [*[(name, "pp") for name in STAGES], ("one MLP", "fsdp")])
def test_a_model_that_no_pipeline_computes_is_refused(tmp_path, name, way):
    """FSDP refuses one MLP for two blocks, too."""
    copy_program(tmp_path)
    change, message = STAGES[name]
    edit_model(tmp_path, change)
    _, err = run(tmp_path, "run", 3, *WAYS[way], processes=2, status=2)
    assert message in err and not (tmp_path / "run").exists()


class OneSize(GPT):
    def hidden(self, idx, *args):
        if self.config.n_embd != 32:
            raise ValueError("n_embd is not 32")
        return super().hidden(idx, *args)


def test_a_pipeline_of_a_model_of_one_size_only_is_refused():
    """Its stages cannot be compared with it."""
    with pytest.raises(
        UserError, match="a small test GPT of this model.py fails .n_embd is not 32"
    ):
        check_stages(OneSize(MODEL), 2)


class Storing(GPT):
    def hidden(self, idx, *args):
        self.stored = super().hidden(idx, *args)
        return self.stored


def test_a_pipeline_of_a_model_that_stores_a_result():
    check_stages(Storing(MODEL), 2)


@pytest.mark.slow
def test_one_block_for_all_layers(tmp_path):
    """As in ALBERT (Lan et al. 2020, arXiv:1909.11942)."""
    copy_program(tmp_path)
    edit_model(tmp_path, STAGES["one block"][0])
    run(tmp_path, "run", 2)
    log = read_log(tmp_path / "run")
    for way, flags in dict(fsdp=WAYS["fsdp"], tp=WAYS["tp"], ddp=[]).items():
        run(tmp_path, way, 2, *flags, processes=2)
        for key, value in read_log(tmp_path / way).items():
            assert float(value) == pytest.approx(float(log[key]), rel=1e-5), (way, key)
    weights = checkpoint(tmp_path / "run", 2)["model"]
    first, second = (weights[f"transformer.h.{i}.ln_1.weight"] for i in (0, 1))
    assert torch.equal(first, second)


# The mean id of the targets. It depends on the data alone, so the test can compute it.
OWN_FIGURE = (
    "        return None, self.loss(x, targets)\n",
    "        counted = targets != -100\n"
    "        own = (targets * counted).sum() / counted.sum()\n"
    '        return None, self.loss(x, targets), {"own": own}\n',
)


@pytest.mark.slow
def test_a_figure_of_the_models_own_is_a_mean_over_the_step(tmp_path):
    """With pairs, micro-batches have different weights."""
    copy_program(tmp_path)
    edit_model(tmp_path, OWN_FIGURE)
    with open(tmp_path / "pairs.jsonl", "w") as file:
        for i in range(300):
            file.write(json.dumps(dict(prompt=f"{i}?", response="yes " * (1 + i % 4))) + "\n")
    sources = Sources([str(tmp_path / "pairs.jsonl")], None, None)
    (tokens, _), *_ = sources.open(get_tokenizer("bytes"), 16, 256)
    loader = DataLoaderLite([tokens], [1], 16)
    expected = []
    for step in range(2):  # of 16 sequences, on any number of processes
        y = loader.batch(16 * step, 16, CPU)[1]
        expected.append(y[y != -100].double().mean().item())
    for way, flags in dict(WAYS, one=[]).items():
        processes = 1 if way == "one" else 2
        run(tmp_path, way, 2, "--data", "pairs.jsonl", *flags, processes=processes)
        log = read_log(tmp_path / way)
        found = [float(log[step, "own"]) for step in range(2)]
        assert found == pytest.approx(expected, rel=1e-6), way


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "norm", "lr", "my own"])
def test_a_figure_with_the_name_of_another_one_is_refused(tmp_path, name):
    copy_program(tmp_path)
    edit_model(tmp_path, (OWN_FIGURE[0], OWN_FIGURE[1].replace('"own"', f'"{name}"')))
    _, err = run(tmp_path, "run", 3, status=1)
    message = f"got multiple values for keyword argument '{name}'"
    if name == "my own":
        message = "the name of a metric must be one word, not 'my own'"
    assert message in err


def check_flops(module, name):
    """GPT.flops_per_token is what PyTorch counts in a step."""
    config = module["GPTConfig"](2, 2, 64, 64, 256)
    model = module["GPT"](config)
    idx = torch.randint(256, (2, 64))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    expected = model.flops_per_token()
    if name == "soft-cap":
        expected += 2 * 256 * 64  # the head is computed once more
    if name == "value-residual":
        expected += 6 * 2 * (2 - 1) * 32**2  # mix is used for each head
    assert counter.get_total_flops() / idx.numel() == expected


def check_positions(module):
    """Samples with a cache equal samples without; endings may share a row."""
    model = randomise(module["GPT"](module["GPTConfig"](2, 2, 16, 16, 256)))
    model.requires_grad_(False).eval()
    idx = out = torch.randint(256, (3, 5))
    for _ in range(20):  # beyond the context
        out = torch.cat([out, model(out[:, -16:])[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(idx, 20, temperature=0), out)
    endings = [(np.array(ids), i, True) for i, ids in enumerate(([7, 8, 9], [5, 6]))]
    rows = [Row(np.arange(9), ending) for ending in (endings, endings[:1], endings[1:])]
    together, *alone = (forward(model, [row], 12, idx.device)[1] for row in rows)
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), rtol=1e-4)


def edit_model(directory, *changes):
    """Replaces texts of the copied model.py. changes: (old, new); each old one occurs once."""
    path = directory / "model.py"
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def copy_with_scale(directory, heads="1", q="q", mlp=""):
    """Copies the program. In its model, the parts of attention and MLP may have a Scale."""
    copy_program(directory)
    edit_model(
        directory,
        ("class CausalSelfAttention(", SCALE),
        ("self.n_head = config.n_head", f"self.n_head, self.scale = config.n_head, {heads}"),
        ("        if cache is not None:", f"        q = {q}\n        if cache is not None:"),
        ('nn.GELU(approximate="tanh")', f'nn.Sequential(nn.GELU("tanh"){mlp})'),
    )


@pytest.mark.slow
def test_a_parameter_inside_attention_has_the_gradient_of_all_heads(tmp_path):
    """One that all heads share, and one with a value for each head."""
    both = "nn.Sequential(Scale(1), Scale(config.n_head, 1, 1))"
    copy_with_scale(tmp_path, heads=both, q="self.scale(q)")
    out, _ = run(tmp_path, "run", 2)
    assert_split_run_matches(tmp_path, "tp", (read_log(tmp_path / "run"), out))


@pytest.mark.slow
def test_a_layer_of_query_key_and_value_that_differ_in_size_is_not_split(tmp_path):
    """--tp would cut it in the wrong places. Two heads share a key and a value."""
    copy_program(tmp_path)
    edit_model(
        tmp_path,
        (
            "nn.Linear(config.n_embd, 3 * config.n_embd)",
            "nn.Linear(config.n_embd, 2 * config.n_embd)",
        ),
        ("self.c_attn(x).chunk(3, dim=2)", "self.c_attn(x).split([C, C // 2, C // 2], dim=2)"),
        ("mask, dropout, causal)", "mask, dropout, causal, enable_gqa=True)"),
    )
    run(tmp_path, "fsdp", 1, *WAYS["fsdp"], processes=2)
    _, err = run(tmp_path, "tp", 1, *WAYS["tp"], processes=2, status=2)
    assert f"error: --tp: {NOT_SMALL}" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "edits, message",
    [
        (
            dict(heads="nn.Parameter(torch.ones(()))", q="self.scale * q"),
            "transformer.h.0.attn.scale is not in a layer; make it the weight of an nn.Module",
        ),
        (
            dict(mlp=", Scale(1)"),
            "the processes have different gradients of "
            "transformer.h.0.mlp.gelu.1.weight; remove --tp",
        ),
    ],
    ids=["direct", "MLP"],
)
def test_a_parameter_that_cannot_be_split(tmp_path, edits, message):
    copy_with_scale(tmp_path, **edits)
    # Only rank 0: if it ends early, the other one may lose its connection.
    process, _ = spawn(
        *SMALL,
        "--max_steps",
        5,
        *WAYS["tp"],
        processes=2,
        cwd=tmp_path,
        program=tmp_path / "train_gpt2.py",
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.splitlines()[-1] == f"error: --tp: {message}"
