"""Times a training step of train_gpt2.py or train_large.py, and prints one row.

  python bench.py --preset gpt2 --batch_size 4
  torchrun --nproc_per_node=8 bench.py --large --preset gpt3-1.3b --tp 2
  python bench.py --batch_size 4 --peer transformers plain

In this help, [x] is the default of a flag. A preset may set a different value.

--peer also times the training step of other implementations of GPT-2. All
models use AdamW, and no dropout. In each of 3 rounds, each model runs --steps
steps. Therefore, another program on the machine slows down all models equally.
Each model runs in its own process and prints its own row. The peers first
compute all logits, and then the loss:

- transformers: Hugging Face's GPT-2 (pip install transformers).
- plain: our model, with the output layer and the loss of build-nanogpt.

After the settings, the row shows:

- the median time of a step, and the times of the fastest and the slowest step,
- the tokens per second, summed over all processes,
- the FLOPs per second of the model, counted with full attention,
- the fraction of the GPU's peak FLOPs per second (data sheet), if known,
- the peak memory of one process (on a GPU, only the memory of its tensors),
- the time of the first step, which includes compilation, unless the search for
  a batch size has already compiled the model. bench.py searches for a batch
  size only on a GPU, and without --batch_size, --large and --peer.
"""

import math
import multiprocessing
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Literal, get_type_hints

from plaingpt.checkpoint import make_whole_gpt
from plaingpt.device import choose_compile, peak_flops
from plaingpt.errors import UserError, require, run_program
from plaingpt.flags import flag, parse_flags, pick
from plaingpt.machine import read_ranks
from plaingpt.memory import batch_size_advice
from plaingpt.process import Process
from plaingpt.settings import PRESETS
from plaingpt.terminal import print_result

import torch
from torch.nn.attention import SDPBackend

from model import GPT, GPTConfig
from train_gpt2 import TrainConfig, Training, train_step

OURS = "plaingpt"  # the label of plainGPT's row, with --peer
ROUNDS = 3


@dataclass
class BenchConfig:
    preset: Literal[tuple(PRESETS)] = flag("gpt2", "model and recipe")
    batch_size: int | None = flag(
        None,
        "sequences per process [GPU: up to 64; CPU: 4]; with --large, per micro-batch",
        above=0,
    )
    steps: int = flag(10, "number of steps to time; with --peer, per round", above=0)
    large: bool = flag(False, "time train_large.py instead of train_gpt2.py")
    tp: int | None = flag(None, "with --large: --tp of train_large.py", above=0)
    pp: int | None = flag(None, "with --large: --pp of train_large.py", above=0)
    peer: list[Literal["transformers", "plain"]] | None = flag(
        None, "other implementations of GPT-2 to time as well"
    )
    profile: bool = flag(False, "print the slowest operations; write bench_trace.json", either=True)


# These flags mean the same as in train_gpt2.py.
SHARED = (
    "block_size",
    "optimizer",
    "device",
    "dtype",
    "compile",
    "activation_checkpointing",
)


def shared_config():
    """Builds a dataclass from the fields of GPTConfig and TrainConfig whose names are in SHARED."""
    shared = []
    for config in (GPTConfig, TrainConfig):
        types = get_type_hints(config)
        for each in fields(config):
            if each.name in SHARED:
                copy = field(default=each.default, metadata=each.metadata)
                shared.append((each.name, types[each.name], copy))
    return make_dataclass("SharedConfig", shared)


class Peer(torch.nn.Module):
    """Another implementation of GPT-2, which computes all logits before the cross-entropy.

    name: "transformers" or "plain". config: a GPTConfig.
    """

    def __init__(self, name, config):
        super().__init__()
        if name == "plain":
            # build-nanogpt, too, pads vocab_size from 50,257 to 50,304.
            n_rows = config.vocab_size + -config.vocab_size % 128
            self.model = GPT(replace(config, vocab_size=n_rows))
        else:
            hf = require("transformers")
            hf_config = hf.GPT2Config(
                **vars(config),
                n_positions=config.block_size,
                embd_pdrop=config.dropout,
                attn_pdrop=config.dropout,
                resid_pdrop=config.dropout,
                use_cache=False,  # only generation needs a KV cache
            )
            self.model = hf.GPT2LMHeadModel(hf_config)

    def forward(self, idx, targets):
        logits = self.model(idx)[0].float()  # (B, T, vocab_size)
        return None, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, *_):
        return [torch.optim.AdamW(self.parameters(), learning_rate, fused=True)]


class PeerTraining(Training):
    """Trains a Peer in the same way as train_gpt2.py trains a GPT."""

    def __init__(self, name, *args):
        self.name = name
        super().__init__(*args)

    def build(self, weights):
        return Peer(self.name, self.gpt_config).to(self.process.device)

    def wrap(self):
        model = self.raw_model
        if self.config.compile:
            model = torch.compile(model, dynamic=False)
        return model, None  # only validation needs `hidden`, and bench.py does not validate


@dataclass
class Subject:
    """A model whose training step is timed."""

    label: str  # preset, batch size and context length, for the row
    config: TrainConfig
    process: Process
    training: Training
    micro_batches: list  # of (x, y), as in train_step
    B: int  # sequences per process in each step
    T: int
    flops_per_token: int  # of our GPT, even if the model is a peer

    @property
    def n_tokens(self):
        """The number of tokens in a step, summed over all processes."""
        return self.B * self.T * self.process.world_size

    def time_step(self):
        """Returns the seconds of one training step. Raises UserError if memory runs out."""
        begin = time.perf_counter()
        with batch_size_advice(self.B):
            # train_step returns only after the device has finished all work of the step.
            train_step(self.training, self.micro_batches)
        return time.perf_counter() - begin


def make_subject(name, given):
    """Builds a model and random data. Returns a Subject.

    name: OURS, or the name of a peer. given: {name: value} of the flags on the command line. Raises
    UserError if a flag has a wrong value, or if memory runs out.
    """
    training = build_training(name, given)
    gpt_config, config, process = training.gpt_config, training.config, training.process
    T = gpt_config.block_size
    # With --pp, a step contains one micro-batch per pipeline stage.
    B = config.batch_size * config.min_micro_batches
    torch.manual_seed(process.rank)
    with batch_size_advice(B):
        x, y = torch.randint(gpt_config.vocab_size, (2, B, T), device=process.device)  # (B, T) each
    micro_batches = list(zip(x.split(config.batch_size), y.split(config.batch_size)))
    label = f"{pick(BenchConfig, given).preset} B={B} T={T}"
    flops = make_whole_gpt(GPT, gpt_config).flops_per_token()
    return Subject(label, config, process, training, micro_batches, B, T, flops)


def build_training(name, given):
    """Builds the Training of our model or of a peer.

    The config of the Training contains the batch size to time. The arguments are as in
    make_subject.
    """
    bench = pick(BenchConfig, given)
    gpt_config, config, training_class = choose_settings(bench, given)
    process = training_class.setup(config)
    if not bench.large:
        largest_B = 64 if process.device.type == "cuda" else 4
        config = replace(config, batch_size=bench.batch_size or largest_B)
    T = gpt_config.block_size
    n_sequences = config.batch_size * config.min_micro_batches * process.world_size
    config = replace(
        config,
        compile=choose_compile(config.compile, process.device),
        total_batch_size=n_sequences * T,
    )
    if name == OURS:
        training = training_class(gpt_config, config, process)
    else:
        training = PeerTraining(name, gpt_config, config, process)
    if not (bench.batch_size or bench.peer):  # with --peer, all models use the same batch size
        training.fit_batch_size(T)
    return training


def choose_settings(bench, given):
    """Returns the GPTConfig, the TrainConfig and the subclass of Training for these flags.

    bench: the BenchConfig. given: as in make_subject.
    """
    values = dict(PRESETS[bench.preset])
    if bench.peer:  # the peers have the same settings as our model
        values.update(optimizer="adamw", dropout=0.0)
    values.update(given)
    gpt_config = pick(GPTConfig, values)
    if not bench.large:
        return gpt_config, pick(TrainConfig, values), Training
    import train_large  # imports PyTorch's modules for parallelism, which takes two seconds

    config = pick(train_large.LargeConfig, values)
    return gpt_config, config, train_large.choose_training(config)


def describe(subject, first, seconds):
    """Returns the row that bench.py prints for a Subject, as text.

    first: the time of the first step, in seconds. seconds: the times of the steps that are timed.
    """
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
    """Returns the name of PyTorch's attention kernel on this GPU, and cuDNN's version, as text."""
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
    print_result(profiler.key_averages().table(sort_by=sort_by, row_limit=15))
    if subject.process.is_main:
        profiler.export_chrome_trace("bench_trace.json")  # chrome://tracing opens this file


def compare(names, given):
    """Times several models, each in its own process. Prints a row for each model.

    Only one model runs at a time. names: OURS and the peers. given: as in make_subject.
    """
    _, _, world_size = read_ranks()
    if world_size > 1:
        raise UserError(f"--peer {names[-1]}: needs a single process; do not use torchrun")
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    workers = []  # (process, pipe) of each model
    for name in names:
        pipe, other_end = context.Pipe()
        # A daemon is terminated when this process ends, even after an error or Ctrl-C.
        worker = context.Process(target=serve, args=(name, given, other_end), daemon=True)
        worker.start()
        workers.append((worker, pipe))
        other_end.close()  # otherwise, `ask` would wait forever if the worker ended
        ask(worker, pipe, "start")  # waits for the first step before the next worker starts
    for _ in range(ROUNDS):
        for worker, pipe in workers:
            ask(worker, pipe, "round")
    for name, (worker, pipe) in zip(names, workers):
        print_result(f"{name} {ask(worker, pipe, 'row')}")
        worker.join()  # lets the worker remove its semaphores; otherwise, Python prints a warning


def ask(worker, pipe, request):
    """Sends a request to `serve` in a worker, and returns the answer.

    Raises the UserError that the worker sends, or a UserError if a signal has killed the worker. If
    the worker has ended with a traceback, this process exits with the same status.
    """
    try:
        pipe.send(request)
        answer = pipe.recv()
    except (EOFError, ConnectionError):  # the worker has ended
        worker.join()
        if worker.exitcode < 0:  # Linux may kill a process without a message if memory runs out
            message = "the process of a model was killed; try a smaller --batch_size"
            raise UserError(message) from None
        sys.exit(worker.exitcode)  # Python has printed the traceback of the worker
    if isinstance(answer, UserError):
        raise answer
    return answer


def serve(name, given, pipe):
    """Runs in a worker, and answers the requests of `compare`.

    "start" takes the first step. "round" times steps. "row" returns the row, and ends the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the main process, then this worker
    try:
        subject = make_subject(name, given)
        first = subject.time_step()
        seconds = []
        for request in iter(pipe.recv, "row"):
            if request == "round":
                subject.time_step()  # not timed: the caches still contain another model's data
                for _ in range(pick(BenchConfig, given).steps):
                    seconds.append(subject.time_step())
                torch.cuda.empty_cache()  # the other models need this memory
            pipe.send("done")
        pipe.send(describe(subject, first, seconds))
    except UserError as error:
        pipe.send(error)
    except EOFError:  # another model has failed, and `compare` has ended
        pass


def main(argv=None):
    given = parse_flags(__doc__, BenchConfig, shared_config(), argv=argv)
    bench = pick(BenchConfig, given)
    if not bench.large and (bench.tp or bench.pp):
        raise UserError("--tp and --pp: need --large; give --large, or remove --tp and --pp")
    if bench.large and bench.peer:
        raise UserError(
            "--peer: needs a single process, but --large needs several; remove --peer or --large"
        )
    if bench.peer and given.get("activation_checkpointing"):
        raise UserError("--peer: no peer uses activation checkpointing; remove the flag")
    if bench.peer and given.get("optimizer") == "muon":
        raise UserError("--peer: all models use AdamW; remove --optimizer")
    if bench.peer:
        compare([OURS, *bench.peer], given)
        return
    subject = make_subject(OURS, given)
    first = subject.time_step()
    subject.time_step()  # not timed, because the second step may also be slow
    seconds = [subject.time_step() for _ in range(bench.steps)]
    if bench.profile:
        profile_step(subject)
    print_result(describe(subject, first, seconds))
    if subject.process.device.type == "cuda":
        print_result(name_attention(subject))
    subject.process.barrier()


def peak_memory(device):
    """Returns the peak memory of this process in bytes, or NaN if it is unknown.

    On a GPU, the result is only the memory of tensors.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return math.nan
    import resource  # not available on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    run_program(main)
