"""The log of a run: log.txt, the terminal, TensorBoard and Weights & Biases; and run.json."""

import html
import os
import weakref
from pathlib import Path

from plaingpt.base.errors import UserError, require
from plaingpt.base.files import lock, writing
from plaingpt.base.terminal import print0
from plaingpt.distributed.process import on_rank0
from plaingpt.run.directory import prepare_run_directory
from plaingpt.run.facts import print_summary, write_facts
from plaingpt.run.progress import Progress
from plaingpt.run.sinks import TensorBoard, WandB


class RunLog:
    """Writes what a run says: its lines in the terminal, log.txt, and run.json. All on rank 0.

    log.txt has a line "{step} {name} {value}" for each number. All processes must make a RunLog.
    Rank 0 first locks the run directory and prepares it, see prepare_run_directory. Then it writes
    run.json, see write_facts. Raises UserError.

    given: {name: value} of the flags on the command line. sizes: from plan_steps. step: where the
    run starts.
    """

    def __init__(self, given, config, training, data, sizes, step, process):
        self.config = config
        self.data = data
        self.process = process
        self.path = Path(config.log_dir, "log.txt")
        self.first_step = step
        self.figures = {}  # {name: last value}
        self.known = set()  # (step, name) of the numbers that log.txt already has
        self.sinks = []
        on_rank0(self.open, training.whole_gpt.config, step)
        on_rank0(write_facts, step, training.whole_gpt, config, given, data, process)
        self.progress = Progress(config, training.whole_gpt.flops_per_token(), process)
        if step < config.max_steps:  # otherwise, a finished run was resumed
            print_summary(training, config, data, sizes, process)

    def open(self, gpt_config, step):
        """Opens the run directory, and the connections to TensorBoard and wandb."""
        # Imports these packages before anything is moved, because one of them may be missing.
        if self.config.tensorboard:
            require("tensorboard")  # torch.utils.tensorboard needs it
        if self.config.wandb:
            require("wandb")
        directory = self.path.parent
        with writing(f"--log_dir {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
            # The lock ends with this object, because a notebook may start the next run.
            weakref.finalize(self, os.close, lock(directory, "--log_dir"))
        known = prepare_run_directory(directory, step)
        self.known = {(step, name) for name in known}
        if self.config.tensorboard:
            self.sinks.append(TensorBoard(directory, step))
        if self.config.wandb:
            self.sinks.append(WandB(directory, self.config, gpt_config))
        # TensorBoard has removed the values of this step, so it gets those that log.txt keeps.
        self.publish(step, known)

    def write(self, step, **values):
        """Appends a line for each value that log.txt does not have yet. Raises UserError."""
        self.figures.update(values)
        if self.process.rank > 0:
            return
        new = {}
        lines = []
        for name, value in values.items():
            if len(name.split()) != 1:
                raise ValueError(f"the name of a figure must be one word, and not {name!r}")
            if (step, name) not in self.known:
                new[name] = value
                text = str(value) if isinstance(value, int) else f"{value:.8g}"
                lines.append(f"{step} {name} {text}\n")
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

    def write_step(self, step, n_tokens, seconds, figures):
        """Writes the figures of a step, and prints them every log_every steps.

        figures: {name: number}, with train (the loss), norm and lr. Raises UserError after ten
        steps in a row without a finite gradient.
        """
        if step == self.first_step and (taken := figures.keys() & self.figures.keys()):
            raise ValueError(
                f"GPT.forward returns {taken}, but the log has other figures of this name"
            )
        self.write(step, **figures)
        self.progress.show_step(step, n_tokens, seconds, figures)
        if self.progress.n_skipped_in_row == 10:
            raise UserError("no finite gradient in 10 steps; use --resume and a lower --max_lr")

    def write_validation(self, step, losses, epochs):
        """Prints and writes the losses of a validation. The arguments are as in show_validation."""
        self.progress.show_validation(step, losses, self.data.names, epochs)
        self.write(step, **losses)

    def write_samples(self, step, texts):
        """Prints samples, and sends them to TensorBoard and wandb. log.txt does not have them."""
        for i, text in enumerate(texts):
            print0(f"--- sample {i} at step {step} ---\n{text}\n")
            self.publish(step, {f"sample {i}": f"<pre>{html.escape(text)}</pre>"})
