"""Trains a GPT-2 on text or on token shards. Writes a log and checkpoints.

  python train_gpt2.py                  trains a small model on the bytes of
                                        input.txt if edu_fineweb10B/ is missing
  python train_gpt2.py --data my.txt    does the same on your own text
  torchrun --nproc_per_node=8 train_gpt2.py
                                        trains GPT-2 124M on 8 GPUs, if
                                        fineweb.py has made edu_fineweb10B/

The same command with --resume continues a run. A preset overrides the defaults
of the flags. A flag overrides the preset. In --help, [x] is the default.
--no-NAME turns a switch off. These are the presets, with their numbers of
parameters:

  baby      0.4M, reads bytes; --preset auto chooses it for a text
  gpt2      124M; auto chooses it for shards of 10^9 tokens or more, if there is
            a GPU
  mini      11M with GPT-2's ids; auto chooses it for all other shards
  finetune  changes weights at a low rate: 100 steps, or 400 if the weights have
            fewer than 768 channels; auto chooses it with --init_from
  gpt2-medium, gpt2-large, gpt2-xl    355M, 774M, 1.6B
  gpt3-SIZE                           the sizes of the GPT-3 paper

A run writes these files into --log_dir:

  run.json       is written at the start and at each resume
  changes.patch  is written with it, if this clone has uncommitted changes
  log.txt        gets new lines in every step
  model_STEP.pt  is saved every --save_every steps, after the last step, and
                 when the run is stopped; only the newest --keep of them stay
  model_best.pt  is saved at the lowest validation loss, with --keep_best

Rank 0 writes all files. Samples are printed; only TensorBoard and W&B keep
them. A new run first moves the files of an old run, from log/baby to
log/baby.1.

The order of a run, which is the order of main:

  1. flags, preset and data give the configuration
  2. the processes of torchrun join, each with its device
  3. the start is found: a checkpoint, --init_from, or random weights
  4. the data sets are opened, and a loader puts their sequences into an order
  5. model and optimizers are made; on a GPU, the largest micro-batch is found
  6. with --resume, the optimizers get their state; the log is opened
  in each step:
  7. what is due is done: save, validate (also at step 0), benchmarks, samples
  8. the learning rate is set, and the next batch is taken
  9. one micro-batch after the other goes forward and backward
 10. the gradients are clipped, and the optimizers change the weights
 11. the figures of the step are logged
"""

import importlib.util
import inspect
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from plaingpt.base.errors import UserError, run_program
from plaingpt.base.flags import EMPTY, FREE, REPEAT, parse_flags
from plaingpt.base.signals import catch_stop_signals
from plaingpt.data.data_sets import Data
from plaingpt.data.prefetch import prefetch
from plaingpt.data.sources import Sources
from plaingpt.distributed.batch_search import fit_batch_size
from plaingpt.distributed.device import Dtype, choose_compile
from plaingpt.distributed.gradients import clip_grad_norm, grad_scaler, set_gradient_sync
from plaingpt.distributed.memory import batch_size_advice
from plaingpt.distributed.pipeline import Pipeline
from plaingpt.distributed.process import on_rank0, start
from plaingpt.distributed.split import is_split, split_model
from plaingpt.ops.order import hash_numbers, order_of_sets, permute
from plaingpt.ops.sampling import attention_for_many_shapes, generate_tokens
from plaingpt.run.facts import write_facts
from plaingpt.run.log import RunLog
from plaingpt.run.presets import PRESETS
from plaingpt.run.progress import Progress
from plaingpt.run.resolve import GROUPS, choose_data, make_configs
from plaingpt.run.samples import answer_prompts
from plaingpt.run.steps import plan_steps
from plaingpt.scoring.evals import load_evals, run_evals
from plaingpt.weights.checkpoint import load_newest
from plaingpt.weights.fill import load_weights, make_whole_gpt
from plaingpt.weights.saver import Saver
from plaingpt.weights.start import choose_start

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig

# Python takes the first model.py that it finds. In a notebook, that may be another one.
MODEL = inspect.getsourcefile(GPT)
assert Path(MODEL).samefile(Path(__file__).resolve().with_name("model.py")), (
    f"{MODEL} is another model.py; put {Path(__file__).parent} first in sys.path"
)


# Configuration. Each field is a flag: its type, its help, its range, and a mark. plaingpt/run has
# the presets, and decides what is not given. The marks:
#   FREE    A resume may change the flag without a note. Losses do not depend on it, except for
#           rounding and the masks of dropout. A change of another flag is printed.
#   REPEAT  Runs that differ only in this flag repeat one experiment.
#   EMPTY   An empty value means something. For other flags, it is a mistake.
@dataclass
class TrainConfig:
    # preset and data
    preset: Annotated[Literal[("auto", *PRESETS)], "auto fits data and device"] = "auto"
    data: Annotated[list[str] | None, "shards, text or pairs; a mixture: A=WEIGHT B=WEIGHT"] = None
    tokenizer: Annotated[str | None, "for text data: gpt2 or a tokenizer.json [bytes]"] = None
    val_fraction: Annotated[float | None, "held out [0.01; text 0.1]", "above 0 and below 1"] = None
    shuffle: Annotated[bool, "new random order of the sequences in each epoch"] = True
    seed: Annotated[int, "random seed", f"at least 0 and at most {2**32 - 1}", REPEAT] = 1337
    init_from: Annotated[str | None, "start from a checkpoint, run, or Hugging Face GPT-2"] = None
    # batch and steps
    batch_size: Annotated[int, "sequences in a micro-batch; cut to fit a GPU", "above 0", FREE] = 64
    total_batch_size: Annotated[int, "tokens in a step, of all processes", "above 0"] = 2**19
    rampup_steps: Annotated[int, "steps of a growing batch", "at least 0 and at most 1e6"] = 0
    rampup_batch_size: Annotated[int, "tokens in the first step of the ramp", "above 0"] = 32768
    max_steps: Annotated[int, "steps in the run; gpt2: 10B tokens", "above 0"] = 19073
    max_minutes: Annotated[float | None, "end with a save", "above 0 and at most 1e6", FREE] = None
    # optimizer
    optimizer: Annotated[Literal["adamw", "muon"], "muon: Muon for matrices of blocks"] = "adamw"
    max_lr: Annotated[float, "peak learning rate", "above 0"] = 6e-4
    muon_lr: Annotated[float | None, "peak learning rate of Muon [max_lr]", "above 0"] = None
    schedule: Annotated[Literal["cosine", "linear", "wsd", "constant"], "after warm-up"] = "cosine"
    warmup_steps: Annotated[int, "steps of linear warm-up", "at least 0"] = 715
    decay_steps: Annotated[int | None, "length of wsd's decay [max_steps / 5]", "above 0"] = None
    min_lr: Annotated[float | None, "learning rate at the end [max_lr / 10]", "at least 0"] = None
    weight_decay: Annotated[float, "decay of matrices and embeddings", "at least 0"] = 0.1
    grad_clip: Annotated[float, "maximum gradient norm; 0: no clipping", "at least 0"] = 1.0
    # evaluation
    val_every: Annotated[int, "steps between validations; 0: first and last", "at least 0"] = 500
    val_tokens: Annotated[int, "validation tokens of each data set", "above 0"] = 20 * 2**19
    eval_every: Annotated[int, "steps between benchmarks; 0: never", "at least 0"] = 500
    evals: Annotated[str, "benchmarks, NAME or NAME=FILE", EMPTY] = "hellaswag,lambada,storycloze"
    sample_every: Annotated[int, "steps between samples; 0: at the end", "at least 0", FREE] = 500
    sample_tokens: Annotated[int | None, "of a sample [64; bytes: 500]", "above 0", FREE] = None
    # output
    log_dir: Annotated[str | None, "run directory [log/PRESET]", FREE] = None
    resume: Annotated[bool, "continue the run in log_dir; starts it if there is none", FREE] = False
    save_every: Annotated[int, "steps between saves; 0: at the end", "at least 0", FREE] = 1000
    keep: Annotated[int, "number of checkpoints to keep; 0: all", "at least 0", FREE] = 2
    keep_best: Annotated[bool, "also save the step of lowest val loss, model_best.pt", FREE] = False
    log_every: Annotated[int, "steps between printed lines; log.txt has all", "above 0", FREE] = 1
    tensorboard: Annotated[bool, "also write TensorBoard event files into log_dir", FREE] = False
    wandb: Annotated[str | None, "also log to this project of Weights & Biases", FREE] = None
    # hardware
    device: Annotated[str, "cuda, cuda:1, mps or cpu", FREE] = "auto"
    dtype: Annotated[Dtype, "number format of matrix products"] = "auto"
    compile: Annotated[bool | None, "use torch.compile [on for cuda only]", FREE] = None
    activation_checkpointing: Annotated[bool, "recompute activations to save memory", FREE] = False
    parallel: Annotated[Literal["ddp", "fsdp"], "replicate or shard the model", FREE] = "ddp"
    tp: Annotated[int, "tensor parallel processes; divides n_head", "above 0", FREE] = 1
    pp: Annotated[int, "pipeline stages; at most n_layer", "above 0", FREE] = 1


class DataLoaderLite:
    """The stream of sequences of a run, in an order that depends on nothing but the arguments.

    Sequence j of a data set is the T+1 tokens from jT to jT+T. They give T inputs, and T targets,
    which are one token later. Its last token is the first one of sequence j+1, so no token is a
    target twice in an epoch. An epoch of a data set is a random permutation of its sequences.

    A position counts the sequences from the start of the run. A step of n sequences that begins at
    position p takes p to p+n-1, on any number of processes. The next step begins at p+n.

    sets: a Tokens object for each data set, which joins its shards. shares: how many of the
    sequences are from each set, as Fractions (fractions.Fraction) that add up to 1. Raises
    UserError if a set has fewer than T+1 tokens.
    """

    def __init__(self, sets, shares, T, seed=1337, shuffle=True):
        self.sets = sets
        self.shares = shares
        self.T = T
        self.seed = seed
        self.shuffle = shuffle
        self.lengths = [tokens.count_sequences(T) for tokens in sets]  # in sequences
        # Data sets take turns. The order of the turns repeats after one period, which `turns` has:
        # for each turn, the data set, and how many turns this set had earlier in the period. The
        # shares 2/3 and 1/3 give [(0, 0), (0, 1), (1, 0)]. A single data set gives [(0, 0)].
        self.turns = order_of_sets(self.shares)
        self.turns_per_period = [int(share * len(self.turns)) for share in self.shares]

    def sequence(self, position):
        """Returns the inputs and targets at a position: (2, T). Target -100 is not in the loss.

        Only data of prompts and responses (pairs) have such targets: prompts, and padding.
        """
        periods, i = divmod(position, len(self.turns))
        k, earlier = self.turns[i]  # k is the index of the data set
        # `taken` is the number of sequences of this data set that came before this position.
        taken = periods * self.turns_per_period[k] + earlier
        epoch, j = divmod(taken, self.lengths[k])
        if self.shuffle:
            j = permute(j, self.lengths[k], self.seed, epoch)
        return self.sets[k].read_sequence(j * self.T, self.T)

    def epochs(self, position):
        """Returns for each data set how often the run has read it, up to a position."""
        epochs = []
        for share, length in zip(self.shares, self.lengths):
            epochs.append(position * float(share) / length)
        return epochs

    def count_targets(self, position, n):
        """Returns the number of targets that are in the loss, in n sequences from a position on."""
        if all(tokens.counted is None for tokens in self.sets):  # without pairs
            return n * self.T
        return sum(int((self.sequence(position + i)[1] != -100).sum()) for i in range(n))

    def batch(self, position, B, device):
        """Reads B sequences from a position on -> x, y: (B, T) int64. y is x one token later."""
        sequences = [self.sequence(position + b) for b in range(B)]
        batch = torch.from_numpy(np.stack(sequences, axis=1))  # (2, B, T)
        if device.type == "cuda":
            batch = batch.pin_memory()  # pinned memory is copied while the GPU computes
        # On MPS, such a copy may read the memory after it is freed (pytorch/pytorch#189690).
        return batch.to(device, non_blocking=device.type == "cuda").unbind()  # (B, T) each

    def batches(self, steps, position, sizes, process):
        """Yields the batch of each step: (n, n_targets, micro-batches of this process).

        n = 8 sequences in a step, B = 2 in a micro-batch, on two processes, from position p:

          rank 0    p, p+1    p+4, p+5
          rank 1    p+2, p+3  p+6, p+7

        So n is a multiple of dp_size x B. With TP or PP, the processes that compute one model
        together count as one, and have the same sequences. dp_rank is then the index of such a
        group, otherwise the rank. dp_size is the number of groups.

        n_targets: how many targets are in the loss, on all processes. Every process knows n and
        n_targets without communication. A micro-batch is x, y: (B, T) each.

        steps: the range of steps. position: where the first of them begins. sizes: from plan_steps.
        """
        for step in steps:
            n, B = sizes[min(step, len(sizes) - 1)]  # steps after the ramp have the last size
            starts = range(position + process.dp_rank * B, position + n, process.dp_size * B)
            micro_batches = [self.batch(first, B, process.device) for first in starts]
            yield n, self.count_targets(position, n), micro_batches
            position += n


def get_lr(step, config):
    """Returns the learning rate of a step: a linear warm-up to max_lr, then a decay to min_lr.

    cosine decays along half a period (GPT-3 paper, appendix B). linear decays by the same amount in
    each step. wsd stays constant and then decays linearly in the last decay_steps (Hu et al. 2024,
    arXiv:2404.06395). constant does not decay.
    """
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    first = config.warmup_steps  # the first step of the decay
    if config.schedule == "wsd":
        first = max(first, config.max_steps - (config.decay_steps or config.max_steps // 5))
    # This is 0 at the start of the decay, and 1 at max_steps, the step after the last one.
    fraction = max(0.0, min(1.0, (step - first) / max(1, config.max_steps - first)))
    # The heights are between 0 and 1. 0 stands for min_lr, and 1 for max_lr.
    heights = dict(
        cosine=0.5 * (1 + math.cos(math.pi * fraction)),
        linear=1 - fraction,
        wsd=1 - fraction,
        constant=1.0,
    )
    return config.min_lr + heights[config.schedule] * (config.max_lr - config.min_lr)


def set_lr(optimizers, lr, config):
    """Sets the rate of each parameter group to its peak x lr / max_lr. Muon has its own peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # configure_optimizers has stored the peak in "lr". Remember it before the first change.
            peak = group.setdefault("peak_lr", group["lr"])
            group["lr"] = peak * lr / config.max_lr


@torch.no_grad()
def estimate_loss(model, loader, n_bytes_of_id, config, process):
    """Measures the loss on the first val_tokens tokens of a data set -> (loss, bits per byte).

    The loss is in nats per token, so it depends on the tokenizer. Bits per byte of text do not, so
    they compare models with different tokenizers. They are nan if no token is text.

    loader: the loader of this data set, without shuffling. n_bytes_of_id: (vocab_size,), how many
    bytes of text each id stands for. Special ids have 0, so they are in the loss, but not in the
    bits per byte. The number of processes does not change the result, except for rounding. All
    processes must call this.
    """
    B, T = config.batch_size, loader.T
    n_sequences = max(1, min(config.val_tokens // T, loader.lengths[0]))
    model.eval()
    sums = torch.zeros(3, device=process.device)  # nats, nats of text, bytes of text
    for position in range(0, n_sequences, process.dp_size * B):
        first = position + process.dp_rank * B
        # All processes run equally many full batches. A split model needs this, and so does
        # compiled code, which wants one shape. The last batches may go beyond n_sequences. Their
        # surplus is left out below.
        x, y = loader.batch(first, B, process.device)  # (B, T) each
        with process.autocast:
            losses = model.loss(model.hidden(x), y, reduction="none")  # (B, T)
        n_bytes = n_bytes_of_id[y.clamp(min=0)] * (y != -100)  # (B, T)
        parts = torch.stack([losses, losses * (n_bytes > 0), n_bytes.float()])  # (3, B, T)
        sums += parts[:, : max(0, n_sequences - first)].sum(dim=(1, 2))
    model.train()
    # Processes that compute one model together have the same sums, which count once.
    nats, text_nats, n_bytes = process.sum(sums).tolist()
    bits_per_byte = text_nats / (n_bytes or math.nan) / math.log(2)
    return nats / loader.count_targets(0, n_sequences), bits_per_byte


def validate(model, loaders, data, n_bytes_of_id, config, process):
    """Measures the loss on each data set -> {stream: number}, for the log.

    val and bpb are the mean loss and the mean bits per byte, weighted by the shares of the data
    sets. A mixture also has val_NAME and bpb_NAME of each data set. loaders: one for each data set,
    without shuffling. The other arguments are those of main.
    """
    results = []  # (loss, bits per byte) of each data set
    for loader in loaders:
        results.append(estimate_loss(model, loader, n_bytes_of_id, config, process))
    losses, bits = zip(*results)
    figures = dict(
        val=sum(share * loss for share, loss in zip(data.shares, losses)),
        bpb=sum(share * each for share, each in zip(data.shares, bits)),
    )
    if len(loaders) > 1:
        for name, loss, bits_per_byte in zip(data.names, losses, bits):
            figures[f"val_{name}"] = loss
            figures[f"bpb_{name}"] = bits_per_byte
    return figures


def draw_samples(model, data, config, process):
    """Returns two texts that the model writes. All processes must call this.

    With pairs, the model answers validation prompts, and the texts have the expected responses.
    """
    model.eval()
    with process.autocast, attention_for_many_shapes():
        texts = answer_prompts(model, data, process)  # [] without pairs
        if not texts:
            tokenizer = data.tokenizer
            idx = torch.full((2, 1), tokenizer.end_of_text, device=process.device)  # (2, 1)
            n_tokens = config.sample_tokens or (500 if tokenizer.name == "bytes" else 64)
            new = list(generate_tokens(model, idx, n_tokens, temperature=0.8, top_k=50, seed=42))
            for ids in torch.cat(new, dim=1).tolist():  # n_tokens x (2, 1) -> (2, n_tokens)
                texts.append(tokenizer.decode(ids).strip())
    model.train()
    return texts


def accumulate(model, scaler, micro_batches, mean_count, process):
    """Sums the gradients of the micro-batches, one after the other. Returns their mean loss.

    mean_count: how many targets of a micro-batch are in the loss, on average over all of the step.
    """
    mean_loss = 0.0
    for i, (x, y) in enumerate(micro_batches, start=1):
        # The gradients are averaged over the processes only in the step's last backward pass.
        set_gradient_sync(model, i == len(micro_batches))
        with process.autocast:
            _, loss = model(x, y)
        # The loss is a mean over the targets of this micro-batch. The step needs the mean over all
        # of its targets. So the sum over the micro-batches is divided by their number, and each
        # weighs as much as its targets: its count / mean_count, which is 1 without pairs.
        loss = loss / len(micro_batches) / (mean_count / (y != -100).sum())
        scaler.scale(loss).backward()
        mean_loss += loss.detach()
    return mean_loss


def train_step(training, n_targets, micro_batches, grad_clip, signals, process):
    """Makes one optimizer step -> (mean loss, gradient norm, whether any process has signals).

    n_targets: how many targets are in the loss, on all processes together. micro_batches: list of
    (x, y), (B, T) each. signals: a list, to which a signal handler may append at any time.

    If the gradient is infinite or NaN, nothing is updated. The run still counts the step, and goes
    on to the next batch.
    """
    model, optimizers, scaler = training.model, training.optimizers, training.scaler
    mean_count = n_targets / process.dp_size / len(micro_batches)
    if isinstance(model, Pipeline):
        # Does the same as accumulate, but its stages work on different micro-batches at the same
        # time. All stages get the mean loss.
        mean_loss = model(micro_batches, mean_count, scaler)
    else:
        mean_loss = accumulate(model, scaler, micro_batches, mean_count, process)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)  # clipping needs the true gradient
    norm = clip_grad_norm(model, grad_clip or math.inf)  # inf only measures it
    has_signals = torch.full_like(norm, len(signals) > 0)  # 0 or 1, to be sent with the others
    # These are the means over all processes, as Python floats. In a step, the CPU waits for the
    # device only here. (With TP, it waits once more in the first step, to compare gradients.)
    loss, norm, stopping = process.mean(mean_loss, norm, has_signals)
    for optimizer in optimizers:
        if math.isfinite(norm):
            optimizer.step()  # not scaler.step(): it would wait for the device again
        optimizer.zero_grad()
    scaler.update()  # lowers the scale if unscale_ has seen inf or NaN
    return loss, norm, stopping > 0


class Training(NamedTuple):
    """A model and what trains it."""

    whole_gpt: GPT  # on the device meta: it has names and shapes of all parameters, but no memory
    # raw_model and model share their parameters. `model`, which may be compiled and in DDP, is only
    # for train_step. Validation, samples and checkpoints use `raw_model`.
    raw_model: torch.nn.Module
    model: torch.nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler  # does nothing unless the dtype is float16


# What a process has, in a mesh of pp x dp_size x tp processes:
#
#                      of the model           of the data
#   --parallel ddp     all                    its own sequences; DDP averages the gradients
#   --parallel fsdp    a shard of each        its own sequences; FSDP gathers the weights of a block
#                      tensor                 just before it is used, and averages the gradients
#   --tp N             a part of each         the same as N-1 others, which compute the other heads
#                      matrix                 and the rest of the MLP
#   --pp N             some of the blocks     the same as N-1 others; a micro-batch goes from one
#                                             process to the next, and its gradient back
def make_training(gpt_config, config, process, weights=None):
    """Makes a model and what trains it -> Training. weights: a state dict, or None for random ones.

    The order of the lines has reasons:

    - A GPT on the device meta has shapes, but no memory. So split_model can cut the model before it
      has memory, and no process ever holds all of a model that is split.
    - load_weights then makes the parameters on the device. The optimizers are made after it,
      because they take these parameters, and not those on meta.
    - torch.compile comes before DDP. It compiles at the first call, when DDP is already around the
      model. So it can cut its code where a bucket of DDP's gradients is full, and DDP sends this
      bucket while the backward pass computes the next one. split_model compiles each block.
    """
    with torch.device("meta"):
        raw_model = GPT(gpt_config)
    raw_model.activation_checkpointing = config.activation_checkpointing
    if is_split(config, process):
        # With PP, this returns a Pipeline, which has the methods hidden, logits and loss of a GPT.
        # A split model is not put into DDP: FSDP averages its gradients. With --tp or --pp and
        # --parallel ddp, FSDP does only this, and shards nothing.
        raw_model = split_model(raw_model, config, process)
    # Allocates the parameters on the device. Copies `weights` into them, or draws random ones,
    # which depend on the seed only: they are the same for any number of processes. All processes
    # draw the numbers of the whole model, and each keeps its part.
    whole = make_whole_gpt(GPT, gpt_config)
    load_weights(raw_model, whole, weights, config.seed, process.device)
    optimizers = raw_model.configure_optimizers(
        config.weight_decay, config.max_lr, config.optimizer, config.muon_lr
    )
    model = raw_model
    if config.compile and not is_split(config, process):
        model = torch.compile(raw_model, dynamic=False, fullgraph=True)
        # Validation calls raw_model.loss, and so loss_fn, outside of the compiled model.
        raw_model.loss_fn.compile(dynamic=False, fullgraph=True)
    if process.world_size > 1 and not is_split(config, process):
        model = DDP(model, gradient_as_bucket_view=True)  # views need no second copy
        # If Muon is used, it is optimizers[0], and each process then updates some of the matrices.
        # AdamW does not read n_processes.
        optimizers[0].n_processes = process.world_size
    return Training(whole, raw_model, model, optimizers, grad_scaler(process))


def import_benchmarks(config):
    """Imports the files that --evals names -> [(Benchmark, path of its data, or "")].

    Raises UserError if a file has no BENCHMARK.
    """
    found = []
    if config.eval_every == 0:
        return found
    for item in config.evals.split(","):
        if not item:
            continue
        name, _, path = item.strip().partition("=")
        benchmark = None
        if "." not in name and importlib.util.find_spec(name) is not None:
            benchmark = getattr(importlib.import_module(name), "BENCHMARK", None)
        if benchmark is None:
            raise UserError(f"--evals {name}: no such benchmark; give a module, such as lambada")
        if benchmark in [known for known, _ in found]:
            raise UserError(f"--evals {name}: is given twice; give it once")
        found.append((benchmark, path))
    return found


def due(step, every):
    """Whether something that happens every `every` steps is due at this step. Step 0 never is."""
    return every > 0 and step > 0 and step % every == 0


# `step` is the number of steps so far, and `position` is the number of sequences that they took. In
# each round of the loop, all that is due at `step` happens first, and then comes one more step:
#
#   step 0       validation
#   later        save, validation, benchmarks, samples, each if it is due
#   max_steps    save, validation, benchmarks, samples; then the run is done
#   a signal     (or max_minutes) save; then the run ends. A resume does the rest that is due.
#   a resume     begins at the step of its checkpoint, S. It has the weights, the state of the
#                optimizers and the position of the checkpoint. It does not save S again.
#                In log.txt, the lines of S and of later steps are deleted. Only the validation and
#                the benchmarks of S stay. What is due at S is computed again, and logged only if
#                log.txt does not have it.
#
# All processes call save, validate, run_evals, draw_samples and the methods of log. Rank 0 prints,
# and writes the files: log writes log.txt, write_facts writes run.json and changes.patch, and saver
# collects the parts of a split model and writes the checkpoints.
def main(argv=None):
    given = parse_flags(__doc__, GPTConfig, TrainConfig, argv=argv, groups=GROUPS)
    sources = Sources(choose_data(given), given.get("tokenizer"), given.get("val_fraction"))
    gpt_config, config = make_configs(given, sources, GPTConfig, TrainConfig)
    # `process` has the rank of this process, its place among the others, its device and its dtype.
    process = start(config.device, config.dtype, config.tp, config.pp, config.parallel)
    saved = load_newest(config.log_dir, GPT) if config.resume else None  # a checkpoint, or None
    # Shape and weights come from `saved` or from --init_from. Otherwise, flags give the shape, and
    # weights is None, for random ones. `overrides` has settings that saved or the weights decide.
    gpt_config, weights, tokenizer, overrides = choose_start(
        saved, GPT, gpt_config, config, given, sources
    )
    config = replace(config, **overrides, compile=choose_compile(config.compile, process.device))
    T = gpt_config.block_size
    # A set is validated on its val shards, or without them on its last tokens (val_fraction).
    data = Data(sources, tokenizer, gpt_config)
    loader = DataLoaderLite(data.train, data.shares, T, config.seed, config.shuffle)
    val_loaders = [DataLoaderLite([tokens], [1], T, shuffle=False) for tokens in data.val]
    # sizes[s] is (n, B): step s has n sequences, and B of them are in a micro-batch of one process.
    # The last pair is for all later steps. On 8 GPUs without a ramp: [(512, 64)].
    sizes = plan_steps(config, T, sum(loader.lengths), process.dp_size)
    n_bytes_of_id = torch.from_numpy(tokenizer.text_bytes(gpt_config.vocab_size)).to(process.device)
    evals = load_evals(import_benchmarks(config), tokenizer, gpt_config)
    training = make_training(gpt_config, config, process, weights)
    raw_model = training.raw_model
    saver = Saver(training, data, config, process)  # also compares data and flags of the processes
    # Without --batch_size, a GPU searches for the largest micro-batch that fits. No weights change.
    B = given.get("batch_size") or fit_batch_size(training, config, T, sizes, process)
    config = replace(config, batch_size=B)
    sizes = [(n, min(B, planned)) for n, planned in sizes]
    first_step, position = saver.restore(saved)  # loads optimizers and scaler; (0, 0) in a new run
    step = first_step
    log = RunLog(config, gpt_config, first_step, process)  # at step 0, moves an old run aside
    on_rank0(write_facts, step, training.whole_gpt, config, data, process)  # run.json
    progress = Progress(config, training.whole_gpt.flops_per_token(), process)
    batches = loader.batches(range(first_step, config.max_steps), position, sizes, process)
    batches = prefetch(batches, process.device)  # a thread prepares the next step
    stopping = False
    deadline = time.monotonic() + 60 * (config.max_minutes or math.inf)
    with catch_stop_signals("finishing this step") as signals, batch_size_advice(B):
        while True:
            done = step == config.max_steps  # no step is left to do; restore refuses a later one
            if step > first_step and (done or stopping or due(step, config.save_every)):
                saver.save(step, position)
            if stopping and not done:
                break
            if done or step == 0 or due(step, config.val_every):
                losses = validate(raw_model, val_loaders, data, n_bytes_of_id, config, process)
                saver.save_best(losses["val"], step, position)  # does nothing without --keep_best
                progress.show_validation(step, losses, data.names, loader.epochs(position))
                log.write(step, **losses)
            if evals and (done or due(step, config.eval_every)):
                log.write(step, **run_evals(evals, raw_model, process, config, step))
            if done or due(step, config.sample_every):
                log.write_samples(step, draw_samples(raw_model, data, config, process))
            if done:
                break
            began = time.perf_counter()  # evaluating and saving are not timed
            lr = get_lr(step, config)
            set_lr(training.optimizers, lr, config)
            # Each step has a seed, so that a resumed run draws the same dropout masks. The
            # processes of a TP group need equal masks.
            torch.manual_seed(hash_numbers(config.seed, step, process.rank // config.tp))
            n, n_targets, micro_batches = next(batches)  # n and n_targets are of all processes
            if time.monotonic() > deadline:
                signals.append(0)  # as if a signal had come
            loss, norm, stopping = train_step(
                training, n_targets, micro_batches, config.grad_clip, signals, process
            )
            position += n
            seconds = time.perf_counter() - began
            figures = dict(train=loss, lr=lr, norm=norm, tokens=position * T, tok_s=n * T / seconds)
            log.write(step, **figures)
            progress.show_step(step, n * T, seconds, figures)
            if progress.n_skipped_in_row == 10:
                raise UserError("no finite gradient in 10 steps; use --resume and a lower --max_lr")
            step += 1
    progress.show_end(step)
    process.barrier()
    return log.figures  # {stream: last value}


if __name__ == "__main__":
    run_program(main)
