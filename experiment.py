"""Does a change help? Trains pairs of runs, without and with it, for a verdict.

  python experiment.py                            what you changed since the
                                                  last commit
  python experiment.py experiments/rotary.patch   a patch
  python experiment.py -- --optimizer adamw       what you changed, and the
                                                  flags that follow --
  python experiment.py --base HEAD~3              all changes since that commit
  python experiment.py --list                     what was tried so far

Both runs of a pair have the same seed. So they read the same data in the same
order, and mostly begin with the same weights. The figure is the difference of
their last validation losses. Both programs are copied first, so you can go on
editing. Finished runs are used again. The exit status is the verdict:

  0  better     the 95 % interval of the mean difference is below 0
  3  equal      the interval is between -delta and delta
  4  worse      the interval is above 0
  5  undecided  none of these; the verdict says how many pairs may decide
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
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from tqdm import tqdm

from plaingpt import cli
from plaingpt.cli import EMPTY, UserError
from plaingpt.intervals import compare_pairs

ROOT = Path(__file__).resolve().parent
LAB = (ROOT / "log" / "experiments").resolve()  # log may be a link to a larger disk
# The first ledger has the experiments of docs/experiments.md.
LEDGERS = (ROOT / "log" / "records" / "ledger.jsonl", LAB / "ledger.jsonl")
STATUS = dict(better=0, equal=3, worse=4, undecided=5, invalid=6, failed=7)
# Facts in run.json that are not part of a run's identity. Data have a fingerprint, too.
OTHER_FACTS = ("git_commit", "untracked_files", "started", "seed", "log_dir", "data", "max_minutes")
QUIET = "--sample_every 0 --sample_tokens 1 --keep 1 --resume".split()
TOLERANCE = 2e-3  # relative; rounding to bfloat16 makes a smaller difference


@dataclass
class ExperimentConfig:
    flags: Annotated[str, "of both runs", EMPTY] = "--preset baby --max_steps 1000 --val_every 0"
    seeds: Annotated[int, "number of pairs; choose it before", "at least 2 and at most 1000"] = 4
    rates: Annotated[list[float] | None, "values of --max_lr to choose from", "above 0"] = None
    delta: Annotated[float, "a smaller difference does not matter", "above 0"] = 0.01
    base: Annotated[str, "commit to compare with"] = "HEAD"
    name: Annotated[str | None, "what --list calls the change [patch and flags]"] = None
    json: Annotated[str | None, "also write the verdict to this file"] = None
    list: Annotated[bool, "print the experiments so far"] = False


@dataclass
class Side:
    """The program without or with the change, in a copy, and its flags."""

    name: str  # "base" or "changed", also of the copy in LAB
    flags: list[str]
    facts: dict | None = None  # those of run.json, from `ask`
    key: str = ""  # a hash of the facts: runs with the same key differ only in their seed

    def directory(self, run):
        return LAB / "runs" / f"{self.key}-{run}" if self.key else LAB / self.name / "log" / run

    def read(self, run, stream):
        """The values of a stream in a run's log: {step: value}."""
        return cli.read_streams(self.directory(run) / "log.txt").get(stream, {})

    def last(self, run, stream="val"):
        """The value after the last step, by default the validation loss, or None."""
        return self.read(run, stream).get(self.facts["max_steps"])


def make_copy(name, commit, changes=b"", files=()):
    """Copies a commit to LAB, changes the copy, and adds files of this clone. Raises UserError.

    A worktree of git has a HEAD of its own, so a run.json in it names its own changes.
    """
    place = LAB / name
    shutil.rmtree(place, ignore_errors=True)
    cli.run_git("worktree", "add", "--force", "--detach", place, commit)
    if changes:
        cli.run_git("apply", "-", place=place, data=changes)
    for file in files:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, place / file)
        cli.run_git("add", "--intent-to-add", file, place=place)  # so that changes.patch has it


def train(runs, title="training; after Ctrl-C, the same command continues"):
    """Trains runs, as many at a time as there are GPUs or cores. Raises UserError if one fails.

    runs: [(side, name of the run, flags)]. A run that was stopped earlier continues. Ctrl-C reaches
    the runs, too: each saves a checkpoint. title: what the progress bar says.
    """
    n_gpus = torch.cuda.device_count()
    # An even number: both runs of a pair go at the same time, under the same load.
    slots = max(1, (n_gpus or cli.count_cores()) // 2 * 2)

    def train_one(i):
        side, name, flags = runs[i]
        place = side.directory(name)
        place.mkdir(parents=True, exist_ok=True)
        gpu = ["--device", f"cuda:{i % n_gpus}"] if n_gpus else []
        command = [sys.executable, LAB / side.name / "train_gpt2.py", *gpu, *side.flags, *flags]
        with open(place / "output.txt", "w") as file:
            done = subprocess.run([*command, *QUIET, "--log_dir", place], stdout=file, stderr=file)
        if done.returncode:
            lines = (place / "output.txt").read_text("utf-8", "replace").splitlines()
            raise UserError("\n".join([f"{place} failed:", *lines[-3:]]))

    # After an error or Ctrl-C, no other run starts, and those that have started come to their end.
    with ThreadPoolExecutor(slots) as pool:
        list(tqdm(pool.map(train_one, range(len(runs))), title, len(runs)))  # waits for each run


def ask(sides):
    """Completes the sides: each program runs one step, and writes its facts. Raises UserError."""
    train([(side, "asked", ["--max_minutes", "1e-4"]) for side in sides], "one step")
    for side in sides:
        said = cli.read_json(side.directory("asked") / "run.json")
        # `said` is last: it has the device and the dtype that were chosen, not "auto" or "cuda:1".
        side.facts = said.pop("train_config") | said["model_config"] | said["fingerprints"] | said
        known = {name: value for name, value in side.facts.items() if name not in OTHER_FACTS}
        side.key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
    for name in ("validation split", "val_tokens", "block_size"):
        if len({side.facts[name] for side in sides}) > 1:
            raise UserError(f"the losses do not compare: the change has another {name}")


def choose_rates(sides, rates):
    """Adds the best of the rates to the flags of each side. Raises UserError.

    These runs have the seed 0, which no pair has.
    """
    for rate in rates:
        runs = [(side, f"rate{rate}", ["--seed", "0", "--max_lr", str(rate)]) for side in sides]
        with contextlib.suppress(UserError):  # a large rate may diverge
            train([run for run in runs if run[0].last(run[1]) is None])
    for side in sides:
        # min returns inf instead of NaN, which is not below it.
        losses = {rate: min(math.inf, side.last(f"rate{rate}") or math.inf) for rate in rates}
        best = min(losses, key=losses.get)
        edge = "; it is at the edge, so try more" if best in (min(rates), max(rates)) else ""
        cli.print0(f"{side.name}: losses of the rates {losses}; the best rate is {best}{edge}")
        side.flags += ["--max_lr", str(best)]
    ask(sides)


def audit(base, changed, facts, places):
    """Computes the validation losses of models again, in a process of its own.

    Only the models come from the code in `changed`. All else comes from the code in `base`. Adds
    two streams to each log: audit, the loss, and later, by how much later tokens change the logits.
    """
    sys.path.insert(0, changed)
    from plaingpt.checkpoint import load_model

    loaded = [load_model(place) for place in places]
    for name, module in [*sys.modules.items()]:  # from here on, these names mean other files
        if (getattr(module, "__file__", None) or "").startswith(changed):
            del sys.modules[name]
    sys.path[0] = base
    from plaingpt.data import Data, Sources
    from train_gpt2 import DataLoaderLite, GPTConfig

    sources = Sources(facts["data"], None, facts["val_fraction"])
    data = Data(sources, loaded[0][1], GPTConfig(**facts["model_config"]))
    T, step = facts["model_config"]["block_size"], facts["max_steps"]
    for place, (model, _) in zip(places, loaded):
        model.requires_grad_(False).eval()
        loss = 0.0
        for tokens, share in zip(data.val, data.shares):
            loader = DataLoaderLite([tokens], [1], T, shuffle=False)
            n = max(1, min(facts["val_tokens"] // T, *loader.lengths))
            for i in range(n):
                x, y = loader.batch(i, 1, torch.device("cpu"))  # (1, T) each
                logits = model(x)[0][0]  # (T, vocab_size)
                nats = torch.nn.functional.cross_entropy(logits, y[0], reduction="sum").item()
                loss += float(share) * nats / loader.count_targets(0, n)
        later = max((model(x[:, :t])[0][0, -1] - logits[t - 1]).abs().max() for t in range(1, T, 9))
        with open(f"{place}/log.txt", "a") as file:
            file.write(f"{step} audit {loss:.8g}\n{step} later {later / logits.abs().max():.8g}\n")


def check(side, base, seeds):
    """Returns why the losses of a side's runs do not count, or None. See audit."""

    def find_fault(seed):
        logged, found = side.last(seed), side.last(seed, "audit")
        if found is None or not abs(found - logged) <= TOLERANCE * found:  # NaN is a fault, too
            return f"the log has a loss of {logged:.4f}, but the logits give {found or 0:.4f}"
        if not side.last(seed, "later") <= TOLERANCE:
            return "the logits of a position depend on later tokens"

    # A run with a fault is computed again, because the base may be another one by now.
    new = [str(side.directory(seed)) for seed in seeds if find_fault(seed)]
    facts = dict(base.facts, max_steps=side.facts["max_steps"])
    arguments = [str(LAB / "base"), str(LAB / side.name), facts, new]
    code = f"import sys, torch\n{inspect.getsource(audit)}\naudit(*{arguments!r})" if new else ""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return f"the base cannot score a model ({(done.stderr.splitlines() or ['killed'])[-1]})"
    return next(filter(None, map(find_fault, seeds)), None)


def compare(sides, config):
    """Trains the pairs -> the facts of the verdict. Raises UserError if a run fails."""
    ask(sides)
    if config.rates:
        choose_rates(sides, config.rates)
    facts = dict(keys=[s.key for s in sides], parameters=[s.facts["parameters"] for s in sides])
    if sides[0].key == sides[1].key:
        reason = "only comments, layout or docstrings have changed"
        return dict(facts, verdict="equal", difference=0.0, half=0.0, n=0, reason=reason)
    seeds = range(1, config.seeds + 1)
    new = [
        (side, seed, ["--seed", str(seed)])
        for seed in seeds
        for side in sides
        if side.last(seed) is None
    ]
    train(new)
    losses = np.array([[side.last(seed) for side in sides] for seed in seeds], float)
    if not np.isfinite(losses).all():
        raise UserError("a run was stopped, or its loss is not finite")
    paces = [np.median([*side.read(seed, "tok_s").values()]) for side, seed, _ in new]
    # Only runs that went side by side: a change that follows its base in the list.
    ratios = [paces[i] / paces[i + 1] for i in range(len(new) - 1) if new[i][1] == new[i + 1][1]]
    facts.update(
        compare_pairs(*losses.T, config.delta),
        losses=losses.tolist(),
        time_ratio=float(np.median(ratios)) if ratios else None,
    )
    cli.print0("computing the losses again")
    for side in sides:
        if reason := check(side, sides[0], seeds):
            return dict(facts, verdict="invalid", reason=reason)  # keeps the models, see check
        for seed in seeds[:-1]:
            for path in side.directory(seed).glob("model_*.pt"):
                path.unlink()
    return facts


def describe(entry):
    """An experiment of the ledger as one line, for a person."""
    figures = "{difference:+.4f} ± {half:.4f} in {n} pairs; " if "n" in entry else ""
    return ("{date}  {change}: {verdict}; " + figures + "{reason}").format(**entry)


def main():
    end = [*sys.argv, "--"].index("--")
    given = cli.parse_flags(__doc__, ExperimentConfig, argv=sys.argv[1:end], rest="PATCH")
    patches, more, config = given.pop("PATCH"), sys.argv[end + 1 :], ExperimentConfig(**given)
    ledger = [json.loads(line) for path in LEDGERS if path.exists() for line in open(path)]
    if config.list:
        return cli.print0("\n".join(map(describe, ledger)))
    if missing := [path for path in patches if not Path(path).is_file()]:
        raise UserError(f"{missing[0]}: no such patch; give a file")
    commit = cli.run_git("rev-parse", "--verify", f"{config.base}^{{commit}}").decode().strip()
    changes, files = b"".join(Path(path).read_bytes() for path in patches), []
    names = [Path(path).stem for path in patches]
    if not patches:
        # The settings of git may want colors, other prefixes or another program.
        fixed = "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/"
        changes = cli.run_git("diff", "--binary", *fixed, commit)
        found = cli.run_git("ls-files", "-z", "--others", "--exclude-standard", "*.py", place=ROOT)
        # The link by which Emacs locks model.py has this end, too, but leads to no file.
        files = [name for name in os.fsdecode(found).split("\0") if (ROOT / name).is_file()]
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
    cli.check_output("--json", config.json)
    LAB.mkdir(parents=True, exist_ok=True)
    cli.lock(LAB, "experiments in")  # until the program ends
    os.environ["OMP_NUM_THREADS"] = "1"  # in each run
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sides = [Side("base", config.flags.split()), Side("changed", config.flags.split() + more)]
    try:
        make_copy("base", commit)
        make_copy("changed", commit, changes, files)
        entry.update(compare(sides, config))
    except UserError as error:
        entry.update(verdict="failed", reason=str(error))
    finally:
        for side in sides:
            shutil.rmtree(LAB / side.name, ignore_errors=True)
        cli.run_git("worktree", "prune")
    entry["looks"] = 1 + sum(old.get("keys") == entry.get("keys", 0) for old in ledger)
    with cli.writing(LEDGERS[1]), open(LEDGERS[1], "a") as file:
        file.write(json.dumps(entry) + "\n")
    if config.json:
        cli.write_json(config.json, entry)
    cli.print0(f"{describe(entry)}\n{json.dumps(entry)}")
    sys.exit(STATUS[entry["verdict"]])


if __name__ == "__main__":
    cli.run_program(main)
