"""Compares plaingpt/loss.py with a loss of all logits at once, and with manual calculations."""

import re
from dataclasses import replace

from plaingpt import loss
from plaingpt.loss import CHUNK_SIZE, ChunkedCrossEntropy

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, randomise
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=200)


def test_the_memory_of_the_logits_on_the_pages():
    """docs/hardware.md and the docstring of plaingpt/loss.py say how much memory the logits need.

    Each float32 logit of GPT-2 needs 4 bytes.
    """
    page = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    for N in (64 * 1024, CHUNK_SIZE["cuda"]):
        size = f"{N * 50257 * 4 / 1e9:.1f} GB"
        assert f"| {N:,} | {size} |" in page
        assert size in " ".join(loss.__doc__.split())


def naive_loss(model, idx, targets):
    """Computes the loss from all logits at once."""
    logits = F.linear(model.hidden(idx), model.lm_head.weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@pytest.mark.parametrize("rows", [1, 7, 30, 31])
@pytest.mark.parametrize("ignored", [0, 7, 29])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_loss_in_chunks_equals_loss_of_all_logits(monkeypatch, rows, ignored, dtype, tolerance):
    """The first `ignored` targets are -100. These targets must not affect loss and gradients."""
    monkeypatch.setitem(CHUNK_SIZE, "cpu", rows)
    model, (idx, targets) = randomise(GPT(SMALL)), torch.randint(200, (2, 2, 15))
    targets.view(-1)[:ignored] = -100
    expected = naive_loss(model, idx, targets)
    expected = [expected.detach(), *torch.autograd.grad(3 * expected, model.parameters())]
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        _, loss = model(idx, targets)
        with torch.no_grad():
            # Validation computes the same loss without gradients.
            assert model(idx, targets)[1] == loss
    # The factor 3 must also multiply the gradients.
    for a, b in zip([loss, *torch.autograd.grad(3 * loss, model.parameters())], expected):
        assert a.dtype == torch.float32 and (a - b).norm() <= tolerance * b.norm()


def test_float16_keeps_the_small_gradients():
    """If forward divided gradients by the number of targets, 4096, small ones would lose most bits.

    The smallest gradients of logits are 1/1000 of 1/4096, for tokens that never occur as a target.
    float16 would store only two bits of such a gradient. A loss scale does not help, because only
    backward multiplies by the loss scale.
    """
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=512, vocab_size=1000))
    idx, targets = torch.randint(1000, (8, 512)), torch.zeros(8, 512, dtype=torch.long)
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            x = model.hidden(idx).detach().float()
            loss = model.loss(x, targets)
        # The factor 65536 is the loss scale of a gradient scaler.
        gradients.append(torch.autograd.grad(65536 * loss, model.lm_head.weight)[0][1:])
    assert (gradients[1] - gradients[0]).norm() < 0.002 * gradients[0].norm()


def test_extreme_logits_give_the_exact_loss():
    model = GPT(SMALL)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1)
        model.lm_head.weight.zero_()
        # One logit is 1000, one is -1000, and the other 198 are 0.
        model.lm_head.weight[:2] = torch.tensor([[1000.0], [-1000.0]]) / SMALL.n_embd
        _, loss = model(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0, 1, 2]]))
    assert loss == pytest.approx((0 + 2000 + 1000) / 3, rel=1e-6)


@pytest.mark.parametrize("target", [-1, 200])
def test_a_target_outside_the_vocabulary_raises(target):
    targets = torch.tensor([[0, target]])
    with pytest.raises(RuntimeError, match="a target is outside the vocabulary"):
        GPT(SMALL)(torch.zeros_like(targets), targets)


# A head that is more than a matrix multiplication


class Capped(GPT):
    def logits(self, x):
        return 3 * torch.tanh(self.lm_head(x).float() / 3)

    def loss(self, x, targets, reduction="mean"):
        return self.loss_fn(x, targets, self.logits, reduction)


class Scaled(Capped):
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, config.vocab_size))

    def logits(self, x):
        return self.lm_head(x) * self.scale


@pytest.mark.parametrize("kind", [Capped, Scaled])
@pytest.mark.parametrize("rows", [7, 31])
def test_the_loss_of_a_function_is_the_loss_of_its_logits(monkeypatch, kind, rows):
    monkeypatch.setitem(CHUNK_SIZE, "cpu", rows)
    model, (idx, targets) = randomise(kind(SMALL)), torch.randint(200, (2, 2, 15))
    targets[0, :4] = -100
    logits = model.logits(model.hidden(idx)).flatten(0, 1)
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    mean = losses.sum() / 26
    expected = [mean.detach(), *torch.autograd.grad(3 * mean, model.parameters())]
    _, loss = model(idx, targets)
    found = [loss, *torch.autograd.grad(3 * loss, model.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        x = model.hidden(idx)
        each = model.loss(x, targets, "none")
    torch.testing.assert_close(each.flatten(), losses.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_compiled_loss_of_a_function():
    model, idx = randomise(Capped(replace(SMALL, n_layer=1))), torch.randint(200, (2, 16))
    _, expected = model(idx, idx)
    gradients = torch.autograd.grad(expected, model.parameters())
    compiled = torch.compile(model, dynamic=False, fullgraph=True)
    _, loss = compiled(idx, idx)
    found = torch.autograd.grad(loss, model.parameters())
    torch.testing.assert_close([loss, *found], [expected, *gradients], rtol=1e-4, atol=1e-6)


# Memory


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operator has returned."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = filter(torch.is_tensor, torch.utils._pytree.tree_leaves(out))
        self.numbers = max([self.numbers, *(t.numel() for t in tensors)])
        return out


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [GPT, Capped])
def test_all_logits_are_never_in_memory(kind, grad):
    model = kind(GPTConfig(n_layer=1, n_head=1, n_embd=4, block_size=512, vocab_size=1000))
    idx = torch.randint(1000, (4, 512))
    with torch.set_grad_enabled(grad), Largest() as largest:
        _, loss = model(idx, idx)
        if grad:
            loss.backward()
    # The largest tensor contains the logits of a chunk: 384 of the 4 x 512 positions. If the head
    # is a weight, the loss pads the vocabulary size to 1024.
    assert largest.numbers == 384 * (1024 if kind is GPT else 1000)


@pytest.mark.slow
def test_the_compiled_head_keeps_one_chunk_of_logits_in_memory(monkeypatch):
    """In the generated code, two chunks share one bfloat16 buffer for their logits.

    The code has no buffer for float32 logits.
    """
    import torch._inductor.config as inductor
    import torch._inductor.ir as ir
    from torch._inductor.utils import run_and_get_code

    # On a CPU, Inductor stores a result of exp that is used twice, but not on a GPU. This patch
    # selects the code for a GPU.
    monkeypatch.setattr(ir, "is_cpu", lambda device: False)
    torch.manual_seed(0)
    head = torch.nn.Linear(32, 1000, bias=False)
    x, w = torch.randn(8, 64, 32, requires_grad=True), head.weight
    V, loss_fn = 1000, ChunkedCrossEntropy(1000)
    y = torch.randint(V, (8, 64))
    compiled = torch.compile(loss_fn, fullgraph=True, dynamic=False)

    def run(function, rows):
        monkeypatch.setitem(CHUNK_SIZE, "cpu", rows)
        x.grad = w.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(x, y, w)
        loss.backward()
        return loss, x.grad, w.grad

    expected = run(loss_fn, 256)
    with inductor.patch(fx_graph_cache=False):
        # A compiled chunk has 4 x 64 positions.
        found, code = run_and_get_code(lambda: run(compiled, 64))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert buffers(code) == ["torch.bfloat16"]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as in a validation
            _, code = run_and_get_code(lambda: compiled(x, y, w))
        assert buffers(code) == ["torch.bfloat16"]


def buffers(code):
    """Returns the dtypes of the logit buffers in code that Inductor has generated.

    A buffer contains the logits of one chunk: 4 x 64 positions, and a vocabulary size of 1000 that
    the loss pads to 1024.
    """
    return re.findall(r"empty_strided_cpu\(\(256, 1024\), \(1024, 1\), (\S+)\)", "\n".join(code))


def test_second_derivatives_raise():
    """The forward pass computes the gradients, so autograd cannot differentiate the gradients."""
    x, w = torch.randn(2, 5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = ChunkedCrossEntropy(9)(x, torch.randint(9, (2, 5)), w)
    with pytest.raises(RuntimeError, match="has no second derivative; compute it from the logits"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_losses_of_positions_have_no_gradient_and_say_so():
    x, w = torch.randn(2, 5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    arguments = x, torch.randint(9, (2, 5)), w, "none"
    with pytest.raises(ValueError, match='reduction="none" cannot be differentiated'):
        ChunkedCrossEntropy(9)(*arguments)
    with torch.no_grad():
        assert ChunkedCrossEntropy(9)(*arguments).shape == (2, 5)


def test_float16_does_not_overflow_if_all_positions_have_one_target(monkeypatch):
    """The sum of 16,384 positions of value 8 is 131,072. The largest float16 number is 65,504.

    Therefore, a float16 chunk must have fewer positions.
    """
    monkeypatch.setitem(CHUNK_SIZE, "cpu", 16384)
    x, w = torch.full((1, 16384, 4), 8.0), torch.zeros(300, 4, requires_grad=True)
    y = torch.zeros(1, 16384, dtype=torch.long)
    with torch.autocast("cpu", torch.float16):
        loss = ChunkedCrossEntropy(300)(x, y, w)
    loss.backward()
    expected = torch.full((300, 4), 8 / 300)
    expected[0] -= 8
    torch.testing.assert_close(w.grad, expected, rtol=1e-2, atol=0)
