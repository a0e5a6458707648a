"""Finds, loads, saves and resumes checkpoints. Also loads the weights that a run starts from."""

import ast
import hashlib
import math
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from model import GPT, GPTConfig
from plaingpt import cli, parallel
from plaingpt.cli import FREE, UserError, explaining, marked, print0, replacing, writing
from plaingpt.device import check_equal, memory_advice, on_rank0
from tokenizer import get_tokenizer, load_tokenizer

MODEL = Path(__file__).parents[1] / "model.py"
# Fine-tuning of weights that are narrower than GPT-2's takes more steps. Its rate grows with
# 1 / width^2: it is 1.8e-3 for baby, see docs/measurements.md.
NARROW = dict(batch_size=16, max_steps=400, val_every=40)
OPENAI = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # names on the hub


class Saver:
    """Saves and restores the state of a run. All processes must call its methods."""

    def __init__(self, training, data, config, process):
        self.model, self.scaler = training.raw_model, training.scaler
        self.data, self.config, self.process = data, config, process
        check_equal(data.fingerprints, "--data: the processes have different data; copy the files")
        self.flags = {**asdict(config), **asdict(self.model.config)}
        check_equal(self.flags, "the processes have different flags; give all the same")
        # The keys are "adamw" and "muon".
        self.optimizers = {type(each).__name__.lower(): each for each in training.optimizers}
        self.free = marked(type(config), FREE)  # a resume may change these flags without a note
        self.model_code = hash_of_code([MODEL])  # model.py may be edited later, so hash it now
        self.best_val = math.inf  # the lowest validation loss of the run

    def save(self, step, position, name=None):
        """Writes model_{step}.pt, or `name`, and deletes all but the newest `keep` checkpoints.

        position: number of sequences that the run has consumed. The file is either complete or
        absent. Raises UserError.
        """
        model, process = self.model, self.process
        gathered = parallel.gather(model, dict(model.named_parameters()), process)
        moments = {
            kind: parallel.gather(model, get_moments(optimizer), process)
            for kind, optimizer in self.optimizers.items()
        }
        if process.rank > 0:
            return
        # A tied matrix has two names. The checkpoint has both. `gathered` has only the first one.
        first_name = {}  # {parameter: its first name}
        weights = {
            name: gathered[first_name.setdefault(p, name)]
            for name, p in whole_gpt(model.config).named_parameters(remove_duplicate=False)
        }
        settings = {**asdict(self.config), **self.data.fingerprints}
        state = dict(
            model=weights,
            optimizer=moments,
            scaler=self.scaler.state_dict(),
            step=step,
            position=position,
            tokenizer=self.data.tokenizer.source,
            model_code=self.model_code,
            model_config=asdict(model.config),
            train_config={k: v for k, v in settings.items() if k not in self.free},
        )
        path = Path(self.config.log_dir, name or f"model_{step:06d}.pt")
        with writing(path, "free some space, then continue with --resume"), replacing(path) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # PyTorch raises it while it handles an OSError
                raise (error.__context__ or error) from None
        for old in checkpoints(path.parent)[: -self.config.keep] if self.config.keep else ():
            old.unlink()

    def save_best(self, val, step, position):
        """With --keep_best, saves model_best.pt if val is the lowest loss after step 0.

        This comes before val is in log.txt. So if the disk is full, a resume measures it again, and
        saves the file.
        """
        if self.config.keep_best and step and val < self.best_val:
            self.best_val = val
            self.save(step, position, "model_best.pt")

    def restore(self, checkpoint):
        """Loads the optimizers and the scaler -> (step, position); (0, 0) without a checkpoint.

        Prints which settings have changed. Raises UserError if the checkpoint is from other data or
        another optimizer, or is beyond the last step.
        """
        if checkpoint is None:
            return 0, 0
        config, place, step = self.config, self.config.log_dir, checkpoint["step"]
        before = checkpoint["train_config"] | checkpoint["model_config"]
        if step > config.max_steps:
            raise UserError(f"the run in {place} is at step {step}; give a larger --max_steps")
        changed = [
            f"the {split} was {before[split]} and is {now}"
            for split, now in self.data.fingerprints.items()
            if before.get(split, now) != now
        ]
        if changed:
            raise UserError(f"{place} had other data: {changed[0]}; use --init_from, not --resume")
        if checkpoint["optimizer"].keys() != self.optimizers.keys():
            raise UserError(f"the run in {place} has another --optimizer; give all its flags again")
        for kind, optimizer in self.optimizers.items():
            set_moments(optimizer, moments_by_name(checkpoint["optimizer"][kind]))
        if checkpoint["scaler"]:  # it is {} unless the dtype was float16
            self.scaler.load_state_dict(checkpoint["scaler"])
        streams = on_rank0(cli.read_streams, Path(place, "log.txt")) if config.keep_best else {}
        # min returns inf instead of NaN, which is not below it.
        found = streams.get("val", {}).items()
        self.best_val = min([math.inf, *(value for s, value in found if 0 < s <= step)])
        print0(f"resumed from step {step} in {place}")
        for name, now in self.flags.items():
            if name not in self.free and before.get(name, now) != now:
                print0(f"note: {name} changes from {before[name]} to {now}")
        return step, checkpoint["position"]


def whole_gpt(config):
    """Returns the whole GPT of this GPTConfig on the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return GPT(config)


def get_moments(optimizer):
    """Returns the moments of an optimizer: {"transformer.wte.weight.exp_avg": tensor}."""
    return {
        f"{name}.{moment}": tensor
        for name, p in named_params(optimizer)
        for moment, tensor in optimizer.state.get(p, {}).items()
    }


def set_moments(optimizer, moments):
    """Gives an optimizer its moments, which are whole tensors under the names of get_moments.

    Learning rates and weight decay come from the flags, not from here. Raises UserError if a shape
    is wrong, because fused kernels would write beyond the tensor.
    """
    own = dict(named_params(optimizer))
    for key, whole in moments.items():
        name, _, moment = key.rpartition(".")
        if name in own:  # otherwise it belongs to another stage of the pipeline
            if whole.shape not in ((), own[name].shape):
                raise UserError(f"{key} has a wrong shape in the checkpoint; resume from another")
            part = parallel.scatter(name, whole, own[name], own[name].device)
            optimizer.state[own[name]][moment] = part


def named_params(optimizer):
    """Returns [(name, parameter)] of an optimizer."""
    return [pair for g in optimizer.param_groups for pair in zip(g["param_names"], g["params"])]


def moments_by_name(saved):
    """An optimizer's part of a checkpoint -> {"transformer.wte.weight.exp_avg": tensor}.

    Older versions stored the state dict of the optimizer. In it, the parameters have numbers, and
    each group lists their names.
    """
    if "param_groups" not in saved:
        return saved
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    return {
        f"{names[i]}.{moment}": tensor
        for i, moments in saved["state"].items()
        for moment, tensor in moments.items()
    }


def load_checkpoint(path, remedy="give another one"):
    """Loads a checkpoint as the dict that Saver.save wrote, on the CPU. Raises UserError.

    All processes must call it. Only rank 0 reads the file from end to end, to check it.
    remedy: what the user should do if the file is damaged, or is no checkpoint of this program.
    """
    on_rank0(check_file, path, remedy)
    return read_file(path)


def read_file(path):
    """Reads the dict in a checkpoint. With mmap, the processes of a machine share its memory."""
    # Runs no code of the file. build-nanogpt's has a GPTConfig of its own, which ours replaces.
    with torch.serialization.safe_globals([(GPTConfig, "__main__.GPTConfig")]):
        # Windows deletes and moves no file that is mapped.
        checkpoint = torch.load(path, "cpu", weights_only=True, mmap=sys.platform != "win32")
    return checkpoint if "model_config" in checkpoint else convert_nanogpt(checkpoint)


def check_file(path, remedy):
    """Raises UserError unless a file is a complete checkpoint with finite weights."""
    what = f"{path}: not a readable checkpoint"
    # zipfile, pickle and torch raise exceptions of many kinds.
    with explaining(what, remedy), explaining(f"{path}: cannot be read", "try again", OSError):
        with zipfile.ZipFile(path) as archive:  # torch.save writes a zip file, with checksums
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
        checkpoint = read_file(path)
    if checkpoint.get("model_code", code := hash_of_code([MODEL])) != code:
        print0(f"note: {path} was written by another model.py")
        remedy = "restore that model.py; its run may have a changes.patch"
    with explaining(what, remedy):
        model = whole_gpt(GPTConfig(**checkpoint["model_config"]))
        model.load_state_dict(checkpoint["model"], assign=True)  # compares names and shapes
        if not all(tensor.isfinite().all() for tensor in checkpoint["model"].values()):
            raise ValueError("its weights are not finite")


def convert_nanogpt(found):
    """Dict of a checkpoint of nanoGPT or build-nanogpt -> one with the model as we store it.

    Raises ValueError unless its ids are GPT-2's. Their vocabulary of 50,304 has unused ids, which
    are cut off.
    """
    shape = found.get("model_args") or getattr(found.get("config"), "__dict__", {})
    if shape.get("vocab_size") not in (50257, 50304):
        raise ValueError("another program wrote it, or its ids are not GPT-2's")
    config = GPTConfig(
        vocab_size=50257,
        **{name: shape[name] for name in ("block_size", "n_layer", "n_head", "n_embd")},
    )
    given = {name.removeprefix("_orig_mod."): w for name, w in found["model"].items()}
    weights = {
        name: given[name].float()[: len(p)] if name in given else torch.zeros(p.shape)
        for name, p in whole_gpt(config).named_parameters(remove_duplicate=False)
        if name in given or name.endswith(".bias")
    }  # bias=False; others must be there
    return found | dict(model=weights, model_config=asdict(config), tokenizer="gpt2")


def hash_of_code(paths):
    """Returns a hash of the code in Python files. Comments, docstrings and blanks do not count."""
    tree = ast.parse(b"\n".join(path.read_bytes() for path in paths))
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):  # leaves out texts that do nothing
            node.body = [
                each
                for each in node.body
                if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def checkpoints(directory):
    """Lists the checkpoints of a run directory, oldest first, but not those like model_best.pt."""
    paths = [p for p in Path(directory).glob("model_*.pt") if p.stem[6:].isdecimal()]
    return sorted(paths, key=lambda path: int(path.stem[6:]))


def load_newest(directory):
    """Loads the newest checkpoint of a run directory, or returns None. Raises UserError."""
    paths = checkpoints(directory)
    check_equal(paths, "the processes have different checkpoints; give one --log_dir to all")
    if paths:
        checkpoint = load_checkpoint(paths[-1], "delete it to resume from the one before")
        if "train_config" not in checkpoint:
            raise UserError(f"{paths[-1]}: another program wrote it; use --init_from {directory}")
        return checkpoint
    print0(f"nothing to resume in {directory}: starting a new run")
    return None


def load_model(name):
    """Loads weights -> (GPT, Tokenizer). Raises UserError. name: as in read_weights."""
    config, weights, tokenizer = read_weights(name)
    model = whole_gpt(config)
    load_weights(model, weights)
    return model, tokenizer


def read_weights(name):
    """Reads weights -> (GPTConfig, state dict, Tokenizer). Raises UserError.

    name: a checkpoint, a run directory, or the name or directory of a Hugging Face GPT-2.
    """
    path = Path([name, *checkpoints(name)][-1])  # the newest checkpoint, if name is a run
    if path.is_file():
        checkpoint = load_checkpoint(path)
        if "model_args" in checkpoint:  # nanoGPT wrote it; build-nanogpt's GELU is ours
            print0("note: nanoGPT's GELU is exact, ours uses tanh: a logit may differ by 0.01")
        return unpack(checkpoint)
    if name in ("scratch", "resume"):  # nanoGPT's words
        raise UserError(f"--init_from {name}: leave it out for a new run; --resume continues one")
    if path.suffix == ".pt" or not path.exists() and path.parent.is_dir() and path.parent.name:
        raise UserError(f"{name}: no such checkpoint; give another file, or a run directory")
    from plaingpt.huggingface import load_gpt2  # imports transformers

    model, tokenizer = load_gpt2(name), get_tokenizer("gpt2")
    # Without tokenizer.json, the ids behind a vocab.json are unknown, and load_tokenizer raises.
    files = [*path.glob("tokenizer.json"), *path.glob("vocab.json")]
    if files or not path.exists() and name.removeprefix("openai-community/") not in OPENAI:
        tokenizer = load_tokenizer(path)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise UserError(f"{name}: has fewer ids than its tokenizer; correct its tokenizer.json")
    return model.config, model.state_dict(), tokenizer


def unpack(checkpoint):
    """Dict of a checkpoint -> (GPTConfig, state dict, Tokenizer)."""
    config = GPTConfig(**{**checkpoint["model_config"], "dropout": 0.0})
    return config, checkpoint["model"], get_tokenizer(checkpoint["tokenizer"])


def newest_model(place=None):
    """Returns the path of the newest checkpoint. Raises UserError if there is none.

    place: a file, a run, a directory of runs, or an export. The default is log. A file or an export
    is returned as it is.
    """
    place = Path(place or "log")
    if place.is_file() or (place / "config.json").is_file():
        return place
    newest = [path for d in (place, *place.glob("*/")) for path in checkpoints(d)[-1:]]
    if not newest:
        raise UserError(f"no checkpoint in {place}; train a model, or give --checkpoint FILE")
    return max(newest, key=lambda path: path.stat().st_mtime)


def choose_start(checkpoint, gpt_config, config, given, sources):
    """Decides what a run starts from -> (GPTConfig, weights, Tokenizer, kept). Changes nothing.

    With --resume, the checkpoint decides. With --init_from, the weights that this flag names
    decide. Otherwise, the flags and the vocabulary of the data decide. given: {name: value} of the
    flags on the command line. weights: a state dict, or None for random weights. kept: {name of a
    flag: value}, settings that a resumed run keeps. Raises UserError if weights, flags and data do
    not fit together.
    """
    g, source = gpt_config, config.log_dir if checkpoint else config.init_from
    if not source:
        # A larger --vocab_size is allowed; the data never have the additional ids.
        n_vocab = given.get("vocab_size", sources.tokenizer.n_vocab)
        return replace(g, vocab_size=n_vocab), None, sources.tokenizer, {}
    have, weights, tokenizer = unpack(checkpoint) if checkpoint else read_weights(source)
    have, kept = replace(have, dropout=g.dropout), {}
    if checkpoint:  # a new --max_steps does not change what was derived from the old one
        names = {"warmup_steps", "val_every"} & checkpoint["train_config"].keys() - given.keys()
        kept = {name: checkpoint["train_config"][name] for name in names}
    else:
        print0(f"starting from the weights in {source}")
        if "block_size" in given and g.block_size < have.block_size:
            have = replace(have, block_size=g.block_size)  # fine-tuning with a shorter context
            weights = {
                name: w[: g.block_size] if name == "transformer.wpe.weight" else w
                for name, w in weights.items()
            }  # a changed model may have no wpe; (T, C)
    if config.preset == "finetune" and have.n_embd < 768:  # narrower than GPT-2
        kept = NARROW | dict(max_lr=config.max_lr * (768 / have.n_embd) ** 2) | kept
        kept = {name: value for name, value in kept.items() if name not in given}
        print0(f"{have.n_embd} channels: {', '.join(f'{k} {v:g}' for k, v in kept.items())}")
    # A text without --tokenizer takes the tokenizer of the weights.
    if ("tokenizer" in given or not sources.is_text) and sources.tokenizer.name != tokenizer.name:
        raise UserError(f"--data: needs ids of {tokenizer.name}; give a text without --tokenizer")
    wrong = [
        f"{k} is {value}, not {getattr(g, k)}"
        for k, value in asdict(have).items()
        if k in given and value != getattr(g, k)
    ]
    if wrong:
        raise UserError(f"{source} has another model: {', '.join(wrong)}; leave out these flags")
    return have, weights, tokenizer, kept


def load_weights(model, weights=None, seed=0, device="cpu"):
    """Allocates the parameters of a meta model on the device, one at a time, and fills them.

    weights: a state dict. Without it, the parameters get random values. These depend only on the
    seed, and not on how the model is split over processes. Raises UserError if the device has too
    little memory.
    """
    torch.manual_seed(seed)
    own, whole_model = dict(model.named_parameters()), whole_gpt(model.config)
    with memory_advice("the model does not fit into memory; choose a smaller one"):
        for name, p in whole_model.named_parameters():
            whole = torch.full(p.shape, math.nan)
            if weights:
                whole.copy_(weights[name])
            else:  # also for parameters of other stages: all processes draw the same numbers
                whole_model.init_weight(name, whole)
                if whole.isnan().any():
                    raise UserError(f"{name} has no first value; add one to GPT.init_weight")
            if name in own:
                part = torch.nn.Parameter(parallel.scatter(name, whole, own[name], device))
                torch.utils.swap_tensors(own[name], part)  # keeps tied weights tied
