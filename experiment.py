"""Does a change help? Trains models with and without the change, and compares
their losses.

  python experiment.py                            tests your changes since the
                                                  last commit
  python experiment.py experiments/rotary.patch   tests a patch
  python experiment.py -- --optimizer adamw       tests your changes, and the
                                                  flags after --
  python experiment.py --base HEAD~3              tests all changes since HEAD~3
  python experiment.py --rates 2e-3 4e-3 8e-3     compares both programs, each
                                                  at its best learning rate
  python experiment.py --confirm                  repeats the experiment with
                                                  new random seeds
  python experiment.py --sizes 64 96 128 160 --flags "--data my.txt"
                                                  tests at several model sizes
  python experiment.py --list                     lists the experiments so far

The flags after -- replace flags in --flags. Only the values of a list, such as
--data, are added to the values in --flags.

The program without the change is the baseline. The runs of a program differ
only in their random seeds: 1 to --base_seeds for the baseline, 1 to --seeds for
the change. experiments/score.py does each run: it trains a model, and measures
the model's loss on the validation data of the baseline. The verdict depends on
the difference: the mean loss with the change, minus the mean loss of the
baseline. experiment.py first copies both programs, so you can continue to edit.
Later experiments reuse finished runs. The exit status is the verdict:

  0  better     the 95% confidence interval (Welch's t-test) is below 0
  3  equal      the interval is within ± delta, even if it excludes 0
  4  worse      the interval is above 0
  5  undecided  the interval is too wide; the verdict suggests --seeds
  6  invalid    the logits of a position depend on later tokens
  7  failed     the patch does not apply, or a run failed

--sizes repeats the experiment at several model sizes, given in channels. Each
size has heads of 32 channels, a peak learning rate of 1.5 / channels, and
--tokens_per_weight training tokens per parameter. The values of --rates are for
the smallest size; larger sizes scale them by 1 / channels. The verdict is about
the largest size. "Worth x1.2 in compute" means: to reach the loss of the
changed program, the baseline would need 1.2 times the compute of its runs.

Each experiment adds a line to the list of experiments, the ledger:
log/experiments/ledger.jsonl. The program needs scipy (pip install scipy).
"""

import hashlib
import math
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from plaingpt.errors import UserError, explaining, require, run_program
from plaingpt.files import (
    check_output,
    format_json,
    lock,
    open_output,
    read_facts,
    read_streams,
    write_json,
    writing,
)
from plaingpt.flags import flag, parse_flags
from plaingpt.lab.copies import changes_of_clone, make_copy, remove_copies
from plaingpt.lab.runs import LAB, Program, count_flops, count_weights, probe, run_missing
from plaingpt.lab.verdict import (
    add_entry,
    choose_seeds,
    compare_losses,
    discoveries_as_lines,
    entry_as_line,
    read_ledgers,
    worth,
    worth_as_text,
)
from plaingpt.source_code import CLONE, run_git
from plaingpt.terminal import print0, print_result

import numpy as np

# A ledger is a list of experiments. docs/experiments.md describes the experiments of the first
# ledger.
LEDGERS = (CLONE / "log" / "records" / "ledger.jsonl", LAB / "ledger.jsonl")
STATUS = dict(better=0, equal=3, worse=4, undecided=5, invalid=6, failed=7)
HEAD_SIZE = 32  # channels per head, at every size: a different head size would be a second change
RATE = 1.5  # --max_lr x channels; measured with Muon: twice the width halves the best learning rate
LATER_TOLERANCE = 1e-4  # relative to the largest logit; float32's rounding errors are smaller
# --sizes and --rates set the values of these flags of the runs.
SET_BY = dict(
    sizes=["n_embd", "n_head", "max_steps", "warmup_steps", "max_lr"],
    rates=["max_lr"],
)


@dataclass
class ExperimentConfig:
    flags: str = flag(
        "--preset baby --max_steps 1000 --val_every 0",
        "flags of train_gpt2.py for all runs",
        empty=True,
    )
    seeds: int = flag(
        4,
        "number of runs with the change; choose this number before the first run",
        at_least=2,
        at_most=1000,
    )
    base_seeds: int = flag(
        8,
        "number of runs of the baseline; raised to --seeds if smaller",
        at_least=2,
        at_most=1000,
    )
    confirm: bool = flag(False, "use new seeds, with which neither program was trained")
    at_once: int | None = flag(
        None, "number of runs in parallel [one per GPU or core]", above=0, at_most=1000
    )
    rates: list[float] | None = flag(None, "peak learning rates (--max_lr) to try", above=0)
    delta: float = flag(0.01, "differences in loss below this value do not matter", above=0)
    sizes: list[int] | None = flag(None, "widths of the models to test, n_embd", above=0)
    tokens_per_weight: float = flag(5.0, "training tokens per parameter, for --sizes", above=0)
    base: str = flag("HEAD", "commit of the program without the change")
    name: str | None = flag(
        None, "name of the change, shown by --list [default: patch and flags]", path=False
    )
    why: str | None = flag(None, "your reason for trying the change; --list prints it", path=False)
    json: str | None = flag(None, "also write the verdict to this file")
    list: bool = flag(False, "print the experiments so far")


class Change(NamedTuple):
    """The change that an experiment tests."""

    commit: str  # of the baseline
    patch: bytes  # the changes since the commit
    files: list  # names of new .py files in this clone, which git does not track yet
    names: list  # what has changed, in words; empty if nothing has changed


def read_change(base, patches):
    """Reads patches, or the changes in this clone since the commit `base`. Returns a Change.

    base: a commit, as git's commands accept it. patches: paths; an empty list means this clone.
    Raises UserError if git does not know the commit, or if a patch cannot be read.
    """
    commit = run_git("rev-parse", "--verify", f"{base}^{{commit}}").decode().strip()
    if not patches:
        patch, files = changes_of_clone(commit)
        return Change(commit, patch, files, ["this clone"] if patch or files else [])
    edits, _ = changes_of_clone("HEAD")
    if edits:
        print0("note: the runs use the commit and the patch, without your uncommitted edits")
    with explaining("PATCH", "give a file", OSError):
        patch = b"".join(Path(path).read_bytes() for path in patches)
    return Change(commit, patch, [], [Path(path).stem for path in patches])


def choose_rates(programs, rates, at_once):
    """Returns [base, change], each with the learning rate at which it has the lowest loss.

    Does a run of each program at each learning rate, with seed 0, which no other run uses.
    programs: [base, change], as `probe` returns them. rates: the learning rates to try.
    """
    chosen = []
    for program in programs:
        tried = [program.set(max_lr=rate) for rate in rates]
        found = run_missing(tried, [[0]] * len(rates), at_once, may_fail=True)
        losses = [math.inf if loss is None else loss for (loss,) in found]
        best = losses.index(min(losses))
        edge = (
            ", an end of the range, so try values beyond it"
            if rates[best] in (min(rates), max(rates))
            else ""
        )
        text = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in zip(rates, losses))
        print0(f"{program.name}: losses at --max_lr {text}; the best is {rates[best]:g}{edge}")
        chosen.append(tried[best])
    return chosen


def compare(programs, rates, config, ledger, entry):
    """Does the runs that are missing, and adds the facts of the verdict to the ledger entry.

    programs: [base, change], as `probe` returns them. rates: learning rates to try, or None. If
    this function raises UserError, `entry` contains the facts that were known before the error.
    """
    if rates:
        programs = choose_rates(programs, rates, config.at_once)
        entry["chosen_rates"] = [program.facts["max_lr"] for program in programs]
    keys = [program.key for program in programs]
    seeds = choose_seeds(keys, config, ledger)
    base_losses, losses = run_missing(programs, seeds, config.at_once)
    entry.update(keys=keys, last_seed=seeds[0][-1], base_losses=base_losses, losses=losses)
    runs = [program.place(own[0]) for program, own in zip(programs, seeds)]
    entry["parameters"] = [read_facts(run / "run.json")["parameters"] for run in runs]
    for program, own in zip(programs, seeds):
        for seed in own:
            if not program.score(seed):
                raise UserError(f"{program.place(seed)} ended before its last step; see output.txt")
    if None in base_losses + losses:
        raise UserError("the loss of a run is not finite; give a lower --max_lr")
    for program, own in zip(programs, seeds):
        later = max(program.score(seed)["later"] for seed in own)
        if later > LATER_TOLERANCE:
            reason = f"in the {program.name}, later tokens change the logits of earlier positions"
            entry.update(verdict="invalid", reason=f"{reason} by {later:.2%} of the largest logit")
            return
    entry.update(compare_losses(base_losses, losses, config.delta))
    # The ratio is correct only if the machine was equally busy during the runs of both programs.
    speeds = []  # tokens per second
    for program, own in zip(programs, seeds):
        logs = [read_streams(program.place(seed) / "log.txt")["tok_s"].values() for seed in own]
        speeds.append(float(np.median([np.median([*values]) for values in logs])))
    entry["time_ratio"] = speeds[0] / speeds[1]
    facts = [program.facts for program in programs]
    tokens = [each["max_steps"] * each["total_batch_size"] for each in facts]
    if tokens[0] != tokens[1]:
        entry["reason"] += f"; trained on {tokens[1] / tokens[0]:.2f} times as many tokens"
    if len({each["fingerprints"]["training split"] for each in facts}) > 1:
        entry["reason"] += "; trained on different data"
    if seeds[0][0] == 1:  # score.py keeps only the models of seed 1
        places = " ".join(map(os.path.relpath, runs))
        print0(f"to compare two models: python look.py {places} --own_code --text TEXT")


def compare_sizes(programs, config, ledger, entry):
    """Calls `compare` for the programs at each size, and prints a line per size."""
    facts = programs[0].facts
    found = entry["by_size"] = []
    for size in sorted(config.sizes):
        shape = dict(n_embd=size, n_head=size // HEAD_SIZE)
        # A model with twice as many weights trains on twice as many tokens.
        tokens = config.tokens_per_weight * count_weights(facts | shape)
        shape["max_steps"] = max(1, round(tokens / facts["total_batch_size"]))
        shape["warmup_steps"] = round(0.1 * shape["max_steps"])
        rates = [rate * min(config.sizes) / size for rate in config.rates or ()]
        if not rates:
            shape["max_lr"] = RATE / size
        epochs = shape["max_steps"] * facts["total_batch_size"] / facts["train_tokens"]
        print0(f"{size} channels: {shape['max_steps']} steps, {epochs:.2f} epochs")
        own = dict(size=size, flops=count_flops(facts | shape))
        found.append(own)
        compare([each.set(**shape) for each in programs], rates, config, ledger, own)
        if own["verdict"] == "invalid":
            entry.update(own)
            return
    flops = [own["flops"] for own in found]
    base_losses = [float(np.mean(own["base_losses"])) for own in found]
    for i, own in enumerate(found):
        ends = [own["difference"] + sign * own["half"] for sign in (0, 1, -1)]
        own["worth"] = [worth(i, flops, base_losses, end) for end in ends]
        text = f"{own['size']} channels: {own['verdict']}; {ends[0]:+.4f} ± {own['half']:.4f}"
        print0(f"{text}; {worth_as_text(own)}")
    entry.update(found[-1], keys=[key for own in found for key in own["keys"]])


def run_experiment(change, programs, config, ledger, entry):
    """Copies and compares both programs, and adds the facts of the verdict to the entry.

    programs: [base, change], with their flags. If an error makes the comparison impossible, the
    verdict is "failed". Ctrl-C and SIGTERM raise KeyboardInterrupt.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # for each run
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    copies = [LAB / "base", LAB / "change"]
    try:
        make_copy(copies[0], change.commit)
        make_copy(copies[1], change.commit, change.patch, change.files)
        programs = probe(programs)
        if programs[0].key == programs[1].key:
            entry.update(verdict="equal", reason="the change does nothing")
        elif config.sizes:
            compare_sizes(programs, config, ledger, entry)
        else:
            compare(programs, config.rates, config, ledger, entry)
    except UserError as error:
        entry.update(verdict="failed", reason=str(error))
    finally:
        remove_copies(copies)


def check_sizes(sizes):
    """Raises UserError unless --sizes contains two or more multiples of HEAD_SIZE."""
    if len({*sizes}) < 2 or any(size % HEAD_SIZE for size in sizes):
        raise UserError(
            f"--sizes: give two or more numbers of channels, each a multiple of {HEAD_SIZE}"
        )


def check_replaced(config, words):
    """Raises UserError if --sizes or --rates would replace a value that the user gave.

    words: the flags of the runs that the user gave.
    """
    given = [word.partition("=")[0] for word in words]
    for setter, names in SET_BY.items():
        for name in names:
            if getattr(config, setter) and f"--{name}" in given:
                raise UserError(f"--{name}: --{setter} already sets this value; remove --{name}")


def main():
    end = [*sys.argv, "--"].index("--")
    given = parse_flags(__doc__, ExperimentConfig, argv=sys.argv[1:end], rest="PATCH")
    patches = given.pop("PATCH")
    config = ExperimentConfig(**given)
    more = sys.argv[end + 1 :]  # flags that only the changed program receives
    require("scipy.stats")
    ledger = read_ledgers(LEDGERS)
    if config.list:
        print_result("\n".join([*map(entry_as_line, ledger), *discoveries_as_lines(ledger)]))
        return
    with explaining(f"--flags {config.flags}", "correct the quotes", ValueError):
        flags = shlex.split(config.flags)  # splits as a shell does, so quoted spaces are possible
    words = [part for word in flags + more for part in (word, *re.split("[=,]", word))]
    check_output("--json", config.json, [*patches, *LEDGERS, *words])
    if config.sizes:
        check_sizes(config.sizes)
        flags = ["--val_every", "0", *flags]
    # --sizes may replace the --max_steps in the default of --flags.
    check_replaced(config, flags + more if "flags" in given else more)
    change = read_change(config.base, patches)
    if not (change.names or more):
        raise UserError("nothing has changed; edit model.py, give a patch, or give flags after --")
    entry = dict(date=time.strftime("%Y-%m-%d %H:%M"), commit=change.commit, **asdict(config))
    entry["change"] = config.name or " ".join([*change.names, *more])
    entry["patch"] = hashlib.sha256(change.patch).hexdigest()[:12]
    LAB.mkdir(parents=True, exist_ok=True)
    lock(LAB, "experiments in")  # until the program ends
    if config.json and os.path.isfile(config.json):
        with writing(config.json), open_output(config.json):
            pass  # empties the file: if this program is stopped, the file contains no old verdict
    programs = [Program("base", flags), Program("change", flags + more)]
    run_experiment(change, programs, config, ledger, entry)
    add_entry(LEDGERS[1], entry)
    if config.json:
        write_json(config.json, entry)
    print_result(f"{entry_as_line(entry)}\n{format_json(entry)}")
    sys.exit(STATUS[entry["verdict"]])


if __name__ == "__main__":
    run_program(main)
