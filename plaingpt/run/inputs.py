"""Compares what the runs of experiment.py have read."""

import hashlib
from pathlib import Path

from plaingpt.base.errors import UserError
from plaingpt.base.source_hash import hash_of_code
from plaingpt.data.data_sets import log_names
from plaingpt.data.mixture import read_shares


def hash_inputs(files, copy, clone, facts):
    """Returns the facts of a run's inputs: {"program": hash, "files": {name: hash}}.

    program: its code in the copy, without comments. files: what else the run has read in the copy
    or in the clone, and the weights of --init_from. Data have a fingerprint, so they are left out.

    files: the paths in read.json, from experiments/record_run.py. copy: the directory with the
    program. clone: the directory of experiment.py. facts: those of the run. Raises UserError if the
    program reads a file of the clone that is another one in the copy.
    """
    code = []
    hashes = {}
    data = [Path(path).resolve() for path in read_shares(facts["data"])]
    weights = find_weights(facts["init_from"])
    for path in [Path(file).resolve() for file in files]:
        if path.suffix == ".pyc" or any(each in (path, *path.parents) for each in data):
            continue
        if path.is_relative_to(copy):
            if path.suffix == ".py":
                code.append(path)
            elif not path.is_relative_to(copy / "log"):  # a run directory
                hashes[str(path.relative_to(copy))] = hash_of_file(path)
        elif path in weights or path.parent in weights:
            hashes[path.name] = hash_of_file(path)
        elif path.is_relative_to(clone) and path.suffix != ".py":
            name = str(path.relative_to(clone))
            hashes[name] = hash_of_file(path)
            if (copy / name).is_file() and hash_of_file(copy / name) != hashes[name]:
                raise UserError(
                    f"{name}: both programs read the edited file of this clone; "
                    "open Path(__file__).with_name, which is in the copy"
                )
    for path in weights:  # a library in another language may have opened these
        if path.suffix in (".safetensors", ".bin"):
            hashes[path.name] = hash_of_file(path)
    return dict(program=hash_of_code(sorted(code)), files=hashes)


def find_weights(name):
    """Returns the paths of --init_from: a file, or a directory and the weights in it.

    name: the value of the flag, or None. A name on the hub has no path here.
    """
    if name is None or not Path(name).exists():
        return []
    path = Path(name).resolve()
    return [path, *path.glob("*.safetensors"), *path.glob("*.bin")]


def hash_of_file(path):
    """Returns the SHA-256 of a file, as a text."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            sha.update(block)
    return sha.hexdigest()


def find_stream(base, changed):
    """Returns the stream of the changed runs that has the loss on the validation data of the base.

    It is val, or val_NAME if the data of the base are one set of a mixture. None: there is no such
    stream. base, changed: facts.
    """
    if changed["validation split"] == base["validation split"]:
        return "val"
    names = log_names(read_shares(changed["data"]))
    # In a mixture, a set has its share before its fingerprint.
    for name, part in zip(names, changed["validation split"].split(" + ")):
        if part.partition(" of ")[2] == base["validation split"]:
            return f"val_{name}"
    return None
