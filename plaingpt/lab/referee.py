"""Calls the referee: it splits the data before the first run, and measures models after it.

The program experiments/referee.py does the work, in a process of its own, with the code of the
base. Its losses are the only figures of a verdict.
"""

import itertools
import json
import math
import shutil
import subprocess
import sys

from plaingpt.base.errors import UserError
from plaingpt.base.files import read_json, write_json
from plaingpt.lab.runs import LAB, ROOT, TrainingRun, is_known, probe_directory, train

LATER_TOLERANCE = 1e-4  # relative; rounding to float32 makes a smaller difference


def call_referee(task, given):
    """Runs the referee in the copy of the base -> its result. Raises UserError if it fails."""
    # Python imports from the directory of a program, so each program goes into its copy.
    program = shutil.copy(ROOT / "experiments" / "referee.py", LAB / "base")
    command = [sys.executable, program, task]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
    if done.returncode:
        *_, said = done.stderr.splitlines() or ["killed"]
        if said.startswith("error: "):
            raise UserError(said.removeprefix("error: "))
        what = "split the data" if task == "split" else "measure a model"
        raise UserError(f"the referee cannot {what} ({said}); correct the change")
    return json.loads(done.stdout.splitlines()[-1])


def split_data(programs):
    """Splits the data of both programs -> (the programs, with the training part; sealed sets).

    programs: [base, change], not probed yet. Raises UserError.
    """
    base, change = programs
    given = dict(flags=base.flags, more=change.flags, place=str(LAB))
    parts = call_referee("split", given)
    found = []
    for program in programs:
        # If --data is given twice, the last one counts.
        found.append(program.with_flags(["--data", *parts["data"][program.name]]))
    return found, parts["sealed"]


def read_score(program, run):
    """Returns what the referee has measured of a run: {"loss", "later"}, or {}."""
    return read_json(program.directory(run) / "referee.json")


def measure_runs(programs, runs, sealed):
    """Lets the referee measure all runs of both programs that it has not measured yet.

    programs: [base, change]. runs: names of those of the base, and of the change. A run without its
    last model is left out. Deletes all models but that of the first run, which look.py can compare.
    Raises UserError.
    """
    for program, own in zip(programs, runs):
        model = f"model_{program.facts['max_steps']:06d}.pt"
        new = []
        for run in own:
            if (program.directory(run) / model).exists() and not is_known(program, run):
                new.append(run)
        if not new:
            continue
        logits = shutil.copy(ROOT / "experiments" / "give_logits.py", LAB / program.name)
        given = dict(
            base_run=str(probe_directory("base")),
            facts=programs[0].facts,
            sealed=sealed,
            program=logits,
            runs=[str(program.directory(run)) for run in new],
        )
        for run, score in zip(new, call_referee("measure", given)):
            write_json(program.directory(run) / "referee.json", score)
        for run in own[1:]:
            delete_models(program, run)


def delete_models(program, run):
    """Deletes the checkpoints of a run."""
    for path in program.directory(run).glob("model_*.pt"):
        path.unlink()


def read_losses(program, runs):
    """Returns the losses of a program's runs, as the referee has measured them.

    A loss that is not finite is None, because JSON has no such number.
    """
    losses = []
    for run in runs:
        loss = read_score(program, run).get("loss", math.nan)
        losses.append(loss if math.isfinite(loss) else None)
    return losses


def check_losses(losses):
    """Raises UserError if a loss is missing. losses: from read_losses."""
    if None in losses:
        raise UserError("the loss of a run is not finite; give a lower --max_lr")


def try_runs(pairs, sealed):
    """Trains and measures a run of each program with the seed 0 -> [their losses] of each pair.

    pairs: of [base, change] with other rates, probed. A large rate may diverge: its loss is inf.
    """
    new = {}
    for program in itertools.chain(*pairs):
        if not is_known(program, 0):
            place = program.directory(0)
            new[place] = TrainingRun(program, place, ["--seed", "0"])
    train([*new.values()], "trying the rates", may_fail=True)
    losses = []
    for pair in pairs:
        measure_runs(pair, ([0], [0]), sealed)
        for program in pair:
            delete_models(program, 0)
        own = [read_score(program, 0).get("loss", math.inf) for program in pair]
        losses.append([min(math.inf, loss) for loss in own])  # NaN is not below inf
    return losses


def find_leak(programs, runs):
    """Returns a sentence if a position sees later tokens in one of the runs, or None."""
    for program, own in zip(programs, runs):
        for run in own:
            later = read_score(program, run)["later"]
            if not later <= LATER_TOLERANCE:  # a comparison with NaN is false
                return (
                    f"in the {program.name}, a position sees later tokens: other ones change its "
                    f"logits by {later:.2%} of the largest logit"
                )
    return None
