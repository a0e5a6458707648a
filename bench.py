"""How fast is a training step? That of train_gpt2.py itself, beside others and beside what the machine can multiply.

  python bench.py --preset gpt2 --batch_size 4                            tokens a second, MFU, memory
  python bench.py --batch_size 16 32 64 128 --peer plain transformers     beside a plain step and Hugging Face's GPT-2
  python bench.py --profile                                               where the time goes, and a trace to look at
  torchrun --nproc_per_node=8 bench.py --profile                          the same with communication
  torchrun --nproc_per_node=8 bench.py --preset gpt2-xl --parallel fsdp   a model in parts

Every contestant lives in a process of its own, so that its memory can be told and no setting is shared, and they take
turns: a few steps of each, then a few of each again. In the table, last:

  ms          a step: the median over all turns, and the fastest and the slowest
  tok/s       of all processes together; TFLOP/s counts as PaLM does, attention in full
  matmul      the share of what one product of large matrices, in our dtype, reaches in our process at the same time
  peak        the share of the GPU's data sheet: MFU
  GB          the most memory so far, of one process: on a GPU of its tensors, else all that was resident
  first s     the first step, with compiling
  x slower    a step's time, ours being 1
"""

# Read next: plot.py.

import re
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from torch.profiler import profile
from tqdm import tqdm

from model import GPT, PRESETS, GPTConfig
from plaingpt.cli import UserError, first_line, parse_flags, print0, run
from plaingpt.device import choose_dtype, describe, find_device, out_of_memory, peak_flops, ranks, setup, shut_down
from train_gpt2 import RECIPES, TrainConfig, check_config, check_layout, data_share, prepare, train_step

ROUNDS, TRACE = 3, "bench_trace.json"


@dataclass
class BenchConfig:
    preset: str = "gpt2"  # the model and its recipe, as in train_gpt2.py
    batch_size: list[int] = None  # sequences in a step of one process, or of those that share a model [64 on cuda, else 4]
    block_size: int = None  # tokens in a sequence [the preset's]
    steps: int = None  # timed in each of three rounds [20 on cuda, else 2]
    optimizer: str = None  # adamw or muon [the preset's]; the peers' is adamw
    device: str = "auto"  # cuda, mps or cpu
    dtype: str = "auto"  # bfloat16, float16 or float32
    compile: bool = None  # torch.compile our step [on for cuda]
    activation_checkpointing: bool = False  # keep only what enters a block, and compute the rest again
    parallel: str = "ddp"  # or fsdp; this and the next two as in train_gpt2.py
    tp: int = 1  # processes that compute each layer together
    pp: int = 1  # processes that have some of the blocks each
    peer: list[str] = None  # plain (as build-nanogpt does it), transformers (Hugging Face's GPT-2): each eager and compiled
    profile: bool = False  # say where our time goes, and write a trace for chrome://tracing to bench_trace.json


class PlainGPT(GPT):
    """The usual last layer: all logits at once, 50,304 wide, and then their loss."""

    def forward(self, idx, targets):
        logits = self.lm_head(self.hidden(idx))  # (B, T, vocab_size)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def our_step(gpt_config, config, device, dtype, x, y):
    """The step of train_gpt2.py, as a function that makes one and returns the loss."""
    model, optimizers, _ = prepare(GPT(gpt_config), config, device, dtype)
    return lambda: train_step(model, optimizers, repeat((x, y)), 1, config.grad_clip)[0]


def peer_step(name, gpt_config, config, device, dtype, x, y):
    """The step as people write it, on the same batch and with the same optimizer."""
    if name == "plain":
        torch.set_float32_matmul_precision("high")
        module = PlainGPT(replace(gpt_config, vocab_size=gpt_config.vocab_size + -gpt_config.vocab_size % 128))
    else:
        from transformers import GPT2Config, GPT2LMHeadModel
        shape = {k.replace("block_size", "n_positions"): v for k, v in asdict(gpt_config).items()}
        module = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    model = torch.compile(module.to(device)) if config.compile else module.to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=config.max_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(x, y)[1] if name == "plain" else model(x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def serve(pipe, name, gpt_config, config, B):
    """A contestant's process: steps whenever the pipe asks for some, a profile when it asks for 0, the end at None."""
    try:
        ours = name == "plainGPT"
        rank, world_size, device = setup(config.device, config.parallel != "fsdp") if ours else \
            (0, 1, find_device(config.device))
        dtype = choose_dtype(config.dtype, device)
        torch.manual_seed(data_share(config, rank, world_size)[0])
        x, y = torch.randint(gpt_config.vocab_size, (2, B, gpt_config.block_size), device=device)
        step = our_step(gpt_config, config, device, dtype, x, y) if ours else \
            peer_step(name, gpt_config, config, device, dtype, x, y)
        pipe.send([timed(step, device)])
        while (n := pipe.recv()) is not None:
            step()  # the caches are full of somebody else's numbers
            if n == 0:
                pipe.send(by_kind(step, device, rank))
                continue
            seconds = [timed(step, device) for _ in range(n)]
            pipe.send((seconds, peak_memory(device), matmul_rate(device, dtype) if ours else None))
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the next one needs the room
        if ours:
            shut_down(world_size)
    except (RuntimeError, UserError, ImportError) as error:
        pipe.send("does not fit into memory" if out_of_memory(error) else first_line(error)[:100])


def timed(step, device):
    """Seconds from the start of a step to the end of all it set going."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_memory(device):
    """The most bytes so far: on a GPU those of the tensors, else all that was resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def matmul_rate(device, dtype):
    """FLOP/s of one product of large random matrices: all that the machine has to give."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / statistics.median([timed(lambda: a @ b, device) for _ in range(12)][2:])


# What an operator or a kernel is for, told by its name and those of its callers; the first that fits counts.
KINDS = {
    "communication": r"nccl|gloo|c10d|all_?reduce",
    "optimizer": r"adam|muon|multi_tensor_apply|clip_grad|vector_norm",
    "attention": r"scaled_dot_product|flash|fmha|sdpa",
    "matmul": r"gemm|nvjet|cutlass|xmma|\b(add|b|badd)?mm\b",
    "cross-entropy": r"cross_?entropy|log_?softmax|nll_loss|amax",
}


def kind(name, callers=""):
    """One of KINDS, or else "norms and elementwise"."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, name if kind in ("attention", "matmul") else f"{name} {callers}", re.I):
            return kind
    return "norms and elementwise"


def by_kind(step, device, rank, n=3):
    """Profiles n steps -> ({kind: seconds a step}, seconds a step). What is of no kind is waiting. Rank 0 writes the trace."""
    start = time.perf_counter()
    with profile() as profiler:
        for _ in range(n):
            timed(step, device)
        seconds = time.perf_counter() - start
    total = dict.fromkeys((*KINDS, "norms and elementwise"), 0.0)
    for event in profiler.events():
        if device.type == "cuda":
            if event.device_type.name == "CUDA" and not event.is_user_annotation:
                total[kind(event.name)] += event.time_range.elapsed_us() / 1e6 / n
        else:
            callers, parent = "", event.cpu_parent
            while parent:
                callers, parent = f"{callers} {parent.name}", parent.cpu_parent
            total[kind(event.name, callers)] += event.self_cpu_time_total / 1e6 / n
    total["waiting, and Python"] = max(0.0, seconds / n - sum(total.values()))  # communication may hide behind the rest
    if rank == 0:
        profiler.export_chrome_trace(TRACE)
    return total, seconds / n


def race(entries, gpt_config, B, steps, with_profile):
    """Times the entries turn and turn about -> (for each its answers, or at last a reason why not; our profile or None)."""
    context, running = get_context("spawn"), []

    def ask(pipe, process, *question):
        try:
            for q in question:
                pipe.send(q)
            return pipe.recv()
        except (EOFError, BrokenPipeError):
            process.join()
            return f"its process ended with status {process.exitcode}; -9 means that the memory was full"

    for name, config in entries:
        pipe, end = context.Pipe()
        process = context.Process(target=serve, args=(end, name, gpt_config, config, B), daemon=True)
        process.start()
        end.close()
        print0(f"B={B}: first step of {label(name, config)}")
        running.append((pipe, process, [ask(pipe, process)]))
    for _ in tqdm(range(ROUNDS), desc="rounds", leave=False, disable=not sys.stderr.isatty()):
        for pipe, process, answers in running:
            if not isinstance(answers[-1], str):
                answers.append(ask(pipe, process, steps))
    pipe, process, answers = running[0]
    kinds = ask(pipe, process, 0) if with_profile and not isinstance(answers[-1], str) else None
    for pipe, process, answers in running:
        if not isinstance(answers[-1], str):
            pipe.send(None)
        process.join()
    return [answers for _, _, answers in running], kinds


def label(name, config):
    return f"{name} {'compiled' if config.compile else 'eager'} {config.dtype}"


def rows(entries, results, B, T, world_size, flops, peak):
    """The lines of the table for one batch size. flops: of one token. peak: FLOP/s of the data sheet, or None."""
    ours, rate, lines, tokens = None, None, [], B * T * data_share(entries[0][1], 0, world_size)[1]
    for (name, config), answers in zip(entries, results):
        if isinstance(answers[-1], str):
            lines.append(f"{B:4} {label(name, config):31} {answers[-1]}")
            continue
        (first,), turns = answers[0], answers[1:]
        times = [1000 * seconds for turn in turns for seconds in turn[0]]
        seconds = statistics.median(times) / 1000
        if name == "plainGPT":
            ours, rate = seconds, world_size * statistics.median(rate for _, _, rate in turns)
            lines.append(f"{B:4} {'one large matrix product':31} {'':35} {rate / 1e12:8.2f}")
        speed = tokens / seconds * flops
        spread = f"{min(times):,.0f}-{max(times):,.0f}"
        shares = "".join(f"{speed / most:8.1%} " if most else f"{'-':>8} " for most in (rate, peak))
        lines.append(f"{B:4} {label(name, config):31} {seconds * 1000:8,.0f} {spread:>15} {tokens / seconds:10,.0f} "
                     f"{speed / 1e12:8.2f} {shares}{turns[-1][1] / 1e9:7.2f} {first:8.1f} "
                     + (f"{seconds / ours:8.2f}" if ours else ""))
    return lines


def main(argv=None):
    bench = BenchConfig(**parse_flags(__doc__, BenchConfig, argv=argv))
    for name, known in (("preset", [bench.preset]), ("peer", bench.peer or [])):
        allowed = list(PRESETS) if name == "preset" else ["plain", "transformers"]
        if unknown := set(known) - set(allowed):
            raise UserError(f"--{name} {unknown.pop()} is none of {', '.join(allowed)}")
    for name, values in (("steps", [bench.steps]), ("block_size", [bench.block_size]), ("batch_size", bench.batch_size or [])):
        for value in values:
            if value is not None and value < 1:
                raise UserError(f"--{name} {value} cannot be: it is a number above 0")
    rank, local_rank, world_size = ranks()
    if bench.peer and world_size > 1:
        raise UserError("--peer is for one process: the peers know nothing of the others")
    device = find_device(bench.device, local_rank, world_size)
    cuda = device.type == "cuda"
    dtype = choose_dtype(bench.dtype, device)
    gpt_config = GPTConfig(**PRESETS[bench.preset])
    gpt_config.block_size = bench.block_size or gpt_config.block_size
    config = TrainConfig(**{**RECIPES[bench.preset], "device": bench.device, "dtype": str(dtype).removeprefix("torch."),
                            "min_lr": 0.0, "compile": cuda if bench.compile is None else bench.compile,
                            **{name: getattr(bench, name) for name in ("activation_checkpointing", "parallel", "tp", "pp")}})
    config.optimizer = bench.optimizer or config.optimizer
    check_config(gpt_config, config)
    check_layout(config, gpt_config, world_size)
    if small := [B for B in bench.batch_size or [] if B < config.pp]:
        raise UserError(f"--batch_size {small[0]} leaves some of --pp {config.pp} idle; {config.pp} would do")
    entries = [("plainGPT", config)]
    for peer in dict.fromkeys(bench.peer or []):
        entries.append((peer, replace(config, compile=False, dtype="float32" if peer == "transformers" else config.dtype)))
        entries.append((peer, replace(config, compile=True)))

    with torch.device("meta"):  # a shape to count, without memory
        model = GPT(gpt_config)
    flops, T = model.flops_per_token(), gpt_config.block_size
    names = (("ms", 8), ("", 15), ("tok/s", 10), ("TFLOP/s", 8), ("matmul", 8), ("peak", 8), ("GB", 7), ("first s", 8),
             ("x slower", 8))
    table = [f"   B {'step':31} " + " ".join(f"{name:>{width}}" for name, width in names)]
    for B in dict.fromkeys(bench.batch_size or [64 if cuda else 4]):
        results, kinds = race(entries, gpt_config, B, bench.steps or (20 if cuda else 2), bench.profile)
        table += rows(entries, results, B, T, world_size, flops, peak_flops(device, dtype, world_size))
        if isinstance(kinds, tuple):
            kinds, seconds = kinds
            print0(f"where the {seconds * 1000:,.1f} ms of a step go at B={B}, when profiled, which takes time itself ({TRACE} "
                   "has it all):")
            for name, part in kinds.items():
                print0(f"  {name:24} {part * 1000:9,.1f} ms {part / sum(kinds.values()):7.1%}")
    parameters = sum(p.numel() for p in model.parameters())
    print0(f"{bench.preset}: {parameters:,} parameters, T={T}, {config.optimizer}, {flops / 1e6:,.2f} MFLOP a token with full "
           f"attention; {describe(device)}; torch {torch.__version__}; {world_size} process{'es' * (world_size > 1)}"
           + f": {config.parallel}, tp {config.tp}, pp {config.pp}" * (world_size > 1))
    print0("\n".join(table))


if __name__ == "__main__":
    run(main)
