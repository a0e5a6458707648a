"""Does a change help? Trains pairs of runs, without and with it, and gives a verdict.

  python experiment.py                            what you changed since the last
                                                  commit
  python experiment.py experiments/rotary.patch   a patch of the last commit
  python experiment.py -- --optimizer adamw       other flags: all that follows --
  python experiment.py --base HEAD~3              all changes since that commit
  python experiment.py --list                     what was tried so far

Both runs of a pair have the same seed. So they read the same data in the same
order, and mostly begin with the same weights. The figure is the difference of
their last validation losses. Both programs are copied first, so you can go on
editing. Finished runs are used again. The exit status is the verdict:

  0  better     the 95 % interval of the mean difference is below 0
  3  equal      the interval is between -delta and delta
  4  worse      the interval is above 0
  5  undecided  none of these; the verdict says how many pairs would decide
  6  invalid    the losses in the log are not those of the model
  7  failed     the change does not apply, or a run failed

Each experiment adds a line to log/experiments/ledger.jsonl.
"""

import contextlib
import hashlib
import inspect
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from plaingpt import cli
from plaingpt.cli import UserError
from plaingpt.intervals import paired_interval, pairs_needed, unpaired_interval
from plaingpt.runlog import read_streams

ROOT = Path(__file__).resolve().parent
LAB = ROOT / "log" / "experiments"
# The first ledger has the experiments of docs/experiments.md.
LEDGERS = (ROOT / "log" / "records" / "ledger.jsonl", LAB / "ledger.jsonl")
STATUS = dict(better=0, equal=3, worse=4, undecided=5, invalid=6, failed=7)
# Facts in run.json that are not part of a run's identity. Data have a fingerprint, too.
OTHER_FACTS = ("git_commit", "untracked_files", "started", "seed", "log_dir", "data", "max_minutes")
QUIET = "--sample_every 0 --sample_tokens 1 --keep 1 --resume".split()
TOLERANCE = 2e-3  # relative; rounding to bfloat16 makes a smaller difference


@dataclass
class ExperimentConfig:
    flags: Annotated[str, "of both programs"] = "--preset baby --max_steps 1000"
    seeds: Annotated[int, "number of pairs; choose it before", "at least 2 and at most 1000"] = 4
    rates: Annotated[list[float] | None, "values of --max_lr to choose from", "above 0"] = None
    delta: Annotated[float, "a smaller difference does not matter", "above 0"] = 0.01
    base: Annotated[str, "commit to compare with"] = "HEAD"
    json: Annotated[str | None, "also write the verdict to this file"] = None
    list: Annotated[bool, "print the experiments so far"] = False


@dataclass
class Side:
    """The program without or with the change, and its flags."""

    source: Path  # the directory of the copy
    flags: list[str]
    facts: dict | None = None  # those of run.json, from `ask`
    key: str = "new"  # a hash of the facts: runs with the same key differ only in their seed

    def directory(self, name):
        return LAB / "runs" / f"{self.key}-{name}"

    def is_finished(self, name):
        """Whether a run is finished, and its loss was checked or still can be."""
        files = [*self.directory(name).glob("audit.json"), *self.directory(name).glob("model_*.pt")]
        return self.last_loss(name) is not None and files

    def tokens_per_second(self, name):
        return np.median([*read_streams(self.directory(name) / "log.txt")["tok_s"].values()])

    def last_loss(self, name):
        """The validation loss after the last step, or None."""
        return read_streams(self.directory(name) / "log.txt").get("val", {}).get(self.facts["max_steps"])


def git(*command, place=ROOT, data=None):
    """Runs a command of git -> its output, as bytes. data: its input. Raises UserError."""
    try:
        return subprocess.run(["git", *command], cwd=place, input=data, capture_output=True,
                              check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode() or error
        raise UserError(f"git {command[0]}: {cli.first_line(reason)}; see --help") from error


def make_copy(commit, changes=b"", files=()):
    """Copies a commit, changes the copy, and adds files of this clone -> its directory.

    A worktree of git has a HEAD of its own, so a run.json in it names its own changes.
    """
    place = Path(tempfile.mkdtemp(dir=LAB / "copies"))
    git("worktree", "add", "--detach", place, commit)
    if changes:
        git("apply", "-", place=place, data=changes)
    for file in files:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, place / file)
        git("add", "--intent-to-add", file, place=place)  # so that changes.patch has it
    return place


def train(runs, slots):
    """Trains runs, `slots` at a time. Raises UserError if one fails.

    runs: [(side, name of the run, flags)]. A run that was stopped earlier continues.
    """
    start = time.time()
    for i in range(0, len(runs), slots):
        running = {}
        try:
            for slot, (side, name, flags) in enumerate(runs[i : i + slots]):
                place = side.directory(name)
                place.mkdir(parents=True, exist_ok=True)
                gpu = ["--device", f"cuda:{slot}"] if torch.cuda.is_available() else []
                with open(place / "output.txt", "w") as output:
                    running[place] = subprocess.Popen(
                        [sys.executable, side.source / "train_gpt2.py", *side.flags, *gpu, *QUIET,
                         *flags, "--log_dir", place],
                        stdout=output, stderr=output, start_new_session=True)
            while None in [process.poll() for process in running.values()]:
                time.sleep(0.2)
                cli.show_progress(i, len(runs), "runs; " + "".join(last_lines(place, 1)))
        finally:
            for process in running.values():
                process.terminate()  # a run that trains saves a checkpoint first
                process.wait()
        for place, process in running.items():
            if process.returncode:
                raise UserError(f"{place}: status {process.returncode}\n" + "\n".join(last_lines(place, 3)))
        done = i + len(running)
        to_go = timedelta(seconds=round((time.time() - start) / done * (len(runs) - done)))
        cli.print0(f"{done} of {len(runs)} runs are finished; {to_go} to go")


def last_lines(place, n):
    """The last n lines that a run has printed."""
    return (place / "output.txt").read_text("utf-8", "replace").splitlines()[-n:]


def ask(sides):
    """Completes the sides: each program runs one step, and writes its facts. Raises UserError."""
    for i, side in enumerate(sides):
        side.key = f"new{i}"
        shutil.rmtree(side.directory("asked"), ignore_errors=True)
    train([(side, "asked", ["--max_minutes", "1e-4"]) for side in sides], len(sides))
    for side in sides:
        facts = cli.read_json(side.directory("asked") / "run.json")
        side.facts = {**facts.pop("train_config"), **facts}
        known = {name: value for name, value in side.facts.items() if name not in OTHER_FACTS}
        side.key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def choose_rates(sides, rates, slots):
    """Adds the best of the rates to the flags of each side. Raises UserError.

    These runs have the seed 0, which no pair has.
    """
    for rate in rates:
        runs = [(side, f"rate{rate}", ["--seed", "0", "--max_lr", str(rate)]) for side in sides]
        with contextlib.suppress(UserError):  # a large rate may diverge
            train([run for run in runs if run[0].last_loss(run[1]) is None], slots)
    for side in sides:
        losses = {rate: side.last_loss(f"rate{rate}") or math.inf for rate in rates}
        best = min(losses, key=losses.get)
        edge = "; it is at the edge, so try more" if best in (min(rates), max(rates)) else ""
        cli.print0(f"losses of the rates: {losses}; the best is {best}{edge}")
        side.flags = [*side.flags, "--max_lr", str(best)]
    ask(sides)


def audit(base, changed, facts, places):
    """Computes the validation losses of models again, in a process of its own.

    Only the models come from the code in `changed`. All else comes from the code in `base`. Prints
    [loss, error of the first half's loss if later tokens are cut off] for each run.
    """
    import json
    import sys

    import torch

    sys.path.insert(0, changed)
    from plaingpt.checkpoint import load_model

    loaded = [load_model(place) for place in places]
    for name, module in [*sys.modules.items()]:  # from here on, these names mean other files
        if (getattr(module, "__file__", None) or "").startswith(changed):
            del sys.modules[name]
    sys.path[0] = base
    from plaingpt.data import Data, Sources
    from train_gpt2 import DataLoaderLite, GPTConfig

    config = GPTConfig(**facts["model_config"])
    sources = Sources(facts["data"], None, facts["val_fraction"])
    data = Data(sources, loaded[0][1], config)
    for model, _ in loaded:
        model.eval()
        loss = 0.0
        for tokens, share in zip(data.val, data.shares):
            loader = DataLoaderLite([tokens], [1], config.block_size, shuffle=False)
            n = min(facts["val_tokens"] // loader.T, *loader.lengths)
            for i in range(n):
                x, y = loader.batch(i, 1, torch.device("cpu"))  # (1, T) each
                with torch.no_grad():
                    logits = model(x)[0][0].float()  # (T, vocab_size)
                loss += float(share) * torch.nn.functional.cross_entropy(logits, y[0]).item() / n
        with torch.no_grad():
            prefixes = [model(x[:, :t])[0][0, -1] - logits[t - 1] for t in range(1, loader.T, 9)]
        print(json.dumps([loss, (torch.stack(prefixes).abs().max() / logits.abs().max()).item()]))


def check(side, base, names):
    """Returns why the losses of a side's runs do not count, or None. See audit."""
    places = {name: side.directory(name) for name in names}
    new = [str(place) for place in places.values() if not (place / "audit.json").exists()]
    code = (f"{inspect.getsource(audit)}\n"
            f"audit({str(base.source)!r}, {str(side.source)!r}, {base.facts!r}, {new!r})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return f"a model cannot be scored on the data of the base ({done.stderr.splitlines()[-1]})"
    for place, line in zip(new, done.stdout.splitlines()[-len(new) :]):
        cli.write_json(Path(place, "audit.json"), dict(zip(("loss", "later"), json.loads(line))))
    for name, place in places.items():
        found, logged = cli.read_json(place / "audit.json"), side.last_loss(name)
        if found["later"] > TOLERANCE:
            return "the logits of a position depend on later tokens"
        if abs(found["loss"] - logged) > TOLERANCE * found["loss"]:
            return f"the log has a loss of {logged:.4f}, but the logits give {found['loss']:.4f}"
    return None


def compare(sides, config):
    """Trains the pairs -> the facts of the verdict. Raises UserError if a run fails."""
    slots = torch.cuda.device_count() or cli.count_cores()
    slots = max(1, slots // 2 * 2)  # both runs of a pair go at the same time, under the same load
    ask(sides)
    if config.rates:
        choose_rates(sides, config.rates, slots)
    base, changed = sides
    facts = dict(keys=[side.key for side in sides],
                 parameters=[side.facts["parameters"] for side in sides])
    if base.key == changed.key:
        return dict(facts, verdict="equal", n=0, difference=0.0, half=0.0,
                    reason="only comments, layout or docstrings have changed")
    seeds = range(1, config.seeds + 1)
    runs = [(side, seed, ["--seed", str(seed)]) for seed in seeds for side in sides
            if not side.is_finished(seed)]
    train(runs, slots)
    losses = [[side.last_loss(seed) for side in sides] for seed in seeds]
    if not np.isfinite(losses).all():
        raise UserError("a validation loss is not finite")
    new = [seed for seed in seeds if [run[1] for run in runs].count(seed) == 2]
    tok_s = [[side.tokens_per_second(seed) for side in sides] for seed in new]
    facts.update(decide(*zip(*losses), config.delta), losses=losses,
                 time_ratio=float(np.median([a / b for a, b in tok_s])) if new else None)
    for side in sides:
        if reason := check(side, base, seeds):
            facts.update(verdict="invalid", reason=reason)
    for path in (LAB / "runs").glob("*/model_*.pt"):
        if path.parent not in [side.directory(config.seeds) for side in sides]:
            path.unlink()
    return facts


def decide(base, changed, delta):
    """Losses of the pairs -> the verdict, and its figures."""
    mean, half = paired_interval(np.subtract(changed, base))
    verdict = "undecided"
    if abs(mean) + half <= delta:
        verdict = "equal"
    elif half < abs(mean):
        verdict = "better" if mean < 0 else "worse"
    with np.errstate(invalid="ignore"):  # equal losses have no correlation
        correlation = float(np.nan_to_num(np.corrcoef(base, changed)[0, 1]))
    goal = max(abs(mean), delta - abs(mean))  # half the width that decides
    return dict(verdict=verdict, difference=mean, half=half, n=len(base), correlation=correlation,
                unpaired_half=unpaired_interval(base, changed)[1],
                pairs_needed=pairs_needed(np.subtract(changed, base), goal))


def describe(entry):
    """An experiment of the ledger as one line, for a person."""
    text = f"{entry['date']}  {entry['change']}: {entry['verdict']}"
    if "difference" in entry:
        text += f", {entry['difference']:+.4f} ± {entry['half']:.4f} in {entry['n']} pairs"
    if entry["verdict"] == "undecided":
        text += f"; about {entry['pairs_needed']} pairs may decide"
    return text + (f"; {entry['reason']}" if "reason" in entry else "")


def remove_copies():
    shutil.rmtree(LAB / "copies", ignore_errors=True)
    git("worktree", "prune")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    given = cli.parse_flags(__doc__, ExperimentConfig, argv=argv[:end], rest="PATCH")
    patches, more, config = given.pop("PATCH"), argv[end + 1 :], ExperimentConfig(**given)
    ledger = [json.loads(line) for path in LEDGERS if path.exists()
              for line in path.read_text("utf-8").splitlines()]
    if config.list:
        return print("\n".join(map(describe, ledger)))
    cli.check_output("--json", config.json, patches)
    commit = git("rev-parse", "--verify", f"{config.base}^{{commit}}").decode().strip()
    changes, files = b"".join(Path(path).read_bytes() for path in patches), []
    if not patches:
        changes = git("diff", "--binary", commit)
        files = git("ls-files", "--others", "--exclude-standard", "*.py").decode().splitlines()
    if not (changes or files or more):
        raise UserError("nothing is changed; edit model.py, give a patch, or give flags behind --")
    entry = dict(date=time.strftime("%Y-%m-%d %H:%M"), commit=commit, **asdict(config),
                 change=" ".join([*(Path(path).stem for path in patches), *more]) or "this clone",
                 patch=hashlib.sha256(changes).hexdigest()[:12])
    (LAB / "copies").mkdir(parents=True, exist_ok=True)
    lock = cli.lock(LAB, "experiments in")
    os.environ["OMP_NUM_THREADS"] = "1"  # of each run
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        flags = shlex.split(config.flags)
        sides = [Side(make_copy(commit), flags),
                 Side(make_copy(commit, changes, files), [*flags, *more])]
        entry.update(compare(sides, config))
    except UserError as error:
        entry.update(verdict="failed", reason=str(error))
    finally:
        remove_copies()
        os.close(lock)
    entry["looks"] = 1 + sum(old.get("keys") == entry.get("keys", 0) for old in ledger)
    with cli.writing(LEDGERS[1]), open(LEDGERS[1], "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    if config.json:
        cli.write_json(config.json, entry)
    print(describe(entry), json.dumps(entry), sep="\n")
    sys.exit(STATUS[entry["verdict"]])


if __name__ == "__main__":
    cli.run_program(main)
