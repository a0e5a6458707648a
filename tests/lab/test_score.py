"""Tests the loss of experiments/score.py, and how score.py finds models that see later tokens."""

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY

import look
from model import GPT, GPTConfig

score = look.import_file(ROOT / "experiments/score.py", "score")
SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=300)


class Peeking(GPT):
    """A GPT whose hidden state at position 5 depends on the next token."""

    def hidden(self, idx, *more):
        x = super().hidden(idx, *more)
        x[:, 5] += 0.1 * self.transformer.wte(idx[:, 6])
        return x


class Averaging(GPT):
    def logits(self, x):
        return super().logits(x + 0.01 * x.mean(1, keepdim=True))


class Remembering(GPT):
    """A GPT whose hidden states also depend on the tokens of the previous call.

    To all hidden states, the GPT adds the fraction of tokens that differ between both calls.
    """

    def hidden(self, idx, *more):
        before = getattr(self, "before", idx)
        self.before = idx
        return super().hidden(idx, *more) + (before != idx)[..., None].float().mean()


class Broken(GPT):
    def logits(self, x):
        return super().logits(x) * float("nan")


@torch.no_grad()
@pytest.mark.parametrize(
    "kind, sees", [(GPT, 0), (Peeking, 1), (Averaging, 1), (Remembering, 1), (Broken, 1)]
)
def test_later_tokens(kind, sees):
    model = kind(SHAPE, seed=1).eval()
    x = torch.randint(300, (3, 16))
    assert (score.effect_of_later_tokens(model, x) > 1e-4) == sees


@torch.no_grad()
def test_the_loss_is_that_of_the_logits():
    """score.py computes the loss from GPT.logits, even if a change replaces GPT.loss.

    The loss ignores targets of -100.
    """
    model = GPT(SHAPE, seed=1).eval()
    model.loss = None
    x, y = torch.randint(300, (2, 5, 16))
    y[2, :9] = -100
    expected = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
    assert score.mean_loss(model, x, y) == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed, kept", [(1, ["model_000001.pt"]), (2, [])])
def test_a_run_with_a_score_keeps_only_the_model_of_seed_1(seed, kept, tmp_path, monkeypatch):
    """score.py deletes the model at the end of its own run, even if a later run fails."""
    validation = tmp_path / "validation.pt"
    torch.save([(1.0, *torch.randint(256, (2, 1, 32)))], validation)
    flags = [*TINY, "--max_steps", "1", "--warmup_steps", "0", "--seed", str(seed), "--log_dir"]
    monkeypatch.setattr("sys.argv", ["score.py", str(validation), *flags, str(tmp_path / "run")])
    score.main()
    assert (tmp_path / "run" / "score.json").is_file()
    assert [path.name for path in (tmp_path / "run").glob("model_*.pt")] == kept
