"""Times a training step of train_gpt2.py and prints one row.

  python bench.py --preset gpt2 --batch_size 4
  torchrun --nproc_per_node=8 bench.py --preset gpt2-xl --parallel fsdp

Other programs on a machine change all times, so compare runs that alternate.
docs/speed.md shows how to time the models of others.

After the settings, the row shows

- the median time of a step, and the times of the fastest and the slowest,
- the tokens per second of all processes,
- the operations of the model per second, counted with full attention,
- their share of the peak in the data sheet, if the GPU is a known one,
- the peak memory of one process, on a GPU only that of its tensors,
- the time of the first step, which includes compilation.
"""

import math
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import plaingpt.device as devices  # must come before torch, see plaingpt/__init__.py

# isort: split
import torch

from model import PRESETS, GPTConfig
from plaingpt.checkpoint import whole_gpt
from plaingpt.cli import parse_flags, print0, run_program
from plaingpt.data import plan_steps
from train_gpt2 import RECIPES, TrainConfig, make_training, train_step


@dataclass
class BenchConfig:
    preset: Annotated[Literal[tuple(PRESETS)], "model and recipe"] = "gpt2"
    batch_size: Annotated[int | None, "sequences [64 on cuda, otherwise 4]", "above 0"] = None
    block_size: Annotated[int | None, "tokens in a sequence [the preset's]", "above 0"] = None
    steps: Annotated[int, "timed steps", "above 0"] = 10
    profile: Annotated[bool, "print the slowest operations; write bench_trace.json"] = False
    optimizer: Annotated[Literal["adamw", "muon"] | None, "[the preset's]"] = None
    device: Annotated[str, "cuda, cuda:1, mps or cpu"] = "auto"
    dtype: Annotated[devices.Dtype, "number format of matrix products"] = "auto"
    compile: Annotated[bool | None, "use torch.compile [on for cuda only]"] = None
    activation_checkpointing: Annotated[bool, "recompute activations to save memory"] = False
    parallel: Annotated[Literal["ddp", "fsdp"], "replicate the model or shard it"] = "ddp"
    tp: Annotated[int, "tensor parallel processes", "above 0"] = 1
    pp: Annotated[int, "pipeline stages", "above 0"] = 1


def main(argv=None):
    given = parse_flags(__doc__, BenchConfig, argv=argv)
    bench = BenchConfig(**given)
    process = devices.start(bench.device, bench.dtype, bench.tp, bench.pp, bench.parallel)
    cuda = process.device.type == "cuda"
    # The presets have no dropout, so all models compute the same.
    gpt_config = GPTConfig(**PRESETS[bench.preset])
    B = bench.batch_size or (64 if cuda else 4)
    T = gpt_config.block_size = bench.block_size or gpt_config.block_size
    given.update(compile=devices.choose_compile(bench.compile, process.device), batch_size=B,
                 total_batch_size=B * T * process.dp_size)
    values = {**RECIPES.get(bench.preset, {}), **given}
    config = TrainConfig(**{k: v for k, v in values.items() if hasattr(TrainConfig, k)})
    [(n, micro_B)] = plan_steps(config, T, math.inf, process.dp_size)
    torch.manual_seed(process.dp_rank)
    with devices.batch_size_advice(B):
        x, y = torch.randint(gpt_config.vocab_size, (2, B, T), device=process.device)  # (B, T) each
        micro_batches = list(zip(x.split(micro_B), y.split(micro_B)))
        training = make_training(gpt_config, config, process)

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
            print0(profiler.key_averages().table(sort_by=sort_by, row_limit=15))
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
    print0(f"{'compiled' if config.compile else 'eager'} {process.dtype_name} {config.optimizer} | "
           f"{bench.preset} B={B} T={T} | {statistics.median(ms):,.0f} ms ({min(ms):,.0f}-"
           f"{max(ms):,.0f}) | {tok_s:,.0f} tok/s | {tok_s * flops / 1e12:.2f} TFLOP/s{share} | "
           f"{memory / 1e9:.2f} GB | first step {first:.1f} s")
    process.barrier()


if __name__ == "__main__":
    run_program(main)
