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
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Annotated, Literal

import plaingpt.device as devices  # must come before torch, see plaingpt/__init__.py

# isort: split
import torch

from model import GPTConfig
from plaingpt import cli
from plaingpt.checkpoint import whole_gpt
from plaingpt.data import plan_steps
from plaingpt.presets import PRESETS
from train_gpt2 import TrainConfig, make_training, train_step


@dataclass
class BenchConfig:
    preset: Annotated[Literal[tuple(PRESETS)], "model and recipe"] = "gpt2"
    batch_size: Annotated[int | None, "sequences [GPU: up to 64; CPU: 4]", "above 0"] = None
    steps: Annotated[int, "timed steps", "above 0"] = 10
    profile: Annotated[bool, "print the slowest operations; write bench_trace.json"] = False


# These flags of train_gpt2.py are the same here.
SharedConfig = make_dataclass(
    "SharedConfig",
    [
        (f.name, f.type, f.default)
        for f in (*fields(GPTConfig), *fields(TrainConfig))
        if f.name
        in (
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
    ],
)


def main(argv=None):
    given = cli.parse_flags(__doc__, BenchConfig, SharedConfig, argv=argv)
    bench = cli.pick(BenchConfig, given)
    values = {**PRESETS[bench.preset], **given}
    gpt_config, config = cli.pick(GPTConfig, values), cli.pick(TrainConfig, values)
    process = devices.start(config.device, config.dtype, config.tp, config.pp, config.parallel)
    cuda = process.device.type == "cuda"
    B, T = bench.batch_size or (64 if cuda else 4), gpt_config.block_size
    config = replace(
        config,
        compile=devices.choose_compile(config.compile, process.device),
        batch_size=B,
        total_batch_size=B * T * process.dp_size,
    )
    [(n, micro_B)] = sizes = plan_steps(config, T, math.inf, process.dp_size)
    training = make_training(gpt_config, config, process)
    B = bench.batch_size or devices.fit_batch_size(training, config, T, sizes, process)
    n, micro_B = B * process.dp_size, min(B, micro_B)
    torch.manual_seed(process.dp_rank)
    with devices.batch_size_advice(B):
        x, y = torch.randint(gpt_config.vocab_size, (2, B, T), device=process.device)  # (B, T) each
        micro_batches = list(zip(x.split(micro_B), y.split(micro_B)))

        def timed_step():
            start = time.perf_counter()
            # This also waits for the device.
            train_step(training, n * T, micro_batches, config.grad_clip, [], process)
            return time.perf_counter() - start

        # The first two steps may be slow.
        first, _, *times = [timed_step() for _ in range(bench.steps + 2)]
        if bench.profile:
            with torch.profiler.profile() as profiler:
                timed_step()
            sort_by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
            cli.print0(profiler.key_averages().table(sort_by=sort_by, row_limit=15))
            if process.rank == 0:
                profiler.export_chrome_trace("bench_trace.json")  # chrome://tracing shows it
    memory = torch.cuda.max_memory_allocated() if cuda else math.nan
    if not cuda and sys.platform != "win32":
        import resource  # Windows does not have it

        unit = 1 if sys.platform == "darwin" else 1024
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    flops = whole_gpt(gpt_config).flops_per_token()
    ms, peak = [1000 * seconds for seconds in times], devices.peak_flops(process)
    tok_s = n * T / statistics.median(times)
    share = f" | {tok_s * flops / peak:.1%} of peak" if peak else ""
    cli.print0(
        f"{'compiled' if config.compile else 'eager'} {process.dtype_name} "
        f"{config.optimizer} | {bench.preset} B={B} T={T} | {statistics.median(ms):,.0f} ms "
        f"({min(ms):,.0f}-{max(ms):,.0f}) | {tok_s:,.0f} tok/s | {tok_s * flops / 1e12:.2f} "
        f"TFLOP/s{share} | {memory / 1e9:.2f} GB | first step {first:.1f} s"
    )
    process.barrier()


if __name__ == "__main__":
    cli.run_program(main)
