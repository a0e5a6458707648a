"""Saves the state of a run as a checkpoint, and restores it."""

import math
from dataclasses import asdict
from pathlib import Path

from plaingpt.base.errors import UserError, explaining
from plaingpt.base.files import reading, replacing, writing
from plaingpt.base.terminal import print0
from plaingpt.distributed.process import check_equal, on_rank0
from plaingpt.weights.checkpoint import NOT_READABLE, find_checkpoints, load_file, map_file

import torch
from torch.utils._pytree import tree_map


class Saver:
    """Saves and restores the state of a run. All processes must call its methods."""

    def __init__(self, training, data, config, process):
        self.training = training
        self.data = data
        self.config = config
        self.process = process
        check_equal(
            data.fingerprints,
            "--data: the processes have different data; give all processes the same files",
        )
        flags = {**asdict(config), **asdict(training.gpt_config)}
        check_equal(flags, "the processes have different flags; give all processes the same flags")
        self.saved = 0  # the step of the newest checkpoint; step 0 needs no checkpoint
        self.best_val = math.inf  # the lowest validation loss of the run

    def save(self, step, position):
        """Writes model_{step}.pt, and deletes all but the newest `keep` checkpoints.

        position: number of sequences that the run has consumed. Does nothing at step 0, or if the
        run has already saved this step. Raises UserError.
        """
        if step == self.saved:
            return
        self.write(f"model_{step:06d}.pt", step, position)
        self.saved = step
        if self.config.keep and self.process.is_main:
            for old in find_checkpoints(self.config.log_dir)[: -self.config.keep]:
                old.unlink()

    def write(self, file_name, step, position, **more):
        """Writes a checkpoint. An error never leaves an incomplete file. Raises UserError.

        more: additional entries of the dict in the file.
        """
        state = self.training.state_dict()
        if not self.process.is_main:
            return
        state.update(
            step=step,
            position=position,
            tokenizer=self.data.tokenizer.source,
            model_config=asdict(self.training.gpt_config),
            train_config={**self.config.settings_of_losses(), **self.data.fingerprints},
            **more,
        )
        path = Path(self.config.log_dir, file_name)
        with writing(path, "free some space, then continue with --resume"), replacing(path) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # PyTorch raises this while it handles an OSError
                raise (error.__context__ or error) from None
        read_back(path)

    def save_best(self, val, step, position):
        """With --keep_best, saves model_best.pt if val is the lowest validation loss so far.

        At step 0, this method saves nothing. The trainer calls it before it writes val to log.txt.
        Therefore, if the disk is full, a resumed run measures val again and saves the file.
        """
        if self.config.keep_best and step and val < self.best_val:
            self.best_val = val
            self.write("model_best.pt", step, position, val=val)

    def restore(self, checkpoint):
        """Loads the optimizers and the scaler -> (step, position).

        checkpoint: from load_newest. If it is None, returns (0, 0). Prints which settings have
        changed. Raises UserError if the run used different data or a different optimizer, or if the
        checkpoint is beyond max_steps.
        """
        if checkpoint is None:
            return 0, 0
        config = self.config
        place = config.log_dir
        step = checkpoint["step"]
        before = checkpoint["train_config"] | checkpoint["model_config"]
        if step > config.max_steps:
            raise UserError(f"the run in {place} is at step {step}; give a larger --max_steps")
        for split, now in self.data.fingerprints.items():
            if before.get(split, now) != now:
                raise UserError(
                    f"the run in {place} used different data: the {split} was {before[split]} and "
                    f"is now {now}; use --init_from, not --resume"
                )
        if before["optimizer"] != config.optimizer:
            raise UserError(
                f"the run in {place} used a different --optimizer; give all flags of that run again"
            )
        self.training.load_state_dict(checkpoint)
        if config.keep_best:
            self.best_val = on_rank0(read_best_val, Path(place))
        self.saved = step
        print0(f"resumed from step {step} in {place}")
        if config.keep_best and self.best_val == math.inf:
            print0(f"note: --keep_best compares only validation losses from step {step} on")
        settings = {**config.settings_of_losses(), **asdict(self.training.gpt_config)}
        for name, now in settings.items():
            if before.get(name, now) != now:
                print0(f"note: {name} changes from {before[name]} to {now}")
        return step, checkpoint["position"]


def read_back(path):
    """Raises UserError if torch.load refuses a checkpoint that torch.save has written.

    torch.save also writes values of types that torch.load(weights_only=True) refuses, such as a
    NumPy number in the state of an optimizer. Reads no tensors, so this takes milliseconds.
    """
    what = f"{path}: the optimizers contain a value that cannot be read back"
    remedy = "store only tensors, Python's numbers and strings, and lists and dicts of them"
    with explaining(what, remedy, ValueError), open(path, "rb") as file:
        load_file(file, "meta")


def read_best_val(directory):
    """Returns the validation loss of model_best.pt in a run directory, or inf if there is no file.

    log.txt may contain a lower loss, if an earlier part of the run did not use --keep_best.
    """
    path = directory / "model_best.pt"
    if not path.is_file():
        return math.inf
    with reading(path, "move it away", NOT_READABLE):
        return map_file(path)["val"]


def names_of_groups(state):
    """Returns the names of the parameters in each group of an optimizer's state dict: lists."""
    return [group["param_names"] for group in state.get("param_groups", [])]


def check_names(saved, names):
    """Raises UserError unless the optimizers in a checkpoint have these parameters.

    PyTorch identifies the parameters by their order alone. If two layers of the same shape change
    places in model.py, each layer would get the state of the other one.

    saved: the state dict of each optimizer in the checkpoint. names: the names of the parameters in
    each group of each optimizer.
    """
    if [names_of_groups(state) for state in saved] != names:
        raise UserError(
            "--resume: the optimizers of the checkpoint contain other parameters than model.py, or "
            "the same parameters in another order; restore the model.py of that run; its directory "
            "may contain a changes.patch"
        )


def load_optimizer(optimizer, saved):
    """Restores an optimizer from a state dict. Each parameter group keeps what flags determine."""
    kept = []
    for group in optimizer.param_groups:
        kept.append({name: group[name] for name in ("peak_lr", "weight_decay") if name in group})
    optimizer.load_state_dict(saved)
    for group, values in zip(optimizer.param_groups, kept):
        group.update(values)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    # PyTorch's load_state_dict has cast each tensor to the dtype of its parameter, and it has not
    # copied the tensors, which still use the memory of the file.
    for group, old in zip(optimizer.param_groups, saved["param_groups"]):
        for p, i in zip(group["params"], old["params"]):
            if i in saved["state"]:
                values = saved["state"].pop(i)  # frees the memory of the values after their copy
                optimizer.state[p] = tree_map(restore_value, values, optimizer.state[p])


def restore_value(saved, loaded):
    """Returns a copy of a value in a state dict, on the device to which PyTorch has loaded it."""
    return saved.to(loaded.device, copy=True) if torch.is_tensor(saved) else saved
