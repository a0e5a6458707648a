"""Runs a program, and records which files it has read, and on which tokens it has trained.

experiment.py starts train_gpt2.py with this program. The arguments are a directory, the path of the
program, and its arguments. At the end, the directory has two files more:

  read.json    the paths of the files that the program has opened for reading and did not write,
               and of the Python files that it has imported
  trained.npy  (n,) int64, a number for each sequence that was in a forward pass with gradients. It
               depends on the first 64 ids, see number_of. A resumed run adds its own.

Only Python's own way to open a file is seen, not that of a library in another language.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import torch

POWERS = [pow(0x9E3779B97F4A7C15, k, 2**64) for k in range(64)]  # of an odd number


def main():
    place, program, *arguments = sys.argv[1:]
    opened = {True: set(), False: set()}  # {whether a file was opened for writing: paths}
    numbers = []  # tensors (B,)

    def record_file(event, args):
        if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            writes = args[2] & (os.O_WRONLY | os.O_RDWR) != 0
            opened[writes].add(os.path.abspath(os.fsdecode(args[0])))

    last = []  # the ids of the last call: GPT passes them on to its embedding

    def record_ids(module, args):
        # In compiled code, this does nothing. The compiled model itself is called as a module, too.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not args:
            return
        ids = args[0]
        if isinstance(ids, torch.Tensor) and ids.dtype == torch.int64 and ids.dim() == 2:
            if not any(ids is each for each in last):
                last[:] = [ids]
                numbers.append(number_of(ids))

    # Python takes the modules of a program from its directory.
    sys.path[0] = os.path.dirname(program)
    sys.argv[:] = [program, *arguments]
    sys.addaudithook(record_file)
    torch.nn.modules.module.register_module_forward_pre_hook(record_ids)
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        imported = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
        read = opened[False] - opened[True] | imported - {None} | {program}
        write_records(Path(place), read, numbers)


def number_of(ids):
    """Returns a number for each sequence: (B, T) int64 -> (B,) int64, a sum modulo 2^64.

    It is the sum of ids[:, k] * POWERS[k] over the first 64 ids.
    """
    ids = ids[:, : len(POWERS)]
    powers = np.array(POWERS[: ids.size(1)], np.uint64).astype(np.int64)
    return (ids * torch.from_numpy(powers).to(ids.device)).sum(1)


def write_records(place, read, numbers):
    """Writes read.json and trained.npy into a directory, see above."""
    files = sorted(path for path in read if os.path.isfile(path))
    (place / "read.json").write_text(json.dumps(dict(files=files)))
    path = place / "trained.npy"
    parts = [tensor.cpu().numpy() for tensor in numbers]
    if path.exists():
        parts.append(np.load(path))
    np.save(path, np.unique(np.concatenate([np.zeros(0, np.int64), *parts])))


if __name__ == "__main__":
    main()
