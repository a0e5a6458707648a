"""Loads trained weights from a checkpoint, a run, or a GPT-2 of Hugging Face."""

from pathlib import Path

from plaingpt.base.errors import UserError
from plaingpt.base.terminal import print0
from plaingpt.data.tokenizer import get_tokenizer, load_tokenizer
from plaingpt.weights.checkpoint import find_checkpoints, load_checkpoint, unpack
from plaingpt.weights.huggingface import read_gpt2

OPENAI = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # names on the hub


def load_model(name, GPT):
    """Loads weights -> (GPT, Tokenizer). Raises UserError. The arguments are as in read_weights."""
    config, weights, tokenizer = read_weights(name, GPT)
    model = GPT(config)
    model.load_state_dict(weights)
    return model, tokenizer


def read_weights(name, GPT):
    """Reads weights -> (GPTConfig, state dict, Tokenizer). Raises UserError.

    name: a checkpoint, a run directory, or the name or directory of a Hugging Face GPT-2. GPT: the
    class of the model.
    """
    path = Path(name)
    paths = find_checkpoints(name)
    if paths:  # name is a run directory
        path = paths[-1]
    if path.is_file():
        checkpoint = load_checkpoint(path, GPT)
        if "model_args" in checkpoint:  # nanoGPT wrote it; build-nanogpt's GELU is ours
            print0("note: nanoGPT's GELU is exact, ours uses tanh: a logit may differ by 0.01")
        return unpack(checkpoint, GPT)
    if name in ("scratch", "resume"):  # nanoGPT's words
        raise UserError(f"--init_from {name}: leave it out for a new run; --resume continues one")
    # A name such as openai-community/gpt2 is on the hub, unless there is such a directory here.
    is_local = path.parent.is_dir() and path.parent.name != ""
    if path.suffix == ".pt" or (is_local and not path.exists()):
        raise UserError(f"{name}: no such checkpoint; give another file, or a run directory")
    config, weights = read_gpt2(name, GPT)
    if path.exists():
        # If there is only a vocab.json, its ids are unknown, and load_tokenizer raises.
        has_tokenizer = (path / "tokenizer.json").exists() or (path / "vocab.json").exists()
    else:
        has_tokenizer = name.removeprefix("openai-community/") not in OPENAI
    tokenizer = load_tokenizer(path) if has_tokenizer else get_tokenizer("gpt2")
    if tokenizer.n_vocab > config.vocab_size:
        raise UserError(f"{name}: has fewer ids than its tokenizer; correct its tokenizer.json")
    return config, weights, tokenizer
