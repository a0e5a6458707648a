"""Saves the state of a run as a checkpoint, and restores it."""

import math
import re
from dataclasses import asdict
from pathlib import Path

from plaingpt.base.errors import UserError
from plaingpt.base.files import read_streams, reading, replacing, writing
from plaingpt.base.terminal import print0
from plaingpt.distributed.parts import gather, whole_gpt
from plaingpt.distributed.pipeline import own_gpt
from plaingpt.distributed.process import check_equal, on_rank0
from plaingpt.weights.checkpoint import find_checkpoints, hash_of_model, map_file
from plaingpt.weights.optimizer_state import OptimizerState

import torch


class Saver:
    """Saves and restores the state of a run. All processes must call its methods."""

    def __init__(self, training, data, config, process):
        self.model = training.raw_model
        self.scaler = training.scaler
        self.data = data
        self.config = config
        self.process = process
        check_equal(
            data.fingerprints,
            "--data: the processes have different data; give all processes the same files",
        )
        flags = {**asdict(config), **asdict(self.model.config)}
        check_equal(flags, "the processes have different flags; give all processes the same flags")
        self.optimizers = []  # an OptimizerState for each optimizer
        for optimizer in training.optimizers:
            self.optimizers.append(OptimizerState(optimizer, own_gpt(self.model)))
        # A user may edit model.py during the run, so its hash is computed now.
        self.model_code = hash_of_model(own_gpt(self.model))
        # A tied matrix has two names. Training uses the first name; a checkpoint contains both.
        first_names = {}  # {parameter or buffer: its first name}
        self.saved_names = {}  # {name in a checkpoint: first name}
        for name, tensor in whole_gpt(self.model).state_dict(keep_vars=True).items():
            self.saved_names[name] = first_names.setdefault(tensor, name)
        self.saved = 0  # the step of the newest checkpoint; step 0 needs no checkpoint
        self.best_val = math.inf  # the lowest validation loss of the run
        self.keys = None  # keys of the optimizer states after the previous step; see check
        self.is_checked = False

    def save(self, step, position):
        """Writes model_{step}.pt, and deletes all but the newest `keep` checkpoints.

        position: number of sequences that the run has consumed. Does nothing at step 0, or if the
        run has already saved this step. Raises UserError.
        """
        if step == self.saved:
            return
        self.write(f"model_{step:06d}.pt", step, position)
        self.saved = step
        if self.config.keep and self.process.rank == 0:
            for old in find_checkpoints(self.config.log_dir)[: -self.config.keep]:
                old.unlink()

    def write(self, file_name, step, position, **more):
        """Writes a checkpoint. An error never leaves an incomplete file. Raises UserError.

        more: additional entries of the dict in the file.
        """
        model, process = self.model, self.process
        # After an evaluation, FSDP keeps some parameters whole. state_dict() shards them again, and
        # returns the shards. The dict contains a tied matrix under two names, so this method
        # gathers the matrix only under its first name.
        own = own_gpt(model).state_dict()
        firsts = {name: own[name] for name in own if self.saved_names[name] == name}
        gathered = gather(model, firsts, process)
        # Pipeline stages may have different optimizers, so one call of gather returns the values of
        # all optimizers.
        values = {}
        for optimizer in self.optimizers:
            for key, value in optimizer.values().items():
                values[f"{optimizer.kind}/{key}"] = value
        values = gather(model, values, process)
        if process.rank > 0:
            return
        optimizers = {}  # {"adamw": {"transformer.wte.weight.exp_avg": tensor}}
        for key, value in values.items():
            kind, _, own_key = key.partition("/")
            optimizers.setdefault(kind, {})[own_key] = value
        weights = {name: gathered[first] for name, first in self.saved_names.items()}
        state = dict(
            model=weights,
            optimizer=optimizers,
            scaler=self.scaler.state_dict(),
            step=step,
            position=position,
            tokenizer=self.data.tokenizer.source,
            model_code=self.model_code,
            model_config=asdict(model.config),
            train_config={**self.config.settings_of_losses(), **self.data.fingerprints},
            **more,
        )
        path = Path(self.config.log_dir, file_name)
        with writing(path, "free some space, then continue with --resume"), replacing(path) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # PyTorch raises this while it handles an OSError
                raise (error.__context__ or error) from None

    def check(self):
        """Raises UserError if the optimizers have a state that no checkpoint can hold.

        The trainer calls this method after each step. After two consecutive steps with the same
        keys, later calls do nothing.
        """
        if self.is_checked:
            return
        keys = set()
        for optimizer in self.optimizers:
            keys.update(optimizer.values())
        # Steps with a non-finite gradient are skipped, so the first steps may create no state.
        self.is_checked = len(keys) > 0 and keys == self.keys
        self.keys = keys

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
        self.restore_optimizers(checkpoint["optimizer"])
        if checkpoint["scaler"]:  # {} unless the dtype was float16
            self.scaler.load_state_dict(checkpoint["scaler"])
        if config.keep_best:
            self.best_val = on_rank0(read_best_val, Path(place))
        self.saved = step
        print0(f"resumed from step {step} in {place}")
        if config.keep_best and self.best_val == math.inf:
            print0(f"note: --keep_best compares only validation losses from step {step} on")
        settings = {**config.settings_of_losses(), **asdict(self.model.config)}
        for name, now in settings.items():
            if before.get(name, now) != now:
                print0(f"note: {name} changes from {before[name]} to {now}")
        return step, checkpoint["position"]

    def restore_optimizers(self, saved):
        """Restores the state of the optimizers from a checkpoint.

        saved: {"adamw": {key: value}}. Each process restores the values of its own parameters. A
        parameter may move from one AdamW optimizer to a second AdamW optimizer.
        """
        values = {}  # {name of a parameter: {name of a value: value}}
        kinds = {}  # {name of a parameter: class of its optimizer}
        for name, own in saved.items():
            for key, value in own.items():
                parameter, _, value_name = key.rpartition(".")
                values.setdefault(parameter, {})[value_name] = value
                # Version 1.0 wrote "adamw_2" for a second AdamW.
                kinds[parameter] = re.sub(r"_\d+$", "", name)
        for optimizer in self.optimizers:
            for name in optimizer.parameter_names():
                if kinds.get(name, optimizer.kind) != optimizer.kind:
                    raise UserError(
                        f"the run in {self.config.log_dir} used a different --optimizer; "
                        "give all flags of that run again"
                    )
            optimizer.restore(values)


def read_best_val(directory):
    """Returns the validation loss of model_best.pt in a run directory, or inf if there is no file.

    log.txt may contain a lower loss, if an earlier part of the run did not use --keep_best.
    """
    path = directory / "model_best.pt"
    if not path.is_file():
        return math.inf
    with reading(path, "move it away", "not a readable checkpoint"):
        best = map_file(path)
        if "val" in best:
            return best["val"]
        # Version 1.0 wrote this loss only to log.txt.
        return read_streams(directory / "log.txt").get("val", {}).get(best["step"], math.inf)
