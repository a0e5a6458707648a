"""Writes a training text without a download: the Python files of the installed torch, about 46 MB.

  python experiments/write_torch_text.py torch_py.txt

The files are sorted by the hash of their names. The end of the text, which is held out for
validation, thus contains files from many directories. A different version of torch yields a
different text, and a different fingerprint in run.json.
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
