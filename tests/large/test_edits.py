"""Tests edited versions of model.py: each layout trains the edited model, or refuses it."""

import json
import shutil

from plaingpt.data import Sources
from plaingpt.errors import UserError
from plaingpt.large.check_split import check_stages
from plaingpt.tokenizer import get_tokenizer

import pytest
import torch
from conftest import CPU, MODEL, checkpoint, read_log, spawn
from edited import (
    OWN_FIGURE,
    SMALL,
    WAYS,
    assert_split_run_matches,
    copy_program,
    edit_model,
    run,
)

from model import GPT
from train_gpt2 import DataLoaderLite

NOT_SMALL = "a small test GPT of this model.py fails"
# A layer that a reader may add to attention or to the MLP.
SCALE = """class Scale(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return x * self.weight


class CausalSelfAttention("""


LOGITS = "        return self.lm_head(x)\n"


LOSS = "return self.loss_fn(x, targets, self.lm_head.weight, reduction)\n"


# Edits after which GPT.loss is not the cross-entropy of GPT.logits. {name: ((old text, new text),
# part of the error message)}
OWN_HEADS = {
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
    "; in GPT.loss, pass self.logits to loss_fn instead of self.lm_head.weight (if the loss "
    "is an auxiliary loss for training, add it in GPT.forward)\n"
)


def copy_with_head(directory, name):
    """Copies the program, and applies an edit of OWN_HEADS. Returns a part of the error message."""
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
    """If GPT.loss ignored a part of GPT.logits, a run would not train the model that it scores.

    At initialization, an added bias is 0 and an added scale is 1. Therefore, it is not enough to
    check that GPT.loss equals the cross-entropy of GPT.logits.
    """
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
    """Training changes the parameter of an edited head. The run resumes in different layouts."""
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


# Edits of model.py that a pipeline cannot compute. {name: ((old text, new text), part of the error
# message)}
STAGES = {
    "every stage": (  # each stage would multiply x by 4, not only the first stage
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
    """--pp fails with each edit in STAGES. FSDP fails only with an MLP that two blocks share."""
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
    """The check of the stages runs a small GPT, but this model works only with n_embd = 32."""
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
    """All layers may share one block, as in ALBERT (Lan et al. 2020, arXiv:1909.11942)."""
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


@pytest.mark.slow
def test_a_figure_of_the_models_own_is_a_mean_over_the_step(tmp_path):
    """A logged metric is a mean over all counted targets of a step.

    With prompts and responses, micro-batches contain different numbers of counted targets. The
    means of the metric and of the loss therefore weight each micro-batch by its number of targets.
    """
    copy_program(tmp_path)
    edit_model(tmp_path, OWN_FIGURE)
    with open(tmp_path / "pairs.jsonl", "w") as file:
        for i in range(300):
            file.write(json.dumps(dict(prompt=f"{i}?", response="yes " * (1 + i % 4))) + "\n")
    sources = Sources([str(tmp_path / "pairs.jsonl")], None, None)
    (tokens, _), *_ = sources.open(get_tokenizer("bytes"), 16, 256)
    loader = DataLoaderLite([tokens], [1], 16)
    expected = []
    for step in range(2):  # a step reads 16 sequences, on any number of processes
        y = loader.batch(16 * step, 16, CPU)[1]
        expected.append(y[y != -100].double().mean().item())
    for way, flags in dict(dict(one=[]), **WAYS).items():
        processes = 1 if way == "one" else 2
        run(tmp_path, way, 2, "--data", "pairs.jsonl", *flags, processes=processes)
        log = read_log(tmp_path / way)
        found = [float(log[step, "own"]) for step in range(2)]
        assert found == pytest.approx(expected, rel=1e-6), way
        for key, value in read_log(tmp_path / "one").items():
            assert float(log[key]) == pytest.approx(float(value), rel=1e-5), (way, key)


def copy_with_scale(directory, heads="1", q="q", mlp=""):
    """Copies the program, and adds a parameter to attention or to the MLP in the copied model.py.

    Except directory, each argument is Python code. heads: the value of self.scale. q: the new value
    of q. mlp: the layers after the GELU.
    """
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
    """All heads share one parameter. Another parameter contains a different value for each head."""
    both = "nn.Sequential(Scale(1), Scale(config.n_head, 1, 1))"
    copy_with_scale(tmp_path, heads=both, q="self.scale(q)")
    out, _ = run(tmp_path, "run", 2)
    assert_split_run_matches(tmp_path, "tp", (read_log(tmp_path / "run"), out))


@pytest.mark.slow
def test_a_layer_of_query_key_and_value_that_differ_in_size_is_not_split(tmp_path):
    """--tp would cut c_attn into three equal parts, but query, key and value differ in size.

    In the edited model, two query heads share one key head and one value head.
    """
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
    # The test reads only the output of rank 0. When rank 0 ends, rank 1 may print that it has lost
    # its connection.
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
