"""TensorBoard and Weights & Biases: they get the numbers of log.txt, and samples, too."""

import re
import weakref
from dataclasses import asdict

from plaingpt.base.errors import explaining, require
from plaingpt.base.files import writing


class TensorBoard:
    """Writes event files into the run directory.

    Removes the values that an old run has written from this step on.
    """

    def __init__(self, directory, step):
        self.directory = directory
        self.writer = require("torch.utils.tensorboard").SummaryWriter(directory, purge_step=step)

    def write(self, step, values):
        """Writes {name: number, or HTML as a text}. Raises UserError."""
        with writing(self.directory, "free some space, then continue with --resume"):
            for name, value in values.items():
                if isinstance(value, str):
                    self.writer.add_text(name, value, step)
                else:
                    self.writer.add_scalar(name, value, step)
            self.writer.flush()


class WandB:
    """Sends values to a project of Weights & Biases. A resumed run continues its run there."""

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
        """Sends {name: number, or HTML as a text}."""
        sent = {}
        for name, value in values.items():
            sent[name] = self.wandb.Html(value) if isinstance(value, str) else value
        self.wandb.log(sent, step=step)


def find_wandb_id(directory):
    """Returns the id of the newest run of W&B in a run directory, or None."""
    ids = []
    for path in directory.glob("wandb/*run-*"):
        # The id may have dashes.
        if found := re.fullmatch(r"(?:offline-)?run-(\d+_\d+)-(.+)", path.name):
            ids.append(found.groups())  # (time, id)
    return max(ids)[1] if ids else None
