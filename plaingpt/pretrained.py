"""Loads weights from checkpoints, runs and Hugging Face. Exports them in Hugging Face format."""

import json
from pathlib import Path

from plaingpt.checkpoint import (
    check_tied,
    check_weights,
    find_checkpoints,
    load_checkpoint,
    unpack,
)
from plaingpt.errors import UserError, explaining, require
from plaingpt.files import write_json
from plaingpt.terminal import print0
from plaingpt.tokenizer import BYTE_OF, build_byte_level, get_tokenizer, load_tokenizer

import torch

# OpenAI's Conv1D stores these weights as (in, out), and nn.Linear as (out, in).
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# The GPT in model.py uses these settings. A Hugging Face model with different settings would load,
# but compute wrong logits.
GPT2 = dict(
    model_type="gpt2",
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
    scale_attn_weights=True,
    add_cross_attention=False,
    scale_attn_by_inverse_layer_idx=False,
)
OPENAI = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # names on the Hugging Face Hub


def read_gpt2(name, GPT):
    """Reads a GPT-2 in Hugging Face format. Returns (GPTConfig, state dict).

    name: a name on the Hugging Face Hub, such as "gpt2" or "gpt2-medium", or a directory. GPT: the
    class of the model. Raises UserError if the weights cannot be loaded, or are not a GPT-2.
    """
    transformers = require("transformers")
    transformers.utils.logging.disable_progress_bar()  # a download shows its own progress bar
    transformers.utils.logging.set_verbosity_error()
    # The package transformers and the libraries that it uses raise exceptions of many kinds.
    with explaining(f"{name}: transformers cannot load it", "use gpt2, an export, or a .pt file"):
        hf_config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        for key, value in GPT2.items():
            found = getattr(hf_config, key, None)
            if found != value:
                raise ValueError(f"{key} is {found!r}, not {value!r}")
        # Without ignore_mismatched_sizes, transformers would name wrong shapes only in its log
        # messages, which set_verbosity_error has turned off.
        hf, info = transformers.GPT2LMHeadModel.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True
        )
        for key, found, expected in sorted(info["mismatched_keys"]):
            raise ValueError(
                f"{key} has the shape {tuple(found)}, but config.json needs {tuple(expected)}"
            )
        missing = sorted(info["missing_keys"])
        if missing:  # transformers would initialize these weights randomly
            raise ValueError(f"no weights for {', '.join(missing[:3])}")
        config = GPT.config_class(
            n_layer=hf_config.n_layer,
            n_head=hf_config.n_head,
            n_embd=hf_config.n_embd,
            block_size=hf_config.n_positions,
            vocab_size=hf_config.vocab_size,
        )
        weights = transpose_conv1d(hf.float().state_dict())
        check_weights(weights, config, GPT)
        check_tied(weights, config, GPT)
    return config, weights


def save_gpt2(model, directory, tokenizer, dtype=None):
    """Writes a GPT and its Tokenizer into a directory, in Hugging Face format.

    Before that, compares the logits of the GPT with the logits of Hugging Face's GPT-2, because an
    edited model.py may compute different logits. dtype: dtype of the saved weights; None: the dtype
    of the model.

    Raises UserError if a package is missing, if the logits are different, or if a file cannot be
    written. Raises OSError if the file mode of the weights cannot be changed.
    """
    transformers = require("transformers")
    transformers.utils.logging.disable_progress_bar()
    block_size = model.config.block_size
    hf = transformers.GPT2LMHeadModel(make_hf_config(model.config, tokenizer))
    if not same_logits(model, hf):
        raise UserError(
            "model.py no longer computes the logits of Hugging Face's GPT-2; use generate.py"
        )
    hf.generation_config.max_length = block_size  # transformers cannot slide the context window
    with explaining(f"{directory}: cannot write", "free some space"):
        # Writes all weights into one file. If there were several files, a file of an earlier export
        # could remain next to the new files.
        hf.to(dtype).save_pretrained(directory, max_shard_size=2**40)
    save_tokenizer(tokenizer, directory, block_size)
    # save_pretrained lets only the owner read the weights. The next lines let everyone who may read
    # config.json also read the weights.
    for path in Path(directory).glob("*.safetensors"):
        path.chmod(Path(directory, "config.json").stat().st_mode)


def make_hf_config(config, tokenizer):
    """Returns Hugging Face's GPT2Config for a model with this GPTConfig and Tokenizer."""
    transformers = require("transformers")
    end = tokenizer.end_of_text
    return transformers.GPT2Config(
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        vocab_size=config.vocab_size,
        n_positions=config.block_size,
        n_ctx=config.block_size,  # llama.cpp reads n_ctx, the old name of n_positions
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        # A pipeline of transformers puts `prefix` before a prompt, and generate.py does the same.
        # With byte tokens, no token ends a text, except in pairs ("lines"), where a line break ends
        # a text.
        bos_token_id=end,
        eos_token_id=None if tokenizer.source == "bytes" else end,
        prefix=tokenizer.decode([end]),
    )


@torch.no_grad()
def same_logits(model, hf):
    """Returns whether a GPT and Hugging Face's GPT-2 compute the same logits, except for rounding.

    model: the GPT. hf: the GPT2LMHeadModel, into which this function loads the weights of the GPT.
    """
    try:
        hf.load_state_dict(transpose_conv1d(model.state_dict()))
    except RuntimeError:  # names or shapes differ
        return False
    # A sequence with the length of the whole context also reveals an edited attention, such as a
    # sliding window.
    idx = torch.randint(model.config.vocab_size, (1, model.config.block_size))  # (B, T)
    expected, _ = model(idx)  # (B, T, vocab_size)
    difference = (hf(idx).logits - expected).abs().max()
    return bool(difference < 1e-4 * expected.abs().max())


def save_tokenizer(tokenizer, directory, block_size):
    """Writes tokenizer.json and tokenizer_config.json, which AutoTokenizer of transformers reads.

    Like the tokenizer of OpenAI's GPT-2, the written tokenizer adds no token before a text. Only
    plainGPT reads the key "end_of_text".
    """
    library = tokenizer.json or build_library(tokenizer.token_bytes, tokenizer.special)
    settings = json.loads(library.to_str())
    settings["post_processor"] = None
    end = library.id_to_token(tokenizer.end_of_text)
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=block_size,
        clean_up_tokenization_spaces=False,
        end_of_text=end,
    )
    if tokenizer.special:
        config.update(bos_token=end, eos_token=end)
    write_json(Path(directory, "tokenizer.json"), settings)
    write_json(Path(directory, "tokenizer_config.json"), config)


def build_library(token_bytes, special):
    """Returns the tokenizer "gpt2" or "bytes" as an object of the package tokenizers.

    token_bytes: the bytes of each token. special: {string: id} of special tokens.
    """
    bpe_encode = require("tiktoken._educational").bpe_encode
    letters = {byte: letter for letter, byte in BYTE_OF.items()}
    names = []  # the tokens as strings, with a character of BYTE_OF per byte
    ranks = {}  # {bytes of a token: id}
    merges = []
    for token in token_bytes[: len(token_bytes) - len(special)]:  # special tokens come last
        names.append("".join(map(letters.get, token)))
        if len(token) > 1:
            # `ranks` does not contain this token yet, so BPE splits the token into the two tokens
            # whose merge creates it.
            left, right = bpe_encode(ranks, token, visualise=None)
            merges.append((names[left], names[right]))
        ranks[token] = len(ranks)
    vocab = {name: i for i, name in enumerate(names)}
    return build_byte_level(vocab, merges, list(special))


def transpose_conv1d(weights):
    """Converts a state dict between the layouts of OpenAI's Conv1D and nn.Linear.

    The conversion transposes the weights in CONV1D, so it is its own inverse.
    """
    found = {}
    for name, tensor in weights.items():
        found[name] = tensor.t().contiguous() if name.endswith(CONV1D) else tensor
    return found


def load_model(name, GPT):
    """Returns (GPT in eval mode, Tokenizer). The arguments are as in read_weights."""
    config, weights, tokenizer = read_weights(name, GPT)
    model = GPT(config).eval()  # eval, in case an edited model.py ignores dropout 0
    model.load_state_dict(weights)
    return model, tokenizer


def read_weights(name, GPT):
    """Reads weights. Returns (GPTConfig, state dict, Tokenizer).

    name: a checkpoint, a run directory, or the name or directory of a Hugging Face GPT-2. GPT: the
    class of the model.
    """
    path = Path(name)
    paths = find_checkpoints(name)
    if paths:  # name is a run directory
        path = paths[-1]
    if path.suffix == ".safetensors" or path.name == "pytorch_model.bin":
        raise UserError(f"{name}: give the directory of this file, which also contains config.json")
    if path.is_file():
        checkpoint = load_checkpoint(path, GPT)
        if "model_args" in checkpoint:  # from nanoGPT; build-nanogpt's GELU uses tanh
            print0(
                "note: nanoGPT's GELU is exact, but plainGPT approximates GELU with tanh; logits "
                "may differ by 0.01"
            )
        return unpack(checkpoint, GPT)
    if name in ("scratch", "resume"):  # values of --init_from in nanoGPT
        raise UserError(
            f"--init_from {name}: to start a new run, remove this flag; to continue a run, use "
            "--resume"
        )
    # A name such as openai-community/gpt2 refers to the Hugging Face Hub, unless a local directory
    # has this name.
    is_local = path.parent.is_dir() and path.parent.name != ""
    if path.suffix == ".pt" or (is_local and not path.exists()):
        raise UserError(f"{name}: no such checkpoint; give another file or a run directory")
    config, weights = read_gpt2(name, GPT)
    if path.exists():
        # If there is a vocab.json but no merges.txt, load_tokenizer raises UserError.
        has_tokenizer = (path / "tokenizer.json").exists() or (path / "vocab.json").exists()
    else:
        has_tokenizer = name.removeprefix("openai-community/") not in OPENAI
    tokenizer = load_tokenizer(path) if has_tokenizer else get_tokenizer("gpt2")
    if tokenizer.n_vocab > config.vocab_size:
        raise UserError(
            f"{name}: the vocabulary of tokenizer.json is larger than the model's; correct "
            "tokenizer.json"
        )
    return config, weights, tokenizer
