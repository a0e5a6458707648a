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

Before the first run, the data are split: the runs train on one part, and the
other part is sealed. A referee, which has the code of the base, then measures
each model on the sealed part. The figure is the mean of these losses with the
change, minus that without it. The runs differ in their seeds: 1 to --base_seeds
without the change, 1 to --seeds with it. Both programs are copied first, so you
can go on editing. Finished runs are used again. The exit status is the verdict:

  0  better     the 95 % interval of the difference (Welch's t) is below 0
  3  equal      the interval is between -delta and delta, even if 0 is not in it
  4  worse      the interval is above 0
  5  undecided  none of these; the verdict says which --seeds may decide
  6  invalid    a position of the model sees later tokens
  7  failed     the change does not apply, or a run failed

With --sizes, both programs are trained at each size, on as many tokens as fit
it. The figure is how much more compute the base needs for the same loss: x1.2
means 20 % more. The verdict is about the largest size:

  0  helps      the 95 % interval is above x1
  3  no gain    it is between x1/1.1 and x1.1
  4  worse      it is below x1
  5  undecided  none of these

A second word is the trend over the sizes: the gain grows, fades, is steady, or
this is open.

Each experiment adds a line to log/experiments/ledger.jsonl.
"""

import hashlib
import json
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from plaingpt.base.errors import UserError, explaining, run_program
from plaingpt.base.files import check_output, lock, open_output, write_json, writing
from plaingpt.base.flags import flag, parse_flags
from plaingpt.base.terminal import print0
from plaingpt.lab.copies import (
    changes_of_clone,
    check_committed,
    find_commit,
    hash_of_copy,
    make_copy,
    remove_copies,
)
from plaingpt.lab.intervals import compare_losses
from plaingpt.lab.ladder import check_ladder
from plaingpt.lab.ladder_runs import SET_BY_SIZE, compare_ladder
from plaingpt.lab.ledger import (
    add_entry,
    choose_seeds,
    count_comparisons,
    entry_as_line,
    luck_as_lines,
    read_ledgers,
)
from plaingpt.lab.referee import (
    check_losses,
    find_leak,
    measure_runs,
    read_losses,
    split_data,
    try_runs,
)
from plaingpt.lab.runs import (
    LAB,
    ROOT,
    Program,
    probe,
    ratio_of_times,
    show_look,
    train_missing,
)

# The first ledger has the experiments of docs/experiments.md.
LEDGERS = (ROOT / "log" / "records" / "ledger.jsonl", LAB / "ledger.jsonl")
STATUS = {
    "better": 0,
    "helps": 0,
    "equal": 3,
    "no gain": 3,
    "worse": 4,
    "undecided": 5,
    "invalid": 6,
    "failed": 7,
}
UNCHANGED = "the change does nothing: code, settings and data are those of the base"


@dataclass
class ExperimentConfig:
    flags: str = flag("--preset baby --max_steps 1000 --val_every 0", "of all runs", empty=True)
    seeds: int = flag(4, "runs with the change; choose it before", at_least=2, at_most=1000)
    base_seeds: int = flag(8, "runs without it; at least --seeds", at_least=2, at_most=1000)
    confirm: bool = flag(False, "take seeds that no run of both programs has had")
    runs_per_gpu: int | None = flag(None, "at a time [as many as fit]", at_least=1, at_most=1000)
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


def choose_rates(programs, rates, sealed):
    """Chooses the best of the rates for each program -> ([base, change], their rates), probed.

    These runs have the seed 0, which the others do not have. Raises UserError.
    """
    pairs = []
    for rate in rates:
        pair = [program.with_flags(["--max_lr", str(rate)]) for program in programs]
        pairs.append(probe(pair, sealed))
    chosen = []
    for tried, losses in zip(zip(*pairs), zip(*try_runs(pairs, sealed))):
        own = dict(zip(rates, losses))
        best = min(own, key=own.get)
        edge = "; it is at the edge, so try more" if best in (min(rates), max(rates)) else ""
        print0(f"{tried[0].name}: losses of the rates {own}; the best rate is {best}{edge}")
        chosen.append((tried[rates.index(best)], best))
    return zip(*chosen)


def compare_programs(programs, sealed, config, ledger, entry):
    """Trains the runs, and adds the facts of the verdict to the entry of the ledger.

    programs: [base, change], probed. sealed: from split_data. The entry keeps what it has, also if
    this raises UserError.
    """
    more_tokens = compare_tokens(programs)
    if config.rates:
        programs, entry["chosen_rates"] = choose_rates(programs, config.rates, sealed)
    keys = [program.key for program in programs]
    seeds = choose_seeds(keys, config, ledger)
    entry.update(keys=keys, parameters=[program.facts["parameters"] for program in programs])
    runs = train_missing([programs], seeds)
    print0("the referee measures the models")
    measure_runs(programs, seeds, sealed)
    losses = [read_losses(program, own) for program, own in zip(programs, seeds)]
    entry.update(base_losses=losses[0], losses=losses[1], last_seed=seeds[0][-1])
    check_losses(losses[0] + losses[1])
    entry["time_ratio"] = ratio_of_times(programs, runs)
    if reason := find_leak(programs, seeds):
        entry.update(verdict="invalid", reason=reason)
        return
    entry.update(compare_losses(*losses, config.delta))
    entry["reason"] += more_tokens
    splits = [program.facts["fingerprints"]["training split"] for program in programs]
    if splits[0] != splits[1]:
        entry["reason"] += "; other training data"
    show_look(programs, seeds)


def compare_tokens(programs):
    """Returns a note, perhaps empty, on how many tokens the change reads. Raises UserError.

    More tokens a step with the same number of steps are more training, which nobody asked for.
    """
    base, change = [program.facts for program in programs]
    tokens = [facts["max_steps"] * facts["total_batch_size"] for facts in (base, change)]
    if tokens[0] == tokens[1]:
        return ""
    if base["max_steps"] == change["max_steps"]:
        raise UserError(
            f"the change reads {tokens[1]:,} tokens, and the base {tokens[0]:,}; for equal "
            f"tokens, add --max_steps {round(tokens[0] / change['total_batch_size'])} behind --"
        )
    return f"; trained on {tokens[1] / tokens[0]:.2f} times the tokens"


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


def find_paths(flags):
    """Returns all parts of flags that may be paths, such as "a.txt" of --data a.txt=2."""
    parts = []
    for word in flags:
        parts += [word, *re.split("[=,]", word)]  # --evals core=bundle,lambada=a.jsonl
    return parts


def main():
    end = [*sys.argv, "--"].index("--")
    given = parse_flags(__doc__, ExperimentConfig, argv=sys.argv[1:end], rest="PATCH")
    patches = given.pop("PATCH")
    config = ExperimentConfig(**given)
    more = sys.argv[end + 1 :]  # flags of the changed program
    ledger = read_ledgers(LEDGERS)
    if config.list:
        print0("\n".join([*map(entry_as_line, ledger), *luck_as_lines(ledger)]))
        return
    with explaining(f"--flags {config.flags}", "correct it", ValueError):
        flags = shlex.split(config.flags)  # as a shell splits them, so a path may have a space
    check_output("--json", config.json, [*patches, *LEDGERS, *find_paths(flags + more)])
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
    if config.sizes:
        flags = ["--val_every", "0", *flags]
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
    if config.json and os.path.isfile(config.json):
        # Nobody must read an older verdict if this program is stopped. What has a hard link, such
        # as a backup, keeps it.
        with writing(config.json), open_output(config.json):
            pass
    os.environ["OMP_NUM_THREADS"] = "1"  # in each run
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        make_copy(LAB / "base", commit)
        make_copy(LAB / "change", commit, changes, files)
        n = config.runs_per_gpu
        programs = [
            Program("base", flags, hash_of_copy(LAB / "base"), runs_per_gpu=n),
            Program("change", flags + more, hash_of_copy(LAB / "change"), runs_per_gpu=n),
        ]
        programs, sealed = split_data(programs)
        programs = probe(programs, sealed)
        if programs[0].key == programs[1].key:
            verdict = "no gain" if config.sizes else "equal"
            entry.update(verdict=verdict, reason=UNCHANGED)
        elif config.sizes:
            compare_ladder(programs, sealed, config, ledger, entry)
        else:
            compare_programs(programs, sealed, config, ledger, entry)
    except UserError as error:
        entry.update(verdict="failed", reason=str(error))
    finally:
        remove_copies([LAB / "base", LAB / "change"])
    entry["comparisons"] = 1 + count_comparisons(entry.get("keys"), ledger)  # of these programs
    add_entry(LEDGERS[1], entry)
    if config.json:
        write_json(config.json, entry)
    print0(f"{entry_as_line(entry)}\n{json.dumps(entry)}")
    sys.exit(STATUS[entry["verdict"]])


if __name__ == "__main__":
    run_program(main)
