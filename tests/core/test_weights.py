"""Loads unusual weights, such as a tied matrix with two values."""

import re
from dataclasses import asdict, replace

from plaingpt.errors import UserError
from plaingpt.pretrained import load_model, save_gpt2
from plaingpt.tokenizer import get_tokenizer

import pytest
import torch
import torch.nn.functional as F
from conftest import MODEL, TINY, fresh

import model as model_module
import train_gpt2
from model import GPT

HEAD = "lm_head.weight"
WTE = "transformer.wte.weight"


def save_checkpoint(path, config=MODEL, tokenizer="bytes", **changes):
    """Writes a checkpoint. Returns its path.

    changes: tensors that replace some of the weights, as name=tensor.
    """
    weights = fresh(config).state_dict() | changes
    torch.save(dict(model=weights, model_config=asdict(config), tokenizer=tokenizer), path)
    return path


def save_huggingface(path, **changes):
    """Writes a GPT-2 in Hugging Face format. Returns its directory.

    changes: tensors that replace some of the weights, as name=tensor; None removes a weight.
    """
    safetensors = pytest.importorskip("safetensors.torch")
    save_gpt2(fresh(MODEL), path, get_tokenizer("bytes"))
    weights = safetensors.load_file(path / "model.safetensors") | changes
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    safetensors.save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def save_nanogpt(path, **changes):
    """Writes a checkpoint in nanoGPT's format. Returns its path.

    changes: tensors that replace some of the weights, as name=tensor.
    """
    weights = fresh(replace(MODEL, vocab_size=50257)).state_dict()
    arguments = {name: value for name, value in asdict(MODEL).items() if name != "dropout"}
    arguments["vocab_size"] = 50257
    torch.save(dict(model=weights | changes, model_args=arguments), path)
    return path


@pytest.mark.parametrize("save, n", [(save_nanogpt, 50257), (save_huggingface, 256)])
def test_a_tied_matrix_with_two_values_is_refused(save, n, tmp_path):
    """The file of a model without weight tying contains two different matrices.

    If this file were loaded, one of the two matrices would be lost without a message.
    """
    pytest.importorskip("transformers")
    wte = fresh(replace(MODEL, vocab_size=n)).state_dict()[WTE]
    with pytest.raises(UserError, match=f"{WTE} and {HEAD} have different values, but the model"):
        load_model(save(tmp_path / "two", **{HEAD: wte + 0.1}), GPT)
    same, _ = load_model(save(tmp_path / "one", **{HEAD: wte.clone()}), GPT)
    assert torch.equal(same.lm_head.weight, wte)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("transformer.h.0.attn.q_norm.weight", (16,)),  # a layer that model.py does not contain
        ("transformer.h.2.ln_1.weight", (32,)),  # a block more than in the settings
        ("transformer.h.0.mlp.c_fc.bias", (256,)),
    ],
)
def test_a_nanogpt_of_a_different_architecture_is_refused(tmp_path, name, shape):
    with pytest.raises(UserError, match=re.escape(name)):
        load_model(save_nanogpt(tmp_path / "one", **{name: torch.ones(shape)}), GPT)


def test_the_causal_mask_in_a_nanogpt_is_ignored(tmp_path):
    mask = torch.ones(1, 1, 32, 32).tril()
    load_model(save_nanogpt(tmp_path / "one", **{"transformer.h.0.attn.bias": mask}), GPT)


def test_an_embedding_that_a_file_has_only_as_the_head(tmp_path):
    """transformers writes a tied matrix only once, possibly under the name of the head."""
    pytest.importorskip("transformers")
    wte = fresh(MODEL).state_dict()[WTE]
    model, _ = load_model(save_huggingface(tmp_path / "hf", **{HEAD: wte, WTE: None}), GPT)
    assert torch.equal(model.transformer.wte.weight, wte)


def test_a_dropout_of_an_edit_is_off_in_a_loaded_model(tmp_path, monkeypatch):
    """The edit adds dropout. In a loaded model, dropout must be off, so the logits are GPT-2's."""
    plain = model_module.MLP.forward

    def forward(self, x):
        return F.dropout(plain(self, x), 0.5, self.training)

    monkeypatch.setattr(model_module.MLP, "forward", forward)
    loaded, _ = load_model(save_checkpoint(tmp_path / "model.pt"), GPT)
    idx = torch.randint(256, (1, 16))
    assert torch.equal(loaded(idx)[0], loaded(idx)[0])


def test_a_run_with_too_few_ids_is_refused_before_it_starts(tmp_path, monkeypatch):
    """The vocabulary lacks only the id of end_of_text.

    The data do not contain this id, but each sample begins with it.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("A boat came home. " * 999)
    flags = [*TINY, "--data", "t.txt", "--tokenizer", "gpt2", "--vocab_size", "50256"]
    with pytest.raises(UserError, match="--vocab_size 50256: must be at least 50,257, the"):
        train_gpt2.main(flags)
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]
