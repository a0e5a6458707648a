"""Does a change help? Trains runs without and with it, for a verdict.

  python experiment.py                            what you changed since the
                                                  last commit
  python experiment.py experiments/rotary.patch   a patch
  python experiment.py -- --optimizer adamw       what you changed, and the
                                                  flags that follow --
  python experiment.py --base HEAD~3              all changes since that commit
  python experiment.py --confirm                  the same question with seeds
                                                  that no run has had
  python experiment.py --sizes 64 96 128 160 --flags "--data my.txt"
                                                  does it help larger models?
  python experiment.py --list                     what was tried so far

The figure is the mean of the last validation losses with the change, minus that
without it. The runs differ in their seeds: 1 to --base_seeds without the
change, 1 to --seeds with it. Both programs are copied first, so you can go on
editing. Finished runs are used again. The exit status is the verdict:

  0  better     the 95 % interval of the difference (Welch's t) is below 0
  3  equal      the interval is between -delta and delta, even if 0 is not in it
  4  worse      the interval is above 0
  5  undecided  none of these; the verdict says which --seeds may decide
  6  invalid    the losses in the log are not those of the model
  7  failed     the change does not apply, or a run failed

With --sizes, both programs are trained at each size, on as many tokens as fit
it. The figure is how much more compute the base needs for the same loss: x1.2
means 20 % more. A trend is its change for ten times the compute. The verdict is
about the largest size, and each word has a status of its own:

  0  holds, 10 grows    it helps, and also at ten times the compute; or more and
                        more
  11 fades              it helps, but less than smaller models
  12 helps here         it helps; what follows is unknown
  3  no gain            less than x1.1, and more than x1/1.1
  4  worse, 13 reverses it harms; or it helps only small models

Each experiment adds a line to log/experiments/ledger.jsonl.
"""

import contextlib
import hashlib
import json
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from plaingpt.base.errors import UserError, explaining, run_program
from plaingpt.base.files import check_output, lock, write_json
from plaingpt.base.flags import flag, parse_flags
from plaingpt.base.terminal import print0
from plaingpt.run.copies import (
    changes_of_clone,
    check_committed,
    find_commit,
    make_copy,
    remove_copies,
)
from plaingpt.run.intervals import compare_losses
from plaingpt.run.ladder import check_ladder
from plaingpt.run.ladder_runs import SET_BY_SIZE, compare_ladder
from plaingpt.run.ledger import add_entry, choose_seeds, entry_as_line, read_ledgers
from plaingpt.run.sides import (
    LAB,
    ROOT,
    UNCHANGED,
    Side,
    ask,
    check_losses,
    finite_loss,
    losses_of,
    ratio_of_times,
    show_look,
    train,
    train_missing,
)

# The first ledger has the experiments of docs/experiments.md.
LEDGERS = (ROOT / "log" / "records" / "ledger.jsonl", LAB / "ledger.jsonl")
STATUS = {
    "better": 0,
    "equal": 3,
    "worse": 4,
    "undecided": 5,
    "invalid": 6,
    "failed": 7,
    "holds": 0,
    "grows": 10,
    "fades": 11,
    "helps here": 12,
    "no gain": 3,
    "reverses": 13,
}


@dataclass
class ExperimentConfig:
    flags: str = flag("--preset baby --max_steps 1000 --val_every 0", "of all runs", empty=True)
    seeds: int = flag(4, "runs with the change; choose it before", at_least=2, at_most=1000)
    base_seeds: int = flag(8, "runs without it; at least --seeds", at_least=2, at_most=1000)
    confirm: bool = flag(False, "take seeds that no run of both programs has had")
    rates: list[float] | None = flag(None, "values of --max_lr to choose from", above=0)
    delta: float = flag(0.01, "a smaller difference does not matter", above=0)
    sizes: list[int] | None = flag(None, "channels of the models of a ladder", above=0)
    tokens_per_weight: float = flag(5.0, "of a ladder: training tokens", above=0)
    rate_factors: list[float] | None = flag(None, "of a ladder: rates to choose from", above=0)
    base: str = flag("HEAD", "commit to compare with")
    name: str | None = flag(None, "what --list calls the change [patch and flags]")
    why: str | None = flag(None, "your reason to try it, for the ledger")
    json: str | None = flag(None, "also write the verdict to this file")
    list: bool = flag(False, "print the experiments so far")


def choose_rates(sides, rates):
    """Adds the best of the rates to the flags of each side. Raises UserError.

    These runs have the seed 0, which the others do not have.
    """
    for rate in rates:
        name = f"rate{rate}"
        flags = ["--seed", "0", "--max_lr", str(rate)]
        runs = [(side, name, flags) for side in sides if side.last(name) is None]
        with contextlib.suppress(UserError):  # a large rate may diverge
            train(runs)
    for side in sides:
        losses = {}
        for rate in rates:
            losses[rate] = finite_loss(side, f"rate{rate}")
        best = min(losses, key=losses.get)
        edge = "; it is at the edge, so try more" if best in (min(rates), max(rates)) else ""
        print0(f"{side.name}: losses of the rates {losses}; the best rate is {best}{edge}")
        side.flags += ["--max_lr", str(best)]
    ask(sides)


def compare_sides(sides, config, ledger):
    """Trains the runs -> the facts of the verdict. Raises UserError if a run fails."""
    ask(sides)
    if config.rates:
        choose_rates(sides, config.rates)
    facts = dict(
        keys=[side.key for side in sides],
        parameters=[side.facts["parameters"] for side in sides],
    )
    if sides[0].key == sides[1].key:
        facts.update(verdict="equal", difference=0.0, half=0.0, n=0, base_n=0, reason=UNCHANGED)
        return facts
    seeds = choose_seeds(facts["keys"], config, ledger)
    runs = train_missing([sides], seeds)
    losses = [losses_of(side, own) for side, own in zip(sides, seeds)]
    facts.update(compare_losses(*losses, config.delta))
    facts.update(base_losses=losses[0], losses=losses[1], last_seed=seeds[0][-1])
    facts.update(time_ratio=ratio_of_times(sides, runs))
    if sides[0].facts["training split"] != sides[1].facts["training split"]:
        facts["reason"] += "; other training data"
    if reason := check_losses(sides, seeds):
        facts.update(verdict="invalid", reason=reason)
    else:
        show_look(sides, seeds)
    return facts


def check_ladder_flags(config, flags, more):
    """Raises UserError if a flag contradicts --sizes. flags: of all runs. more: of the change."""
    if config.rates:
        raise UserError("--rates: are for one size; give --rate_factors, such as 0.5 1 2")
    given = more
    if config.flags != ExperimentConfig.flags:  # the default has steps
        given = flags + more
    for name in SET_BY_SIZE:
        if any(each.partition("=")[0] == f"--{name}" for each in given):
            raise UserError(f"--{name}: follows from --sizes; leave it out")


def main():
    end = [*sys.argv, "--"].index("--")
    given = parse_flags(__doc__, ExperimentConfig, argv=sys.argv[1:end], rest="PATCH")
    patches = given.pop("PATCH")
    config = ExperimentConfig(**given)
    more = sys.argv[end + 1 :]  # flags of the changed program
    ledger = read_ledgers(LEDGERS)
    if config.list:
        print0("\n".join(map(entry_as_line, ledger)))
        return
    check_output("--json", config.json)
    if config.json:  # a program must not read an older verdict after an error
        Path(config.json).unlink(missing_ok=True)
    for path in patches:
        if not Path(path).is_file():
            raise UserError(f"{path}: no such patch; give a file")
    commit = find_commit(config.base)
    if patches:
        changes = b"".join(Path(path).read_bytes() for path in patches)
        check_committed(changes)
        files = []
        names = [Path(path).stem for path in patches]
    else:
        changes, files = changes_of_clone(commit)
        names = ["this clone"] if changes or files else []
    if not (changes or files or more):
        raise UserError("nothing is changed; edit model.py, give a patch, or give flags behind --")
    with explaining(f"--flags {config.flags}", "correct it", ValueError):
        flags = shlex.split(config.flags)  # as a shell splits them, so a path may have a space
    if config.sizes:
        check_ladder(config.sizes)
        check_ladder_flags(config, flags, more)
    entry = dict(
        date=time.strftime("%Y-%m-%d %H:%M"),
        commit=commit,
        **asdict(config),
        change=config.name or " ".join([*names, *more]),
        patch=hashlib.sha256(changes).hexdigest()[:12],
    )
    LAB.mkdir(parents=True, exist_ok=True)
    lock(LAB, "experiments in")  # until the program ends
    os.environ["OMP_NUM_THREADS"] = "1"  # in each run
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        make_copy(LAB / "base", commit)
        make_copy(LAB / "changed", commit, changes, files)
        if config.sizes:
            entry.update(compare_ladder(flags, more, config, ledger))
        else:
            sides = [Side("base", flags), Side("changed", flags + more)]
            entry.update(compare_sides(sides, config, ledger))
    except UserError as error:
        entry.update(verdict="failed", reason=str(error))
    finally:
        remove_copies([LAB / "base", LAB / "changed"])
    # How many times this pair of programs was compared, with this time. A failure has no keys.
    entry["looks"] = 1
    for old in ledger:
        if "keys" in entry and old.get("keys") == entry["keys"]:
            entry["looks"] += 1
    add_entry(LEDGERS[1], entry)
    if config.json:
        write_json(config.json, entry)
    print0(f"{entry_as_line(entry)}\n{json.dumps(entry)}")
    sys.exit(STATUS[entry["verdict"]])


if __name__ == "__main__":
    run_program(main)
