"""The outputs of a run: log.txt, lines in the terminal, TensorBoard, and Weights & Biases."""

import html
import math
import os
import re
import statistics
import weakref
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from plaingpt.base.errors import UserError, explaining, require
from plaingpt.base.files import (
    delete_temporary_files,
    format_log,
    lock,
    read_json,
    write_json,
    writing,
)
from plaingpt.base.terminal import print0, shorten_line, show_progress
from plaingpt.distributed.device import hardware_name, peak_flops
from plaingpt.distributed.process import on_rank0
from plaingpt.run.directory import check_newest, prepare_run_directory, write_facts

import torch


class TensorBoard:
    """Writes event files into the run directory.

    step: where the run starts. Removes the values of this step and of all later steps, which an
    earlier part of the run may have written.
    """

    def __init__(self, directory, step):
        self.directory = directory
        self.writer = require("torch.utils.tensorboard").SummaryWriter(directory, purge_step=step)

    def write(self, step, values):
        """Writes {name: number, or a string with HTML}. Raises UserError."""
        with writing(self.directory, "free some space, then continue with --resume"):
            for name, value in values.items():
                if isinstance(value, str):
                    self.writer.add_text(name, value, step)
                else:
                    self.writer.add_scalar(name, value, step)
            self.writer.flush()


class WandB:
    """Sends values to a project of Weights & Biases. A resumed run continues its W&B run."""

    def __init__(self, directory, config, gpt_config):
        self.wandb = require("wandb")
        with explaining("--wandb", "first run wandb login", self.wandb.Error):
            run = self.wandb.init(
                project=config.wandb,
                id=find_wandb_id(directory),
                resume="allow",
                name=directory.name,
                dir=directory,
                config={**asdict(config), **asdict(gpt_config)},
                settings=self.wandb.Settings(console="off"),
            )
        weakref.finalize(self, run.finish)  # runs at the end of main

    def write(self, step, values):
        """Sends {name: number, or a string with HTML}."""
        sent = {}
        for name, value in values.items():
            sent[name] = self.wandb.Html(value) if isinstance(value, str) else value
        self.wandb.log(sent, step=step)


def find_wandb_id(directory):
    """Returns the id of the newest run of W&B in a run directory, or None."""
    ids = []
    for path in directory.glob("wandb/*run-*"):
        # The id may contain dashes.
        if found := re.fullmatch(r"(?:offline-)?run-(\d+_\d+)-(.+)", path.name):
            ids.append(found.groups())  # (time, id)
    return max(ids)[1] if ids else None


class Progress:
    """Prints the progress of a run.

    flops_per_token: FLOPs of the GPT per token, for the forward and the backward pass.
    """

    def __init__(self, config, flops_per_token, process):
        self.config = config
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops(process)
        self.seconds_per_token = []  # in the last ten steps
        self.n_skipped = 0  # steps with a non-finite gradient
        self.n_skipped_in_row = 0
        self.n_rises = 0  # how many times in a row the validation loss has risen
        self.last_val = math.inf

    def show_step(self, step, n_tokens, seconds, metrics):
        """Prints every log_every-th step, and each step with a non-finite gradient.

        metrics: {name: number} of the step, including train (the loss), norm (the gradient norm)
        and lr (the learning rate).
        """
        is_skipped = not math.isfinite(metrics["norm"])
        if is_skipped:
            self.n_skipped += 1
            self.n_skipped_in_row += 1
        else:
            self.n_skipped_in_row = 0
        self.seconds_per_token = [*self.seconds_per_token[-9:], seconds / n_tokens]
        to_go = timedelta(seconds=round(self.seconds_to_go(step, n_tokens)))
        progress = f"loss {metrics['train']:.4f} | {to_go} to go"
        is_last = step == self.config.max_steps - 1
        if step % self.config.log_every == 0 or is_last or is_skipped:
            tok_s = n_tokens / seconds
            flops = tok_s * self.flops_per_token
            parts = [f"step {step:5d}/{self.config.max_steps}", progress]
            if is_skipped:
                parts.append(f"{self.n_skipped} skipped")
            parts.append(f"norm {metrics['norm']:.3f}")
            parts.append(f"{tok_s:,.0f} tok/s")
            parts.append(f"lr {metrics['lr']:.2e}")
            parts.append(f"{seconds * 1000:.0f} ms")
            parts.append(f"{flops / 1e12:.2f} TFLOP/s")
            if self.peak_flops:
                parts.append(f"mfu {flops / self.peak_flops:.1%}")
            print0(shorten_line(" | ".join(parts)))
        show_progress(step + 1, self.config.max_steps, progress)

    def seconds_to_go(self, step, n_tokens):
        """Returns how many seconds the steps after `step` will take. n_tokens: tokens in `step`."""
        total = self.config.total_batch_size
        steps_left = self.config.max_steps - step - 1
        # In the batch-size ramp, the number of tokens per step grows linearly to `total`.
        ramp_left = min(steps_left, max(0, self.config.rampup_steps - step - 1))
        tokens_left = total * steps_left - ramp_left * (total - n_tokens) / 2
        return statistics.median(self.seconds_per_token) * tokens_left

    def show_validation(self, step, metrics, names, epochs):
        """Prints the losses of a validation.

        metrics: {name: number}, from validate in train_gpt2.py. names: names of the data sets.
        epochs: number of epochs of each data set that the run has read.
        """
        rest = dict(metrics)
        val = rest.pop("val")
        parts = [
            f"step {step}",
            f"val loss {val:.4f}",
            f"perplexity {math.exp(min(val, 99)):,.2f}",
            f"{rest.pop('bpb'):.4f} bits per byte",
        ]
        if len(names) > 1:
            for name, epoch in zip(names, epochs):
                loss = rest.pop(f"val_{name}")
                bits = rest.pop(f"bpb_{name}")
                parts.append(f"{name}: loss {loss:.4f}, {bits:.4f} bits, epoch {epoch:.2f}")
        # The remaining values are metrics that an edit adds.
        parts += [f"{name} {value:.4f}" for name, value in rest.items()]
        print0(" | ".join(parts))
        if val > self.last_val:
            self.n_rises += 1
        else:
            self.n_rises = 0
        self.last_val = val
        if self.n_rises == 3:
            advice = "start again with --keep_best, which saves the best checkpoint"
            if self.config.keep_best:
                advice = f"{self.config.log_dir}/model_best.pt is the best checkpoint"
            print0(f"note: the validation loss has risen three times in a row; {advice}")

    def show_end(self, step, is_complete, memory):
        """Prints how the run has ended. memory: number of bytes reserved on the GPU, or 0."""
        if step == 0:
            print0("stopped by a signal before the first step")
            return
        how = "done"
        if not is_complete:
            how = f"stopped by a signal or --max_minutes; step {step} is saved, --resume continues"
        skipped = f"{self.n_skipped} steps skipped; " if self.n_skipped else ""
        gpu = f"{memory / 1e9:.1f} GB of the GPU; " if memory else ""
        program = f"python generate.py --checkpoint {self.config.log_dir}"
        print0(f"{how}: {skipped}{gpu}{program} generates text")


def print_summary(training, config, data, plan, process):
    """Prints the sizes of the model, the data and a step. Adds notes if the data set is small.

    plan: from plan_steps. The other arguments are as in main.
    """
    n_parameters = training.count_parameters()
    n_train = sum(map(len, data.train))
    print0(
        f"{n_parameters:,} parameters, {n_train:,} training tokens, {process.dtype_name} "
        f"on {hardware_name(process.device)}, {process.n_processes} processes, in {config.log_dir}"
    )
    n, B = plan[-1]  # after the ramp, if there is one
    T = config.total_batch_size // n
    n_micro = n // B // process.world_size
    schedule = f"learning rate {config.max_lr:g} after {config.warmup_steps} steps of warm-up"
    if config.schedule != "constant":
        schedule += f", then {config.schedule} to {config.min_lr:g}"
    parts = f"{n_micro} micro-batch{'es' if n_micro > 1 else ''} of {B} sequences of {T} tokens"
    print0(f"a step: {parts} on each process; {schedule}")
    n_tensors = {}  # {optimizer and decay: number of tensors}
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            name = f"{type(optimizer).__name__} with decay {group.get('weight_decay', 0):g}"
            n_tensors[name] = n_tensors.get(name, 0) + len(group["params"])
    print0("; ".join(f"{name}: {n} tensors" for name, n in n_tensors.items()))
    epochs = config.max_steps * config.total_batch_size // n_train
    if epochs > 30:
        print0(f"note: the run reads the data {epochs} times; more data would be better")
    n_val = min(map(len, data.val))  # tokens of the smallest validation split
    if n_val < 4096:
        print0(f"note: only {n_val:,} validation tokens, so the loss is inexact; use more data")


class RunLog:
    """Writes the outputs of a run on rank 0: lines in the terminal, log.txt, and run.json.

    log.txt contains a line "{step} {name} {value}" for each number. All processes must create a
    RunLog. Rank 0 first locks the run directory and prepares it, see prepare_run_directory. Then
    rank 0 writes run.json, see write_facts. Raises UserError. RunLog is a context manager, which
    unlocks the directory at its end.

    flags: {name: value} of the flags on the command line. plan: from plan_steps. step: where the
    run starts.
    """

    def __init__(self, flags, config, training, data, plan, step, process):
        self.config = config
        self.data = data
        self.process = process
        self.path = Path(config.log_dir, "log.txt")
        self.metrics = {}  # {name: last value}
        self.known = set()  # (step, name) of the numbers that log.txt already contains
        self.sinks = []
        self.unlock = None
        on_rank0(self.open, training.gpt_config, step)
        on_rank0(write_facts, step, training, config, flags, data, process)
        self.progress = Progress(config, training.flops_per_token(), process)
        if step < config.max_steps:  # otherwise, the user has resumed a finished run
            print_summary(training, config, data, plan, process)

    def open(self, gpt_config, step):
        """Opens the run directory, and the connections to TensorBoard and wandb."""
        # One of these packages may be missing, so they are imported before any file is moved.
        if self.config.tensorboard:
            require("tensorboard")  # torch.utils.tensorboard needs this package
        if self.config.wandb:
            require("wandb")
        directory = self.path.parent
        with writing(f"--log_dir {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
            remedy = "wait for it, or start the processes of one run with torchrun"
            # After an error, a notebook may start the next run, so finalize also unlocks the
            # directory.
            self.unlock = weakref.finalize(self, os.close, lock(directory, "--log_dir", remedy))
            delete_temporary_files(directory)
        check_newest(directory, self.config.resume, step)
        known = prepare_run_directory(directory, step)
        self.known = {(step, name) for name in known}
        if self.config.tensorboard:
            self.sinks.append(TensorBoard(directory, step))
        if self.config.wandb:
            self.sinks.append(WandB(directory, self.config, gpt_config))
        # TensorBoard has removed the values of this step, so they are sent again, from log.txt.
        self.publish(step, known)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.unlock:
            self.unlock()

    def write(self, step, **values):
        """Appends a line for each value that log.txt does not contain yet. Raises UserError."""
        self.metrics.update(values)
        if not self.process.is_main:
            return
        new = {}
        lines = []
        for name, value in values.items():
            if len(name.split()) != 1:
                raise ValueError(f"the name of a metric must be one word, not {name!r}")
            if (step, name) not in self.known:
                new[name] = value
                text = str(value) if isinstance(value, int) else f"{value:.8g}"
                lines.append(format_log(step, name, text))
        with (
            writing(self.path, "free some space, then continue with --resume"),
            open(self.path, "a", encoding="utf-8") as file,
        ):
            file.writelines(lines)
        self.publish(step, new)

    def publish(self, step, values):
        """Sends {name: number or HTML} to TensorBoard and wandb, if they are used."""
        for sink in self.sinks:
            sink.write(step, values)

    def write_step(self, step, n_tokens, seconds, metrics):
        """Writes the metrics of a step, and prints them every log_every steps.

        metrics: as in show_step. Raises UserError after ten consecutive steps with a
        non-finite gradient.
        """
        self.write(step, **metrics)
        self.progress.show_step(step, n_tokens, seconds, metrics)
        if self.progress.n_skipped_in_row == 10:
            raise UserError(
                "no finite gradient in 10 consecutive steps; use --resume and a lower --max_lr"
            )

    def write_validation(self, step, losses, epochs):
        """Prints and writes the losses of a validation. The arguments are as in show_validation."""
        self.progress.show_validation(step, losses, self.data.names, epochs)
        self.write(step, **losses)

    def write_samples(self, step, texts):
        """Prints samples, and sends them to TensorBoard and wandb. log.txt contains no samples."""
        for i, text in enumerate(texts):
            print0(f"--- sample {i} at step {step} ---\n{text}\n")
            self.publish(step, {f"sample {i}": f"<pre>{html.escape(text)}</pre>"})

    def write_end(self, step, is_complete):
        """Prints how the run has ended. Writes to run.json how much GPU memory the run used.

        is_complete: False if a signal or a time limit has stopped the run.
        """
        memory = 0
        has_trained = len(self.progress.seconds_per_token) > 0
        if self.process.device.type == "cuda" and self.process.is_main and has_trained:
            memory = torch.cuda.max_memory_reserved()
            path = self.path.with_name("run.json")
            write_json(path, read_json(path) | dict(gpu_memory_gb=round(memory / 1e9, 1)))
        self.progress.show_end(step, is_complete, memory)
