"""Trains the runs of two programs: the base, and the change."""

import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from plaingpt.base.errors import UserError
from plaingpt.base.files import checksum_of_places, read_json, read_streams
from plaingpt.base.machine import count_cores, count_gpus
from plaingpt.base.source import CLONE
from plaingpt.base.terminal import print0

import numpy as np
from tqdm import tqdm

ROOT = CLONE.resolve()
LAB = (ROOT / "log" / "experiments").resolve()  # log may be a link to a larger disk
# Facts in run.json that are not in the key. Runs with one key differ in their seed. The data are in
# it by their fingerprint, and the code by a hash of its own, see hash_of_copy.
OTHER_FACTS = (
    "program",
    "git_commit",
    "untracked_files",
    "started",
    "flags",
    "fingerprints",
    "seed",
    "log_dir",
    "data",
    "max_minutes",
    "gpu_gb",
)
MEMORY = r"([\d.]+) GB of the GPU"  # what Progress.show_end prints
CUDA_GB = 1.0  # that CUDA itself takes for a process
QUIET = "--sample_every 0 --sample_tokens 1 --keep 1 --resume".split()


@dataclass(frozen=True)
class Program:
    """The base or the change: a copy of the code, and flags."""

    name: str  # "base" or "change", also of the copy in LAB
    flags: list[str]
    code: str  # from hash_of_copy
    facts: dict | None = None  # those of run.json, from `probe`
    key: str = ""  # a hash of all that a loss depends on: runs with the same key differ in the seed
    runs_per_gpu: int | None = None  # None: as many as fit

    def directory(self, run):
        """Returns the directory of a run. It is also there for the next experiments."""
        return LAB / "runs" / f"{self.key}-{run}"

    def read(self, run, stream):
        """Returns the values of a stream in a run's log: {step: value}."""
        return read_streams(self.directory(run) / "log.txt").get(stream, {})

    def with_flags(self, flags):
        """Returns this program with more flags, not probed yet."""
        return replace(self, flags=[*self.flags, *flags], facts=None, key="")


class TrainingRun(NamedTuple):
    """A run that is to be trained."""

    program: Program
    directory: Path
    flags: list[str]  # beside those of the program


def probe_directory(name):
    """Returns the directory of the probe of a program."""
    return LAB / "probes" / name


def count_slots(programs):
    """Returns how many runs of these programs are trained at a time.

    It is an even number: runs of the same seed go at the same time, under the same load.
    """
    n_gpus = count_gpus()
    n = n_gpus * min(map(fit_into_gpu, programs), default=1) if n_gpus else count_cores()
    return max(1, n // 2 * 2)


def fit_into_gpu(program):
    """Returns how many runs of a program are trained at a time on each GPU.

    A small model leaves most of a GPU idle, because a core needs longer to start its kernels than
    the GPU needs to compute them. So each run has a core, and the memory that the probe has taken.
    """
    if program.runs_per_gpu:
        return program.runs_per_gpu
    if program.facts is None or program.facts["gpu_gb"] is None:
        return 1  # it is not known yet
    import torch  # as in count_gpus

    memory = torch.cuda.get_device_properties(0).total_memory / 1e9  # in GB
    fitting = int(memory / (program.facts["gpu_gb"] + CUDA_GB))
    return max(1, min(fitting, count_cores() // count_gpus()))


def train(runs, title="training; after Ctrl-C, the same command continues", may_fail=False):
    """Trains runs, as many at a time as count_slots says. Raises UserError if one must not fail.

    runs: list of TrainingRun. One that was stopped earlier continues. After Ctrl-C, each running
    one saves a checkpoint. title: what the progress bar says.
    """
    n_gpus = count_gpus()
    slots = count_slots([run.program for run in runs])
    free = queue.SimpleQueue()  # the flags of each run that can start: its GPU, if there are GPUs
    processes = []
    for i in range(slots):
        free.put(["--device", f"cuda:{i % n_gpus}"] if n_gpus else [])

    def train_one(run):
        device = free.get()
        try:
            process = start_run(run, device)
            processes.append(process)
            status = process.wait()
        finally:
            free.put(device)
        if status and not may_fail:
            lines = (run.directory / "output.txt").read_text("utf-8", "replace").splitlines()
            raise UserError("\n".join([f"{run.directory} failed:", *lines[-3:]]))

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


def start_run(run, device):
    """Starts a TrainingRun -> Popen. Its output goes to output.txt in the run directory.

    device: the flags that choose it.
    """
    run.directory.mkdir(parents=True, exist_ok=True)
    file = LAB / run.program.name / "train_gpt2.py"
    flags = [*device, *run.program.flags, *run.flags, *QUIET, "--log_dir", run.directory]
    with open(run.directory / "output.txt", "w") as output:
        return subprocess.Popen(
            [sys.executable, file, *flags],
            stdout=output,
            stderr=output,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C, see train
        )


def probe(programs, sealed):
    """Lets each program make a step, which writes its facts -> the programs with facts and key.

    programs: [base, change]. sealed: the sets on which the referee measures. Raises UserError.
    """
    runs = []
    for program in programs:
        place = probe_directory(program.name)
        shutil.rmtree(place, ignore_errors=True)  # it may be that of another size
        runs.append(TrainingRun(program, place, ["--max_minutes", "1e-4"]))
    train(runs, "one step")
    facts_of_both = []
    for program in programs:
        place = probe_directory(program.name)
        run_json = read_json(place / "run.json")
        train_config = run_json.pop("train_config")
        output = (place / "output.txt").read_text("utf-8", "replace")
        used = re.search(MEMORY, output)
        run_json["gpu_gb"] = float(used[1]) if used else None
        # run_json is last: it has the device and dtype that were chosen, not "auto" or "cuda:1".
        facts_of_both.append(train_config | run_json["model_config"] | run_json)
    base, change = facts_of_both
    for name in ("tokenizer", "block_size"):
        if base[name] != change[name]:
            raise UserError(
                f"the losses do not compare: the change has another {name}; "
                "leave this out, or give both programs the same"
            )
    measured = [base["block_size"], base["val_tokens"], base["val_spread"]]
    for part in sealed:
        path = Path(part["sealed"])
        measured.append([part["share"], path.parent.name, path.name])
    probed = []
    for program, facts in zip(programs, facts_of_both):
        known = {name: fact for name, fact in facts.items() if name not in OTHER_FACTS}
        known["training split"] = facts["fingerprints"]["training split"]
        weights = hash_of_weights(facts["init_from"])
        text = json.dumps([known, program.code, weights, measured], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        probed.append(replace(program, facts=facts, key=key))
    return probed


def hash_of_weights(name):
    """Returns a checksum of the weights of --init_from, or "" if they are not in a file.

    name: the value of the flag, or None.
    """
    path = Path(name or "")
    if name is None or not path.exists():
        return ""
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    return checksum_of_places(files)


def is_known(program, run):
    """Returns whether the referee has measured a run."""
    return (program.directory(run) / "referee.json").exists()


def train_missing(pairs, seeds):
    """Trains the runs that earlier experiments have not trained -> these runs, as in `train`.

    pairs: [base, change] of each size. seeds: those of the base, and those of the change.
    """
    runs = []
    for programs in pairs:
        for seed in seeds[0]:  # the base has all seeds of the change
            for program, own in zip(programs, seeds):
                if seed in own and not is_known(program, seed):
                    flags = ["--seed", str(seed)]
                    runs.append(TrainingRun(program, program.directory(seed), flags))
    n = len(pairs) * (len(seeds[0]) + len(seeds[1]))
    print0(f"{n - len(runs)} of {n} runs are known")
    train(runs)
    return runs


def ratio_of_times(programs, runs):
    """Returns the time of a step with the change over that of the base, or None without new runs.

    runs: those that were just trained, as in `train`.
    """
    if not runs:
        return None
    ratios = []
    # Two runs of the same seed follow each other in the list, and went side by side. A run whose
    # partner was trained earlier does not count: the machine may have had more to do.
    for run, following in zip(runs, runs[1:]):
        names = (run.program.name, following.program.name)
        if names == ("base", "change") and run.flags == following.flags:
            ratios.append(median_step_time(following.directory) / median_step_time(run.directory))
    if not ratios:
        base_time, change_time = time_steps(programs)
        ratios = [change_time / base_time]
    return float(np.median(ratios))


def time_steps(programs):
    """Trains a few steps of programs, side by side -> [the time of a step of each, in seconds]."""
    timed = []
    for i, program in enumerate(programs):
        place = probe_directory(f"timed_{i}")
        shutil.rmtree(place, ignore_errors=True)  # it may be that of another size
        timed.append(TrainingRun(program, place, ["--max_minutes", "0.1"]))
    train(timed, "measuring the time of a step")
    return [median_step_time(run.directory) for run in timed]


def median_step_time(place):
    """Returns the median time of a step of a run, in seconds. place: the run directory."""
    streams = read_streams(place / "log.txt")
    times = []
    before = 0
    for step, tokens in streams["tokens"].items():  # those consumed so far
        times.append((tokens - before) / streams["tok_s"][step])
        before = tokens
    return float(np.median(times))


def show_look(programs, seeds):
    """Prints the command that compares the models of the first seed, token by token."""
    places = [os.path.relpath(program.directory(seeds[0][0])) for program in programs]
    print0("a page with the losses of both models, first that of the base, on any text:")
    print0(f'python look.py {" ".join(places)} --own_code --text "MARLOW: The boats came home."')
