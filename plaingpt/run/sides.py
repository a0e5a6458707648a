"""Trains the two programs of an experiment, and computes the losses of their runs again."""

import hashlib
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from plaingpt.base.errors import UserError
from plaingpt.base.files import read_json
from plaingpt.base.git import CLONE
from plaingpt.base.log_file import read_streams
from plaingpt.base.machine import count_cores, count_gpus
from plaingpt.base.terminal import print0
from plaingpt.run.inputs import find_stream, hash_inputs

import numpy as np
from tqdm import tqdm

ROOT = CLONE.resolve()
# Has the program that records what a run reads, and the two programs that compute losses again.
AUDIT = ROOT / "experiments"
LAB = (ROOT / "log" / "experiments").resolve()  # log may be a link to a larger disk
# Facts in run.json that are not part of a run's identity. Data have a fingerprint, too.
OTHER_FACTS = (
    "git_commit",
    "untracked_files",
    "started",
    "flags",
    "seed",
    "log_dir",
    "data",
    "max_minutes",
)
UNCHANGED = "only comments, layout or docstrings have changed"
QUIET = "--sample_every 0 --sample_tokens 1 --keep 1 --resume".split()
TOLERANCE = 2e-3  # relative; rounding to bfloat16 makes a smaller difference
LATER_TOLERANCE = 1e-4  # relative; rounding to float32 makes a smaller difference
SEEN_TOLERANCE = 0.02  # of the validation sequences; some texts have repetitions


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


def count_slots():
    """Returns how many runs are trained at a time.

    It is an even number: runs of the same seed go at the same time, under the same load.
    """
    return max(1, (count_gpus() or count_cores()) // 2 * 2)


def train(runs, title="training; after Ctrl-C, the same command continues"):
    """Trains runs, as many at a time as there are GPUs or cores. Raises UserError if one fails.

    runs: [(side, name of the run, flags)]. A run that was stopped earlier continues. After Ctrl-C,
    each running one saves a checkpoint. title: what the progress bar says.
    """
    n_gpus = count_gpus()
    slots = count_slots()
    free = queue.SimpleQueue()  # the flags of each run that can start: its GPU, if there are GPUs
    processes = []
    for i in range(slots):
        free.put(["--device", f"cuda:{i}"] if n_gpus else [])

    def train_one(run):
        side, name, flags = run
        device = free.get()
        try:
            process = start_run(side, name, [*device, *side.flags, *flags])
            processes.append(process)
            status = process.wait()
        finally:
            free.put(device)
        if status:
            place = side.directory(name)
            lines = (place / "output.txt").read_text("utf-8", "replace").splitlines()
            raise UserError("\n".join([f"{place} failed:", *lines[-3:]]))

    # After an error or Ctrl-C, no other run starts, and those that have started come to their end.
    with ThreadPoolExecutor(slots) as pool:
        try:
            list(tqdm(pool.map(train_one, runs), title, len(runs)))  # waits for each run
        except KeyboardInterrupt:
            # A SIGTERM, such as that of a queue, reaches only this program. A second signal would
            # stop a run before it has saved, so each run gets only this one.
            for process in processes:
                process.send_signal(signal.SIGINT)  # does nothing after its end
            raise


def start_run(side, name, flags):
    """Starts a run of a side -> Popen. Its output goes to output.txt in the run directory."""
    place = side.directory(name)
    place.mkdir(parents=True, exist_ok=True)
    recorder = [sys.executable, AUDIT / "record_run.py", place]
    program = LAB / side.name / "train_gpt2.py"
    with open(place / "output.txt", "w") as file:
        return subprocess.Popen(
            [*recorder, program, *flags, *QUIET, "--log_dir", place],
            stdout=file,
            stderr=file,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C, see train
        )


def ask(sides):
    """Completes the sides: each program runs one step, and writes its facts. Raises UserError."""
    for side in sides:  # an older answer may be that of another size
        shutil.rmtree(side.directory("asked"), ignore_errors=True)
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


def train_missing(ladder, seeds):
    """Trains the runs that earlier experiments have not trained -> these runs, as in `train`.

    ladder: the two sides of each size. seeds: those of the base, and those of the change.
    """
    runs = []
    for sides in ladder:
        for seed in seeds[0]:  # the base has all seeds of the change
            for side, own in zip(sides, seeds):
                if seed in own and side.last(seed) is None:
                    runs.append((side, seed, ["--seed", str(seed)]))
    n = len(ladder) * (len(seeds[0]) + len(seeds[1]))
    print0(f"{n - len(runs)} of {n} runs are known")
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


def ratio_of_times(sides, runs):
    """Returns the time of a step with the change over that without it, or None without new runs.

    runs: those that were just trained, as in `train`.
    """
    if not runs:
        return None
    ratios = []
    # Two runs of the same seed follow each other in the list, and went side by side. A run whose
    # partner was trained earlier does not count: the machine may have had more to do.
    for (base, seed, _), (changed, next_seed, _) in zip(runs, runs[1:]):
        if seed == next_seed:
            ratios.append(median_tok_s(base, seed) / median_tok_s(changed, seed))
    if not ratios:
        for side in sides:
            shutil.rmtree(side.directory("timed"), ignore_errors=True)
        pair = [(side, "timed", ["--max_minutes", "0.1"]) for side in sides]
        train(pair, "measuring the time of a step")
        ratios = [median_tok_s(sides[0], "timed") / median_tok_s(sides[1], "timed")]
    return float(np.median(ratios))


def median_tok_s(side, seed):
    """Returns the median of a run's tokens per second."""
    return np.median(list(side.read(seed, "tok_s").values()))


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


def check_losses(sides, seeds):
    """Computes the losses of both sides again -> why they do not count, or None.

    If they count, deletes the models of all seeds but the first, which look.py can compare.
    """
    print0("computing the losses again")
    for side, own in zip(sides, seeds):
        if reason := find_fault(side, sides[0], own):
            return reason  # keeps the models, see find_fault
        for seed in own[1:]:
            for path in side.directory(seed).glob("model_*.pt"):
                path.unlink()
    return None


def show_look(sides, seeds):
    """Prints the command that compares the models of the first seed, token by token."""
    places = [os.path.relpath(side.directory(seeds[0][0])) for side in sides]
    print0("a page with the losses of both models, first that without the change, on any text:")
    print0(f'python look.py {" ".join(places)} --own_code --text "MARLOW: The boats came home."')


def finite_loss(side, run):
    """Returns the last loss of a run, or inf if there is none, or if it is NaN."""
    return min(math.inf, side.last(run) or math.inf)  # NaN is not below inf
