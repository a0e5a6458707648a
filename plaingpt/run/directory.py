"""Prepares the directory of a run: moves an old run aside, and removes lines of log.txt."""

import shutil

from plaingpt.base.files import replacing, writing
from plaingpt.base.log_file import read_log
from plaingpt.base.terminal import print0

# A training step writes these streams. At one step, evaluations come before them. What comes after
# them is of the training step, too: it has streams that a user may add.
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


def prepare_run_directory(directory, step):
    """Prepares a directory for a run from this step on. Raises UserError.

    A run that starts at step 0 moves an old run aside. In a resumed run, log.txt loses the lines of
    the steps that are computed again. It keeps the validation losses and the scores of `step`.
    Returns these: {stream: value}.
    """
    log_file = directory / "log.txt"
    known = {}
    has_trained = False  # whether a line of the training step `step` has come
    with writing(f"--log_dir {directory}"):
        with replacing(log_file) as file:
            for line_step, stream, value in read_log(log_file):
                is_here = line_step == step > 0
                has_trained = has_trained or (is_here and stream in STEP_STREAMS)
                is_known = is_here and not has_trained
                if is_known:
                    known[stream] = float(value)
                if line_step < step or is_known:
                    file.write(f"{line_step} {stream} {value}\n".encode())
            # This comes after the file was created, which fails in a read-only directory.
            if step == 0:
                move_aside(directory)
    return known


def move_aside(directory):
    """Moves the files of an old run from `directory` to directory.1, or .2, ..."""
    old = []
    for name in RUN_FILES:
        old += directory.glob(name)
    if not old:
        return
    base = directory.resolve()  # this gives "." a name
    i = 1
    aside = base.with_name(f"{base.name}.{i}")
    while aside.exists():
        i += 1
        aside = base.with_name(f"{base.name}.{i}")
    aside.mkdir()
    for path in old:
        shutil.move(path, aside / path.name)  # os.rename fails across file systems
    print0(f"the old run in {directory} was moved to {aside}")
