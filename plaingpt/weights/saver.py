"""Saves the state of a run as a checkpoint, and restores it."""

import math
import re
from dataclasses import asdict
from pathlib import Path

from plaingpt.base.errors import UserError
from plaingpt.base.files import read_streams, reading, replacing, writing
from plaingpt.base.terminal import print0
from plaingpt.distributed.parts import gather
from plaingpt.distributed.pipeline import own_gpt
from plaingpt.distributed.process import check_equal, on_rank0
from plaingpt.weights.checkpoint import find_checkpoints, hash_of_model, map_file
from plaingpt.weights.optimizer_state import OptimizerState

import torch


class Saver:
    """Saves and restores the state of a run. All processes must call its methods."""

    def __init__(self, training, data, config, process):
        self.model = training.raw_model
        self.whole_gpt = training.whole_gpt
        self.scaler = training.scaler
        self.data = data
        self.config = config
        self.process = process
        check_equal(data.fingerprints, "--data: the processes have different data; copy the files")
        flags = {**asdict(config), **asdict(self.model.config)}
        check_equal(flags, "the processes have different flags; give all the same")
        self.optimizers = []  # their OptimizerState
        for optimizer in training.optimizers:
            self.optimizers.append(OptimizerState(optimizer, own_gpt(self.model)))
        # model.py may be edited later, so hash it now.
        self.model_code = hash_of_model(type(self.whole_gpt))
        self.best_val = math.inf  # the lowest validation loss of the run
        self.keys = None  # the keys of the state after the last step, until is_checked
        self.is_checked = False

    def save(self, step, position, name=None, **more):
        """Writes model_{step}.pt, or `name`, and deletes all but the newest `keep` checkpoints.

        position: number of sequences that the run has consumed. more: other values for the file.
        The file is either complete or absent. Raises UserError.
        """
        model, process = self.model, self.process
        gathered = gather(model, tensors_to_save(model), process)
        # Stages of a pipeline may have other optimizers, so all values are gathered together.
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
        # A tied matrix has two names. `gathered` has only the first one, the checkpoint has both.
        first_name = {}  # {parameter or buffer: its first name}
        weights = {}
        for key, tensor in self.whole_gpt.state_dict(keep_vars=True).items():
            weights[key] = gathered[first_name.setdefault(tensor, key)]
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
        path = Path(self.config.log_dir, name or f"model_{step:06d}.pt")
        with writing(path, "free some space, then continue with --resume"), replacing(path) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # PyTorch raises it while it handles an OSError
                raise (error.__context__ or error) from None
        if self.config.keep:
            for old in find_checkpoints(path.parent)[: -self.config.keep]:
                old.unlink()

    def check(self):
        """Raises UserError if the optimizers have a state that no checkpoint can hold.

        This is called after each step, and does nothing after two steps with the same values.
        """
        if self.is_checked:
            return
        keys = set()
        for optimizer in self.optimizers:
            keys.update(optimizer.values())
        # Without a finite gradient, the first steps are skipped, and there is no state yet.
        self.is_checked = len(keys) > 0 and keys == self.keys
        self.keys = keys

    def save_best(self, val, step, position):
        """With --keep_best, saves model_best.pt if val is the lowest loss after step 0.

        This comes before val is in log.txt. So if the disk is full, a resume measures it again, and
        saves the file.
        """
        if self.config.keep_best and step and val < self.best_val:
            self.best_val = val
            self.save(step, position, "model_best.pt", val=val)

    def restore(self, checkpoint):
        """Loads the optimizers and the scaler -> (step, position); (0, 0) without a checkpoint.

        checkpoint: from load_newest.
        Prints which settings have changed. Raises UserError if the checkpoint is from other data or
        another optimizer, or is beyond the last step.
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
                    f"{place} had other data: the {split} was {before[split]} and is {now}; "
                    "use --init_from, not --resume"
                )
        self.restore_optimizers(checkpoint["optimizer"])
        if checkpoint["scaler"]:  # it is {} unless the dtype was float16
            self.scaler.load_state_dict(checkpoint["scaler"])
        if config.keep_best:
            self.best_val = on_rank0(read_best_val, Path(place))
        print0(f"resumed from step {step} in {place}")
        if config.keep_best and self.best_val == math.inf:
            print0(f"note: --keep_best saves the best of the steps from {step} on")
        settings = {**config.settings_of_losses(), **asdict(self.model.config)}
        for name, now in settings.items():
            if before.get(name, now) != now:
                print0(f"note: {name} changes from {before[name]} to {now}")
        return step, checkpoint["position"]

    def restore_optimizers(self, saved):
        """Gives the optimizers their state from a checkpoint. Raises UserError.

        saved: {"adamw": {key: value}}. A process takes what belongs to its parameters. Which one of
        two AdamW had a parameter does not matter.
        """
        values = {}  # {name of a parameter: {name of a value: value}}
        kinds = {}  # {name of a parameter: class of the optimizer that had it}
        for name, own in saved.items():
            for key, value in own.items():
                parameter, _, value_name = key.rpartition(".")
                values.setdefault(parameter, {})[value_name] = value
                # Version 1.0 has written "adamw_2" for a second AdamW.
                kinds[parameter] = re.sub(r"_\d+$", "", name)
        for optimizer in self.optimizers:
            for name in optimizer.parameter_names():
                if kinds.get(name, optimizer.kind) != optimizer.kind:
                    raise UserError(
                        f"the run in {self.config.log_dir} has another --optimizer; "
                        "give all its flags again"
                    )
            optimizer.restore(values)


def tensors_to_save(model):
    """Returns the parameters and the persistent buffers of this process: {name: tensor}."""
    part = own_gpt(model)
    tensors = dict(part.named_parameters())
    persistent = part.state_dict().keys()
    for name, buffer in part.named_buffers():
        if name in persistent:
            tensors[name] = buffer
    return tensors


def read_best_val(directory):
    """Returns the validation loss of model_best.pt in a run directory, or inf without this file.

    The lowest loss in log.txt may be another one, because --keep_best may have been given late.
    """
    path = directory / "model_best.pt"
    if not path.is_file():
        return math.inf
    with reading(path, "move it away", "not a readable checkpoint"):
        best = map_file(path)
        if "val" in best:
            return best["val"]
        # Version 1.0 has written the loss into log.txt only.
        return read_streams(directory / "log.txt").get("val", {}).get(best["step"], math.inf)
