"""Finds, loads, saves and resumes checkpoints. Also loads the weights that a run starts from."""

import io
import math
import os
import re
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from model import GPT, GPTConfig
from plaingpt.cli import UserError, first_line, print0, replacing, writing
from plaingpt.device import on_rank0, ranks
from plaingpt.mixture import find_common_tokenizer, read_shares
from plaingpt.shards import is_text
from tokenizer import get_tokenizer, load_tokenizer

ENTRIES = dict(model=dict, optimizer=dict, scaler=dict, step=int, position=int, model_config=dict,
               train_config=dict, tokenizer=str)
# Settings that checkpoints do not store. They may change at a resume without a note.
NOT_STORED = {"batch_size", "device", "compile", "activation_checkpointing", "parallel", "tp", "pp",
              "log_dir", "log_every", "resume", "tensorboard", "wandb", "keep_best", "max_minutes"}
OPENAI = r"(openai-community/)?gpt2(-medium|-large|-xl)?"  # names on the hub
ORDER = "Feistel"  # of the sequences, see permute; older versions had another order


class Damaged(UserError):
    """The file can be opened, but is not a complete checkpoint."""


class Saver:
    """Saves the checkpoints of a run, one at a time: a thread of rank 0 writes the files.

    save() waits for the previous write. It returns when the new file is complete in memory. If the
    thread cannot write it, the next save() or wait() raises the UserError. All processes must call.
    checkpoint: the one to resume, or None. fingerprints: {split: fingerprint}.
    """

    def __init__(self, trainer, config, tokenizer, fingerprints, checkpoint):
        self.trainer, self.config, self.tokenizer = trainer, config, tokenizer
        self.fingerprints = fingerprints
        best = (checkpoint or {}).get("best_val", math.inf)
        self.best_val = float(best)  # the lowest validation loss of the run
        self.executor = ThreadPoolExecutor(1)
        weakref.finalize(self, self.executor.shutdown)  # finishes the last write if main fails
        self.write = None  # the Future of the last write

    def save(self, step, position, name=None):
        """Starts to write the whole state. position: sequences consumed. Raises UserError.

        name: of the file; the default is model_{step}.pt.
        """
        trainer, config = self.trainer, self.config
        self.wait()
        model_state, optimizer_states = trainer.full_state()
        if ranks()[0] > 0:
            return
        if not is_finite(model_state):
            raise UserError(f"the parameters are not finite at step {step}: the run has diverged, "
                            f"and this step is not saved; {divergence_advice(config)}")
        settings = {**asdict(config), **self.fingerprints, "order": ORDER}
        state = dict(
            model=model_state, optimizer=dict(zip(names_of(trainer.optimizers), optimizer_states)),
            scaler=trainer.scaler.state_dict(), step=step, position=position,
            best_val=self.best_val, tokenizer=self.tokenizer.source,
            model_config=asdict(trainer.eval_model.config),
            train_config={k: v for k, v in settings.items() if k not in NOT_STORED})
        data = io.BytesIO()
        torch.save(state, data)
        path = Path(config.log_dir, name or f"model_{step:06d}.pt")
        self.write = self.executor.submit(write_checkpoint, data.getbuffer(), path, config.keep)

    def save_best(self, val, step, position):
        """With --keep_best, saves model_best.pt if val is the lowest loss after step 0."""
        if self.config.keep_best and step and val < self.best_val:
            self.best_val = val
            self.save(step, position, "model_best.pt")

    def wait(self):
        """Waits until the last checkpoint is written. Raises UserError if that failed."""
        if self.write:
            self.write.result()


def write_checkpoint(data, path, keep):
    """Writes a checkpoint atomically, then deletes all but the newest `keep`. Raises UserError."""
    remedy = "the older checkpoints are complete: free some space, then continue with --resume"
    with writing(path, remedy), replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    for old in checkpoints(path.parent)[:-keep] if keep else ():
        old.unlink()


def is_finite(model_state):
    return all(tensor.isfinite().all() for tensor in model_state.values())


def divergence_advice(config):
    """Returns advice for a diverged run, as text."""
    rates = f"--max_lr {config.max_lr / 2:g}"
    if config.min_lr > config.max_lr / 2:
        rates += f" --min_lr {config.max_lr / 20:g}"
    if config.muon_lr:
        rates += f" --muon_lr {config.muon_lr / 2:g}"
    if paths := checkpoints(config.log_dir):
        return f"continue from {paths[-1]} with --resume {rates}"
    return f"there is no checkpoint: start again with {rates}"


def names_of(optimizers):
    return [type(optimizer).__name__.lower() for optimizer in optimizers]  # adamw, muon


def load_checkpoint(path):
    """Loads a checkpoint as the dict that Saver.save wrote, on the CPU.

    Raises Damaged, or another UserError if the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save writes a zip file, with checksums
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
        # mmap: the processes of a machine share the memory. It needs a name in UTF-8.
        utf8 = os.fsencode(path) == str(path).encode(errors="replace")
        with open(path, "rb") as file:
            checkpoint = torch.load(
                path if utf8 else file, map_location="cpu", weights_only=True, mmap=utf8)
        check_checkpoint(checkpoint)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or first_line(error)}); make it "
                        "readable, or give another checkpoint") from error
    except Exception as error:  # zipfile, pickle and torch raise exceptions of many kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise Damaged(
            f"{path}: not a readable checkpoint ({reason}); give another checkpoint") from error
    return checkpoint


def check_checkpoint(checkpoint):
    """Raises ValueError unless the entries have their types, and the weights fit the model."""
    for name, kind in ENTRIES.items():
        if not (isinstance(checkpoint, dict) and isinstance(checkpoint.get(name), kind)):
            raise ValueError(f"not from plainGPT: no {name} of type {kind.__name__}")
    state, config = checkpoint["model"], GPTConfig(**checkpoint["model_config"])
    numbers = [*asdict(config).values(), checkpoint["step"], checkpoint["position"]]
    float(checkpoint.get("best_val", math.inf))
    if not all(0 <= n < 2**63 for n in numbers) or config.n_layer > len(state):
        raise ValueError(f"implausible numbers: {config}")
    model, _ = on_meta(config)  # takes no memory, whatever the sizes are
    compare_shapes(state, {name: p.shape for name, p in model.state_dict().items()})
    if not is_finite(state):
        raise ValueError("its weights are not finite")
    get_tokenizer(checkpoint["tokenizer"])


def compare_shapes(tensors, shapes):
    """Raises ValueError unless these are floating-point tensors of these shapes: {name: shape}."""
    if names := shapes.keys() ^ tensors.keys():
        raise ValueError(f"missing or unexpected: {', '.join(sorted(map(str, names)))}")
    for name, tensor in tensors.items():
        shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if shape != list(shapes[name]):
            raise ValueError(f"{name}: is {shape}, not {list(shapes[name])}")
        if not (tensor.is_floating_point() and tensor.is_contiguous()):
            raise ValueError(f"{name}: is not a contiguous floating-point tensor")


def checkpoints(directory):
    """The checkpoints of a run directory, oldest first. Ignores files like model_best.pt."""
    paths = [p for p in Path(directory).glob("model_*.pt") if p.stem[6:].isdecimal()]
    return sorted(paths, key=lambda path: int(path.stem[6:]))


def load_model(name):
    """Loads weights -> (GPT, Tokenizer). Raises UserError. name: as in load_weights."""
    config, weights, tokenizer = load_weights(name)
    model, weights = on_meta(config, weights)
    fill(model, weights)
    return model, tokenizer


def load_weights(name):
    """Loads weights -> (GPTConfig, state dict, Tokenizer). Raises UserError.

    name: a checkpoint, a run directory, or the name or directory of a Hugging Face GPT-2.
    """
    path = Path([name, *checkpoints(name)][-1])  # the newest checkpoint, if name is a run
    if path.is_file():
        return unpack(load_checkpoint(path))
    if path.suffix == ".pt" or not path.exists() and path.parent.is_dir() and path.parent.name:
        raise UserError(f"{name}: no such checkpoint; give another file, or a run directory")
    model, tokenizer = GPT.from_pretrained(name), get_tokenizer("gpt2")
    if any((path / file).exists() for file in ("tokenizer.json", "vocab.json")):
        tokenizer = load_tokenizer(path)
    elif not path.exists() and not re.fullmatch(OPENAI, name):
        tokenizer = load_tokenizer(name)
    if not is_finite(model.state_dict()):
        raise UserError(f"{name}: its weights are not finite; give another model")
    if model.config.vocab_size < tokenizer.n_vocab:
        raise UserError(f"{name}: has {model.config.vocab_size} ids, fewer than the "
                        f"{tokenizer.n_vocab} of {tokenizer.name}; add the model's tokenizer.json")
    return model.config, model.state_dict(), tokenizer


def unpack(checkpoint):
    """Dict of a checkpoint -> (GPTConfig, state dict, Tokenizer)."""
    config = GPTConfig(**{**checkpoint["model_config"], "dropout": 0.0})
    return config, checkpoint["model"], get_tokenizer(checkpoint["tokenizer"])


def find_model(config):
    """The source that --checkpoint or --model names. Raises UserError if there is none."""
    if config.model and config.checkpoint:
        raise UserError("--model and --checkpoint exclude each other; give one")
    return config.model or newest_model(config.checkpoint)


def newest_model(place=None):
    """Path of the newest checkpoint. place: a file, a run, a directory of runs [log], or an export.

    A file or an export is returned as it is.
    """
    place = Path(place or "log")
    if place.is_file() or (place / "config.json").is_file():
        return place
    newest = [path for d in (place, *place.glob("*/")) for path in checkpoints(d)[-1:]]
    if not newest:
        raise UserError(f"no checkpoint in {place}; python train_gpt2.py makes one, or give "
                        "--checkpoint FILE")
    return max(newest, key=lambda path: path.stat().st_mtime)


def init_model(gpt_config, config, given, checkpoint):
    """Returns (GPT on the meta device, whole_weights for it, Tokenizer of the data).

    given: names of the flags given. checkpoint: to resume, or None. Raises UserError if weights,
    flags and data do not fit together.
    """
    c, g = config, gpt_config
    if g.n_embd % g.n_head:
        raise UserError(f"--n_head {g.n_head} does not divide --n_embd {g.n_embd}; give a divisor")
    if c.min_lr > c.max_lr:
        raise UserError(f"--min_lr {c.min_lr} is above --max_lr {c.max_lr}; leave it out")
    if c.muon_lr and c.optimizer != "muon":
        raise UserError("--muon_lr needs --optimizer muon; --max_lr sets the rate of AdamW")
    data_tokenizer = find_common_tokenizer(config)
    if not checkpoint and not config.init_from:
        if "vocab_size" not in given:
            g.vocab_size = data_tokenizer.n_vocab
        if g.vocab_size > data_tokenizer.n_vocab:
            raise UserError(f"--vocab_size {g.vocab_size} is more than the data's "
                            f"{data_tokenizer.n_vocab} ids; leave it out, the model pads by itself")
        return *on_meta(g, seed=config.seed), data_tokenizer
    source = config.log_dir if checkpoint else config.init_from
    model_config, weights, tokenizer = unpack(checkpoint) if checkpoint else load_weights(source)
    model_config.dropout = gpt_config.dropout
    if not checkpoint:
        print0(f"starting from the weights in {source}")
        if "block_size" in given and gpt_config.block_size < model_config.block_size:
            model_config.block_size = gpt_config.block_size  # fine-tuning with a shorter context
            wpe = weights["transformer.wpe.weight"]  # (T, C)
            weights = {**weights, "transformer.wpe.weight": wpe[: gpt_config.block_size]}
    text = all(map(is_text, read_shares(config.data))) and not config.tokenizer
    if not text and data_tokenizer.name != tokenizer.name:
        raise UserError(f"--data {' '.join(config.data)}: has tokens of {data_tokenizer.name}, but "
                        f"{source} was trained on {tokenizer.name}; give the data as a text file, "
                        "without --tokenizer")
    if checkpoint and "preset" in given and not config.init_from:  # must have the preset's shape
        given = {*given, "n_layer", "n_head", "n_embd", "block_size"}
    have, want = asdict(model_config), asdict(gpt_config)
    wrong = [f"{k} is {have[k]}, not {want[k]}" for k in want
             if k in given and have[k] != want[k]]
    if wrong:
        raise UserError(f"{source} has another model: {', '.join(wrong)}; leave out these flags or "
                        "--preset")
    return *on_meta(model_config, weights), tokenizer


def on_meta(config, weights=None, seed=0):
    """Returns (GPT on the meta device, whole_weights for it)."""
    with torch.device("meta"):
        model = GPT(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}  # before TP or PP change them
    return model, whole_weights(model, shapes, weights, seed)


def whole_weights(model, shapes, weights, seed):
    """Yields (name, CPU tensor) for each parameter of a GPT, one at a time.

    shapes: {name: shape}. weights: a state dict, or None for fresh weights. Fresh weights depend on
    the seed only, not on how the model is split over processes.
    """
    if not weights:
        torch.manual_seed(seed)
    for name, shape in shapes.items():
        whole = torch.empty(shape)
        if weights:
            whole.copy_(weights[name])
        else:
            model.init_weight(name, whole)
        yield name, whole


def fill(model, weights, device="cpu"):
    """Gives a GPT on the meta device its parameters: pairs (name, tensor)."""
    state = {name: whole.to(device) for name, whole in weights}
    model.load_state_dict(state, strict=False, assign=True)
    model.lm_head.weight = model.transformer.wte.weight  # tied again


def find_checkpoint(config):
    """The newest checkpoint of --log_dir if --resume is given, else None. Raises UserError."""
    checkpoint = None

    def search():
        nonlocal checkpoint
        path, checkpoint = newest_checkpoint(config.log_dir)
        return path

    path = on_rank0(search) if config.resume else None
    return load_checkpoint(path) if path and not checkpoint else checkpoint


def newest_checkpoint(directory):
    """Loads the newest complete checkpoint -> (path, checkpoint). Renames damaged newer ones.

    Returns (None, None) if the directory has no checkpoint. Raises UserError if all are damaged.
    """
    damaged, found = [], (None, None)
    for path in reversed(checkpoints(directory)):
        try:
            found = path, load_checkpoint(path)
            break
        except Damaged as error:
            print0(f"skipped {str(error).split('; ')[0]}")
            damaged.append(path)
    if damaged and not found[0]:
        raise UserError(f"all checkpoints in {directory} are damaged; restore one, or choose "
                        "another --log_dir to start a new run")
    for path in damaged:  # or --keep would count it
        print0(f"{path} is now {path.rename(f'{path}.damaged').name}")
    if not found[0]:
        print0(f"nothing to resume in {directory}: starting a new run")
    return found


def check_optimizer_state(state, groups, parameters):
    """Raises ValueError unless all parameters have the same entries, with moments of their shape.

    PyTorch's fused optimizers do not check this, and write beyond the end of a short tensor.
    """
    names = {i: n for g in groups for i, n in zip(g["params"], g["param_names"])}
    keys = next(iter(state.values()), {}).keys()
    if state and (state.keys() != names.keys() or not keys):
        raise ValueError("parameters are missing or unexpected")
    for i, entry in state.items():
        shape = parameters[names[i]].shape
        shapes = dict(step=torch.Size(), exp_avg=shape, exp_avg_sq=shape, momentum_buffer=shape)
        if entry.keys() != keys:
            raise ValueError(f"{names[i]}: has other entries than the first parameter")
        known = entry.keys() & shapes.keys()
        compare_shapes({key: entry[key] for key in known}, {key: shapes[key] for key in known})


def restore(checkpoint, trainer, config, fingerprints):
    """Loads the optimizers and the scaler. Returns (step, position); (0, 0) without a checkpoint.

    Prints which settings have changed. Raises UserError if the checkpoint is from other data or
    another optimizer, or is beyond the last step.
    """
    if checkpoint is None:
        return 0, 0
    run, step, before = config.log_dir, checkpoint["step"], checkpoint["train_config"]
    if step > config.max_steps:
        raise UserError(f"the run in {run} is at step {step}, beyond --max_steps "
                        f"{config.max_steps}; give more steps")
    changed = [f"the {split} was {before[split]} and is {now}"
               for split, now in fingerprints.items() if before.get(split, now) != now]
    if changed:
        raise UserError(f"--data {' '.join(config.data)} is not the data of the run in {run}: "
                        f"{', '.join(changed)}; for a new run: --init_from {run}, not --resume")
    saved = checkpoint["optimizer"]
    names = names_of(trainer.optimizers)
    if saved.keys() != set(names):
        raise UserError(f"the run in {run} has --preset {before.get('preset')} and --optimizer "
                        f"{before.get('optimizer')}, not {config.optimizer}; give its flags again")
    try:
        states = [saved[name]["state"] for name in names]
        for state, groups in zip(states, trainer.groups):
            check_optimizer_state(state, groups, checkpoint["model"])
        for name in trainer.scaler.state_dict() if checkpoint["scaler"] else ():
            float(checkpoint["scaler"][name])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"the optimizer of the checkpoint in {run} is damaged ({error}); use its "
                        f"weights in a new run: --init_from {run}, not --resume") from error
    trainer.load_optimizer_states(states)
    if checkpoint["scaler"]:  # empty unless the dtype was float16
        trainer.scaler.load_state_dict(checkpoint["scaler"])
    print0(f"resumed from step {step} in {run}")
    if config.shuffle and before.get("order") != ORDER:
        print0("note: an older version started this run; the order of the data is now different")
    for name, now in asdict(config).items():
        old, now = (" ".join(v) if isinstance(v, list) else v for v in (before.get(name, now), now))
        if old != now:
            print0(f"note: {name} changes from {old} to {now}")
    return step, checkpoint["position"]
