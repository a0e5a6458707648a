"""Checkpoints: find, load, save, resume. And the weights that a run or a program starts from."""

import os
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from model import GPT, GPTConfig
from plaingpt.cli import UserError, first_line, print0, replacing, writing
from plaingpt.device import memory_advice, ranks
from plaingpt.shards import tokenizer_name
from tokenizer import get_tokenizer

ENTRIES = {"model", "optimizer", "scaler", "step", "position", "model_config", "train_config",
           "tokenizer"}
# Settings that may change at every resume without a note: checkpoints do not keep them.
LAYOUT = {"batch_size", "device", "compile", "activation_checkpointing", "parallel", "tp", "pp",
          "log_dir", "log_every", "resume", "tensorboard"}


def save_checkpoint(trainer, step, position, config, tokenizer, fingerprints):
    """Writes the whole state of a run, atomically. All processes must call; rank 0 writes.

    position: sequences consumed. fingerprints: {split: fingerprint}. Raises UserError.
    """
    model_state, optimizer_states = trainer.full_state()
    if ranks()[0] > 0:
        return
    settings = {**asdict(config), **fingerprints}
    state = dict(
        model=model_state, optimizer=dict(zip(names_of(trainer.optimizers), optimizer_states)),
        scaler=trainer.scaler.state_dict(), step=step, position=position,
        tokenizer=tokenizer.name, model_config=asdict(trainer.eval_model.config),
        train_config={k: v for k, v in settings.items() if k not in LAYOUT})
    run_dir = Path(config.log_dir)
    path = run_dir / f"model_{step:06d}.pt"
    remedy = "the older checkpoints are whole: free some space, then continue with --resume"
    with writing(path, remedy), replacing(path) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if config.keep:
        for old in checkpoints(run_dir)[: -config.keep]:
            old.unlink()


def names_of(optimizers):
    return [type(optimizer).__name__.lower() for optimizer in optimizers]  # adamw, muon


def load_checkpoint(path):
    """Loads a checkpoint as the dict that save_checkpoint wrote, on the CPU. Raises UserError."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save writes a zip file, with checksums
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")
        # mmap: the processes of a machine share the memory.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        missing = ENTRIES - set(checkpoint)
    except Exception as error:  # zipfile, pickle and torch raise exceptions of many kinds
        reason = first_line(error)
        raise UserError(f"{path}: not a readable checkpoint ({reason}); give another") from error
    if missing:
        names = ", ".join(sorted(missing))
        raise UserError(f"{path}: not a checkpoint of plainGPT, {names} missing; give another")
    return checkpoint


def checkpoints(directory):
    """The checkpoints of a run directory, oldest first. Ignores files like model_best.pt."""
    paths = [p for p in Path(directory).glob("model_*.pt") if p.stem[6:].isdigit()]
    return sorted(paths, key=lambda p: int(p.stem[6:]))


def build_model(checkpoint, source, dropout=0.0):
    """Dict of a checkpoint -> (GPT, Tokenizer). source: named in the UserError if it is invalid."""
    try:
        model = GPT(GPTConfig(**{**checkpoint["model_config"], "dropout": dropout}))
        model.load_state_dict(checkpoint["model"])
        return model, get_tokenizer(checkpoint["tokenizer"])
    except Exception as error:  # a file of unknown origin may hold anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{source}: its model cannot be built ({reason}); give another "
                        "checkpoint") from error


def load_model(name, dropout=0.0):
    """Loads weights -> (GPT, Tokenizer). Raises UserError.

    name: a checkpoint, a run directory, or the name or directory of a Hugging Face GPT-2.
    """
    path = Path([name, *checkpoints(name)][-1])  # of a run, the newest checkpoint
    if path.is_file():
        return build_model(load_checkpoint(path), path, dropout)
    if path.suffix == ".pt":
        raise UserError(f"{name}: no such checkpoint; give another file, or a run directory")
    model, tokenizer = GPT.from_pretrained(name, dropout), get_tokenizer("gpt2")
    if model.config.vocab_size < tokenizer.n_vocab:
        raise UserError(f"{name}: has {model.config.vocab_size} ids, fewer than GPT-2's "
                        f"{tokenizer.n_vocab}; give a model with GPT-2's vocabulary")
    return model, tokenizer


def find_model(config):
    """The source that --checkpoint or --model names. Raises UserError if there is none."""
    if config.model and config.checkpoint:
        raise UserError("--model and --checkpoint exclude each other; give one")
    if config.model:
        return config.model
    place = Path(config.checkpoint or "log")
    if place.is_file():
        return place
    newest = [path for d in (place, *place.glob("*/")) for path in checkpoints(d)[-1:]]
    if not newest:
        raise UserError(f"no checkpoint in {place}; python train_gpt2.py makes one, or give "
                        "--checkpoint FILE or --model gpt2")
    return max(newest, key=lambda path: path.stat().st_mtime)


def init_model(gpt_config, config, given, checkpoint):
    """The model of a run and the tokenizer of its data -> (GPT, Tokenizer).

    given: names of the flags given. checkpoint: to resume, or None. Raises UserError if weights,
    flags and data do not fit together.
    """
    torch.manual_seed(config.seed)
    name = tokenizer_name(config.data)
    if not checkpoint and not config.init_from:
        tokenizer = get_tokenizer(name)
        if "vocab_size" not in given:
            gpt_config.vocab_size = tokenizer.n_vocab
        if gpt_config.vocab_size > tokenizer.n_vocab:
            raise UserError(f"--vocab_size {gpt_config.vocab_size} is more than the data's "
                            f"{tokenizer.n_vocab} ids; leave it out, the model pads by itself")
        with memory_advice("the model does not fit into memory; choose a smaller one"):
            return GPT(gpt_config), tokenizer
    if checkpoint:
        source = config.log_dir
        model, tokenizer = build_model(checkpoint, source, gpt_config.dropout)
    else:
        source = config.init_from
        model, tokenizer = load_model(source, gpt_config.dropout)
        if "block_size" in given and gpt_config.block_size < model.config.block_size:
            model.config.block_size = gpt_config.block_size  # fine-tuning with a shorter context
            wpe = model.transformer.wpe
            wpe.weight = torch.nn.Parameter(wpe.weight[: gpt_config.block_size].detach().clone())
    if Path(config.data).is_dir() and name != tokenizer.name:
        raise UserError(f"--data {config.data}: has tokens of {name}, but {source} was trained on "
                        f"{tokenizer.name}; tokenize the data again")
    have, want = asdict(model.config), asdict(gpt_config)
    wrong = [f"{k} is {have[k]}, not {want[k]}" for k in want
             if k in given and k != "dropout" and have[k] != want[k]]
    if wrong:
        raise UserError(f"{source} has another model: {', '.join(wrong)}; leave these flags out")
    return model, tokenizer


def find_checkpoint(config, rank, world_size):
    """The newest readable checkpoint of --log_dir if --resume is given, else None.

    Rank 0 chooses the file, and all processes load it.
    """
    if not config.resume:
        return None
    checkpoint, choice = None, [None]
    for path in reversed(checkpoints(config.log_dir) if rank == 0 else []):
        try:
            checkpoint, choice = load_checkpoint(path), [path]
            break
        except UserError as error:
            print0(f"skipped {error}")
    if world_size > 1:
        dist.broadcast_object_list(choice)
    if choice[0] is None:
        print0(f"nothing to resume in {config.log_dir}: starting a new run")
        return None
    return checkpoint or load_checkpoint(choice[0])


def restore(checkpoint, trainer, config, fingerprints):
    """Loads the optimizers and the scaler -> (step, position); (0, 0) without a checkpoint.

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
        raise UserError(f"--data {config.data} is not the data of the run in {run}: "
                        f"{', '.join(changed)}; to use its weights in a new run, --init_from {run}")
    saved = checkpoint["optimizer"]
    names = names_of(trainer.optimizers)
    if saved.keys() != set(names):
        raise UserError(f"the run in {run} has --optimizer {before.get('optimizer', 'adamw')}, not "
                        f"{config.optimizer}; give the same")
    trainer.load_optimizer_states([saved[name]["state"] for name in names])
    if checkpoint["scaler"]:  # empty unless the dtype was float16
        trainer.scaler.load_state_dict(checkpoint["scaler"])
    print0(f"resumed from step {step} in {run}")
    for name, now in asdict(config).items():
        if name in before and before[name] != now:
            print0(f"note: {name} changes from {before[name]} to {now}")
    return step, checkpoint["position"]
