"""Writes, finds, checks and reads checkpoints. Also reads checkpoints of nanoGPT."""

import math
import pickle
import re
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

from plaingpt.errors import UserError, explaining
from plaingpt.files import reading, replacing, writing
from plaingpt.process import check_equal, on_rank0
from plaingpt.terminal import print0
from plaingpt.tokenizer import get_tokenizer

import torch

NOT_READABLE = "not a readable checkpoint"
# Glob patterns of the files that a run or an export contains.
MODEL_FILES = (
    "*.pt",
    "log.txt",
    "run.json",
    "changes.patch",
    "*.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "README.md",
)


def make_whole_gpt(GPT, config, activation_checkpointing=False):
    """Creates the whole GPT on the meta device, where tensors need no memory.

    GPT: the class in model.py. config: the GPTConfig of the new GPT.
    """
    with torch.device("meta"):
        return GPT(config, activation_checkpointing)


def check_tied(weights, config, GPT):
    """Raises ValueError if weights that a GPT ties, such as embedding and head, have two values.

    load_state_dict would silently keep only one of the two values. weights: a state dict. config:
    the GPTConfig. GPT: the class of the model.
    """
    first_names = {}  # {parameter: the first of its names}
    for name, p in make_whole_gpt(GPT, config).named_parameters(remove_duplicate=False):
        first = first_names.setdefault(p, name)
        if first != name and not torch.equal(weights[first], weights[name]):
            raise ValueError(f"{first} and {name} have different values, but the model ties them")


def convert_nanogpt(found, GPT):
    """Converts the dict in a checkpoint of nanoGPT or build-nanogpt to plainGPT's format.

    `save` in train_gpt2.py describes this format. Raises ValueError unless the token ids are
    GPT-2's. If the vocabulary size is padded to 50,304, removes the rows of the unused ids. GPT:
    the class of the model.
    """
    # nanoGPT stores the settings of a model in a dict, and build-nanogpt in a GPTConfig.
    settings = found.get("model_args")
    if not settings:
        settings = getattr(found.get("config"), "__dict__", {})
    if settings.get("vocab_size") not in (50257, 50304):
        raise ValueError("another program wrote this file, or the token ids are not GPT-2's")
    config = GPT.config_class(
        vocab_size=50257,
        block_size=settings["block_size"],
        n_layer=settings["n_layer"],
        n_head=settings["n_head"],
        n_embd=settings["n_embd"],
    )
    weights = {}
    for name, tensor in found["model"].items():
        # torch.compile adds the prefix _orig_mod, and DDP adds the prefix module. A name may have
        # both prefixes, in either order.
        name = re.sub(r"^((_orig_mod|module)\.)+", "", name)
        if name in ("transformer.wte.weight", "lm_head.weight"):
            tensor = tensor[: config.vocab_size]
        if not name.endswith(".attn.bias"):  # a buffer with the causal mask
            weights[name] = tensor.float()
    for name, p in make_whole_gpt(GPT, config).named_parameters(remove_duplicate=False):
        if name.endswith(".bias"):  # a model of nanoGPT with bias=False has no biases
            weights.setdefault(name, torch.zeros(p.shape))
    check_weights(weights, config, GPT)
    check_tied(weights, config, GPT)
    return found | dict(model=weights, model_config=asdict(config), tokenizer="gpt2")


def load_checkpoint(path, GPT, remedy="give another checkpoint"):
    """Loads a checkpoint. Returns the dict that `save` in train_gpt2.py describes, on the CPU.

    All processes must call this function. Only rank 0 computes the checksums. GPT: the class of the
    model. remedy: what the user can do if the file is damaged, or if another program wrote it.
    """
    on_rank0(check_checksums, path, remedy)
    # A file of build-nanogpt contains a GPTConfig, which torch reads as a SimpleNamespace.
    build_nanogpt = (SimpleNamespace, "__main__.GPTConfig")
    # zipfile, pickle and torch raise exceptions of many kinds.
    with reading(path, remedy, NOT_READABLE), torch.serialization.safe_globals([build_nanogpt]):
        checkpoint = map_file(path)
        if "model_config" not in checkpoint:
            return convert_nanogpt(checkpoint, GPT)
    with explaining(
        f"{path}: does not fit this model.py",
        "restore the model.py of that run; the run directory may contain a changes.patch",
        (RuntimeError, TypeError),
    ):
        check_weights(checkpoint["model"], GPT.config_class(**checkpoint["model_config"]), GPT)
    return checkpoint


def check_weights(weights, config, GPT):
    """Raises RuntimeError unless a state dict contains exactly the names and shapes of a GPT.

    weights: the state dict. config: the GPTConfig of the GPT. GPT: the class of the model.
    """
    # load_state_dict with assign=True stores this option in the metadata of a state dict. A later
    # load_state_dict of the same dict would then also assign the weights, and so untie tied
    # weights. A plain dict has no metadata.
    make_whole_gpt(GPT, config).load_state_dict(dict(weights), assign=True)


def check_checksums(path, remedy):
    """Raises UserError if a checksum in a checkpoint, which is a zip file, is wrong.

    torch.load does not compare the checksums. If a bit had changed on the disk, torch.load would
    load wrong weights.
    """
    with reading(path, remedy, NOT_READABLE), zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()  # the first damaged file in the archive, or None
        if damaged:
            raise ValueError(f"the checksum of {damaged} is wrong")


def map_file(path):
    """Returns the contents of a file written by torch.save, with its tensors mapped into memory.

    All processes on a machine share the memory of a mapped file. Raises exceptions of many kinds if
    the file is damaged.
    """
    # Windows cannot delete or move a file that is mapped into memory.
    return load_file(path, "cpu", mmap=sys.platform != "win32")


def load_file(file, device, **options):
    """Returns the contents of a file written by torch.save, without running code from the file.

    file: a path or an open file. device, options: arguments of torch.load.

    Raises ValueError if the file contains a value of a type that torch.load refuses.
    """
    try:
        return torch.load(file, device, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
        if not refused:
            raise
        raise ValueError(f"torch.load refuses the type {refused[1]}") from error


def write_checkpoint(path, state):
    """Writes a dict as a checkpoint. After an error, the file at `path` is unchanged.

    torch.save also writes values of types that torch.load(weights_only=True) refuses, such as a
    NumPy number in the state of an optimizer. If the dict contains such a value, this function
    raises UserError.
    """
    what = f"{path}: the optimizers contain a value that cannot be read back"
    remedy = "store only tensors, Python's numbers and strings, and lists and dicts of them"
    with writing(path, "free some space, then continue with --resume"), replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # PyTorch turns an OSError into a RuntimeError
            raise (error.__context__ or error) from None
        file.flush()
        with explaining(what, remedy, ValueError), open(file.name, "rb") as written:
            load_file(written, "meta")  # reads no tensors, so this takes milliseconds


def read_best_val(directory):
    """Returns the validation loss of model_best.pt, or inf if the run directory has no such file.

    log.txt may contain a lower loss, if an earlier part of the run did not use --keep_best.
    """
    path = directory / "model_best.pt"
    if not path.is_file():
        return math.inf
    with reading(path, "move it away", NOT_READABLE):
        return map_file(path)["val"]


def find_checkpoints(directory):
    """Returns the paths of a run's checkpoints, except model_best.pt. The oldest comes first."""
    paths = [path for path in Path(directory).glob("model_*.pt") if step_of(path) is not None]
    return sorted(paths, key=step_of)


def step_of(path):
    """Returns the step in a file name: 500 for model_000500.pt, None if there is no step."""
    step = path.stem.removeprefix("model_")
    return int(step) if step.isdecimal() else None


def list_model_files(source):
    """Returns the paths of files that no output may replace: all files of a run or an export.

    source: the path of a checkpoint, a run or an export, or a name on the Hugging Face Hub. For a
    name on the Hugging Face Hub, returns [].
    """
    path = Path(source)
    if not path.exists():
        return []
    directory = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else []
    for name in MODEL_FILES:
        files += directory.glob(name)
    return files


def load_newest(directory, GPT):
    """Returns the dict of the newest checkpoint in a run directory, or None if there is none.

    All processes must call this function. GPT: the class of the model.
    """
    paths = find_checkpoints(directory)
    check_equal(paths, "the processes have different checkpoints; use the same --log_dir for all")
    if not paths:
        print0(f"nothing to resume in {directory}: starting a new run")
        return None
    remedy = "move it away to resume from the previous checkpoint"
    checkpoint = load_checkpoint(paths[-1], GPT, remedy)
    if "train_config" not in checkpoint:
        raise UserError(f"{paths[-1]}: another program wrote it; use --init_from {directory}")
    if "optimizers" not in checkpoint:
        raise UserError(
            f"{paths[-1]}: version 2.1 or older wrote it; finish the run with that version, or "
            f"replace --resume with --init_from {directory}, and give --preset, --data and another "
            "--log_dir"
        )
    return checkpoint


def unpack(checkpoint, GPT):
    """Returns (GPTConfig, state dict, Tokenizer) from the dict of a checkpoint.

    The GPTConfig has a dropout of 0. GPT: the class of the model.
    """
    config = replace(GPT.config_class(**checkpoint["model_config"]), dropout=0.0)
    return config, checkpoint["model"], get_tokenizer(checkpoint["tokenizer"])


def find_newest_model(place=None):
    """Returns the path of the newest checkpoint. Raises UserError if there is none.

    place: the path of a checkpoint, a run directory, a directory of runs, or an export. The default
    is log. The path of a checkpoint or an export is returned unchanged. If place is a run
    directory, skips the old runs in its subdirectories old-1, old-2 and so on.
    """
    place = Path(place or "log")
    if place.is_file() or (place / "config.json").is_file():
        return place
    is_run = (place / "log.txt").is_file()
    newest = []  # the newest checkpoint of each run
    for directory in (place, *place.glob("*/")):
        paths = find_checkpoints(directory)
        is_old = is_run and directory != place and re.fullmatch(r"old-\d+", directory.name)
        if paths and not is_old:
            newest.append(paths[-1])
    if not newest:
        raise UserError(f"no checkpoint in {place}; train a model, or give --checkpoint FILE")
    return max(newest, key=lambda path: path.stat().st_mtime)
