"""The outputs of a run: log.txt, run.json, changes.patch, and the lines in the terminal.

log.txt contains a line "{step} {name} {value}" for each number.
"""

import contextlib
import html
import math
import os
import statistics
import time
import weakref
from collections import deque
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from plaingpt.checkpoint import find_checkpoints, step_of
from plaingpt.device import hardware_name, peak_flops
from plaingpt.errors import UserError, require
from plaingpt.files import (
    delete_temporary_files,
    format_log,
    lock,
    read_json,
    read_log,
    replacing,
    write_json,
    writing,
)
from plaingpt.process import on_rank0
from plaingpt.source_code import hash_of_program, read_git
from plaingpt.terminal import print0, shorten_line, show_progress

import torch

RUN_FILES = (
    "log.txt",
    "run.json",
    "changes.patch",
    "model_*.pt",
    "look*.html",
    "events.out.tfevents.*",
    "wandb",
)


class RunLog:
    """Writes the outputs of a run. Only rank 0 writes files and prints.

    All processes must create a RunLog. Rank 0 then locks the run directory, moves an old run aside,
    and opens log.txt. At the end of a `with` block, a RunLog closes log.txt and unlocks the
    directory.

    flags: {name: value} of the flags on the command line. training: a Training. data: a Data. step:
    the step at which the run starts. The attribute `metrics` is {name: last value}.
    """

    def __init__(self, flags, training, data, step):
        self.config = training.config
        self.process = training.process
        self.flops_per_token = training.flops_per_token()
        self.peak_flops = peak_flops(self.process)
        self.metrics = {}
        self.known = set()  # (step, name) of the numbers that log.txt contains for the first step
        self.last_steps = {}  # {name: step of its last value in this run}
        self.file = None  # log.txt, on rank 0
        self.trackers = []  # TensorBoard and Weights & Biases, on rank 0
        self.stack = contextlib.ExitStack()  # closes the files and unlocks the directory
        # If an error occurs before the `with` block, the next line closes the files and unlocks the
        # directory, so that a notebook can start the next run.
        weakref.finalize(self, self.stack.close)
        self.seconds_per_token = deque(maxlen=10)  # of the last ten steps
        self.n_skipped = 0  # steps with a non-finite gradient
        self.n_skipped_in_row = 0
        self.n_rises = 0  # how many times in a row the validation loss has risen
        on_rank0(self.open, training.gpt_config, step)
        if step < self.config.max_steps:  # a finished run that is resumed keeps its run.json
            on_rank0(write_facts, training, flags, data)

    def open(self, gpt_config, step):
        """Prepares the run directory, and opens log.txt, TensorBoard and Weights & Biases."""
        config = self.config
        for package in ("tensorboard", "wandb"):
            if getattr(config, package):
                require(package)  # fails before any file is moved
        directory = Path(config.log_dir)
        with writing(f"--log_dir {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
            remedy = "wait until it ends, or start the processes of one run with torchrun"
            self.stack.callback(os.close, lock(directory, "--log_dir", remedy))
            delete_temporary_files(directory)
        check_newest(directory, config.resume, step)
        known = prepare_run_directory(directory, step)
        self.known = {(step, name) for name in known}
        # Without a buffer, closing the file writes nothing, so close() cannot fail on a full disk.
        self.file = self.stack.enter_context(open(directory / "log.txt", "ab", buffering=0))
        if config.tensorboard or config.wandb:
            from plaingpt.trackers import TensorBoard, WandB  # imported only if needed

            if config.tensorboard:
                self.trackers.append(TensorBoard(directory, step))
            if config.wandb:
                self.trackers.append(WandB(directory, config, gpt_config))
            for tracker in self.trackers:
                self.stack.callback(tracker.close)
            # On a resume, TensorBoard hides everything that the run logged at `step` and later,
            # so send the values in `known` again.
            self.publish(step, known)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()

    def write(self, step, **values):
        """Appends a line for each value that log.txt does not contain yet.

        Raises ValueError if two values of a step have the same name.
        """
        for name in values:
            if self.last_steps.get(name) == step:
                raise ValueError(f"step {step} has two metrics named {name!r}; rename one of them")
            self.last_steps[name] = step
        self.metrics.update(values)
        if not self.file:
            return
        new = {}
        lines = ""
        for name, value in values.items():
            if len(name.split()) != 1:
                raise ValueError(f"the name of a metric must be one word, not {name!r}")
            if (step, name) not in self.known:
                new[name] = value
                text = str(value) if isinstance(value, int) else f"{value:.8g}"
                lines += format_log(step, name, text)
        data = lines.encode()
        with writing(self.file.name, "free some space, then continue with --resume"):
            while data:
                data = data[self.file.write(data) :]  # on a full disk, write may write only a part
        self.publish(step, new)

    def publish(self, step, values):
        """Sends values to TensorBoard and W&B, if they are on. values: {name: number or HTML}."""
        for tracker in self.trackers:
            tracker.write(step, values)

    def write_step(self, step, n_tokens, seconds, metrics):
        """Writes the metrics of a step, and prints them every log_every steps.

        metrics: {name: number}, including train (the loss), norm (the gradient norm), lr (the
        learning rate) and tok_s (the tokens per second). Raises UserError after ten consecutive
        steps with a non-finite gradient.
        """
        self.write(step, **metrics)
        is_skipped = not math.isfinite(metrics["norm"])
        self.n_skipped += is_skipped
        self.n_skipped_in_row = self.n_skipped_in_row + 1 if is_skipped else 0
        self.seconds_per_token.append(seconds / n_tokens)
        max_steps = self.config.max_steps
        to_go = timedelta(seconds=round(self.seconds_to_go(step, n_tokens)))
        progress = f"loss {metrics['train']:.4f} | {to_go} to go"
        if step % self.config.log_every == 0 or step == max_steps - 1 or is_skipped:
            flops = metrics["tok_s"] * self.flops_per_token
            parts = [f"step {step:5d}/{max_steps}", progress]
            if is_skipped:
                parts.append(f"{self.n_skipped} skipped")
            parts.append(f"norm {metrics['norm']:.3f}")
            parts.append(f"{metrics['tok_s']:,.0f} tok/s")
            parts.append(f"lr {metrics['lr']:.2e}")
            parts.append(f"{seconds * 1000:.0f} ms")
            parts.append(f"{flops / 1e12:.2f} TFLOP/s")
            if self.peak_flops:
                parts.append(f"mfu {flops / self.peak_flops:.1%}")
            if self.process.device.type == "cuda":
                parts.append(f"{torch.cuda.max_memory_reserved() / 1e9:.1f} GB")
            print0(shorten_line(" | ".join(parts)))
        show_progress(step + 1, max_steps, progress)
        if self.n_skipped_in_row == 10:
            raise UserError(
                "no finite gradient in 10 consecutive steps; use --resume and a lower --max_lr"
            )

    def seconds_to_go(self, step, n_tokens):
        """Estimates the time of all steps after `step`, in seconds. n_tokens: tokens in `step`."""
        total = self.config.total_batch_size
        steps_left = self.config.max_steps - step - 1
        # In the batch-size ramp-up, the number of tokens per step grows linearly to `total`.
        ramp_left = min(steps_left, max(0, self.config.rampup_steps - step - 1))
        tokens_left = total * steps_left - ramp_left * (total - n_tokens) / 2
        return statistics.median(self.seconds_per_token) * tokens_left

    def write_validation(self, step, metrics):
        """Writes and prints the metrics of a validation. metrics: the result of `validate`."""
        val = metrics["val"]
        self.n_rises = self.n_rises + 1 if val > self.metrics.get("val", math.inf) else 0
        self.write(step, **metrics)
        parts = [f"step {step}", f"val loss {val:.4f}", f"{metrics['bpb']:.4f} bits per byte"]
        for name, value in metrics.items():
            if name not in ("val", "bpb"):  # such as val_code, the loss on one data set of several
                parts.append(f"{name} {value:.4f}")
        print0(" | ".join(parts))
        if self.n_rises == 3:
            advice = "start again with --keep_best, which saves the best checkpoint"
            if self.config.keep_best:
                advice = f"{self.config.log_dir}/model_best.pt is the best checkpoint"
            print0(f"note: the validation loss has risen three times in a row; {advice}")

    def write_evals(self, step, metrics):
        """Writes and prints the metrics of benchmarks: {name: number}."""
        self.write(step, **metrics)
        texts = [f"{name} {value:.4f}" for name, value in metrics.items()]
        print0(" | ".join([f"step {step}", *texts]))

    def write_samples(self, step, texts):
        """Prints samples, and sends them to TensorBoard and W&B. log.txt contains no samples."""
        for i, text in enumerate(texts):
            print0(f"--- sample {i} at step {step} ---\n{text}\n")
            self.publish(step, {f"sample {i}": f"<pre>{html.escape(text)}</pre>"})

    def write_end(self, step, is_complete):
        """Prints how the run has ended. On a GPU, writes the memory that the run used to run.json.

        is_complete: False if a signal or --max_minutes has stopped the run.
        """
        if self.file and self.seconds_per_token and self.process.device.type == "cuda":
            path = Path(self.config.log_dir, "run.json")
            gpu_memory = round(torch.cuda.max_memory_reserved() / 1e9, 1)
            write_json(path, read_json(path) | dict(gpu_memory_gb=gpu_memory))
        if step == 0:
            print0("stopped by a signal before the first step")
            return
        how = "done"
        if not is_complete:
            how = f"stopped by a signal or --max_minutes; --resume continues from step {step}"
        skipped = f"{self.n_skipped} steps skipped; " if self.n_skipped else ""
        program = f"python generate.py --checkpoint {self.config.log_dir}"
        print0(f"{how}: {skipped}{program} generates text")


def check_newest(directory, resume, step):
    """Raises UserError if this process has not read the newest checkpoint.

    Another process may have saved a newer checkpoint in the meantime. resume: whether the run
    continues an earlier run. step: the step of the checkpoint that this process has read, or 0.
    """
    paths = find_checkpoints(directory)
    newest = step_of(paths[-1]) if paths else 0
    if resume and newest != step:
        raise UserError(
            f"{directory}: another process changed the checkpoints after this process had read "
            "the newest checkpoint; start this process again"
        )


def prepare_run_directory(directory, step):
    """Prepares a directory for a run that starts at `step`.

    At step 0, moves an old run into a subdirectory, and returns {}. For a resumed run, removes from
    log.txt all lines that the run will write again, but keeps the validation losses and the
    benchmark scores at `step`. Returns these losses and scores: {name: value}.
    """
    path = directory / "log.txt"
    lines = read_log(path) if step > 0 else []
    known = {}
    with writing(f"--log_dir {directory}"):
        with replacing(path) as file:
            for line_step, name, value in lines:
                # A training step writes "train" after the evaluations with the same step number,
                # and before its other metrics.
                if line_step > step or (line_step == step and name == "train"):
                    break
                if line_step == step:
                    known[name] = float(value)
                file.write(format_log(line_step, name, value).encode())
            # Moves files last, so in a read-only directory, creating log.txt fails before any move.
            if step == 0:
                move_aside(directory)
    return known


def move_aside(directory):
    """Moves the files of an old run into directory/old-1, or old-2 if old-1 exists, and so on.

    The directory may be a separate volume, so the files stay inside it. If a move fails, moves all
    files back, and raises OSError.
    """
    old = []
    for name in RUN_FILES:
        old += directory.glob(name)
    if not old:
        return
    i = 1
    while (directory / f"old-{i}").exists():
        i += 1
    aside = directory / f"old-{i}"
    aside.mkdir()
    moved = []
    try:
        for path in old:
            os.rename(path, aside / path.name)
            moved.append(path)
    except OSError:
        for path in moved:
            os.rename(aside / path.name, path)
        aside.rmdir()
        raise
    print0(f"the old run in {directory} was moved to {aside}")


def write_facts(training, flags, data):
    """Writes run.json and changes.patch, so that a user can repeat the run.

    changes.patch contains the uncommitted changes of tracked files. If there are no changes, there
    is no changes.patch. run.json lists the names of untracked files. The arguments are as in
    RunLog.
    """
    config, process = training.config, training.process
    commit, untracked, changes = read_git()
    facts = dict(
        model_config=asdict(training.gpt_config),
        train_config=asdict(config),
        flags=flags,
        parameters=training.count_parameters(),
        tokenizer=data.tokenizer.name,
        fingerprints=data.fingerprints,
        train_tokens=sum(map(len, data.train)),
        dtype=process.dtype_name,
        device=hardware_name(process.device),
        processes=process.n_processes,
        threads=torch.get_num_threads(),
        program=hash_of_program(),
        git_commit=commit or None,
        untracked_files=untracked,
        started=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        versions=dict(torch=torch.__version__),
    )
    directory = Path(config.log_dir)
    write_json(directory / "run.json", facts)
    patch = directory / "changes.patch"
    with writing(directory):
        if changes:
            patch.write_bytes(changes)
        elif commit:  # removes an older patch, because the code has no changes now
            patch.unlink(missing_ok=True)


def print_summary(training, data, size):
    """Prints the sizes of the model, the data and a step. Adds notes if the data set is small.

    size: (n, B) of a step, see step_size in train_gpt2.py. The other arguments are as in RunLog.
    """
    config, process = training.config, training.process
    n, B = size
    n_train = sum(map(len, data.train))
    print0(
        f"{training.count_parameters():,} parameters, {n_train:,} training tokens, "
        f"{process.dtype_name} on {hardware_name(process.device)}, {process.n_processes} "
        f"processes, in {config.log_dir}"
    )
    T = training.gpt_config.block_size
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
    n_read = config.max_steps * config.total_batch_size  # tokens, if there is no batch-size ramp-up
    parts = zip(data.shares, data.train)
    epochs = max(int(n_read * share / len(tokens)) for share, tokens in parts)
    if epochs > 30:
        which = "the data" if len(data.train) == 1 else "one of the data sets"
        print0(f"note: the run reads {which} {epochs} times; more data would be better")
    n_val = min(map(len, data.val))  # tokens of the smallest validation split
    if n_val < 4096:
        print0(f"note: only {n_val:,} validation tokens, so the loss is inexact; use more data")
