"""What a run writes beside its checkpoints: log.txt, run.json, files of TensorBoard and wandb."""

import contextlib
import html
import math
import os
import shutil
import statistics
import sys
import time
import weakref
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch

from plaingpt import cli
from plaingpt.checkpoint import hash_of_code, whole_gpt
from plaingpt.cli import UserError, print0, read_log, run_git
from plaingpt.device import hardware_name, on_rank0, peak_flops

# Training steps write these streams. Evaluations write all others.
STEP_STREAMS = {"train", "lr", "norm", "tok_s", "tokens"}


class RunLog:
    """Writes log.txt, run.json, and files of TensorBoard and wandb, on rank 0. Raises UserError.

    log.txt has a line "{step} {stream} {value}" for each number. A run that starts at step 0 moves
    an old run aside. A resumed run removes the lines of the steps that it computes again. It keeps
    the validation loss and the scores of the step at which it resumes.
    """

    def __init__(self, gpt_config, config, data, step, process):
        self.gpt_config, self.config, self.data, self.process = gpt_config, config, data, process
        self.writer = self.wandb = None  # TensorBoard's SummaryWriter; the module wandb
        self.pace = []  # seconds per token of the last ten steps
        # `skipped` counts steps with a non-finite gradient, and `skipped_in_row` those in a row.
        # `rises` counts how many times in a row the validation loss has risen.
        self.skipped = self.skipped_in_row = self.rises = 0
        self.figures = {}  # the last value of each stream
        model = whole_gpt(gpt_config)
        self.n_parameters = sum(p.numel() for p in model.parameters())
        self.flops_per_token, self.peak_flops = model.flops_per_token(), peak_flops(process)
        on_rank0(self.open_directory, Path(config.log_dir), step)

    def open_directory(self, directory, step):
        """Locks the run directory, moves an old run aside, opens the files, writes the facts."""
        config, self.path = self.config, directory / "log.txt"
        # Imports these packages before it moves anything, because one of them may be missing.
        tensorboard = cli.require("torch.utils.tensorboard") if config.tensorboard else None
        self.wandb = cli.require("wandb") if config.wandb else None
        with cli.writing(f"--log_dir {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
            weakref.finalize(self, os.close, cli.lock(directory, "--log_dir"))
            kept = [
                line
                for line in read_log(self.path)
                if line[0] < step or 0 < step == line[0] and line[1] not in STEP_STREAMS
            ]
            self.known = {line[:2]: float(line[2]) for line in kept if line[0] == step}
            with cli.replacing(self.path) as file:
                file.writelines(f"{s} {stream} {v}\n".encode() for s, stream, v in kept)
                # This comes after the first write, which fails in a read-only directory.
                if step == 0:
                    move_aside(directory)
        if tensorboard:
            self.writer = tensorboard.SummaryWriter(directory, purge_step=step)
        if self.wandb:
            runs = sorted(directory.glob("wandb/*run-*-*"))  # wandb/run-{time}-{id}
            with cli.explaining("--wandb", "first run wandb login", self.wandb.Error):
                run = self.wandb.init(
                    project=config.wandb,
                    id=runs[-1].name.rpartition("-")[2] if runs else None,
                    resume="allow",
                    name=directory.name,
                    dir=directory,
                    config={**asdict(config), **asdict(self.gpt_config)},
                    settings=self.wandb.Settings(console="off"),
                )
            weakref.finalize(self, run.finish)  # runs at the end of main
        # Publishes these values again, because purge_step has removed them.
        self.publish(step, {stream: value for (_, stream), value in self.known.items()})
        if step < config.max_steps:  # a finished run keeps its run.json
            self.write_facts()

    def write_facts(self):
        """Writes run.json and changes.patch, with which the run can be repeated. Prints a summary.

        changes.patch has the uncommitted changes of tracked files, if there are any. It does not
        have the untracked files, but run.json lists their names.
        """
        c, g, process = self.config, self.gpt_config, self.process
        n_train = sum(map(len, self.data.train))
        commit = untracked = changes = b""
        with contextlib.suppress(UserError):  # a copy of the files may be without git
            commit = run_git("describe", "--always", "--abbrev=40", "--dirty")
            untracked = run_git("ls-files", "--others", "--exclude-standard", "--full-name", ":/")
            changes = run_git("diff", "HEAD")
        facts = dict(
            model_config=asdict(g),
            train_config=asdict(c),
            parameters=self.n_parameters,
            tokenizer=self.data.tokenizer.name,
            fingerprints=self.data.fingerprints,
            train_tokens=n_train,
            dtype=process.dtype_name,
            device=hardware_name(process.device),
            processes=process.world_size,
            threads=torch.get_num_threads(),
            program=hash_of_program(),
            git_commit=commit.decode().strip() or None,
            untracked_files=untracked.decode(errors="replace").splitlines(),
            started=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            versions=dict(torch=torch.__version__),
        )
        cli.write_json(self.path.with_name("run.json"), facts)
        patch = self.path.with_name("changes.patch")
        with cli.writing(self.path.parent):
            if changes:
                patch.write_bytes(changes)
            elif commit:  # removes an older patch: this code has no changes any more
                patch.unlink(missing_ok=True)
        print0(
            f"{facts['parameters']:,} parameters, {n_train:,} training tokens, {facts['dtype']} "
            f"on {facts['device']}, {facts['processes']} processes, in {c.log_dir}"
        )
        if (epochs := c.max_steps * c.total_batch_size // n_train) > 30:
            print0(f"note: the run reads the data {epochs} times; more data would be better")
        if (n_val := min(map(len, self.data.val))) < 4096:  # of the smallest set
            print0(f"note: only {n_val:,} validation tokens, so the loss is inexact; use more data")

    def write(self, step, **values):
        """Appends a line for each value that log.txt does not have yet."""
        self.figures.update(values)
        if self.process.rank > 0:
            return
        new = {k: v for k, v in values.items() if (step, k) not in self.known}
        texts = {k: v if isinstance(v, int) else f"{v:.8g}" for k, v in new.items()}
        with (
            cli.writing(self.path, "free some space, then continue with --resume"),
            open(self.path, "a", encoding="utf-8") as file,
        ):
            file.writelines(f"{step} {stream} {text}\n" for stream, text in texts.items())
        self.publish(step, new)

    def publish(self, step, values):
        """Sends {name: number or HTML} to TensorBoard and wandb, if they are used."""
        if self.writer:
            with cli.writing(self.path.parent, "free some space, then continue with --resume"):
                for name, value in values.items():
                    add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
                    add(name, value, step)
                self.writer.flush()
        if self.wandb:
            self.wandb.log(
                {
                    name: self.wandb.Html(value) if isinstance(value, str) else value
                    for name, value in values.items()
                },
                step=step,
            )

    def write_losses(self, step, means, losses, loader, position):
        """Logs a validation.

        losses: (nats per token, bits per byte) of each data set. means: the means of both, weighted
        by shares. If there are several sets, it also logs the losses of each, and prints how often
        each was read.
        """
        val, bpb = means
        streams = dict(val=val, bpb=bpb)
        text = (
            f"step {step} | val loss {val:.4f} | perplexity {math.exp(min(val, 99)):,.2f} | "
            f"{bpb:.4f} bits per byte"
        )
        if len(losses) > 1:
            for i, (name, (val_i, bpb_i)) in enumerate(zip(self.data.names, losses)):
                streams |= {f"val_{name}": val_i, f"bpb_{name}": bpb_i}
                epochs = position * float(loader.shares[i]) / loader.lengths[i]
                text += f" | {name}: loss {val_i:.4f}, {bpb_i:.4f} bits, epoch {epochs:.2f}"
        print0(text)
        self.rises = self.rises + 1 if val > self.figures.get("val", math.inf) else 0
        if self.rises == 3:
            print0("note: the validation loss has risen three times in a row; use --keep_best")
        self.write(step, **streams)

    def write_samples(self, step, texts):
        """Prints samples, and sends them to TensorBoard and wandb. log.txt does not have them."""
        for i, text in enumerate(texts):
            print0(f"--- sample {i} at step {step} ---\n{text}\n")
            self.publish(step, {f"sample {i}": f"<pre>{html.escape(text)}</pre>"})

    def write_step(self, step, n_tokens, seconds, **streams):
        """Logs a step. Prints every log_every-th step, and those with a non-finite gradient.

        The tenth of those in a row raises a UserError.

        streams: numbers by their name in log.txt: train (the loss), lr, norm, tokens.
        """
        c, tok_s, norm = self.config, n_tokens / seconds, streams["norm"]
        self.write(step, **streams, tok_s=tok_s)
        is_bad = not math.isfinite(norm)
        self.skipped += is_bad
        self.skipped_in_row = self.skipped_in_row + 1 if is_bad else 0
        self.pace = [*self.pace[-9:], seconds / n_tokens]
        left = c.max_steps - step - 1  # steps
        # In a ramp, steps have fewer tokens than total_batch_size; the number grows linearly.
        fewer = min(left, max(0, c.rampup_steps - step - 1)) * (c.total_batch_size - n_tokens) / 2
        to_go = statistics.median(self.pace) * (c.total_batch_size * left - fewer)  # seconds
        progress = f"loss {streams['train']:.4f} | {timedelta(seconds=round(to_go))} to go"
        if step % c.log_every == 0 or step == c.max_steps - 1 or is_bad:
            flops = tok_s * self.flops_per_token
            mfu = f" | mfu {flops / self.peak_flops:.1%}" if self.peak_flops else ""
            skipped = f"{self.skipped} skipped | " if is_bad else ""
            print0(
                cli.shorten_line(
                    f"step {step:5d}/{c.max_steps} | {progress} | {skipped}norm {norm:.3f} | "
                    f"{tok_s:,.0f} tok/s | lr {streams['lr']:.2e} | {seconds * 1000:.0f} ms | "
                    f"{flops / 1e12:.2f} TFLOP/s{mfu}"
                )
            )
        cli.show_progress(step + 1, c.max_steps, progress)
        if self.skipped_in_row == 10:
            raise UserError("no finite gradient in 10 steps; use --resume and a lower --max_lr")

    def finish(self, step):
        """Prints how the run has ended."""
        directory, how = self.config.log_dir, "done"
        if step < self.config.max_steps:
            how = f"stopped by a signal or --max_minutes; step {step} is saved, --resume continues"
        skipped = f"{self.skipped} steps skipped; " if self.skipped else ""
        print0(f"{how}: {skipped}python generate.py --checkpoint {directory} writes text")


def hash_of_program():
    """Returns a hash of the files of this clone that the program has imported. See hash_of_code."""
    root, library = Path(__file__).parents[1], Path(os.__file__).parent
    files = {Path(getattr(m, "__file__", None) or "/") for m in [*sys.modules.values()]}
    # Python itself and its packages may be in the clone, too.
    return hash_of_code(
        sorted(
            f
            for f in files
            if root in f.parents
            and f.suffix == ".py"
            and not (library in f.parents or "site-packages" in f.parts)
        )
    )


def move_aside(directory):
    """Moves the files of an old run from `directory` to directory.1, or .2, ..."""
    names = ("log.txt", "run.json", "changes.patch", "model_*.pt", "events.out.tfevents.*", "wandb")
    old = [path for name in names for path in directory.glob(name)]
    if old:
        base, i = directory.resolve(), 1  # resolve() gives "." a name
        while (aside := base.with_name(f"{base.name}.{i}")).exists():
            i += 1
        aside.mkdir()
        for path in old:
            shutil.move(path, aside / path.name)  # os.rename fails across file systems
        print0(f"the old run in {directory} was moved to {aside}")
