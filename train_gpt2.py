"""Trains a GPT-2: text or token shards in, a log and checkpoints out.

  python train_gpt2.py                                   a byte-level baby on input.txt, a minute or two on a laptop
  python train_gpt2.py --data my.txt                     the same on your own text
  torchrun --nproc_per_node=8 train_gpt2.py              GPT-2 124M on the shards that fineweb.py made in edu_fineweb10B/
  python train_gpt2.py --resume                          go on where the last run of this preset stopped

Every flag is a field of GPTConfig (model.py) or TrainConfig. A preset overrides the defaults shown, a flag the preset.
"""

# Read from the top: the knobs, the stream of batches, the schedules, one step, and main, which is the whole of training.
# cli.py, device.py and checkpoint.py hold what surrounds it.
# Read next: checkpoint.py for what a run leaves behind; parallel.py for models in parts.

import bisect
import importlib
import itertools
import math
import os
import re
import statistics
import sys
import time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from model import PRESETS, GPTConfig
from plaingpt.checkpoint import RunLog, find_checkpoint, init_model, restore, save_checkpoint, write_run_json
from plaingpt.cli import UserError, catch_stop_signals, duration, first_line, fit, parse_flags, print0, run
from plaingpt.device import choose_dtype, memory_advice, peak_flops, setup, shut_down
from tokenizer import decode, get_encoding, start_id


@dataclass
class TrainConfig:
    preset: str = "auto"  # gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3-1.3b, gpt3-2.7b, baby; auto: gpt2 for shards, else baby
    data: str = None  # a directory of shards, or a text file [edu_fineweb10B; input.txt for the baby]
    batch_size: int = 64  # micro-batch: the sequences that one process takes through the model at a time, at most
    total_batch_size: int = 524288  # tokens in a step, over all processes and micro-steps
    max_steps: int = 19073  # of 2^19 tokens: one epoch of 10B
    warmup_steps: int = 715  # the learning rate rises linearly for so long: 375M tokens
    optimizer: str = "adamw"  # adamw, or muon for the matrices of the blocks and adamw for the rest
    max_lr: float = 6e-4  # the peak of the learning rate
    muon_lr: float = None  # the peak of muon's, which rises and falls in proportion to the other [max_lr]
    min_lr: float = None  # its value at the last step [a tenth of max_lr]
    weight_decay: float = 0.1  # of matrices only, in units of the learning rate
    grad_clip: float = 1.0  # the gradient's norm is cut down to this; 0: never
    rampup_steps: int = 0  # the batch grows linearly for so many steps
    rampup_batch_size: int = 32768  # tokens in a step at the start of the ramp, and the unit in which it grows
    seed: int = 1337  # of the initial weights and of the order of the data
    shuffle: bool = True  # a new random order of the sequences every epoch, rather than the order of the source
    val_every: int = 250  # steps between validations; 0: only at the start and the end
    val_tokens: int = 10485760  # validation tokens, from the start of the validation split
    eval_every: int = 250  # steps between benchmarks, which run at the end too; 0: never
    evals: str = "hellaswag,lambada,storycloze"  # which; also wikitext, and NAME=FILE to take the examples from a file
    sample_every: int = 250  # steps between samples; 0: only at the end
    save_every: int = 500  # steps between checkpoints; 0: only at the end
    keep: int = 2  # the newest checkpoints to keep; 0: all
    log_dir: str = None  # the run directory [log/PRESET]
    tensorboard: bool = False  # log for TensorBoard, too, into log_dir: the numbers, the samples, the configuration
    resume: bool = False  # go on with the run in log_dir; start afresh if there is none
    init_from: str = None  # weights to start from: a checkpoint, or the name or directory of a Hugging Face GPT-2
    device: str = "auto"  # cuda, cuda:1, mps or cpu
    dtype: str = "auto"  # bfloat16, float16 (with a gradient scaler) or float32
    compile: bool = None  # torch.compile the model [on for cuda]
    deterministic: bool = False  # only algorithms that give the same bits every time: slower on a GPU
    activation_checkpointing: bool = False  # keep only what enters a block, and compute the rest again: memory for time
    parallel: str = "ddp"  # each process holds the whole model, or with fsdp a share of every tensor
    tp: int = 1  # processes, started by torchrun, that compute each layer together; divides n_head
    pp: int = 1  # processes that have some of the blocks each, one after the other; at most n_layer


# What a preset changes beside the shape of the model: rates and batches as GPT-3's table 2.1 has them for the size; for the
# baby as measured: of many shapes these two layers reached the lowest loss in a minute of two cores.
RECIPES = {
    "gpt2": dict(),
    "gpt2-medium": dict(max_lr=3e-4, batch_size=32),
    "gpt2-large": dict(max_lr=2.5e-4, batch_size=16),
    "gpt2-xl": dict(max_lr=2e-4, batch_size=8),
    "gpt3-1.3b": dict(max_lr=2e-4, batch_size=8, total_batch_size=2**20, max_steps=9537, warmup_steps=358),
    "gpt3-2.7b": dict(max_lr=1.6e-4, batch_size=4, total_batch_size=2**20, max_steps=9537, warmup_steps=358),
    "baby": dict(optimizer="muon", max_lr=4e-3, batch_size=16, total_batch_size=1024, max_steps=2700, warmup_steps=100,
                 val_every=500, val_tokens=65536, eval_every=0, sample_every=900, save_every=500),
}
SHARDS, TEXT = "edu_fineweb10B", Path(__file__).with_name("input.txt")
EVALS = ("hellaswag", "lambada", "storycloze", "wikitext")  # modules beside this one
MAX_BAD_STEPS = 10  # steps in a row whose gradient is not finite, after which a run is given up
JUMP, RECENT = 10, 100  # a gradient's norm jumps if it is so many times the median of so many before it
ENDS = 2**16  # tokens of each shard, at its start and at its end, that are looked at before the run


def parse_args(argv=None):
    """argv -> (GPTConfig, TrainConfig, the set of flags given). Raises UserError for what cannot be."""
    given = parse_flags(__doc__, GPTConfig, TrainConfig, argv=argv)
    preset, data = given.get("preset", "auto"), given.get("data")
    if preset not in ("auto", *PRESETS):
        raise UserError(f"--preset {preset} is none of auto, {', '.join(PRESETS)}")
    if preset == "auto":
        preset = "gpt2" if Path(data or SHARDS).is_dir() else "baby"
        other = f"python fineweb.py makes {SHARDS}/ for gpt2" if preset == "baby" else "--preset baby learns input.txt"
    values = {**asdict(GPTConfig()), **asdict(TrainConfig()), **PRESETS[preset], **RECIPES[preset], **given, "preset": preset}
    text = TEXT.name if TEXT.parent == Path.cwd() else str(TEXT)
    values["data"] = data or (text if preset == "baby" else SHARDS)
    print0(f"preset {preset} on {values['data']}" + (f"; {other}" if "preset" not in given and not data else ""))
    values["log_dir"] = values["log_dir"] or f"log/{preset}"
    if values["min_lr"] is None:
        values["min_lr"] = values["max_lr"] / 10
    if "muon_lr" in given and values["optimizer"] != "muon":
        raise UserError(f"--muon_lr {given['muon_lr']} is for --optimizer muon alone; --max_lr is that of adamw")
    if "evals" in given and "eval_every" not in given:  # who asks for benchmarks gets them, of the baby too
        values["eval_every"] = TrainConfig.eval_every
    if "vocab_size" not in given:  # the data decide: a text is read as bytes, shards hold GPT-2's ids
        values["vocab_size"] = 256 if Path(values["data"]).is_file() else 50257
    gpt_config, config = (cls(**{f.name: values[f.name] for f in fields(cls)}) for cls in (GPTConfig, TrainConfig))
    check_config(gpt_config, config)
    return gpt_config, config, set(given)


def check_config(gpt_config, config):
    """Raises UserError for the first value that cannot be, and names one that could."""
    positive = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size", "batch_size", "total_batch_size", "max_steps",
                "rampup_batch_size", "val_tokens", "max_lr", "muon_lr", "tp", "pp"}
    g, c = gpt_config, config
    for name, value in {**asdict(g), **asdict(c)}.items():
        if type(value) in (int, float) and not (0 <= value < math.inf and (value or name not in positive)):
            raise UserError(f"--{name} {value} cannot be: it is a number {'above 0' if name in positive else 'from 0 up'}")
    if g.n_embd % g.n_head:
        fits = max(n for n in range(1, g.n_head) if g.n_embd % n == 0)
        raise UserError(f"--n_head {g.n_head} does not divide --n_embd {g.n_embd}; --n_head {fits} would")
    if g.vocab_size > 50257:
        raise UserError(f"--vocab_size {g.vocab_size} is more than the 50257 ids of GPT-2; leave the flag out, the padding for "
                        "speed is done inside the model")
    weights = 4 * g.n_embd * (12 * g.n_layer * g.n_embd + g.block_size + g.vocab_size)  # bytes, in the CPU's memory first
    if hasattr(os, "sysconf") and weights > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise UserError(f"--n_layer {g.n_layer} of --n_embd {g.n_embd}: the weights alone take {weights / 1e9:,.0f} GB, and "
                        f"this machine has {memory / 1e9:,.0f}; take fewer")
    for name, _ in split_evals(c):
        if name not in EVALS:
            raise UserError(f"--evals {name} is none of {', '.join(EVALS)}")
    for name, allowed in dict(optimizer=("adamw", "muon"), parallel=("ddp", "fsdp")).items():
        if getattr(c, name) not in allowed:
            raise UserError(f"--{name} {getattr(c, name)} is none of {', '.join(allowed)}")
    if c.seed >= 2**32:
        raise UserError(f"--seed {c.seed} cannot be: it is below 2^32, say 1337")
    if c.min_lr > c.max_lr:
        raise UserError(f"--min_lr {c.min_lr} is above --max_lr {c.max_lr}; leave it out for a tenth of that")


def check_layout(config, gpt_config, world_size):
    """Raises UserError unless the processes, the heads and the blocks can be divided as --tp and --pp ask for."""
    tp, pp, heads = config.tp, config.pp, gpt_config.n_head
    if heads % tp:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(f"--tp {tp} does not divide the {heads} heads of this model; {fits} do")
    if pp > gpt_config.n_layer:
        raise UserError(f"--pp {pp} is more than the {gpt_config.n_layer} blocks of this model, which is the most")
    if world_size % (tp * pp):
        raise UserError(f"--tp {tp} x --pp {pp} takes a multiple of {tp * pp} processes, and there are {world_size}: "
                        f"torchrun --nproc_per_node={tp * pp * max(1, world_size // (tp * pp))} train_gpt2.py would do")
    if config.parallel == "fsdp" and world_size == tp * pp:
        print0("note: --parallel fsdp shares a model out among processes with different data, and here there is one such")


def data_share(config, rank, world_size):
    """Which share of the data a process takes, and of how many: on a mesh of pp x dp x tp processes, its place along dp."""
    dp = world_size // (config.pp * config.tp)
    return rank // config.tp % dp, dp


def check_batches(config, T, dp, n_sequences):
    """Raises UserError unless the data fill a step, and each of its dp shares is a whole number of micro-steps."""
    total, first, pp, unit = config.total_batch_size, config.rampup_batch_size, config.pp, T * dp
    most, least = n_sequences // dp * unit, pp * unit  # tokens in a step: a sequence for each process, and for each stage
    if most < least:
        raise UserError(f"--data {config.data}: its training split of {n_sequences} sequences is too small for {dp} processes"
                        + f" x {pp} stages" * (pp > 1) + "; give more, a smaller --block_size, or take fewer processes")
    sizes = [("total_batch_size", total, range(least, most + 1, unit))]
    if config.rampup_steps and total <= most:
        sizes.append(("rampup_batch_size", first, [n for n in range(least, total + 1, unit) if total % n == 0]))
    for name, size, allowed in sizes:
        if size not in allowed:
            reason = f"is more than the {n_sequences * T} tokens of the training split" if size > n_sequences * T else \
                f"is no multiple of block_size {T} x {dp} processes" if size % unit else \
                f"gives each stage of --pp {pp} less than one sequence to work on" if size < least else \
                f"does not divide --total_batch_size {total}"
            fits = allowed[max(0, bisect.bisect_right(allowed, size) - 1)]
            raise UserError(f"--{name} {size} {reason}; {fits} would do")
    shares = {get_batch_tokens(step, config) // unit for step in range(config.rampup_steps + 1)}  # sequences of each process

    def undivided(B):
        return [share for share in sorted(shares) if share % min(B, share // pp)]

    if odd := undivided(config.batch_size):
        fits = max(b for b in range(1, config.batch_size) if not undivided(b))
        raise UserError(f"--batch_size {config.batch_size} does not divide the {odd[0]} sequences that each of "
                        f"{dp} processes has in a step" + f", or leaves some of --pp {pp} idle" * (pp > 1)
                        + f"; --batch_size {fits} would")


class DataLoaderLite:
    """The stream of sequences, a pure function of (data, T, seed, epoch).

    The shards of a split, in the order of their names, are one long row of N tokens. Sequence i is tokens iT … iT+T, both
    included: T+1 of them, the last being the first of the next sequence, so that every token is a target once. An epoch is
    a permutation of the (N-1)//T sequences, and a position counts the sequences of the whole run. So nothing depends on
    which process asks for which part of a step, or in what portions.

    data: a directory of shards, {name}_{train|val}_{index}.npy as build-nanogpt writes them or .bin as llm.c does; or a
    text file, whose last tenth is the validation split. split: "train" or "val". Raises UserError for data that cannot be.
    """

    def __init__(self, data, split, T, vocab_size, seed=1337, shuffle=True, tokenizer="bytes"):
        self.T, self.vocab_size, self.seed, self.shuffle = T, vocab_size, seed, shuffle
        self.epoch, self.order, self.text = None, None, None
        path = Path(data)
        if path.is_dir():
            paths = sorted(p for p in path.iterdir() if re.search(rf"_{split}_\d+\.(npy|bin)$", p.name))
            if not paths:
                raise UserError(f"--data {data}: no {split} shards in it, *_{split}_000000.npy or .bin; fineweb.py makes them")
            if split == "train" and (path / "progress.json").exists():
                print0(f"note: {data} is not complete, fineweb.py is at work on it or was interrupted")
            self.shards = [open_shard(p) for p in paths]
        elif path.is_file():
            text = read_text(path, tokenizer)
            cut = len(text) * 9 // 10
            self.text = text[:cut] if split == "train" else text[cut:]
            self.shards = [(path, 0, len(self.text), None)]
        else:
            raise UserError(f"--data {data}: {'not a file' if path.exists() else 'no such file'} or directory; it is a text "
                            "or fineweb.py's directory of shards")
        self.starts = np.cumsum([0] + [n_tokens for _, _, n_tokens, _ in self.shards]).tolist()
        self.n_sequences = (self.starts[-1] - 1) // T
        if self.n_sequences < 1:
            raise UserError(f"--data {data}: the {self.starts[-1]} tokens of its {split} split are too few for one sequence of "
                            f"block_size {T} + 1; give more, or a smaller --block_size")

    def contents(self):
        """What tells these tokens from others, in words. Raises UserError if some of them are outside the vocabulary."""
        crc, most = 0, ENDS if self.text is None else self.starts[-1]
        for number, (path, _, n_tokens, _) in enumerate(self.shards):
            n = min(n_tokens, most)
            for start in sorted({0, n_tokens - n}):
                tokens = self.read(number, start, n)
                self.check(tokens, path)
                crc = zlib.crc32(tokens.astype("<u2"), crc)
        return f"{self.starts[-1]:,} tokens with CRC-32 {crc:08x}"

    def check(self, tokens, path):
        if tokens.max(initial=0) >= self.vocab_size:
            raise UserError(f"{path}: token id {tokens.max()} is outside the vocabulary of {self.vocab_size}: "
                            "made with another encoding, or --vocab_size is wrong")

    def read(self, number, start, count):
        """`count` tokens of a shard from `start` on."""
        return self.text[start:start + count] if self.text is not None else read_shard(self.shards[number], start, count)

    def sequence(self, position):
        """The T+1 tokens at a position of the run, and the shard they begin in."""
        epoch, i = divmod(position, self.n_sequences)
        if self.shuffle:
            if epoch != self.epoch:
                order = np.arange(self.n_sequences, dtype=np.uint32)
                # RandomState's streams are frozen for good (NEP 19); those of numpy's newer generators may change
                self.epoch, self.order = epoch, np.random.RandomState([self.seed, epoch]).permutation(order)
            i = int(self.order[i])
        start, end, parts = i * self.T, (i + 1) * self.T + 1, []
        shard = bisect.bisect_right(self.starts, start) - 1
        path = self.shards[shard][0]
        while start < end:  # a sequence may run on into the next shards
            stop = min(end, self.starts[shard + 1])
            parts.append(self.read(shard, start - self.starts[shard], stop - start))
            start, shard = stop, shard + 1
        return np.concatenate(parts), path

    def batch(self, position, B, device="cpu"):
        """The sequences at position … position+B-1 -> x, y: (B, T) int64 each, y being x one token later."""
        tokens = np.empty((B, self.T + 1), dtype=np.int64)
        for b in range(B):
            tokens[b], path = self.sequence(position + b)
            self.check(tokens[b], path)
        tokens = torch.from_numpy(tokens)
        if torch.device(device).type == "cuda":
            tokens = tokens.pin_memory()  # page-locked memory is copied while the GPU computes
        tokens = tokens.to(device, non_blocking=True)  # (B, T+1)
        return tokens[:, :-1], tokens[:, 1:]


def open_shard(path):
    """Checks a shard's header and size -> (path, byte offset of the first token, number of tokens, time of its last change).

    Raises UserError.
    """
    try:
        changed = path.stat().st_mtime_ns
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.dtype != np.uint16 or tokens.ndim != 1:
                raise UserError(f"{path}: {tokens.dtype} of shape {tokens.shape}, but a shard is one-dimensional uint16")
            return path, tokens.offset, len(tokens), changed
        header, size = np.fromfile(path, "<i4", 256).tolist(), path.stat().st_size
    except UserError:
        raise
    except Exception as error:  # np.load parses the header, and raises whatever a damaged one leads to
        raise UserError(f"{path}: not a readable shard ({first_line(error)}); fetch or make it again") from error
    if len(header) < 256 or header[:2] != [20240520, 1]:
        raise UserError(f"{path}: not a shard as llm.c writes them, beginning with 20240520 and 1, but with {header[:2]}")
    if size != 1024 + 2 * header[2]:
        raise UserError(f"{path}: {size} bytes, but the {header[2]} tokens that its header promises take "
                        f"{1024 + 2 * header[2]}: truncated or damaged, fetch or make it again")
    return path, 1024, header[2], changed


def read_shard(shard, start, count):
    """`count` tokens of a shard from `start` on -> (count,) uint16.

    Read, not mapped: the pages of a map count as the process's memory and grow until it has touched them all.
    """
    path, offset, _, changed = shard
    try:
        with open(path, "rb") as file:
            same = os.fstat(file.fileno()).st_mtime_ns == changed
            tokens = np.fromfile(file, "<u2", count, offset=offset + 2 * start)
    except OSError as error:
        raise UserError(f"{path}: became unreadable during the run ({first_line(error)}); mend it, then --resume") from error
    if not same or len(tokens) < count:
        raise UserError(f"{path}: was changed during the run; make it again as it was, then --resume")
    return tokens


def read_text(path, tokenizer):
    """A text file as token ids: (N,) uint8 or uint16."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"--data {path}: cannot be read ({first_line(error)}); give a text or a directory of shards") from error
    if b"\0" in data:
        raise UserError(f"--data {path}: is no text, it holds zero bytes; give one in UTF-8, or the directory of shards")
    if tokenizer == "bytes":
        return np.frombuffer(data, np.uint8)
    return np.array(get_encoding(tokenizer).encode_ordinary(data.decode("utf-8", errors="replace")), np.uint16)


def get_lr(step, config):
    """Linear warm-up, then half a cosine from max_lr down to min_lr at max_steps (GPT-3, appendix B)."""
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps  # from 1: a rate of zero would waste the first step
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps))
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.max_lr - config.min_lr)


def get_batch_tokens(step, config):
    """Tokens in a step: from rampup_batch_size linearly to total_batch_size, in multiples of the former (GPT-3, appendix B)."""
    if step >= config.rampup_steps:
        return config.total_batch_size
    first, last = config.rampup_batch_size, config.total_batch_size
    return first + (last - first) * step // config.rampup_steps // first * first


@torch.no_grad()
def estimate_loss(model, loader, config, share, device, autocast):
    """Mean loss in nats over the first val_tokens tokens of the loader: the same tokens, however they are portioned out."""
    (number, dp), B, n = share, config.batch_size, max(1, min(config.val_tokens // loader.T, loader.n_sequences))
    total = torch.zeros(2, device=device)  # loss, sequences
    for start in range(0, n, dp * B):
        first = start + number * B
        rows = max(0, min(B, n - first))
        x, y = loader.batch(min(first, n - 1), max(rows, 1), device)  # who has none left helps the others with theirs
        with autocast:
            total += torch.stack([model.loss(model.hidden(x), y), torch.ones_like(total[0])]) * rows
    if dist.is_initialized():
        dist.all_reduce(total)
    return (total[0] / total[1]).item()


def split_evals(config):
    """--evals -> [(name of the benchmark, file of its examples or "")]."""
    items = (item.partition("=") for item in config.evals.split(",") if item.strip())
    return [(name.strip(), path.strip()) for name, _, path in items]


def load_evals(config, tokenizer, gpt_config):
    """The benchmarks of --evals -> [(module, its examples, their rows)]. One that is not to be had is said and left out."""
    evals = []
    for name, path in split_evals(config) if config.eval_every else []:
        try:
            module = importlib.import_module(name)  # not before: to train from shards takes torch and numpy alone
            examples = module.evaluation.load_examples(module, path)
            evals.append((module, examples, module.evaluation.make_rows(examples, tokenizer, gpt_config)))
        except (UserError, ModuleNotFoundError) as error:
            if path:
                raise
            print0(f"note: {name} is left out: {error}")
    return evals


def run_evals(evals, model, autocast, config, share):
    """Scores the raw model on each benchmark -> {stream: its first figure}, the same on every process."""
    figures = {}
    for module, examples, rows in evals:
        batch_size = min(config.batch_size * model.config.block_size, module.evaluation.default_batch_size(model))
        report = module.report if sys.stderr.isatty() else None
        scores = module.evaluation.score(model, examples, rows, autocast, batch_size, report, share)
        figures[module.STREAM] = next(iter(module.report(examples, scores).values()))
    return figures


def print_samples(model, tokenizer, step, device):
    """What the model writes by itself, so that a person can see it learn -> the texts."""
    idx = torch.full((2, 1), start_id(tokenizer, model.config.vocab_size), device=device)  # (B, T)
    texts = model.generate(idx, 500 if tokenizer == "bytes" else 64, temperature=0.8, top_k=50, seed=42)[:, 1:]
    texts = [decode(tokenizer, ids).strip() for ids in texts.tolist()]
    for i, text in enumerate(texts):
        print0(f"--- sample {i} at step {step} ---\n{text}\n")
    return texts


def portion(step, config, T, dp):
    """Sequences in a step, and how many of them a process is given at a time: a pipeline, its whole share."""
    n_sequences = get_batch_tokens(step, config) // T
    return n_sequences, n_sequences // dp if config.pp > 1 else min(config.batch_size, n_sequences // dp)


def micro_batches(loader, config, first_step, position, share, device):
    """This process's pairs (x, y), each (B, T), from a step on to the end of the run."""
    number, dp = share
    for step in range(first_step, config.max_steps):
        n_sequences, B = portion(step, config, loader.T, dp)
        for start in range(position + number * B, position + n_sequences, dp * B):
            yield loader.batch(start, B, device)
        position += n_sequences


def prefetch(batches):
    """The same batches, each made by a thread while the caller computes with the one before."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = thread.submit(next, batches, None)
            yield batch


class Replica:
    """The model as it is trained by processes that each hold all of it: one process, or DDP. parallel.py has the other ways."""

    def __init__(self, raw_model, config, device, dtype, autocast):
        self.autocast, self.scaler = autocast, torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.model = raw_model.to(device)
        if config.compile:
            self.model = torch.compile(self.model, dynamic=False, fullgraph=True)  # forward, loss and backward as a graph each
        if dist.is_initialized():  # gradient_as_bucket_view: the buffers that are sent are the gradients, and not copies
            ids = [device.index] if device.type == "cuda" else None
            self.model = DDP(self.model, device_ids=ids, gradient_as_bucket_view=True)

    def sync(self, on):
        """Whether the next backward averages the gradients over the processes. DDP reads it in the forward before."""
        if isinstance(self.model, DDP):
            self.model.require_backward_grad_sync = on

    def forward_backward(self, x, y, micro_steps):
        """Adds a micro-batch's part to the gradients -> its part of the loss."""
        with self.autocast:
            _, loss = self.model(x, y)
        loss = loss / micro_steps  # cross-entropy is a mean: the mean over the whole batch is the mean of these
        self.scaler.scale(loss).backward()
        return loss.detach()

    def clip(self, max_norm):
        """Cuts the gradient's norm down to max_norm -> what it was."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)


def prepare(raw_model, config, device, dtype):
    """What a step needs -> (the model as it is trained, its optimizers, the autocast)."""
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    raw_model.activation_checkpointing = config.activation_checkpointing
    if config.compile is None:
        config = replace(config, compile=device.type == "cuda")
    in_parts = dist.is_initialized() and (config.parallel == "fsdp" or config.tp * config.pp > 1)
    kind = importlib.import_module("plaingpt.parallel").Parts if in_parts else Replica
    model = kind(raw_model, config, device, dtype, autocast)
    muon_lr = (config.muon_lr or config.max_lr) if config.optimizer == "muon" else None
    return model, raw_model.configure_optimizers(config.weight_decay, config.max_lr, muon_lr), autocast


def train_step(model, optimizers, batches, micro_steps, grad_clip, stop=()):
    """One step: accumulate, average, clip, update -> (mean loss, gradient norm, whether any process wants to stop).

    Takes `micro_steps` pairs (x, y) from the iterator batches, this process's share of the batch. A gradient that is not
    finite is dropped. stop: a list, which may be filled during the step; this process wants to stop if it is not empty.
    """
    loss_sum = 0.0
    for micro_step, (x, y) in enumerate(itertools.islice(batches, micro_steps), start=1):
        model.sync(micro_step == micro_steps)  # only the sum of all is of interest
        loss_sum += model.forward_backward(x, y, micro_steps)
    for optimizer in optimizers:
        model.scaler.unscale_(optimizer)  # before clipping, which is about the true gradient
    norm = model.clip(grad_clip or math.inf)
    stats = torch.stack([loss_sum, torch.full_like(loss_sum, len(stop) > 0), torch.ones_like(loss_sum)])
    if dist.is_initialized():
        dist.all_reduce(stats)  # sums: gloo has no average
    loss_sum, stop, processes, norm = torch.cat([stats, norm.view(1)]).tolist()  # the one synchronisation of the step
    if math.isfinite(norm):  # which scaler.step would ask the device once more
        for optimizer in optimizers:
            optimizer.step()
    model.scaler.update()  # halves float16's scale after an overflow
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    return loss_sum / processes, norm, stop > 0


class Watch:
    """Over the gradient norms of a run: which steps were skipped, and where the norm jumped."""

    def __init__(self):
        self.recent, self.bad_in_a_row, self.skipped, self.jumps = deque(maxlen=RECENT), 0, 0, 0

    def mark(self, norm):
        """What a step's line is to say of its norm, most often nothing."""
        mark, finite = "", math.isfinite(norm)
        self.bad_in_a_row = 0 if finite else self.bad_in_a_row + 1
        self.skipped += not finite
        if finite:
            usual = statistics.median(self.recent) if len(self.recent) >= RECENT // 10 else math.inf
            if norm > JUMP * usual:
                self.jumps, mark = self.jumps + 1, f" | jump: norm {norm / usual:.0f} x its median"
            self.recent.append(norm)
        return mark + f" | {self.skipped} skipped" * (self.skipped > 0)

    def summary(self):
        return f"steps skipped: {self.skipped}, jumps of the gradient norm: {self.jumps}"


def due(step, every):
    return every > 0 and step > 0 and step % every == 0


def main(argv=None):
    gpt_config, config, given = parse_args(argv)
    rank, world_size, device = setup(config.device, config.parallel != "fsdp", config.deterministic)
    stop_signals = catch_stop_signals()
    run_dir = Path(config.log_dir)
    checkpoint = find_checkpoint(run_dir, rank, world_size) if config.resume else None
    raw_model, tokenizer = init_model(gpt_config, config, given, checkpoint)
    T, vocab_size = raw_model.config.block_size, raw_model.config.vocab_size
    check_layout(config, raw_model.config, world_size)
    share = _, dp = data_share(config, rank, world_size)
    train_loader = DataLoaderLite(config.data, "train", T, vocab_size, config.seed, config.shuffle, tokenizer)
    val_loader = DataLoaderLite(config.data, "val", T, vocab_size, shuffle=False, tokenizer=tokenizer)
    contents = {"training split": train_loader.contents(), "validation split": val_loader.contents()}
    check_batches(config, T, dp, train_loader.n_sequences)
    evals = load_evals(config, tokenizer, raw_model.config)

    dtype = choose_dtype(config.dtype, device)
    model, optimizers, autocast = prepare(raw_model, config, device, dtype)
    first_step, position = restore(checkpoint, optimizers, model.scaler, config, contents) if checkpoint else (0, 0)
    if rank == 0:
        log = RunLog(run_dir, first_step, {**asdict(config), **asdict(raw_model.config)} if config.tensorboard else None)
        if first_step < config.max_steps:  # a finished run keeps the facts of its making
            write_run_json(run_dir, raw_model, config, tokenizer, device, dtype, world_size, train_loader)
    del checkpoint  # its tensors have been copied: give the memory back
    batches = prefetch(micro_batches(train_loader, config, first_step, position, share, device))
    flops, peak = raw_model.flops_per_token(), peak_flops(device, dtype, world_size)

    stop, watch, seconds = False, Watch(), 0.0
    for step in range(first_step, config.max_steps + 1):
        last = step == config.max_steps
        n_sequences, B = portion(step, config, T, dp)
        evaluate = evals and (last or due(step, config.eval_every))
        if step > first_step and (last or stop or evaluate or due(step, config.save_every)):
            save_checkpoint(run_dir, raw_model, optimizers, model.scaler, step, position, config, tokenizer, contents)
        if stop:
            print0(f"stopped by a signal; step {step} is saved, --resume goes on from there; {watch.summary()}")
            break
        if last or step == 0 or due(step, config.val_every):
            with memory_advice(config.batch_size, n_sequences // dp):
                val_loss = estimate_loss(raw_model, val_loader, config, share, device, autocast)
            print0(f"step {step} | val loss {val_loss:.4f} | perplexity {math.exp(min(val_loss, 99)):,.2f}")
            if rank == 0:
                log.write(step, val=val_loss)
        if evaluate:
            figures = run_evals(evals, raw_model, autocast, config, share)
            print0(f"step {step} | " + " | ".join(f"{stream} {value:.4f}" for stream, value in figures.items()))
            if rank == 0:
                log.write(step, **figures)
        if last or due(step, config.sample_every):
            texts = print_samples(raw_model, tokenizer, step, device)
            if rank == 0:
                log.write_samples(step, texts)
        if last:
            print0(f"done: {watch.summary()}; {run_dir} holds the log and the checkpoints; python generate.py --checkpoint "
                   f"{run_dir} writes more")
            break

        start = time.perf_counter()  # the clock runs in the step alone, not while evaluating or saving
        lr = get_lr(step, config)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["initial_lr"] * lr / config.max_lr
        with memory_advice(min(B, config.batch_size), n_sequences // dp):
            loss, norm, stop = train_step(model, optimizers, batches, n_sequences // (B * dp), config.grad_clip,
                                          stop_signals)
        position += n_sequences
        mark = watch.mark(norm)
        dt = time.perf_counter() - start
        seconds += dt if step > first_step else 0.0  # the first one compiles
        if rank == 0:
            tok_s = n_sequences * T / dt
            log.write(step, train=loss, lr=lr, norm=norm, tok_s=tok_s)
            use = f"mfu {tok_s * flops / peak:.1%}" if peak else f"{tok_s * flops / 1e12:.2f} TFLOP/s"
            to_go = duration((seconds / (step - first_step) if step > first_step else dt) * (config.max_steps - step - 1))
            print0(fit([f"step {step:5d}/{config.max_steps}", f"loss {loss:.4f}", f"lr {lr:.2e}", f"norm {norm:.3f}",
                        f"{dt * 1000:.0f} ms", f"{tok_s:,.0f} tok/s", use, f"{to_go} to go{mark}"], drop=(6, 4, 2)))
        if watch.bad_in_a_row == MAX_BAD_STEPS:
            raise UserError(f"no finite gradient in {MAX_BAD_STEPS} steps in a row, up to step {step}: the run has diverged; "
                            f"checkpoints in {run_dir} are from before, --resume --max_lr {config.max_lr / 2:g} may save it")
    shut_down(world_size)


if __name__ == "__main__":
    run(main)
