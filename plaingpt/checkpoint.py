"""What a run starts from and what it leaves on disk: weights, checkpoints, a log, and what one needs to repeat it."""

# Read next: device.py.

import html
import os
import platform
import shutil
import subprocess
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from model import GPT, GPTConfig
from plaingpt.cli import UserError, first_line, print0, replacing, write_json, writing
from plaingpt.device import describe, ranks
from tokenizer import name_for, token_bytes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

STEP_STREAMS = {"train", "lr", "norm", "tok_s"}  # what a step itself logs; all else a checkpoint's model scored
# How a run is laid out over machines: free to change at every resume, and so no part of a checkpoint.
LAYOUT = {"batch_size", "device", "compile", "activation_checkpointing", "parallel", "tp", "pp", "log_dir", "resume",
          "tensorboard"}


def save_checkpoint(run_dir, model, optimizers, scaler, step, position, config, tokenizer, contents):
    """Writes a run's whole state, to a temporary name that is then renamed: a reader never meets half a file.

    Every process calls it, since each may hold a part of the state, and rank 0 writes. contents: what the data are, a text
    for each split, by which a resumed run knows them again. Raises UserError if the disk is full.
    """
    path, temporary = run_dir / f"model_{step:06d}.pt", run_dir / "model.tmp"
    state = dict(model=model.state_dict(), optimizer={name_of(o): o.state_dict() for o in optimizers},
                 scaler=scaler.state_dict(), step=step, position=position, tokenizer=tokenizer,
                 model_config=asdict(model.config),
                 train_config={k: v for k, v in {**asdict(config), **contents}.items() if k not in LAYOUT})
    if ranks()[0] > 0:
        return
    remedy = "the checkpoints before it are whole: make room, and --resume goes on from the last"
    with writing(path, remedy), replacing(path, temporary), open(temporary, "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    if config.keep:
        for old in checkpoints(run_dir)[:-config.keep]:
            old.unlink()


def name_of(optimizer):
    return type(optimizer).__name__.lower()  # adamw, muon


def load_checkpoint(path):
    """A checkpoint as the dict that save_checkpoint wrote, its tensors on the CPU. Raises UserError if it is not one."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.save writes a zip, and with it a CRC-32 of everything inside
            if damaged := archive.testzip():
                raise UserError(f"{path}: damaged, the checksum of {damaged} is wrong")
        # mapped: the processes of a machine share the pages, and take from them what is theirs
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        keys = {"model", "optimizer", "scaler", "step", "position", "model_config", "train_config", "tokenizer"}
        missing = keys - set(checkpoint)
    except UserError:
        raise
    except Exception as error:  # a damaged file may fail anywhere in zipfile, pickle or torch
        raise UserError(f"{path}: not a readable checkpoint ({first_line(error)})") from error
    if missing:
        raise UserError(f"{path}: not a checkpoint of this program, it lacks {', '.join(sorted(missing))}")
    return checkpoint


def checkpoints(directory):
    """The checkpoints of a run directory, oldest first; a model_best.pt that somebody put there is not one of them."""
    paths = (p for p in Path(directory).glob("model_*.pt") if p.stem[6:].isdigit())
    return sorted(paths, key=lambda p: int(p.stem[6:]))


def model_from(checkpoint, source):
    """A checkpoint's dict -> (GPT, its tokenizer's name). source: where it is from. Raises UserError if it makes no sense."""
    try:
        model = GPT(GPTConfig(**checkpoint["model_config"]))
        model.load_state_dict(checkpoint["model"])
        token_bytes(checkpoint["tokenizer"])
    except Exception as error:  # somebody else's file may hold anything
        raise UserError(f"{source}: its model cannot be built ({first_line(error)}); give another checkpoint") from error
    return model, checkpoint["tokenizer"]


def load_model(name):
    """Weights to start from -> (GPT, its tokenizer's name).

    name: a checkpoint, a run directory, whose newest counts, or the name or directory of a Hugging Face GPT-2.
    """
    if newest := checkpoints(name)[-1:]:
        name = newest[0]
    if Path(name).is_file():
        try:
            checkpoint = load_checkpoint(name)
        except UserError as error:
            raise UserError(f"{error}; give another") from error
        return model_from(checkpoint, name)
    if Path(name).suffix == ".pt":
        raise UserError(f"{name}: no such checkpoint; give another file, or a run directory")
    try:
        model = GPT.from_pretrained(name)
    except Exception as error:  # of transformers, and of whatever reads its files
        raise UserError(f"{name}: neither a checkpoint nor a GPT-2 that transformers can load ({first_line(error)}); give "
                        "a file, a run directory, a name such as gpt2, or a directory of transformers") from error
    return model, name_for(model.config.vocab_size)


def find_model(config):
    """The file, directory or name that --checkpoint or --model mean. Raises UserError if there is none."""
    if config.model and config.checkpoint:
        raise UserError("--model and --checkpoint exclude each other: give one")
    if config.model:
        return config.model
    place = Path(config.checkpoint or "log")
    if place.is_file():
        return place
    last = [path for d in (place, *place.glob("*/")) for path in checkpoints(d)[-1:]]  # of each run, by its step
    newest = max(last, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise UserError(f"no checkpoint in {place}: python train_gpt2.py makes one, or give --checkpoint FILE or --model gpt2")
    return newest


def init_model(gpt_config, config, given, checkpoint):
    """The model, fresh, or of the checkpoint to resume, or of --init_from -> (GPT, its tokenizer's name).

    Raises UserError if the weights are of another shape than the one asked for.
    """
    torch.manual_seed(config.seed)
    if checkpoint:
        (model, tokenizer), source = model_from(checkpoint, config.log_dir), config.log_dir
    elif config.init_from:
        (model, tokenizer), source = load_model(config.init_from), config.init_from
        if "block_size" in given and gpt_config.block_size < model.config.block_size:
            model.crop_block_size(gpt_config.block_size)
    else:
        return GPT(gpt_config), name_for(gpt_config.vocab_size)
    # Weights of --init_from bring their shape, and only an explicit flag can contradict it; a resumed run must be the same.
    want, have = asdict(gpt_config), asdict(model.config)
    differ = [name for name in have if have[name] != want[name] and (name in given or not config.init_from)]
    if differ:
        raise UserError(f"{source} holds another model: " + ", ".join(f"{n} is {have[n]}, not {want[n]}" for n in differ)
                        + "; give the same, or leave the flags out")
    return model, tokenizer


def find_checkpoint(directory, rank, world_size):
    """The newest checkpoint of a run directory that reads, or None. Rank 0 chooses, all processes load the same."""
    checkpoint, choice = None, [None]
    for path in reversed(checkpoints(directory) if rank == 0 else []):
        try:
            checkpoint, choice = load_checkpoint(path), [path]
            break
        except UserError as error:
            print0(f"passed over {error}")
    if world_size > 1:
        dist.broadcast_object_list(choice)
    if choice[0] is None:
        print0(f"nothing to resume in {directory}: starting afresh")
        return None
    return checkpoint or load_checkpoint(choice[0])


def restore(checkpoint, optimizers, scaler, config, contents):
    """Puts the optimizers and the scaler of a checkpoint back -> (step, position); says which settings have changed.

    Raises UserError if it is not this run's: its data, its optimizer, or a step beyond the last.
    """
    if checkpoint["step"] > config.max_steps:
        raise UserError(f"the run in {config.log_dir} is at step {checkpoint['step']} already, "
                        f"past --max_steps {config.max_steps}; give more")
    before = checkpoint["train_config"]
    if differ := [f"its {k} was {before[k]} and is {now}" for k, now in contents.items() if before.get(k, now) != now]:
        raise UserError(f"--data {config.data} is not what the run in {config.log_dir} was trained on: {', '.join(differ)}; "
                        f"--init_from {config.log_dir} takes its weights into a new run")
    saved, optimizers = checkpoint["optimizer"], {name_of(optimizer): optimizer for optimizer in optimizers}
    if "state" in saved:  # as it was written when there was AdamW alone
        saved = {"adamw": saved}
    if saved.keys() != optimizers.keys():
        raise UserError(f"the run in {config.log_dir} is one of --optimizer {min(saved, key=len)}, not {config.optimizer}")
    for name, optimizer in optimizers.items():
        # Only the moments: rate, decay and kernel are those of this run's flags and device.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(dict(state=saved[name]["state"], param_groups=groups))
    if checkpoint["scaler"]:  # empty unless the dtype was float16
        scaler.load_state_dict(checkpoint["scaler"])
    print0(f"resumed from step {checkpoint['step']} in {config.log_dir}")
    for name, now in asdict(config).items():
        if name in before and before[name] != now:
            print0(f"note: {name} was {before[name]} until here and is {now} from here on")
    return checkpoint["step"], checkpoint["position"]


def lock(directory):
    """Until it ends, this process alone writes to a run directory -> what holds the lock.

    Raises UserError if another one does.
    """
    descriptor = os.open(directory, os.O_RDONLY)  # the lock is on the directory itself, and leaves no file behind
    try:
        if fcntl:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"--log_dir {directory}: another run is writing there; stop it, or give another directory") from error
    except OSError as error:  # on some network file systems
        print0(f"note: {directory} cannot be locked ({error.strerror}): see to it that no second run writes there")
    return descriptor


def move_aside(directory):
    """Makes way for a fresh run: the files of a run that lies in `directory` go to directory.1, or .2, …"""
    old = [*checkpoints(directory), *directory.glob("events.out.tfevents.*")]
    old += [p for p in (directory / "run.json", directory / "log.txt") if p.exists()]
    if old:
        # "." has no name to add to, and what a link points to may be on another disk
        base = directory if directory.name.strip(".") and not directory.is_symlink() else directory.resolve()
        aside = next(p for i in range(1, 10**6) if not (p := base.with_name(f"{base.name}.{i}")).exists())
        aside.mkdir()
        for p in old:
            shutil.move(p, aside / p.name)  # the directory may be a disk of its own
        print0(f"the run in {directory} was moved to {aside}")


def read_log(path):
    """log.txt -> [(step, stream, value as it stands)]. Half a line, as a kill may leave at the end, is not one."""
    text = path.read_text(errors="replace")
    lines = [line.split() for line in text[:text.rfind("\n") + 1].splitlines()]
    return [(int(line[0]), *line[1:]) for line in lines if len(line) == 3 and line[0].isdecimal()]


class RunLog:
    """log.txt, one number a line: "{step} {stream} {value}", as build-nanogpt writes it; and the same for TensorBoard.

    A log that starts at step 0 is a new run's, and an old one is moved aside. Otherwise the lines of steps taken after the
    checkpoint at `step` are cut off, to be written again. What that very checkpoint scored stays: it is not written twice.
    settings: the run's, if TensorBoard's event files are wanted. Raises UserError if the directory cannot be written, or if
    another run is writing there.
    """

    def __init__(self, directory, step, settings=None):
        if settings:
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams
        self.path, self.events, temporary = directory / "log.txt", None, directory / "log.tmp"
        with writing(f"--log_dir {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
            self.lock = lock(directory)
            temporary.touch()  # where nothing may be written, nothing is moved
            temporary.unlink()
            if step == 0:
                move_aside(directory)
            lines = read_log(self.path) if self.path.exists() else []
            kept = [line for line in lines if (line[0], line[1] in STEP_STREAMS) < (step, True)]
            self.known = {line[:2] for line in kept if line[0] == step}
            with replacing(self.path, temporary):
                temporary.write_text("".join(f"{step} {stream} {value}\n" for step, stream, value in kept))
            self.file = open(self.path, "ab", buffering=0)  # what cannot be written is not tried again at the end
        if settings:  # from this step on, TensorBoard forgets what files from before say; part of it holds
            self.events = SummaryWriter(directory, purge_step=step)
            for summary in hparams({name: str(value) for name, value in settings.items()}, {"val": 0}):
                self.events.file_writer.add_summary(summary)
            for at, stream, value in kept:
                if at == step:
                    self.events.add_scalar(stream, float(value), at)

    def write(self, step, **values):
        new = {stream: value for stream, value in values.items() if (step, stream) not in self.known}
        data = "".join(f"{step} {stream} {value:.8g}\n" for stream, value in new.items()).encode()
        with writing(self.path, "make room, and --resume goes on from the last checkpoint"):
            while data:
                data = data[self.file.write(data):]  # a nearly full disk may take less than all
        if self.events:
            for stream, value in new.items():
                self.events.add_scalar(stream, value, step)
            self.events.flush()

    def write_samples(self, step, texts):
        if self.events:
            for i, text in enumerate(texts):
                self.events.add_text(f"sample {i}", f"<pre>{html.escape(text)}</pre>", step)  # as it is, not as Markdown
            self.events.flush()


def write_run_json(run_dir, model, config, tokenizer, device, dtype, world_size, loader):
    """run.json, what somebody needs to repeat the run: configuration, commit, versions, device."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None  # no git, or no clone
    with torch.device("meta"):  # to count: this process may hold a part of the model
        parameters = sum(p.numel() for p in GPT(model.config).parameters())
    facts = dict(
        model_config=asdict(model.config), train_config=asdict(config), tokenizer=tokenizer,
        parameters=parameters, train_tokens=loader.starts[-1],
        device=f"{device.type}: {describe(device)}", dtype=str(dtype).removeprefix("torch."), processes=world_size,
        git_commit=commit,
        versions=dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__),
        started=time.strftime("%Y-%m-%d %H:%M:%S %Z"))
    write_json(run_dir / "run.json", facts)
    sizes = {"pp": config.pp, config.parallel: world_size // (config.pp * config.tp), "tp": config.tp}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    print(f"{facts['parameters']:,} parameters, {facts['train_tokens']:,} training tokens, {facts['dtype']} on "
          f"{world_size} x {facts['device']}{layout and f' ({layout})'}; log and checkpoints in {run_dir}", flush=True)
