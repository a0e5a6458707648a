"""Times a training step of train_gpt2.py.

  python bench.py --preset gpt2 --batch_size 4
  python bench.py --batch_size 16 32 64 --peer plain transformers
  torchrun --nproc_per_node=8 bench.py --preset gpt2-xl --parallel fsdp

--peer also times a model like build-nanogpt's (plain) and that of Hugging Face
(transformers), eager and compiled. All models alternate, each in a new process.

Columns of the table:
  ms        median time of a step; column range: fastest to slowest
  tok/s     tokens per second of all processes together
  TFLOP/s   operations of the model per second, with full attention
  peak      share of the GPU's peak TFLOP/s in its data sheet (MFU)
  GB        peak memory of one process; on a GPU, of its tensors
  first s   time of the first step, with compilation
  x slower  time of a step divided by that of plainGPT
"""

import itertools
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

import plaingpt.device as devices
from model import GPT, PRESETS, GPTConfig
from plaingpt.checkpoint import on_meta
from plaingpt.cli import UserError, first_line, parse_flags, print0, require, run
from train_gpt2 import RECIPES, TrainConfig, prepare, train_step

TRACE = "bench_trace.json"
ROW = "{:>4} {:31} {:>8} {:>15} {:>10} {:>8} {:>8} {:>7} {:>8} {:>8}"
HEAD = "B|step|ms|range|tok/s|TFLOP/s|peak|GB|first s|x slower".split("|")


@dataclass
class BenchConfig:
    preset: Annotated[Literal[tuple(PRESETS)], "model and recipe"] = "gpt2"
    batch_size: Annotated[list[int] | None, "sequences [64 on cuda, else 4]", "above 0"] = None
    block_size: Annotated[int | None, "tokens in a sequence [the preset's]", "above 0"] = None
    steps: Annotated[int | None, "timed steps in a round [20 on cuda, else 2]", "above 0"] = None
    rounds: Annotated[int, "rounds of timing; with torchrun: 1", "above 0"] = 3
    optimizer: Annotated[Literal["adamw", "muon"] | None, "[preset's; with --peer: adamw]"] = None
    device: Annotated[str, "cuda, cuda:1, mps or cpu"] = "auto"
    dtype: Annotated[devices.Dtype, "number format of matrix products"] = "auto"
    compile: Annotated[bool | None, "use torch.compile for our step [on for cuda]"] = None
    activation_checkpointing: Annotated[bool, "recompute activations to save memory"] = False
    parallel: Annotated[Literal["ddp", "fsdp"], "replicate the model or shard it"] = "ddp"
    tp: Annotated[int, "tensor parallel processes", "above 0"] = 1
    pp: Annotated[int, "pipeline stages", "above 0"] = 1
    peer: Annotated[list[Literal["plain", "transformers"]] | None, "also time these models"] = None
    profile: Annotated[bool, f"print the slowest operations; write {TRACE}"] = False


class Peer(torch.nn.Module):
    """A model with the usual last layer: all logits at once, then their loss."""

    configure_optimizers = GPT.configure_optimizers

    def __init__(self, name, config):
        super().__init__()
        self.loss_fn = torch.nn.Identity()  # unused, but Trainer compiles model.loss_fn
        if name == "plain":  # 50,304 ids instead of 50,257
            torch.set_float32_matmul_precision("high")
            vocab_size = config.vocab_size + -config.vocab_size % 128
            self.model = GPT(replace(config, vocab_size=vocab_size))
        else:
            transformers = require("transformers")
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
                **vars(config), n_positions=config.block_size, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0))

    def forward(self, idx, targets):
        logits = self.model(idx)[0].float()  # (B, T, vocab_size)
        return None, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(name, config, with_profile, gpt_config, B, n, device):
    """Times n steps. Returns lists: first (1 time in s), times (n times in s), memory (bytes)."""
    cuda = device.type == "cuda"
    rank, _, world_size = devices.ranks()
    if name == "plainGPT" and not dist.is_initialized():
        devices.setup(config.device)
    dtype = devices.choose_dtype(config.dtype, device)
    torch.manual_seed(devices.data_parallel_rank(config, rank, world_size)[0])
    with devices.memory_advice(f"--batch_size {B} does not fit into memory"):
        x, y = torch.randint(gpt_config.vocab_size, (2, B, gpt_config.block_size), device=device)
        if name == "plainGPT":
            model, weights = on_meta(gpt_config)
        else:
            model, weights = Peer(name, gpt_config), None
        trainer = prepare(model, config, device, dtype, weights)

        def timed_step():
            start = time.perf_counter()
            train_step(trainer, [(x, y)], 1, config.grad_clip)
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - start

        first, _, *times = [timed_step() for _ in range(n + 2)]  # the second may be slow, too
        unit = 1 if sys.platform == "darwin" else 1024
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if cuda:
            memory = torch.cuda.max_memory_allocated()
        if with_profile:
            with torch.profiler.profile() as profiler:
                timed_step()
            sort_by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
            print0(f"one step of plainGPT at B={B}; trace: {TRACE}")
            print0(profiler.key_averages().table(sort_by=sort_by, row_limit=15))
            if rank == 0:
                profiler.export_chrome_trace(TRACE)
        return dict(first=[first], times=times, memory=[memory])


def run_rounds(models, rounds, with_profile, *args):
    """Measures every model in every round. Returns {label: results of all its rounds}."""
    results = defaultdict(lambda: defaultdict(list))
    for i, (name, config) in itertools.product(range(rounds), models):
        label = f"{name} {'compiled' if config.compile else 'eager'} {config.dtype}"
        if not results[label]["failure"]:
            print0(f"round {i + 1}: {label}")
            profiled = with_profile and i == 0 and name == "plainGPT"
            for key, values in in_new_process(measure, name, config, profiled, *args).items():
                results[label][key] += values
    return results


def exit_with_parent():
    """Ends this process when the main process ends, even if a signal kills the main process."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def in_new_process(function, *args):
    """Returns function(*args), or dict(failure=[text]). With torchrun it runs in this process."""
    if dist.is_initialized():
        return function(*args)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), exit_with_parent) as pool:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the child, which inherits it
        future = pool.submit(function, *args)
        signal.signal(signal.SIGINT, handler)
        try:
            return future.result()
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.kill()
            raise
        except Exception as error:  # the other models continue
            if not isinstance(error, UserError):
                traceback.print_exc()
            return dict(failure=[first_line(error)])


def print_rows(B, results, tokens, flops, peak):
    """Prints the table of one batch size. tokens: of a step; flops: of a token."""
    print0(ROW.format(*HEAD))
    our_time = None
    for label, result in results.items():
        if result["failure"]:
            print0(f"{B:4} {label:31} {result['failure'][0]}")
            continue
        ms = [1000 * seconds for seconds in result["times"]]
        seconds = statistics.median(result["times"])
        if label.startswith("plainGPT"):
            our_time = seconds
        speed = tokens * flops / seconds
        print0(ROW.format(
            B, label, f"{1000 * seconds:,.0f}", f"{min(ms):,.0f}-{max(ms):,.0f}",
            f"{tokens / seconds:,.0f}", f"{speed / 1e12:.2f}",
            f"{speed / peak:.1%}" if peak else "-", f"{max(result['memory']) / 1e9:.2f}",
            f"{result['first'][0]:.1f}", f"{seconds / our_time:.2f}" if our_time else "-"))


def main(argv=None):
    given = parse_flags(__doc__, BenchConfig, argv=argv)
    bench = BenchConfig(**given)
    _, world_size, device = devices.setup(bench.device, keep_memory=bench.parallel != "fsdp")
    if bench.peer and world_size > 1:
        raise UserError("--peer: needs one process; leave it out with torchrun")
    cuda = device.type == "cuda"
    dtype = devices.choose_dtype(bench.dtype, device)
    same = ("optimizer", "device", "compile", "activation_checkpointing", "parallel", "tp", "pp")
    values = {**RECIPES[bench.preset], "compile": cuda}
    values.pop("dropout", None)  # no dropout, so that all models compute the same
    if bench.peer:
        values["optimizer"] = "adamw"
    values.update({k: given[k] for k in same if k in given})
    config = TrainConfig(**values, dtype=str(dtype).removeprefix("torch."))
    _, dp_size = devices.data_parallel_rank(config, 0, world_size)
    gpt_config = GPTConfig(**PRESETS[bench.preset])
    T = gpt_config.block_size = bench.block_size or gpt_config.block_size
    model, _ = on_meta(gpt_config)  # takes no memory
    flops, peak = model.flops_per_token(), devices.peak_flops(device, dtype, world_size)
    n_parameters = sum(p.numel() for p in model.parameters())
    print0(f"{bench.preset}: {n_parameters:,} parameters, T={T}, {config.optimizer}, "
           f"{flops / 1e6:,.2f} MFLOP a token with full attention; {devices.describe(device)}; "
           f"torch {torch.__version__}; processes: {world_size} ({config.parallel}, "
           f"tp {config.tp}, pp {config.pp})")
    models = [("plainGPT", config)]
    for peer in bench.peer or []:
        compiled = replace(config, optimizer="adamw", activation_checkpointing=False, compile=True)
        eager_dtype = "float32" if peer == "transformers" else config.dtype
        models += [(peer, replace(compiled, compile=False, dtype=eager_dtype)), (peer, compiled)]
    rounds = 1 if world_size > 1 else bench.rounds
    n = bench.steps or (20 if cuda else 2)
    for B in bench.batch_size or [64 if cuda else 4]:
        results = run_rounds(models, rounds, bench.profile, gpt_config, B, n, device)
        print_rows(B, results, B * T * dp_size, flops, peak)
    devices.shut_down(world_size)


if __name__ == "__main__":
    run(main)
