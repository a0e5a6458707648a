"""train_gpt2.py for tests of many processes: samples of a few tokens, and at the end the memory of each process.

The line says how many MB were resident before the model was made, and the most since.
"""

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch._dynamo  # noqa: E402, F401  so that what it takes is there before the model

import train_gpt2  # noqa: E402
from model import GPT  # noqa: E402
from plaingpt import (
    cli,  # noqa: E402
    parallel,  # noqa: E402, F401
)

before, init, generate = [], GPT.__init__, GPT.generate


def measured_init(self, config):
    before.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    init(self, config)


GPT.__init__ = measured_init
GPT.generate = lambda self, idx, max_new_tokens, *args, **kwargs: generate(self, idx, min(max_new_tokens, 12), *args, **kwargs)
cli.run(train_gpt2.main)
most = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())  # ru_maxrss would count what started us, too
print("MB", before[0] / 1e6, int(most[1]) * 1024 / 1e6)
