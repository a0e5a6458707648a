"""Does a change help? Trains runs without and with it, for a verdict.

  python experiment.py                            what you changed since the
                                                  last commit
  python experiment.py experiments/rotary.patch   a patch
  python experiment.py -- --optimizer adamw       what you changed, and the
                                                  flags that follow --
  python experiment.py --base HEAD~3              all changes since that commit
  python experiment.py --confirm                  the same question with seeds
                                                  that no run has had
  python experiment.py --list                     what was tried so far

The figure is the mean of the last validation losses with the change, minus that
without it. The runs differ in their seeds: 1 to --base_seeds without the
change, 1 to --seeds with it. Both programs are copied first, so you can go on
editing. Finished runs are used again. The exit status is the verdict:

  0  better     the 95 % interval of the difference (Welch's t) is below 0
  3  equal      the interval is between -delta and delta, even if 0 is not in it
  4  worse      the interval is above 0
  5  undecided  none of these; the verdict says how many runs may decide
  6  invalid    the losses in the log are not those of the model
  7  failed     the change does not apply, or a run failed

Each experiment adds a line to log/experiments/ledger.jsonl.
"""

import contextlib
import hashlib
import json
import math
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from plaingpt.base.errors import UserError, explaining, run_program
from plaingpt.base.files import check_output, lock, read_json, write_json
from plaingpt.base.flags import flag, parse_flags
from plaingpt.base.log_file import read_streams
from plaingpt.base.machine import count_cores
from plaingpt.base.terminal import print0
from plaingpt.run.copies import (
    changes_of_clone,
    check_committed,
    find_commit,
    make_copy,
    remove_copies,
)
from plaingpt.run.inputs import find_stream, hash_inputs
from plaingpt.run.intervals import compare_losses
from plaingpt.run.ledger import add_entry, entry_as_line, read_ledgers

import numpy as np
import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent
# Has the program that records what a run reads, and the two programs that compute losses again.
AUDIT = ROOT / "experiments"
LAB = (ROOT / "log" / "experiments").resolve()  # log may be a link to a larger disk
# The first ledger has the experiments of docs/experiments.md.
LEDGERS = (ROOT / "log" / "records" / "ledger.jsonl", LAB / "ledger.jsonl")
STATUS = dict(better=0, equal=3, worse=4, undecided=5, invalid=6, failed=7)
# Facts in run.json that are not part of a run's identity. Data have a fingerprint, too.
OTHER_FACTS = (
    "git_commit",
    "untracked_files",
    "started",
    "origins",
    "seed",
    "log_dir",
    "data",
    "max_minutes",
)
QUIET = "--sample_every 0 --sample_tokens 1 --keep 1 --resume".split()
TOLERANCE = 2e-3  # relative; rounding to bfloat16 makes a smaller difference
LATER_TOLERANCE = 1e-4  # relative; rounding to float32 makes a smaller difference
SEEN_TOLERANCE = 0.02  # of the validation sequences; some texts have repetitions


@dataclass
class ExperimentConfig:
    flags: str = flag("--preset baby --max_steps 1000 --val_every 0", "of all runs", empty=True)
    seeds: int = flag(4, "runs with the change; choose it before", at_least=2, at_most=1000)
    base_seeds: int = flag(8, "runs without it; at least --seeds", at_least=2, at_most=1000)
    confirm: bool = flag(False, "take seeds that no run of both programs has had")
    rates: list[float] | None = flag(None, "values of --max_lr to choose from", above=0)
    delta: float = flag(0.01, "a smaller difference does not matter", above=0)
    base: str = flag("HEAD", "commit to compare with")
    name: str | None = flag(None, "what --list calls the change [patch and flags]")
    json: str | None = flag(None, "also write the verdict to this file")
    list: bool = flag(False, "print the experiments so far")


@dataclass
class Side:
    """The program without or with the change, in a copy, and its flags."""

    name: str  # "base" or "changed", also of the copy in LAB
    flags: list[str]
    facts: dict | None = None  # those of run.json, from `ask`
    key: str = ""  # a hash of the facts: runs with the same key differ only in their seed
    stream: str = "val"  # in the log, the loss on the validation data of the base

    def directory(self, run):
        return LAB / "runs" / f"{self.key}-{run}" if self.key else LAB / self.name / "log" / run

    def read(self, run, stream):
        """The values of a stream in a run's log: {step: value}."""
        return read_streams(self.directory(run) / "log.txt").get(stream, {})

    def last(self, run, stream=None):
        """The value after the last step, by default the validation loss, or None."""
        return self.read(run, stream or self.stream).get(self.facts["max_steps"])


def train(runs, title="training; after Ctrl-C, the same command continues"):
    """Trains runs, as many at a time as there are GPUs or cores. Raises UserError if one fails.

    runs: [(side, name of the run, flags)]. A run that was stopped earlier continues. Ctrl-C reaches
    the runs, too: each saves a checkpoint. title: what the progress bar says.
    """
    n_gpus = torch.cuda.device_count()
    # An even number: runs of the same seed go at the same time, under the same load.
    slots = max(1, (n_gpus or count_cores()) // 2 * 2)
    free = queue.SimpleQueue()  # the flags of each run that can start: its GPU, if there are GPUs
    for i in range(slots):
        free.put(["--device", f"cuda:{i}"] if n_gpus else [])

    def train_one(run):
        side, name, flags = run
        place = side.directory(name)
        place.mkdir(parents=True, exist_ok=True)
        program = LAB / side.name / "train_gpt2.py"
        output = place / "output.txt"
        device = free.get()
        recorder = [sys.executable, AUDIT / "record_run.py", place]
        command = [*recorder, program, *device, *side.flags, *flags, *QUIET]
        try:
            with open(output, "w") as file:
                done = subprocess.run([*command, "--log_dir", place], stdout=file, stderr=file)
        finally:
            free.put(device)
        if done.returncode:
            lines = output.read_text("utf-8", "replace").splitlines()
            raise UserError("\n".join([f"{place} failed:", *lines[-3:]]))

    # After an error or Ctrl-C, no other run starts, and those that have started come to their end.
    with ThreadPoolExecutor(slots) as pool:
        list(tqdm(pool.map(train_one, runs), title, len(runs)))  # waits for each run


def ask(sides):
    """Completes the sides: each program runs one step, and writes its facts. Raises UserError."""
    train([(side, "asked", ["--max_minutes", "1e-4"]) for side in sides], "one step")
    for side in sides:
        said = read_json(side.directory("asked") / "run.json")
        train_config = said.pop("train_config")
        # `said` is last: it has the device and the dtype that were chosen, not "auto" or "cuda:1".
        side.facts = train_config | said["model_config"] | said["fingerprints"] | said
        files = read_json(side.directory("asked") / "read.json")["files"]
        side.facts |= hash_inputs(files, LAB / side.name, ROOT, side.facts)
        known = {name: value for name, value in side.facts.items() if name not in OTHER_FACTS}
        side.key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
    base, changed = sides
    changed.stream = find_stream(base.facts, changed.facts)
    differ = []
    for name in ("val_tokens", "val_spread", "block_size"):
        if base.facts.get(name) != changed.facts.get(name):
            differ.append(name)
    if changed.stream is None:
        differ.insert(0, "validation split")
    if differ:
        raise UserError(
            f"the losses do not compare: the change has another {differ[0]}; "
            "leave this out, or give both runs the same"
        )


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
            loss = side.last(f"rate{rate}") or math.inf
            losses[rate] = min(math.inf, loss)  # inf instead of NaN, which is not below it
        best = min(losses, key=losses.get)
        edge = "; it is at the edge, so try more" if best in (min(rates), max(rates)) else ""
        print0(f"{side.name}: losses of the rates {losses}; the best rate is {best}{edge}")
        side.flags += ["--max_lr", str(best)]
    ask(sides)


def audit(side, base, places):
    """Computes the validation losses of a side's runs again -> subprocess.CompletedProcess.

    Adds three streams to each log: audit, the loss; later, by how much later tokens change the
    logits; and seen, the share of the validation sequences that were trained. Only the models come
    from the code of the side: they are in a process of their own, in its copy. All else comes from
    the code of the base. places: the run directories.
    """
    # Python imports from the directory of a program, so each program goes into its copy. This comes
    # after the runs, which write down all files that git does not know.
    losses = shutil.copy(AUDIT / "audit_losses.py", LAB / base.name)
    shutil.copy(AUDIT / "record_run.py", LAB / base.name)  # audit_losses.py imports it
    logits = shutil.copy(AUDIT / "audit_logits.py", LAB / side.name)
    facts = dict(base.facts, max_steps=side.facts["max_steps"])
    given = json.dumps(dict(facts=facts, program=logits, places=places))
    return subprocess.run([sys.executable, losses], input=given, capture_output=True, text=True)


def fault_of_run(side, base, seed):
    """Returns why the loss in the log of a run does not count, or None. See audit.

    The run of the base with this seed must have been audited.
    """
    logged = side.last(seed)
    computed = side.last(seed, "audit")
    # A comparison with NaN is false, so NaN is a fault, too.
    if computed is None or not abs(computed - logged) <= TOLERANCE * computed:
        return f"the log has a loss of {logged:.4f}, but the logits give {computed or 0:.4f}"
    if not side.last(seed, "later") <= LATER_TOLERANCE:
        return "the logits of a position depend on later tokens"
    seen = side.last(seed, "seen")
    if not seen - base.last(seed, "seen") <= SEEN_TOLERANCE:
        return f"the change trains on {seen:.0%} of the validation sequences"
    return None


def find_fault(side, base, seeds):
    """Returns why the losses of a side's runs do not count, or None. Audits those with a fault."""
    # A run with a fault is computed again, because the base may be another one by now.
    places = [str(side.directory(seed)) for seed in seeds if fault_of_run(side, base, seed)]
    if places:
        done = audit(side, base, places)
        if done.returncode:
            lines = done.stderr.splitlines() or ["killed"]
            return f"the base cannot score a model ({lines[-1]})"
    for seed in seeds:
        if fault := fault_of_run(side, base, seed):
            return fault
    return None


def choose_seeds(sides, config, ledger):
    """Returns the seeds of the runs: (those of the base, those of the change), both as ranges.

    They begin at 1, and with --confirm behind the last seed that the ledger has for one of the two
    programs. Seeds of an experiment that was stopped are not in the ledger, so the same command
    continues it.
    """
    first = 1
    if config.confirm:
        keys = {side.key for side in sides}
        for entry in ledger:
            if keys & set(entry.get("keys", [])):
                # The entries of older versions have pairs, and no last_seed.
                first = max(first, entry.get("last_seed", entry.get("n", 0)) + 1)
    n_base = max(config.base_seeds, config.seeds)
    return range(first, first + n_base), range(first, first + config.seeds)


def train_missing(sides, seeds):
    """Trains the runs that earlier experiments have not trained -> these runs, as in `train`.

    seeds: those of each side.
    """
    runs = []
    for seed in seeds[0]:  # the base has all seeds of the change
        for side, own in zip(sides, seeds):
            if seed in own and side.last(seed) is None:
                runs.append((side, seed, ["--seed", str(seed)]))
    train(runs)
    return runs


def losses_of(side, seeds):
    """Returns the last validation losses of a side's runs. Raises UserError if one has none."""
    losses = np.array([side.last(seed) for seed in seeds], float)
    if not np.isfinite(losses).all():
        raise UserError(
            "a run was stopped, or its loss is not finite; run the same command again, "
            "or give a lower --max_lr"
        )
    return losses.tolist()


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
        facts.update(
            verdict="equal",
            difference=0.0,
            half=0.0,
            n=0,
            reason="only comments, layout or docstrings have changed",
        )
        return facts
    seeds = choose_seeds(sides, config, ledger)
    runs = train_missing(sides, seeds)
    losses = [losses_of(side, own) for side, own in zip(sides, seeds)]
    facts.update(compare_losses(*losses, config.delta))
    facts.update(base_losses=losses[0], losses=losses[1], last_seed=seeds[0][-1])
    facts.update(time_ratio=ratio_of_times(runs))
    if sides[0].facts["training split"] != sides[1].facts["training split"]:
        facts["reason"] += "; other training data"
    print0("computing the losses again")
    for side, own in zip(sides, seeds):
        if reason := find_fault(side, sides[0], own):
            facts.update(verdict="invalid", reason=reason)
            return facts  # keeps the models, see find_fault
        for seed in own[1:]:  # the models of the first seed stay: look.py can compare them
            for path in side.directory(seed).glob("model_*.pt"):
                path.unlink()
    return facts


def ratio_of_times(runs):
    """Returns the time of a step with the change over that without it, or None if it is unknown.

    runs: those that were just trained, as in train.
    """
    ratios = []
    # Two runs of the same seed follow each other in the list, and went side by side. A run whose
    # partner was trained earlier does not count.
    for (base, seed, _), (changed, next_seed, _) in zip(runs, runs[1:]):
        if seed == next_seed:
            ratios.append(median_tok_s(base, seed) / median_tok_s(changed, seed))
    return float(np.median(ratios)) if ratios else None


def median_tok_s(side, seed):
    """Returns the median of a run's tokens per second."""
    return np.median(list(side.read(seed, "tok_s").values()))


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
    entry = dict(
        date=time.strftime("%Y-%m-%d %H:%M"),
        commit=commit,
        **asdict(config),
        change=config.name or " ".join([*names, *more]),
        patch=hashlib.sha256(changes).hexdigest()[:12],
    )
    check_output("--json", config.json)
    LAB.mkdir(parents=True, exist_ok=True)
    lock(LAB, "experiments in")  # until the program ends
    os.environ["OMP_NUM_THREADS"] = "1"  # in each run
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with explaining(f"--flags {config.flags}", "correct it", ValueError):
        flags = shlex.split(config.flags)  # as a shell splits them, so a path may have a space
    sides = [Side("base", flags), Side("changed", flags + more)]
    try:
        make_copy(LAB / "base", commit)
        make_copy(LAB / "changed", commit, changes, files)
        entry.update(compare_sides(sides, config, ledger))
    except UserError as error:
        entry.update(verdict="failed", reason=str(error))
    finally:
        remove_copies([LAB / side.name for side in sides])
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
