"""The directory of a run: moves an old run aside, and writes run.json and changes.patch."""

import os
import time
from dataclasses import asdict
from pathlib import Path

from plaingpt.base.errors import UserError
from plaingpt.base.files import format_log, read_log, replacing, write_json, writing
from plaingpt.base.source import hash_of_program, read_git
from plaingpt.base.terminal import print0
from plaingpt.distributed.device import hardware_name
from plaingpt.weights.checkpoint import find_checkpoints, step_of

import torch

# Each line of log.txt belongs to a stream, such as "train". A training step writes these streams
# after the evaluations at the same step. All later lines with the same step number, such as
# metrics that an edit adds, also belong to the training step.
STEP_STREAMS = {"train", "lr", "norm", "tok_s", "tokens"}
RUN_FILES = (
    "log.txt",
    "run.json",
    "changes.patch",
    "model_*.pt",
    "look*.html",
    "events.out.tfevents.*",
    "wandb",
)


def check_newest(directory, resume, step):
    """Raises UserError if another process has saved a newer checkpoint than this process has read.

    resume: whether the run continues an earlier run. step: the step of the checkpoint that this
    process has read, or 0.
    """
    paths = find_checkpoints(directory)
    newest = step_of(paths[-1]) if paths else 0
    if resume and newest != step:
        raise UserError(
            f"{directory}: another process changed the checkpoints after this process had read "
            "the newest checkpoint; start this process again"
        )


def prepare_run_directory(directory, step):
    """Prepares a directory for a run that starts at `step`. Raises UserError.

    At step 0, moves an old run into a subdirectory. For a resumed run, removes from log.txt all
    lines that the run will write again, but keeps the validation losses and the benchmark scores at
    `step`. Returns these losses and scores: {stream: value}.
    """
    log_file = directory / "log.txt"
    known = {}
    has_trained = False  # whether the loop has seen a line of the training step `step`
    with writing(f"--log_dir {directory}"):
        with replacing(log_file) as file:
            for line_step, stream, value in read_log(log_file):
                is_here = line_step == step > 0
                has_trained = has_trained or (is_here and stream in STEP_STREAMS)
                is_known = is_here and not has_trained
                if is_known:
                    known[stream] = float(value)
                if line_step < step or is_known:
                    file.write(format_log(line_step, stream, value).encode())
            # Moves files last. In a read-only directory, creating log.txt fails before any move.
            if step == 0:
                move_aside(directory)
    return known


def move_aside(directory):
    """Moves the files of an old run into directory/old-1, or old-2, ... Raises OSError.

    The directory may be a separate volume, so the files stay inside it. If one move fails, all
    files are moved back.
    """
    old = []
    for name in RUN_FILES:
        old += directory.glob(name)
    if not old:
        return
    i = 1
    while (directory / f"old-{i}").exists():
        i += 1
    aside = directory / f"old-{i}"
    aside.mkdir()
    moved = []
    try:
        for path in old:
            os.rename(path, aside / path.name)
            moved.append(path)
    except OSError:
        for path in moved:
            os.rename(aside / path.name, path)
        aside.rmdir()
        raise
    print0(f"the old run in {directory} was moved to {aside}")


def write_facts(step, training, config, flags, data, process):
    """Writes run.json and changes.patch, so that a user can repeat the run.

    changes.patch contains the uncommitted changes of tracked files, if any. run.json lists the
    names of untracked files.

    step: where the run starts. If step is max_steps, the user has resumed a finished run, and its
    files stay unchanged. training: a Training. flags: {name: value} of the flags on the command
    line. Raises UserError.
    """
    if step == config.max_steps:
        return
    commit, untracked, changes = read_git()
    facts = dict(
        model_config=asdict(training.gpt_config),
        train_config=asdict(config),
        flags=flags,
        parameters=training.count_parameters(),
        tokenizer=data.tokenizer.name,
        fingerprints=data.fingerprints,
        train_tokens=sum(map(len, data.train)),
        dtype=process.dtype_name,
        device=hardware_name(process.device),
        processes=process.n_processes,
        threads=torch.get_num_threads(),
        program=hash_of_program(),
        git_commit=commit or None,
        untracked_files=untracked,
        started=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        versions=dict(torch=torch.__version__),
    )
    directory = Path(config.log_dir)
    write_json(directory / "run.json", facts)
    patch = directory / "changes.patch"
    with writing(directory):
        if changes:
            patch.write_bytes(changes)
        elif commit:  # removes an older patch, because the code has no changes now
            patch.unlink(missing_ok=True)
