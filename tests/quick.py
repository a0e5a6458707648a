"""train_gpt2.py with short samples.

At the end it prints the memory of each process in MB: before the model was built, and the maximum.
"""

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch._dynamo  # noqa: E402, F401  before memory is measured

import plaingpt.parallel  # noqa: E402, F401
import train_gpt2  # noqa: E402
from model import GPT  # noqa: E402
from plaingpt.cli import run  # noqa: E402

before, init, generate = [], GPT.__init__, GPT.generate


def measured_init(self, config):
    before.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    init(self, config)


def short_generate(self, idx, max_new_tokens, *args, **kwargs):
    return generate(self, idx, min(max_new_tokens, 12), *args, **kwargs)


GPT.__init__, GPT.generate = measured_init, short_generate
run(train_gpt2.main)
# Not ru_maxrss, because it includes the parent process.
most = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
print("MB", before[0] / 1e6, int(most[1]) * 1024 / 1e6)
