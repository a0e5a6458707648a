"""What a run writes beside its checkpoints: log.txt, run.json, files of TensorBoard and wandb."""

import contextlib
import html
import json
import math
import operator
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
import weakref
from collections import deque
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from plaingpt import cli
from plaingpt.checkpoint import checkpoints, divergence_advice, on_meta
from plaingpt.cli import UserError, print0
from plaingpt.device import describe, peak_flops, ranks

STEP_STREAMS = {"train", "lr", "norm", "tok_s", "tokens"}  # of training steps; others: evaluation
LINE = re.compile(r"^(\d+) (\S+) ([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|inf|nan))\n", re.M)  # of log.txt
JUMP, RECENT = 10, 100  # the norm jumps if it is above JUMP times the median of RECENT steps
MAX_BAD_STEPS = 10  # steps in a row with a non-finite gradient after which a run stops


def read_log(path):
    """log.txt -> [(step, stream, value as text)], or []. Ignores an incomplete last line."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    return [(int(step), stream, value) for step, stream, value in LINE.findall(text)]


class RunLog:
    """Writes log.txt, run.json, and files of TensorBoard and wandb, on rank 0. Raises UserError.

    log.txt has a line "{step} {stream} {value}" per number. A run that starts at step 0 moves an
    old run aside. A resumed run removes the lines of the steps that it computes again. It keeps the
    validation loss and the scores of the step at which it resumes.
    """

    def __init__(self, config, gpt_config, step, rank):
        self.config, self.gpt_config, self.first_step = config, gpt_config, step
        self.enabled = rank == 0
        self.writer = self.wandb = None  # TensorBoard's SummaryWriter; the module wandb
        self.last_lr = None  # learning rate of the last step before a resume
        self.recent = deque(maxlen=RECENT)  # gradient norms
        self.pace = deque(maxlen=10)  # seconds per token of the last steps
        self.first_pace = math.inf  # their median, in the first ten steps
        self.bad_in_a_row = self.skipped = self.jumps = 0
        if not self.enabled:
            return
        if config.tensorboard:  # imported before anything is moved
            cli.require("tensorboard")
            tensorboard = cli.require("torch.utils.tensorboard")
        if config.wandb:
            self.wandb = cli.require("wandb")
            with wandb_errors(self.wandb, config.wandb):
                self.wandb.login()
        directory = Path(config.log_dir)
        self.path = directory / "log.txt"
        with cli.writing(f"--log_dir {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
            weakref.finalize(self, os.close, cli.lock(directory, "--log_dir"))
            (directory / "log.txt.tmp").touch()  # fails before anything is moved
            for temporary in directory.glob("*.tmp"):
                temporary.unlink()  # of this process, or of one that was killed
            if step == 0:
                move_aside(directory)
            kept = [line for line in read_log(self.path)
                    if line[0] < step or line[0] == step and line[1] not in STEP_STREAMS]
            rates = [float(value) for _, stream, value in kept if stream == "lr"]
            self.last_lr = rates[-1] if rates else None
            self.known = {line[:2]: line[2] for line in kept if line[0] == step}
            with cli.replacing(self.path) as temporary:
                temporary.write_text("".join(f"{s} {stream} {v}\n" for s, stream, v in kept))
            self.file = open(self.path, "ab", buffering=0)
        settings = {**asdict(config), **asdict(gpt_config)}
        if config.tensorboard:
            self.writer = tensorboard.SummaryWriter(directory, purge_step=step)
            self.writer.add_text("settings", preformatted(json.dumps(settings, indent=2)))
            for (_, stream), value in self.known.items():  # purged above
                self.writer.add_scalar(stream, float(value), step)
        if config.wandb:
            self.start_wandb(directory, settings)

    def start_wandb(self, directory, settings):
        """Starts a run of Weights & Biases, or continues the one of the run directory."""
        old = sorted(directory.glob("wandb/*run-*-*"))  # wandb/run-{time}-{id}
        project = self.config.wandb
        with wandb_errors(self.wandb, project):
            run = self.wandb.init(
                project=project, id=old[-1].name.rpartition("-")[2] if old else None,
                resume="allow", reinit="finish_previous", name=directory.resolve().name,
                dir=directory, config=settings, settings=self.wandb.Settings(console="off"))
        weakref.finalize(self, run.finish)  # at the end of main

    def start(self, tokenizer, device, dtype, train_tokens):
        """Writes run.json, which has what one needs to repeat the run, and prints a summary."""
        c, world_size = self.config, ranks()[2]
        model, _ = on_meta(self.gpt_config)  # takes no memory; the trainer may have only a part
        self.flops_per_token = model.flops_per_token()
        self.peak_flops = peak_flops(device, dtype, world_size)
        if not self.enabled or self.first_step == c.max_steps:  # a finished run keeps its run.json
            return
        facts = dict(
            model_config=asdict(self.gpt_config), train_config=asdict(c), tokenizer=tokenizer.name,
            parameters=sum(p.numel() for p in model.parameters()), train_tokens=train_tokens,
            device=f"{device.type}: {describe(device)}", dtype=str(dtype).removeprefix("torch."),
            processes=world_size, git_commit=git_commit(),
            versions=dict(python=platform.python_version(), torch=torch.__version__,
                          numpy=np.__version__),
            started=time.strftime("%Y-%m-%d %H:%M:%S %Z"))
        cli.write_json(self.path.with_name("run.json"), facts)
        dp_size = world_size // (c.pp * c.tp)
        g = self.gpt_config
        print0(f"{facts['parameters']:,} parameters ({g.n_layer} layers, {g.n_embd} channels, "
               f"context {g.block_size}), {train_tokens:,} training tokens, {facts['dtype']} on "
               f"{facts['device']}; processes: {c.parallel} {dp_size}, tp {c.tp}, pp {c.pp}; "
               f"{c.optimizer}, peak rate {c.max_lr:g}; run directory {c.log_dir}")

    def write(self, step, **values):
        """Appends a line for each value that log.txt does not have yet."""
        if not self.enabled:
            return
        new = {k: v for k, v in values.items() if (step, k) not in self.known}
        text = "".join(f"{step} {stream} {value:.8g}\n" if isinstance(value, float) else
                       f"{step} {stream} {value}\n" for stream, value in new.items())
        data = text.encode()
        with cli.writing(self.path, "free some space, then continue with --resume"):
            while data:
                data = data[self.file.write(data):]  # write() may write less if the disk is full
        self.publish(step, new, {})

    def write_losses(self, step, losses, loader, position):
        """Logs a validation. Returns the mean loss, weighted by the shares of `loader`, a Mixture.

        losses: (nats per token, bits per byte) of each set. With several sets, each is also logged.
        """
        val, bpb = (sum(map(operator.mul, loader.shares, values)) for values in zip(*losses))
        streams = dict(val=val, bpb=bpb)
        parts = [f"step {step}", f"val loss {val:.4f}",
                 f"perplexity {math.exp(min(val, 99)):,.2f}", f"{bpb:.4f} bits per byte"]
        if len(losses) > 1:
            for (name, epochs), (val_k, bpb_k) in zip(loader.epochs(position).items(), losses):
                streams |= {f"val_{name}": val_k, f"bpb_{name}": bpb_k}
                parts.append(f"{name}: loss {val_k:.4f}, {bpb_k:.4f} bits, epoch {epochs:.2f}")
        print0(" | ".join(parts))
        self.write(step, **streams)
        return val

    def publish(self, step, numbers, texts):
        """Sends {name: number} and {name: HTML} to TensorBoard and wandb, if they are used."""
        if self.writer:
            for name, number in numbers.items():
                self.writer.add_scalar(name, number, step)
            for name, text in texts.items():
                self.writer.add_text(name, text, step)
            self.writer.flush()
        if self.wandb:
            shown = {name: self.wandb.Html(text) for name, text in texts.items()}
            self.wandb.log({**numbers, **shown}, step=step)

    def write_samples(self, step, model, tokenizer, device):
        """Prints two texts that the model writes without a prompt. All processes must call."""
        model.eval()
        idx = torch.full((2, 1), tokenizer.end_of_text, device=device)  # (B, T)
        n = self.config.sample_tokens or (500 if tokenizer.name == "bytes" else 64)
        idx = model.generate(idx, n, temperature=0.8, top_k=50, seed=42)  # (B, T)
        model.train()
        for i, ids in enumerate(idx.tolist()):
            text = tokenizer.decode(ids[1:]).strip()
            print0(f"--- sample {i} at step {step} ---\n{text}\n")
            self.publish(step, {}, {f"sample {i}": preformatted(text)})

    def write_step(self, step, loss, lr, norm, n_tokens, consumed, start):
        """Logs a step. Prints every log_every-th step, and those with a problem.

        n_tokens: of the step. consumed: of all steps so far. start: time of the step's start.
        """
        seconds = time.perf_counter() - start
        c, tok_s = self.config, n_tokens / seconds
        self.write(step, train=loss, lr=lr, norm=norm, tok_s=tok_s, tokens=consumed)
        self.pace.append(seconds / n_tokens)
        pace = statistics.median(self.pace)
        if step == self.first_step + 9:
            self.first_pace = pace
        if pace > 5 * self.first_pace:
            self.first_pace = math.inf  # printed once
            print0("note: steps take five times longer than at first; another program may use this "
                   "machine. On a CPU, GOMP_SPINCOUNT=1000 in the environment helps")
        seconds_to_go = pace * n_tokens * (c.max_steps - step - 1)
        to_go = f"{timedelta(seconds=round(seconds_to_go))} to go"
        before = self.last_lr if step == self.first_step >= c.warmup_steps else None
        if before and lr > 1.1 * before:
            print0(f"note: the learning rate rises from {before:.2e} to {lr:.2e}: it "
                   "depends on --max_steps; with wsd, resume from a checkpoint before its decay")
        problem = self.check(norm)
        if step % c.log_every == 0 or step == c.max_steps - 1 or problem:
            use = f"{tok_s * self.flops_per_token / 1e12:.2f} TFLOP/s"
            if self.peak_flops:
                use = f"mfu {tok_s * self.flops_per_token / self.peak_flops:.1%}"
            print0(cli.fit(f"step {step:5d}/{c.max_steps} | loss {loss:.4f}{problem} | {to_go} | "
                       f"norm {norm:.3f} | {tok_s:,.0f} tok/s | lr {lr:.2e} | "
                       f"{seconds * 1000:.0f} ms | {use}"))
        cli.show_progress(step + 1, c.max_steps, f"loss {loss:.4f} | {to_go}")
        if self.bad_in_a_row == MAX_BAD_STEPS:
            raise UserError(f"no finite gradient in {MAX_BAD_STEPS} steps in a row, up to step "
                            f"{step}: the run has diverged; {divergence_advice(c)}")

    def check(self, norm):
        """Counts a norm that is not finite, or jumps. Returns a note for the step's line, or ""."""
        if not math.isfinite(norm):
            self.bad_in_a_row += 1
            self.skipped += 1
            return f" | {self.skipped} skipped"
        self.bad_in_a_row = 0
        enough = len(self.recent) >= RECENT // 10
        median = statistics.median(self.recent) if enough else math.inf
        self.recent.append(norm)
        if norm <= JUMP * median:
            return ""
        self.jumps += 1
        return f" | jump: norm {norm / median:.0f} x its median"

    def summary(self):
        return f"steps skipped: {self.skipped}, jumps of the gradient norm: {self.jumps}"


@contextlib.contextmanager
def wandb_errors(wandb, project):
    """Raises a UserError instead of an error of wandb."""
    try:
        yield
    except wandb.Error as error:
        reason = cli.first_line(error).rstrip(".")
        raise UserError(f"--wandb {project}: {reason}; or set WANDB_MODE=offline") from error


def preformatted(text):
    """Plain text -> HTML that shows it as it is."""
    return f"<pre>{html.escape(text)}</pre>"


def git_commit():
    """The commit of this clone, with "-dirty" if files are changed; None without git."""
    git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def move_aside(directory):
    """Moves the files of an old run from `directory` to directory.1, or .2, ..."""
    patterns = ("events.out.tfevents.*", "run.json", "log.txt", "model_*.damaged",
                "model_best.pt", "wandb")
    old = checkpoints(directory) + [path for p in patterns for path in directory.glob(p)]
    if old:
        base, i = directory.resolve(), 1  # resolve() gives "." a name
        while (aside := base.with_name(f"{base.name}.{i}")).exists():
            i += 1
        aside.mkdir()
        for path in old:
            shutil.move(path, aside / path.name)  # os.rename fails across file systems
        print0(f"the old run in {directory} was moved to {aside}")
