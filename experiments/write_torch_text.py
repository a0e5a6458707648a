"""Writes a text that everybody has: the Python files of the installed torch, about 46 MB.

  python experiments/write_torch_text.py torch_py.txt

A hash of their names orders the files, so the end of the text, which is held out for validation,
does not come from one directory. Another version of torch yields another text; the fingerprint in
run.json then differs.
"""

import hashlib
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    root = Path(torch.__file__).parent
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    with open(sys.argv[1], "wb") as file:
        for name in names:
            file.write((root / name).read_bytes())
