"""Does and scores the runs of two programs: the baseline, and the program with the change."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from plaingpt.errors import UserError
from plaingpt.files import checksum_of_places, read_facts, read_json, read_streams
from plaingpt.machine import count_cores, count_gpus
from plaingpt.source_code import CLONE
from plaingpt.terminal import print0

from tqdm import tqdm

LAB = (CLONE.resolve() / "log" / "experiments").resolve()  # log may be a symbolic link
VALIDATION = LAB / "validation.pt"
QUIET = "--sample_every 0 --sample_tokens 1 --keep 1 --resume --log_dir".split()
# The key of a program omits these fields of run.json. All runs of a program have the same key, so
# the key omits the seed. In place of data, flags and program, the key contains the fingerprints of
# the data, the settings and a hash of the code. The other fields do not change the loss.
OTHER_FACTS = {*"seed data flags program git_commit untracked_files started gpu_memory_gb".split()}


class Program(NamedTuple):
    """One of the two programs that an experiment compares: a copy of the code, and its flags."""

    name: str  # "base" or "change", which is also the name of the copy in LAB
    flags: list
    facts: dict = {}  # the fields of run.json and of its configs; see `probe`
    key: str = ""  # a hash of everything that the loss depends on, except the seed
    speed: float = 0.0  # FLOPs per second of a run; 0 if unknown

    def place(self, seed):
        """Returns the directory of the run with this seed. A later experiment may reuse the run."""
        return LAB / "runs" / f"{self.key}-{seed}"

    def score(self, seed):
        """Returns the scores of the run with this seed: {"loss": ..., "later": ...}.

        "later" is the effect of later tokens on the logits of earlier positions.
        experiments/score.py writes these scores. If the run has no scores yet, returns {}.
        """
        return read_json(self.place(seed) / "score.json")

    def set(self, **settings):
        """Returns this Program with new settings. The key changes only if a setting changes."""
        new = {name: value for name, value in settings.items() if self.facts[name] != value}
        flags = [text for name, value in new.items() for text in (f"--{name}", str(value))]
        key = hash_of([self.key, new]) if new else self.key
        return self._replace(flags=[*self.flags, *flags], facts=self.facts | new, key=key)


def hash_of(value):
    """Returns a short hash of a value that JSON can represent."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def count_weights(facts):
    """Returns the number of weights in the matrices of a GPT. facts: as in Program."""
    C = facts["n_embd"]
    return 12 * facts["n_layer"] * C**2 + facts["vocab_size"] * C


def count_flops(facts):
    """Returns the FLOPs of a run: 6 per weight and token, plus the FLOPs of full attention.

    facts: as in Program.
    """
    attention = 12 * facts["n_layer"] * facts["n_embd"] * facts["block_size"]
    n_tokens = facts["max_steps"] * facts["total_batch_size"]
    return n_tokens * (6 * count_weights(facts) + attention)


def train(jobs, at_once, may_fail=False):
    """Starts or resumes runs. Returns after their end.

    Raises UserError if a run fails, unless may_fail is True. jobs: a list with (Program, run
    directory, additional flags) for each run. at_once: the number of parallel runs. After Ctrl-C,
    no further run starts, and the current runs save a checkpoint.
    """
    n_gpus = count_gpus()
    processes = []
    stopping = threading.Event()  # set after Ctrl-C
    # A run occupies a slot until it ends. The slots are distributed evenly over the GPUs.
    free = SimpleQueue()
    for slot in range(at_once):
        free.put(slot)

    def train_one(job):
        if stopping.is_set():
            return
        program, place, more = job
        place.mkdir(parents=True, exist_ok=True)
        slot = free.get()
        device = ["--device", f"cuda:{slot % n_gpus}"] if n_gpus else []
        # Python imports modules from the directory of the program that it runs. Therefore, `probe`
        # has copied score.py into the copy, and score.py imports the model.py there.
        command = [sys.executable, LAB / program.name / "score.py", VALIDATION, *device]
        command += [*program.flags, *more, *QUIET, place]
        try:
            with open(place / "output.txt", "w") as output:
                # In its own session, the run does not receive the terminal's Ctrl-C, only the
                # SIGTERM from terminate() below.
                run = subprocess.Popen(
                    command, stdout=output, stderr=output, start_new_session=True
                )
                processes.append(run)
                if stopping.is_set():  # Ctrl-C came while the process was created
                    run.terminate()
                status = run.wait()
        finally:
            free.put(slot)
        if status and not may_fail:
            lines = (place / "output.txt").read_text("utf-8", "replace").splitlines()
            print0("\n".join(lines[-20:]))
            raise UserError(f"{place} failed: {lines[-1] if lines else 'it was killed'}")

    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(tqdm(pool.map(train_one, jobs), "Ctrl-C saves", len(jobs)))
        except KeyboardInterrupt:
            stopping.set()
            for process in processes:
                process.terminate()  # the run saves a checkpoint; a finished run ignores the signal
            raise


def probe(programs):
    """Runs each program for about one second. Returns the Programs with facts, key and speed.

    programs: [base, change]. The run of the baseline also writes the validation sequences on which
    all runs are scored.
    """
    VALIDATION.unlink(missing_ok=True)
    found = []
    for program in programs:
        place = LAB / "probes" / program.name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copy(CLONE / "experiments" / "score.py", LAB / program.name)
        train([(program, place, ["--max_minutes", "0.02"])], 1)
        facts = read_facts(place / "run.json")
        facts = facts.pop("train_config") | facts.pop("model_config") | facts
        code = read_json(place / "program.json")
        other = OTHER_FACTS.union(code["change_no_loss"])
        known = {name: value for name, value in facts.items() if name not in other}
        start = Path(facts["init_from"] or "/nowhere")
        files = sorted(file for file in (start, *start.glob("*")) if file.is_file())
        key = hash_of([code["hash"], known, checksum_of_places([VALIDATION, *files])])
        # The first step is slow, so its speed is not used. With torch.compile, the run may
        # contain only this step.
        tokens_per_second = [*read_streams(place / "log.txt")["tok_s"].values()][1:]
        n_tokens = facts["max_steps"] * facts["total_batch_size"]
        speed = max(tokens_per_second, default=0) * count_flops(facts) / n_tokens
        found.append(program._replace(facts=facts, key=key, speed=speed))
    for name in ("tokenizer", "block_size"):
        if found[0].facts[name] != found[1].facts[name]:
            raise UserError(f"the losses are not comparable: the change uses a different {name}")
    return found


def run_missing(programs, seeds, at_once=None, may_fail=False):
    """Does the runs that have no score yet. Returns the losses: a list for each program.

    seeds: a list for each program. at_once: the number of parallel runs; None: one per GPU or core.
    may_fail: whether runs may fail, for example because of a large learning rate. A loss that is
    missing or not finite is None.
    """
    at_once = at_once or count_gpus() or count_cores()
    runs = [(seed, program) for program, own in zip(programs, seeds) for seed in own]
    runs.sort(key=lambda run: run[0])  # so that runs with the same seed start together
    missing = [(seed, program) for seed, program in runs if not program.score(seed)]
    line = f"{len(runs) - len(missing)} of {len(runs)} runs are already finished"
    if missing and all(program.speed for program in programs):
        seconds = sum(count_flops(program.facts) / program.speed for _, program in missing)
        line += f"; the other runs take about {seconds / 60 / at_once:.1f} minutes"
    print0(line)
    jobs = [(program, program.place(seed), ["--seed", str(seed)]) for seed, program in missing]
    train(jobs, at_once, may_fail)
    return [[p.score(seed).get("loss") for seed in own] for p, own in zip(programs, seeds)]
