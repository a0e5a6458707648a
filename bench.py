"""Times a training step of train_gpt2.py and prints one row.

  python bench.py --preset gpt2 --batch_size 4
  torchrun --nproc_per_node=8 bench.py --preset gpt2-xl --parallel fsdp
  python bench.py --batch_size 4 --peer transformers plain

In this help, [x] is the default of a flag, unless the preset has another value.

--peer also times the step of another GPT-2, with AdamW. Other programs on a
machine change all times, so the models take turns: 3 rounds of --steps each.
Each model has its own process and its own row. The peers compute all logits at
once, then the loss:

- transformers: the model of Hugging Face; first pip install transformers.
- plain: our model with the last layer of build-nanogpt.

After the settings, the row shows

- the median time of a step, and the times of the fastest and the slowest step,
- the tokens per second of all processes,
- the FLOPs per second of the model, counted with full attention,
- their fraction of the peak in the data sheet, if the program knows the GPU,
- the peak memory of one process, on a GPU only of its tensors,
- the time of the first step, including compilation if --batch_size is given.
"""

import math
import multiprocessing
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Literal

from plaingpt.base.errors import UserError, require, run_program
from plaingpt.base.flags import flag, parse_flags, pick, types_of
from plaingpt.base.machine import read_ranks
from plaingpt.base.terminal import print0
from plaingpt.distributed.batch_size import fit_batch_size, plan_steps
from plaingpt.distributed.device import choose_compile, peak_flops
from plaingpt.distributed.gradients import GradientClipper, grad_scaler
from plaingpt.distributed.memory import batch_size_advice
from plaingpt.distributed.parts import make_whole_gpt
from plaingpt.distributed.process import Process, setup
from plaingpt.run.config import PRESETS

import torch
from torch.nn.attention import SDPBackend

from model import GPT, GPTConfig
from train_gpt2 import TrainConfig, Training, make_training, train_step

OURS = "plaingpt"  # the label of our row if there are peers
ROUNDS = 3


@dataclass
class BenchConfig:
    preset: Literal[tuple(PRESETS)] = flag("gpt2", "model and recipe")
    batch_size: int | None = flag(None, "sequences [GPU: up to 64; CPU: 4]", above=0)
    steps: int = flag(10, "timed steps; with --peer, in each round", above=0)
    peer: list[Literal["transformers", "plain"]] | None = flag(None, "also time these GPT-2s")
    profile: bool = flag(False, "print the slowest operations; write bench_trace.json", either=True)


# These flags mean the same as in train_gpt2.py.
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
    """Builds a dataclass from the fields of GPTConfig and TrainConfig that are in SHARED."""
    shared = []
    for config in (GPTConfig, TrainConfig):
        types = types_of(config)
        for each in fields(config):
            if each.name in SHARED:
                copy = field(default=each.default, metadata=each.metadata)
                shared.append((each.name, types[each.name], copy))
    return make_dataclass("SharedConfig", shared)


class Peer(torch.nn.Module):
    """Another GPT-2, with the usual last layer: computes all logits, then their loss."""

    def __init__(self, name, config):
        super().__init__()
        if name == "plain":  # 50,304 ids instead of 50,257, as in build-nanogpt
            n_rows = config.vocab_size + -config.vocab_size % 128
            self.model = GPT(replace(config, vocab_size=n_rows))
        else:
            hf = require("transformers")
            # Only generation needs a cache of keys and values.
            hf_config = hf.GPT2Config(
                **vars(config), n_positions=config.block_size, use_cache=False
            )
            self.model = hf.GPT2LMHeadModel(hf_config).eval()  # eval turns dropout off

    def forward(self, idx, targets):
        logits = self.model(idx)[0].float()  # (B, T, vocab_size)
        return None, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_peer(name, gpt_config, config, process):
    """Builds a Peer, its optimizer, scaler and clipper -> Training."""
    raw_model = Peer(name, gpt_config).to(process.device)
    optimizer = torch.optim.AdamW(raw_model.parameters(), config.max_lr, fused=True)
    model = torch.compile(raw_model, dynamic=False) if config.compile else raw_model
    clipper = GradientClipper(model, tp=1)
    hidden = None  # a peer is not validated
    return Training(raw_model, model, hidden, [optimizer], grad_scaler(process), clipper)


@dataclass
class Subject:
    """A model whose step is timed."""

    label: str  # the beginning of its row
    config: TrainConfig
    process: Process
    training: Training
    micro_batches: list  # of (x, y, weight), as in train_step
    B: int  # sequences of a process in a step
    T: int
    flops_per_token: int  # of GPT, even for a peer

    @property
    def n_tokens(self):
        """The number of tokens in a step of all processes."""
        return self.B * self.T * self.process.dp_size

    def time_step(self):
        """Takes a step -> its seconds. Raises UserError if memory runs out."""
        begin = time.perf_counter()
        with batch_size_advice(self.B):
            # train_step also waits for the device.
            train_step(self.training, self.micro_batches, self.config.grad_clip, self.process)
        return time.perf_counter() - begin


def make_subject(name, given):
    """Builds our model or a peer, and random data -> Subject. Raises UserError.

    given: {name: value} of the flags on the command line.
    """
    bench = pick(BenchConfig, given)
    values = {**PRESETS[bench.preset], **given}
    gpt_config = pick(GPTConfig, values)
    config = pick(TrainConfig, values)
    process = setup(config.device, config.dtype, config.tp, config.pp, config.parallel)
    T = gpt_config.block_size
    largest_B = bench.batch_size or (64 if process.device.type == "cuda" else 4)
    config = replace(
        config,
        compile=choose_compile(config.compile, process.device),
        batch_size=largest_B,
        total_batch_size=largest_B * T * process.dp_size,
        optimizer=config.optimizer if name == OURS else "adamw",
    )
    plan = plan_steps(config, T, math.inf, process.dp_size)
    if name == OURS:
        training = make_training(gpt_config, config, process)
    else:
        training = make_peer(name, gpt_config, config, process)
    B = largest_B
    if not (bench.batch_size or bench.peer):  # with peers, all models use one batch size
        B, plan = fit_batch_size(training, config, T, plan, process)
    # All steps have the same (n, B). With --pp, a step contains several micro-batches.
    _, micro_B = plan[0]
    torch.manual_seed(process.dp_rank)
    with batch_size_advice(B):
        x, y = torch.randint(gpt_config.vocab_size, (2, B, T), device=process.device)  # (B, T) each
    weight = torch.ones((), device=process.device)  # of each micro-batch, for train_step
    micro_batches = [(*batch, weight) for batch in zip(x.split(micro_B), y.split(micro_B))]
    label = f"{bench.preset} B={B} T={T}"
    flops = make_whole_gpt(GPT, gpt_config).flops_per_token()
    return Subject(label, config, process, training, micro_batches, B, T, flops)


def describe(subject, first, seconds):
    """Returns the row of a Subject. first: seconds of its first step. seconds: of the others."""
    config = subject.config
    process = subject.process
    ms = [1000 * each for each in seconds]
    tok_s = subject.n_tokens / statistics.median(seconds)
    flops = tok_s * subject.flops_per_token
    parts = [
        f"{'compiled' if config.compile else 'eager'} {process.dtype_name} {config.optimizer}",
        subject.label,
        f"{statistics.median(ms):,.0f} ms ({min(ms):,.0f}-{max(ms):,.0f})",
        f"{tok_s:,.0f} tok/s",
        f"{flops / 1e12:.2f} TFLOP/s",
    ]
    if peak := peak_flops(process):
        parts.append(f"{flops / peak:.1%} of peak")
    parts.append(f"{peak_memory(process.device) / 1e9:.2f} GB")
    parts.append(f"first step {first:.1f} s")
    return " | ".join(parts)


def name_attention(subject):
    """Returns which attention kernel PyTorch chooses on a GPU, and the version of cuDNN."""
    config = subject.training.raw_model.config
    shape = (subject.B, config.n_head, subject.T, config.n_embd // config.n_head)
    q = torch.empty(shape, device=subject.process.device, dtype=subject.process.dtype)
    kernel = SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name
    return f"attention: {kernel}, cuDNN {torch.backends.cudnn.version()}"


def profile_step(subject):
    """Prints the slowest operations of a step, and writes bench_trace.json."""
    with torch.profiler.profile() as profiler:
        subject.time_step()
    is_cuda = subject.process.device.type == "cuda"
    sort_by = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
    print0(profiler.key_averages().table(sort_by=sort_by, row_limit=15))
    if subject.process.rank == 0:
        profiler.export_chrome_trace("bench_trace.json")  # chrome://tracing shows it


def compare(names, given):
    """Times models in turn, each in its own process. Prints their rows. Raises UserError."""
    _, _, world_size = read_ranks()
    if world_size > 1:
        raise UserError(f"--peer {names[-1]}: needs one process; do not use torchrun")
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    pipes = []
    workers = []
    for name in names:
        pipe, other_end = context.Pipe()
        # After an error or Ctrl-C, a daemon ends with this process.
        worker = context.Process(target=serve, args=(name, given, other_end), daemon=True)
        worker.start()
        workers.append(worker)
        other_end.close()  # so that `receive` fails if the process ends
        receive(pipe)  # the next process starts after this one's first step
        pipes.append(pipe)
    for _ in range(ROUNDS):
        for pipe in pipes:
            pipe.send("round")
            receive(pipe)
    for name, pipe, worker in zip(names, pipes, workers):
        pipe.send("row")
        print0(f"{name} {receive(pipe)}")
        worker.join()  # the process removes its semaphores, so Python does not warn


def receive(pipe):
    """Returns what a process sends. Raises a UserError that it sends, or one if it has ended."""
    try:
        found = pipe.recv()
    except EOFError:  # Linux may kill a process without a message if memory runs out
        raise UserError("a model's process has ended; try a smaller --batch_size") from None
    if isinstance(found, UserError):
        raise found
    return found


def serve(name, given, pipe):
    """Takes steps of a model whenever `compare` asks for a round, and sends the row at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends compare, which ends this process
    try:
        subject = make_subject(name, given)
        first = subject.time_step()
        seconds = []
        pipe.send("ready")
        while pipe.recv() == "round":
            subject.time_step()  # the caches contain numbers of another model
            for _ in range(pick(BenchConfig, given).steps):
                seconds.append(subject.time_step())
            torch.cuda.empty_cache()  # the others need this memory
            pipe.send("done")
        pipe.send(describe(subject, first, seconds))
    except UserError as error:
        pipe.send(error)


def main(argv=None):
    given = parse_flags(__doc__, BenchConfig, shared_config(), argv=argv)
    bench = pick(BenchConfig, given)
    if bench.peer:
        compare([OURS, *bench.peer], given)
        return
    subject = make_subject(OURS, given)
    first = subject.time_step()
    subject.time_step()  # the second step may also be slow
    seconds = [subject.time_step() for _ in range(bench.steps)]
    if bench.profile:
        profile_step(subject)
    print0(describe(subject, first, seconds))
    if subject.process.device.type == "cuda":
        print0(name_attention(subject))
    subject.process.barrier()


def peak_memory(device):
    """Returns the peak memory of this process in bytes, on a GPU only of its tensors.

    NaN means unknown.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return math.nan
    import resource  # Windows lacks this module

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    run_program(main)
