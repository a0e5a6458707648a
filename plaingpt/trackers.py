"""Sends the metrics and samples of a run to TensorBoard and to Weights & Biases."""

import re
from dataclasses import asdict

from plaingpt.errors import explaining, require
from plaingpt.files import writing


class TensorBoard:
    """Writes TensorBoard's event files into the run directory.

    step: the step at which the run starts. On a resume, TensorBoard hides everything that an
    earlier part of the run has logged at this step and later.
    """

    def __init__(self, directory, step):
        self.directory = directory
        self.writer = require("torch.utils.tensorboard").SummaryWriter(directory, purge_step=step)

    def write(self, step, values):
        """Writes the values of a step. values: {name: number, or a string with HTML}."""
        with writing(self.directory, "free some space, then continue with --resume"):
            for name, value in values.items():
                if isinstance(value, str):
                    self.writer.add_text(name, value, step)
                else:
                    self.writer.add_scalar(name, value, step)
            self.writer.flush()

    def close(self):
        with writing(self.directory, "free some space, then continue with --resume"):
            self.writer.close()


class WandB:
    """Sends values to a project of Weights & Biases. A resumed run continues the same W&B run."""

    def __init__(self, directory, config, gpt_config):
        self.wandb = require("wandb")
        with explaining("--wandb", "first run wandb login", self.wandb.Error):
            self.run = self.wandb.init(
                project=config.wandb,
                id=find_wandb_id(directory),
                resume="allow",
                name=directory.name,
                dir=directory,
                config={**asdict(config), **asdict(gpt_config)},
                settings=self.wandb.Settings(console="off"),
            )

    def write(self, step, values):
        """Sends the values of a step. values: {name: number, or a string with HTML}."""
        sent = {}
        for name, value in values.items():
            sent[name] = self.wandb.Html(value) if isinstance(value, str) else value
        self.wandb.log(sent, step=step)

    def close(self):
        self.run.finish()


def find_wandb_id(directory):
    """Returns the id of the newest W&B run in a run directory, or None."""
    ids = []
    for path in directory.glob("wandb/*run-*"):
        # The id of a W&B run may contain dashes.
        if found := re.fullmatch(r"(?:offline-)?run-(\d+_\d+)-(.+)", path.name):
            ids.append(found.groups())  # (time, id)
    return max(ids)[1] if ids else None
