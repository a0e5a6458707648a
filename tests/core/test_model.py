"""Compares the model with Hugging Face's GPT-2, with manual calculations, and with the paper."""

import json
import math
from dataclasses import replace

from plaingpt.errors import UserError
from plaingpt.large.split import check_shared
from plaingpt.muon import Muon
from plaingpt.pretrained import read_gpt2, save_gpt2
from plaingpt.sampling import KVCache, sample
from plaingpt.tokenizer import get_tokenizer

import pytest
import torch
import torch.nn.functional as F
from conftest import randomise

import model as model_module
from model import GPT, GPTConfig
from train_large import LargeConfig

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=200)
DROPOUT = replace(SMALL, dropout=0.3)


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(1337)
    return GPT(GPTConfig())


def test_parameters(gpt2):
    assert sum(p.numel() for p in gpt2.parameters()) == 124_439_808
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight


def test_initialization(gpt2):
    projections = 0
    for name, p in gpt2.named_parameters():
        if p.dim() == 1:
            assert (p == (1 if "ln_" in name and name.endswith("weight") else 0)).all(), name
        else:
            residual = name.endswith(("attn.c_proj.weight", "mlp.c_proj.weight"))
            projections += residual
            std = 0.02 / math.sqrt(2 * 12) if residual else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.01), name
            assert abs(p.mean().item()) < 1e-4, name
    assert projections == 24  # two in each block


def test_the_type_of_a_layer_decides_its_initialization():
    """init_weights initializes every linear layer, whatever its name is.

    A layer of a different type keeps the initialization of its constructor.
    """
    model = GPT(SMALL)
    model.conv = torch.nn.Conv1d(64, 64, 3)
    model.gate = torch.nn.Linear(64, 64)
    kept = model.conv.weight.clone()
    model.init_weights()
    assert torch.equal(model.conv.weight, kept)
    assert model.gate.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not model.gate.bias.any()


def load_gpt2(directory):
    """Loads a GPT-2 in Hugging Face format, even if the directory contains no tokenizer."""
    config, weights = read_gpt2(directory, GPT)
    model = GPT(config)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize(
    "shape",
    [
        dict(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=200),
        dict(n_layer=3, n_head=4, n_embd=64, n_positions=48, vocab_size=1000),
    ],
)
def test_equals_transformers(tmp_path, shape):
    transformers = pytest.importorskip("transformers")
    hf = randomise(transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))).eval()
    hf.save_pretrained(tmp_path / "hf")
    model = load_gpt2(tmp_path / "hf")
    idx = torch.randint(shape["vocab_size"], (3, shape["n_positions"]))
    with torch.no_grad():
        (ours, _), (_, loss) = model(idx), model(idx, idx)
        theirs = hf(idx, labels=idx)
        torch.testing.assert_close(ours, theirs.logits, atol=1e-4, rtol=1e-4)
        shifted = F.cross_entropy(theirs.logits.flatten(0, 1), idx.flatten())
    assert loss.item() == pytest.approx(shifted.item(), rel=1e-5)

    save_gpt2(model, tmp_path / "back", get_tokenizer("bytes"))
    back = load_gpt2(tmp_path / "back")
    torch.testing.assert_close(back.state_dict(), model.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back").eval()(idx).logits
    torch.testing.assert_close(again, theirs.logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(activation_function="relu"), "activation_function is 'relu', not 'gelu_new'"),
        (dict(model_type="llama"), "model_type"),
        (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
        (dict(n_layer=3), "no weights for .*h.2.attn"),
    ],
    ids=str,
)
def test_other_architectures_and_missing_weights_are_refused(tmp_path, change, message):
    save_gpt2(GPT(SMALL), tmp_path, get_tokenizer("bytes"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=message):
        load_gpt2(tmp_path)


def by_hand(model, idx, n, seed, **sampling):
    """Generates without a cache: for every token, the model runs on the whole window again."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        with torch.no_grad():
            logits, _ = model(idx[:, -model.config.block_size :])
        sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **sampling}
        idx = torch.cat([idx, sample(logits[:, -1], generator=generator, **sampling)], dim=1)
    return idx


@pytest.mark.parametrize(
    "sampling",
    [dict(temperature=0.0), dict(), dict(temperature=0.7, top_k=20), dict(top_p=0.8)],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 5, 16, 20])
def test_cached_generation_equals_uncached(length, sampling):
    model = randomise(GPT(SMALL))
    idx = torch.randint(200, (3, length))
    out = model.generate(idx, 24, seed=7, **sampling)  # longer than the block_size of 16
    assert out.shape == (3, length + 24) and torch.equal(out[:, :length], idx)
    assert torch.equal(out, by_hand(model, idx, 24, seed=7, **sampling))


def test_generate_has_its_own_random_state():
    model, idx = randomise(GPT(SMALL)), torch.zeros(2, 1, dtype=torch.long)
    before = torch.get_rng_state()
    a = model.generate(idx, 20, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert torch.equal(a, model.generate(idx, 20, seed=1))
    assert not torch.equal(a, model.generate(idx, 20, seed=2))


def test_the_residual_stream_is_float32_on_a_cpu():
    """The residual stream is float32 even if matrix multiplications use bfloat16.

    For CUDA, see test_gpu.py.
    """
    model, dtypes = GPT(SMALL), []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model.hidden(torch.zeros(2, 16, dtype=torch.long))
    assert dtypes == [torch.float32] * 2


def test_sample_top_k_and_top_p_by_hand():
    probs = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])

    def reachable(**sampling):
        generator = torch.Generator().manual_seed(0)
        sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **sampling}
        return {sample(probs.log(), generator=generator, **sampling).item() for _ in range(400)}

    assert reachable() == reachable(top_k=99) == {0, 1, 2, 3, 4}
    assert reachable(top_k=2) == reachable(top_p=0.69) == {1, 3}  # 0.4 + 0.3 >= 0.69
    assert reachable(top_p=0.72) == {1, 3, 4}
    assert reachable(top_p=0.01) == reachable(temperature=0) == reachable(temperature=1e-50) == {1}
    cold = sample(probs.log().expand(2000, 5), torch.Generator().manual_seed(0), 0.5)
    share = (probs**2)[0, 1] / (probs**2).sum()  # at temperature 0.5: p^2, normalized
    assert (cold == 1).double().mean() == pytest.approx(share.item(), abs=0.04)


@pytest.mark.parametrize("has_bfloat16, tolerance", [(True, 0), (False, 5e-5)])
def test_muon_updates_the_hidden_matrices_and_adamw_the_rest(monkeypatch, has_bfloat16, tolerance):
    """In bfloat16, the update equals the update of torch.optim.Muon bit for bit.

    If the CPU has no instructions for bfloat16, Muon uses float32, and the updates differ by
    rounding.
    """
    monkeypatch.setattr("plaingpt.muon.has_bfloat16", lambda device: has_bfloat16)
    model = randomise(GPT(SMALL))
    model.transformer.h[0].attn.scale = torch.nn.Parameter(torch.ones(2, 1, 1))  # not a matrix
    muon, adamw = model.configure_optimizers(0.1, 1e-3, "muon", 2e-3)
    assert type(muon) is Muon and type(adamw) is torch.optim.AdamW
    names_of = {p: name for name, p in model.named_parameters()}
    names = [
        [names_of[p] for group in o.param_groups for p in group["params"]] for o in (muon, adamw)
    ]
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert {*names[0]} == {f"transformer.h.{i}.{layer}.weight" for i in (0, 1) for layer in layers}
    assert sorted(names[0] + names[1]) == sorted(n for n, _ in model.named_parameters())
    assert [g["lr"] for o in (muon, adamw) for g in o.param_groups] == [2e-3, 2e-3, 1e-3, 1e-3]
    p = model.transformer.h[0].mlp.c_fc.weight
    q = torch.nn.Parameter(p.detach().clone())
    p.grad = q.grad = torch.randn(128, 32)
    # Query, key and value are three matrices, even if one layer computes all of them.
    c_attn = model.transformer.h[0].attn.c_attn.weight
    qkv = [torch.nn.Parameter(part.clone()) for part in c_attn.detach().chunk(3)]
    c_attn.grad = torch.randn(96, 32)
    for part, grad in zip(qkv, c_attn.grad.chunk(3)):
        part.grad = grad
    muon.step()
    torch.optim.Muon([q, *qkv], 2e-3, 0.1, adjust_lr_fn="match_rms_adamw").step()
    torch.testing.assert_close(p, q, rtol=0, atol=tolerance)
    torch.testing.assert_close(c_attn, torch.cat(qkv), rtol=0, atol=tolerance)


def test_a_gradient_scaler_unscales_for_muon():
    """torch.amp.GradScaler divides the gradients by its scale before it calls the step of Muon."""
    weights = []
    for scale in (1.0, 1024.0):
        p = torch.nn.Parameter(torch.eye(32))
        muon = Muon([p], 0.1)
        scaler = torch.amp.GradScaler("cpu", scale)
        scaler.scale((p * torch.arange(32)).sum()).backward()
        scaler.step(muon)
        weights.append((p.detach(), muon.state[p]["momentum_buffer"]))
    torch.testing.assert_close(weights[0], weights[1])


def test_groups_of_muon():
    """Each parameter group has its own learning rate, weight decay and momentum."""
    torch.manual_seed(0)
    first, second, a, b = (torch.nn.Parameter(torch.randn(32, 48)) for _ in range(4))
    a.data, b.data = first.detach().clone(), second.detach().clone()
    groups = [dict(params=[first]), dict(params=[second], lr=0.3, weight_decay=0.5, momentum=0.5)]
    optimizers = [Muon(groups, 0.1), Muon([a], 0.1), Muon([b], 0.3, 0.5, 0.5)]
    for _ in range(2):
        first.grad = a.grad = torch.randn(32, 48)
        second.grad = b.grad = torch.randn(32, 48)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close([first, second], [a, b])


def test_one_layer_of_query_key_and_value_that_differ_in_size():
    """Muon would split c_attn into three equal parts, but query, key and value differ in size."""
    model = GPT(SMALL)
    # The two query heads share one key head and one value head, so the layer has 64 outputs.
    model.transformer.h[1].attn.c_attn = torch.nn.Linear(32, 64)
    model.configure_optimizers(0.1, 1e-3, "adamw")
    message = "transformer.h.1.attn.c_attn.weight has 64 rows .*three separate layers"
    with pytest.raises(ValueError, match=message):
        model.configure_optimizers(0.1, 1e-3, "muon")


def test_two_layers_with_one_parameter():
    """If two layers share a parameter, TP would give each layer a parameter of its own."""
    model = GPT(SMALL)
    check_shared(model, LargeConfig(tp=2))
    block = model.transformer.h[0]
    block.ln_2.weight = block.ln_1.weight
    check_shared(model, LargeConfig())
    with pytest.raises(UserError, match="h.0.ln_1.weight and .*h.0.ln_2.weight are the same param"):
        check_shared(model, LargeConfig(tp=2))


def test_activation_checkpointing_saves_memory_and_keeps_the_gradients():
    """When the backward pass recomputes a block, the dropout masks are the same as before."""
    model, idx = randomise(GPT(DROPOUT)), torch.randint(200, (2, 16))

    def run():
        kept = []
        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
            _, loss = model(idx, idx)
        return sum(kept), torch.autograd.grad(loss, model.parameters())

    kept, gradients = run()
    model.activation_checkpointing = True
    kept_little, again = run()
    # With activation checkpointing, a block saves only its input, (B, T, C), for the backward pass.
    assert kept_little < kept / 3
    assert all(torch.equal(a, b) for a, b in zip(gradients, again))


def test_activation_checkpointing_repeats_the_random_numbers_of_an_edit(monkeypatch):
    """The recomputation of an edited block repeats its random numbers, even if --dropout is 0."""
    plain = model_module.MLP.forward

    def forward(self, x):
        return F.dropout(plain(self, x), 0.2, self.training)

    monkeypatch.setattr(model_module.MLP, "forward", forward)
    model, idx = randomise(GPT(SMALL)), torch.randint(200, (2, 16))
    gradients = []
    for model.activation_checkpointing in (False, True):
        torch.manual_seed(5)
        _, loss = model(idx, idx)
        gradients.append(torch.autograd.grad(loss, model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_flops_per_token(gpt2):
    assert gpt2.flops_per_token() == 6 * 123_568_128 + 12 * 12 * 768 * 1024  # 854.65M


def test_a_mask_hides_tokens_also_with_activation_checkpointing():
    model, idx = randomise(GPT(SMALL)), torch.randint(200, (2, 8))
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    mask[:, :, 2:, 1] = False  # later tokens do not attend to token 1
    results = []
    for model.activation_checkpointing in (False, True):
        x = model.hidden(idx, mask=mask)
        results.append([x, *torch.autograd.grad(x.sum(), model.parameters())])
    assert all(map(torch.equal, *results))
    changed = idx.clone()
    changed[:, 1] = (changed[:, 1] + 1) % 200
    same = model.hidden(changed, mask=mask).isclose(results[0][0], atol=1e-5).all(-1)  # (B, T)
    assert same.tolist() == [[t != 1 for t in range(8)]] * 2


# Dropout


def test_dropout_is_active_in_training_only():
    model, idx = randomise(GPT(DROPOUT)), torch.randint(200, (2, 16))
    plain = GPT(SMALL)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval().hidden(idx), plain.hidden(idx))
    model.train()
    assert not torch.equal(model.hidden(idx), model.hidden(idx))
    assert plain.training and torch.equal(plain.hidden(idx), plain.hidden(idx))


def test_dropout_is_in_the_same_places_as_in_gpt2(monkeypatch):
    """Dropout applies to embeddings, attention weights, and both projections of each block."""
    model, idx = GPT(DROPOUT), torch.randint(200, (2, 16))
    shapes, weights, real = [], [], F.scaled_dot_product_attention
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda m, x, y: shapes.append((m.p, tuple(y.shape))))

    def watched(*args, **options):
        weights.append(args[4])
        return real(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model.hidden(idx)
    assert shapes == [(0.3, (2, 16, 32))] * 5 and weights == [0.3, 0.3]
    model.eval().hidden(idx)
    assert weights[2:] == [0.0, 0.0]


def test_several_new_tokens_after_a_cache_need_a_mask():
    model = GPT(GPTConfig(2, 2, 16, 16, 256)).eval()
    cache, idx = [KVCache(16) for _ in range(2)], torch.randint(256, (1, 8))
    with torch.no_grad():
        model.hidden(idx[:, :4], cache)
        with pytest.raises(ValueError, match="4 new tokens after a cache of 4 need a mask"):
            model.hidden(idx[:, 4:], cache)
        mask = torch.ones(4, 8, dtype=torch.bool).tril(4)[None, None]  # (1, 1, T, T so far)
        found = model.hidden(idx[:, 4:], cache, mask=mask)
        torch.testing.assert_close(found, model.hidden(idx)[:, 4:], rtol=1e-4, atol=1e-5)
