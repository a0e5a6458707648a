"""Times a training step of train_gpt2.py and prints one row.

  python bench.py --preset gpt2 --batch_size 4
  torchrun --nproc_per_node=8 bench.py --preset gpt2-xl --parallel fsdp

In this help, [x] is the default of a flag, unless the preset has another value.
Other programs on a machine change all times, so compare runs that alternate.
docs/speed.md shows how to time the models of others.

After the settings, the row shows

- the median time of a step, and the times of the fastest and the slowest,
- the tokens per second of all processes,
- the operations of the model per second, counted with full attention,
- their share of the peak in the data sheet, if the GPU is a known one,
- the peak memory of one process, on a GPU only that of its tensors,
- the time of the first step; it includes compilation if --batch_size is given.
"""

import math
import statistics
import sys
import time
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Literal

from plaingpt.base.errors import run_program
from plaingpt.base.flags import flag, parse_flags, pick, types_of
from plaingpt.base.terminal import print0
from plaingpt.distributed.batch_search import fit_batch_size
from plaingpt.distributed.device import choose_compile
from plaingpt.distributed.hardware import peak_flops
from plaingpt.distributed.memory import batch_size_advice
from plaingpt.distributed.process import start
from plaingpt.run.presets import PRESETS
from plaingpt.run.steps import plan_steps

import torch

from model import GPTConfig
from train_gpt2 import TrainConfig, make_training, train_step


@dataclass
class BenchConfig:
    preset: Literal[tuple(PRESETS)] = flag("gpt2", "model and recipe")
    batch_size: int | None = flag(None, "sequences [GPU: up to 64; CPU: 4]", above=0)
    steps: int = flag(10, "timed steps", above=0)
    profile: bool = flag(False, "print the slowest operations; write bench_trace.json")


# These flags of train_gpt2.py are the same here.
SHARED = (
    "block_size",
    "optimizer",
    "device",
    "dtype",
    "compile",
    "parallel",
    "tp",
    "pp",
    "activation_checkpointing",
)


def shared_config():
    """Makes a dataclass of the fields of GPTConfig and TrainConfig that are in SHARED."""
    shared = []
    for config in (GPTConfig, TrainConfig):
        types = types_of(config)
        for each in fields(config):
            if each.name in SHARED:
                copy = field(default=each.default, metadata=each.metadata)
                shared.append((each.name, types[each.name], copy))
    return make_dataclass("SharedConfig", shared)


def main(argv=None):
    given = parse_flags(__doc__, BenchConfig, shared_config(), argv=argv)
    bench = pick(BenchConfig, given)
    values = {**PRESETS[bench.preset], **given}
    gpt_config = pick(GPTConfig, values)
    config = pick(TrainConfig, values)
    process = start(config.device, config.dtype, config.tp, config.pp, config.parallel)
    is_cuda = process.device.type == "cuda"
    T = gpt_config.block_size
    largest_B = bench.batch_size or (64 if is_cuda else 4)
    config = replace(
        config,
        compile=choose_compile(config.compile, process.device),
        batch_size=largest_B,
        total_batch_size=largest_B * T * process.dp_size,
    )
    sizes = plan_steps(config, T, math.inf, process.dp_size)
    training = make_training(gpt_config, config, process)
    B = bench.batch_size
    if not B:
        B, sizes = fit_batch_size(training, config, T, sizes, process)
    # All steps have one size, (n, B). With --pp, a step has several micro-batches.
    _, micro_B = sizes[0]
    n_tokens = B * T * process.dp_size  # in a step of all processes
    torch.manual_seed(process.dp_rank)
    with batch_size_advice(B):
        x, y = torch.randint(gpt_config.vocab_size, (2, B, T), device=process.device)  # (B, T) each
        micro_batches = list(zip(x.split(micro_B), y.split(micro_B)))

        def time_step():
            begin = time.perf_counter()
            # This also waits for the device.
            train_step(training, n_tokens, micro_batches, config.grad_clip, process)
            return time.perf_counter() - begin

        first = time_step()
        time_step()  # the second step may be slow, too
        seconds = [time_step() for _ in range(bench.steps)]
        if bench.profile:
            with torch.profiler.profile() as profiler:
                time_step()
            sort_by = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
            print0(profiler.key_averages().table(sort_by=sort_by, row_limit=15))
            if process.rank == 0:
                profiler.export_chrome_trace("bench_trace.json")  # chrome://tracing shows it
    ms = [1000 * each for each in seconds]
    tok_s = n_tokens / statistics.median(seconds)
    flops = tok_s * training.whole_gpt.flops_per_token()
    parts = [
        f"{'compiled' if config.compile else 'eager'} {process.dtype_name} {config.optimizer}",
        f"{bench.preset} B={B} T={T}",
        f"{statistics.median(ms):,.0f} ms ({min(ms):,.0f}-{max(ms):,.0f})",
        f"{tok_s:,.0f} tok/s",
        f"{flops / 1e12:.2f} TFLOP/s",
    ]
    if peak := peak_flops(process):
        parts.append(f"{flops / peak:.1%} of peak")
    parts.append(f"{peak_memory(process.device) / 1e9:.2f} GB")
    parts.append(f"first step {first:.1f} s")
    print0(" | ".join(parts))
    process.barrier()


def peak_memory(device):
    """Returns the peak memory of this process in bytes, on a GPU only that of its tensors.

    It is NaN where it is unknown.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return math.nan
    import resource  # Windows does not have it

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    run_program(main)
