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

  1. the flags are read; the processes join, each with its device
  2. the data are found, and with --resume also the checkpoint
  3. flags, preset, data, weights and device give the configuration
  4. the data sets are opened, and a loader puts their sequences into an order
  5. model and optimizers are made; on a GPU, the largest micro-batch is found
  6. with --resume, the optimizers get their state; the log is opened
  in each step:
  7. what is due is done: save, validate (also at step 0), benchmarks, samples
  8. the learning rate is set, and the next batch is taken
  9. one micro-batch after the other goes forward and backward
 10. the gradients are clipped, and the optimizers change the weights
 11. the figures of the step are logged

lesson/09_muon.py trains the same model with the same losses, in 317 lines.
This program adds (docs/lesson.md has the files, and the reasons):

  flags, presets                       TrainConfig
  mixtures, pairs                      Sources, Data
  an order of data of any size         DataLoaderLite.sequence
  other schedules                      get_lr
  the loss in chunks                   ChunkedCrossEntropy
  bits per byte                        estimate_loss
  samples and benchmarks during a run  draw_samples, import_benchmarks
  a mean over the targets in the loss  accumulate
  float16 and skipped steps            train_step
  models that are split                make_training
  resuming                             Saver, load_saved
  a log                                RunLog
"""

import importlib.machinery
import inspect
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from plaingpt.base.errors import UserError, run_program
from plaingpt.base.flags import flag, parse_flags, pick
from plaingpt.base.signals import StopRequest
from plaingpt.data.data_sets import Data
from plaingpt.data.prefetch import prefetch
from plaingpt.data.sources import Sources
from plaingpt.distributed.batch_search import fit_batch_size
from plaingpt.distributed.device import Dtype
from plaingpt.distributed.fill import make_whole_gpt
from plaingpt.distributed.gradients import GradientClipper, grad_scaler, set_gradient_sync
from plaingpt.distributed.memory import batch_size_advice, memory_advice
from plaingpt.distributed.pipeline import Pipeline
from plaingpt.distributed.process import on_rank0, start
from plaingpt.distributed.split import is_split, split_model
from plaingpt.ops.order import hash_numbers, order_of_sets, permute
from plaingpt.ops.sampling import attention_for_many_shapes, generate_tokens
from plaingpt.run.facts import write_facts
from plaingpt.run.log import RunLog
from plaingpt.run.presets import PRESETS
from plaingpt.run.progress import Progress
from plaingpt.run.resolve import GROUPS, choose_data, load_saved, resolve
from plaingpt.run.samples import answer_prompts
from plaingpt.run.steps import plan_steps
from plaingpt.scoring.evals import load_evals, run_evals
from plaingpt.weights.saver import Saver

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig

# Python takes the first model.py that it finds. In a notebook, that may be another one.
MODEL = inspect.getsourcefile(GPT)
assert Path(MODEL).samefile(Path(__file__).resolve().with_name("model.py")), (
    f"{MODEL} is another model.py; put {Path(__file__).parent} first in sys.path"
)


# Configuration. Each field is a flag: its name, its type, its default, its help and its range.
# plaingpt/run has the presets, and decides what is not given. Some flags have one more property:
#   free     A resume may change the flag without a note. Losses do not depend on it, except for
#            rounding and the masks of dropout. A change of another flag is printed.
#   repeat   Runs that differ only in this flag repeat one experiment.
#   empty    An empty value means something. For other flags, it is a mistake.
@dataclass
class TrainConfig:
    # preset and data
    preset: Literal[("auto", *PRESETS)] = flag("auto", "auto fits data and device")
    data: list[str] | None = flag(None, "shards, text or pairs; a mixture: A=WEIGHT B=WEIGHT")
    tokenizer: str | None = flag(None, "for text data: gpt2 or a tokenizer.json [bytes]")
    val_fraction: float | None = flag(None, "held out [0.01; text 0.1]", above=0, below=1)
    shuffle: bool = flag(True, "new random order of the sequences in each epoch")
    seed: int = flag(1337, "random seed", at_least=0, at_most=2**32 - 1, repeat=True)
    init_from: str | None = flag(None, "start from a checkpoint, run, or Hugging Face GPT-2")
    # batch and steps
    batch_size: int = flag(64, "sequences in a micro-batch; cut to fit a GPU", above=0, free=True)
    total_batch_size: int = flag(2**19, "tokens in a step, of all processes", above=0)
    rampup_steps: int = flag(0, "steps of a growing batch", at_least=0, at_most=1e6)
    rampup_batch_size: int = flag(32768, "tokens in the first step of the ramp", above=0)
    max_steps: int = flag(19073, "steps in the run; gpt2: 10B tokens", above=0)
    max_minutes: float | None = flag(None, "end with a save", above=0, at_most=1e6, free=True)
    # optimizer
    optimizer: Literal["adamw", "muon"] = flag("adamw", "muon: Muon for matrices of blocks")
    max_lr: float = flag(6e-4, "peak learning rate", above=0)
    muon_lr: float | None = flag(None, "peak learning rate of Muon [max_lr]", above=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = flag("cosine", "after warm-up")
    warmup_steps: int = flag(715, "steps of linear warm-up", at_least=0)
    decay_steps: int | None = flag(None, "length of wsd's decay [max_steps / 5]", above=0)
    min_lr: float | None = flag(None, "learning rate at the end [max_lr / 10]", at_least=0)
    weight_decay: float = flag(0.1, "decay of matrices and embeddings", at_least=0)
    grad_clip: float = flag(1.0, "maximum gradient norm; 0: no clipping", at_least=0)
    # evaluation
    val_every: int = flag(500, "steps between validations; 0: first and last", at_least=0)
    val_tokens: int = flag(20 * 2**19, "validation tokens of each data set", above=0)
    val_spread: bool = flag(True, "take them from everywhere in data that are held out")
    eval_every: int = flag(500, "steps between benchmarks; 0: never", at_least=0)
    evals: str = flag("hellaswag,lambada,storycloze", "benchmarks, NAME or NAME=FILE", empty=True)
    sample_every: int = flag(500, "steps between samples; 0: at the end", at_least=0, free=True)
    sample_tokens: int | None = flag(None, "of a sample [64; bytes: 500]", above=0, free=True)
    # output
    log_dir: str | None = flag(None, "run directory [log/PRESET]", free=True)
    resume: bool = flag(False, "continue the run in log_dir; starts it if there is none", free=True)
    save_every: int = flag(1000, "steps between saves; 0: at the end", at_least=0, free=True)
    keep: int = flag(2, "number of checkpoints to keep; 0: all", at_least=0, free=True)
    keep_best: bool = flag(False, "also save the step of lowest val loss, model_best.pt", free=True)
    log_every: int = flag(1, "steps between printed lines; log.txt has all", above=0, free=True)
    tensorboard: bool = flag(False, "also write TensorBoard event files into log_dir", free=True)
    wandb: str | None = flag(None, "also log to this project of Weights & Biases", free=True)
    # hardware
    device: str = flag("auto", "cuda, cuda:1, mps or cpu", free=True)
    dtype: Dtype = flag("auto", "number format of matrix products")
    compile: bool | None = flag(None, "use torch.compile [on for cuda only]", free=True)
    activation_checkpointing: bool = flag(False, "recompute activations to save memory", free=True)
    parallel: Literal["ddp", "fsdp"] = flag("ddp", "replicate or shard the model", free=True)
    tp: int = flag(1, "tensor parallel processes; divides n_head", above=0, free=True)
    pp: int = flag(1, "pipeline stages; at most n_layer", above=0, free=True)


class DataLoaderLite:
    """The stream of sequences of a run, in an order that depends on nothing but the arguments.

    Sequence j of a data set is the T+1 tokens from jT to jT+T. They give T inputs, and T targets,
    which are one token later. Its last token is the first one of sequence j+1, so no token is a
    target twice in an epoch. An epoch of a data set is a random permutation of its sequences.

    A position counts the sequences from the start of the run. A step of n sequences that begins at
    position p takes p to p+n-1, on any number of processes. The next step begins at p+n.

    sets: a Tokens object for each data set, which joins its shards. shares: how many of the
    sequences are from each set, as Fractions (fractions.Fraction) that add up to 1. stride: of each
    set, take only sequences 0, stride, 2 stride and so on. Raises UserError if a set has fewer than
    T+1 tokens.

    lesson/07_accumulate.py has a DataLoaderLite for one text.
    """

    def __init__(self, sets, shares, T, seed=1337, shuffle=True, stride=1):
        self.sets = sets
        self.shares = shares
        self.T = T
        self.seed = seed
        self.shuffle = shuffle
        self.stride = stride
        self.lengths = [tokens.count_sequences(T) // stride for tokens in sets]  # in sequences
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
        return self.sets[k].read_sequence(j * self.stride * self.T, self.T)

    def epochs(self, position):
        """Returns for each data set how often the run has read it, up to a position."""
        epochs = []
        for share, length in zip(self.shares, self.lengths):
            epochs.append(position * float(share) / length)
        return epochs

    def count_targets(self, position, n):
        """Returns the number of targets that are in the loss, in n sequences from a position on."""
        if not any(tokens.has_pairs for tokens in self.sets):  # all are
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


def make_val_loader(tokens, T, config):
    """Returns the loader of a validation split, whose first val_tokens tokens are measured.

    A val split on disk is measured from its start, as in build-nanogpt, so its losses compare. The
    start of a part that was held out of the data may be one file or one subject. So val_spread
    takes sequences from all of it, at equal distances. This also makes the loss depend less on the
    seed. tokens: the Tokens of the split.
    """
    stride = 1
    if tokens.is_held_out and config.val_spread:
        n_measured = max(1, config.val_tokens // T)
        stride = max(1, tokens.count_sequences(T) // n_measured)
    return DataLoaderLite([tokens], [1], T, shuffle=False, stride=stride)


@torch.no_grad()
def estimate_loss(model, loader, n_bytes_of_id, config, process):
    """Measures the loss on val_tokens tokens of a data set -> (loss, bits per byte).

    The loss is in nats per token, so it depends on the tokenizer. Bits per byte of text do not, so
    they compare models with different tokenizers. They are nan if no token is text.

    loader: that of this data set, from make_val_loader. n_bytes_of_id: (vocab_size,), how many
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
    from make_val_loader. The other arguments are those of main.
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
        # of its targets, so a micro-batch weighs as much as it has targets.
        n_here = (y != -100).sum()
        weight = n_here / mean_count  # 1 if all targets are in the loss
        loss = loss * weight / len(micro_batches)
        scaler.scale(loss).backward()
        mean_loss += loss.detach()
    return mean_loss


def train_step(training, n_targets, micro_batches, grad_clip, process, stop=None):
    """Makes one optimizer step -> (mean loss, gradient norm, whether any process is told to stop).

    n_targets: how many targets are in the loss, on all processes together. micro_batches: list of
    (x, y), (B, T) each. stop: a StopRequest of this process, or None.

    If the gradient is infinite or NaN, no weight changes, and the scale of float16 becomes smaller.
    The run still counts the step, and goes on to the next batch.
    """
    model, optimizers, scaler = training.model, training.optimizers, training.scaler
    # Targets of a micro-batch, on average over all micro-batches of all processes.
    mean_count = n_targets / process.dp_size / len(micro_batches)
    if isinstance(model, Pipeline):
        # A Pipeline does what accumulate does, but its stages work on different micro-batches at
        # the same time. All stages get the mean loss.
        mean_loss = model(micro_batches, mean_count, scaler)
    else:
        mean_loss = accumulate(model, scaler, micro_batches, mean_count, process)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)  # clipping needs the true gradient
    norm = training.clipper.clip(grad_clip or math.inf)  # inf: it only measures the norm
    requested = torch.full_like(norm, stop is not None and stop.requested)  # 0.0 or 1.0
    # The next line takes the means over all processes, as Python floats. It is the only one in a
    # step that waits for the device. (With TP, the first step also waits to compare gradients.)
    loss, norm, stopping = process.mean(mean_loss, norm, requested)
    for optimizer in optimizers:
        if math.isfinite(norm):
            optimizer.step()  # not scaler.step(): it would wait for the device again
        optimizer.zero_grad()
    scaler.update()  # lowers the scale if unscale_ has seen inf or NaN
    return loss, norm, stopping > 0


class Training(NamedTuple):
    """A model and what trains it."""

    # The whole GPT: raw_model, or for a split model a GPT without memory, for names and shapes.
    whole_gpt: GPT
    # raw_model and model share their parameters. `model`, which may be compiled and in DDP, is for
    # train_step, and for the search that finds a micro-batch. All else uses `raw_model`.
    raw_model: torch.nn.Module
    model: torch.nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler  # does nothing unless the dtype is float16
    clipper: GradientClipper


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

    - The model is made on its device, and then gets its weights. Only a split model is cut while it
      is still without values, because all of it may not fit into one process.
    - The optimizers take the parameters that are on the device.
    - torch.compile comes before DDP. It compiles in the first call, and sees the DDP around the
      model. So the compiled code ends where a bucket of DDP's gradients is full, and DDP sends this
      bucket during the rest of the backward pass. split_model compiles each block.
    """
    has_part = is_split(config, process)  # whether each process has only a part of the model
    if has_part:
        # With PP, raw_model is a Pipeline, which has the methods hidden, logits and loss of a GPT.
        # FSDP averages the gradients of a split model, so it is not put into DDP. With --tp or --pp
        # and --parallel ddp, FSDP averages gradients and shards nothing.
        whole = make_whole_gpt(GPT, gpt_config)
        raw_model = split_model(whole, weights, config, process)
    else:
        # init_weights draws GPT-2's parameters. This seed is for others that a constructor draws.
        torch.manual_seed(config.seed)
        with (
            process.device,  # the tensors are made on it
            memory_advice("the model does not fit into memory; choose a smaller one"),
        ):
            whole = raw_model = GPT(gpt_config, config.activation_checkpointing)
        if weights:
            raw_model.load_state_dict(weights)
        else:
            raw_model.init_weights(config.seed)  # all processes draw the same values
    uses_ddp = process.world_size > 1 and not has_part
    n_processes = process.world_size if uses_ddp else 1  # with DDP, Muon shares its work
    optimizers = raw_model.configure_optimizers(
        config.weight_decay, config.max_lr, config.optimizer, config.muon_lr, n_processes
    )
    model = raw_model
    if config.compile and not has_part:
        model = torch.compile(raw_model, dynamic=False, fullgraph=True)
        # Validation calls raw_model.loss and not the compiled model, so loss_fn is compiled, too.
        raw_model.loss_fn.compile(dynamic=False, fullgraph=True)
    if uses_ddp:
        model = DDP(model, gradient_as_bucket_view=True)  # views need no second copy
    clipper = GradientClipper(model, config.tp)
    return Training(whole, raw_model, model, optimizers, grad_scaler(process), clipper)


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
        if "." not in name and importlib.machinery.PathFinder.find_spec(name) is not None:
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
#   a signal     (or max_minutes) save; then the run ends. A resume does what else is due.
#   a resume     begins at the step of its checkpoint, S. It has the weights, the state of the
#                optimizers and the position of the checkpoint. It does not save S again.
#                log.txt keeps what comes before S, and the validation and the benchmarks of S.
#                What is due at S is computed again, and logged if log.txt does not have it.
#
# In the log, the step that leads from `step` to step + 1 has the number `step`.
#
# All processes call save, validate, run_evals, draw_samples and the methods of log. Rank 0 prints,
# and writes the files: log writes log.txt, write_facts writes run.json and changes.patch, and saver
# collects the parts of a split model and writes the checkpoints.
def main(argv=None):
    given = parse_flags(__doc__, GPTConfig, TrainConfig, argv=argv, groups=GROUPS)
    asked = pick(TrainConfig, given)  # No preset changes the fields that are read from it here.
    # `process` has the rank of this process, its place among the others, its device and its dtype.
    process = start(asked.device, asked.dtype, asked.tp, asked.pp, asked.parallel)
    sources = Sources(choose_data(given), asked.tokenizer, asked.val_fraction)
    saved = load_saved(given, sources, GPT)  # the checkpoint that --resume continues, or None
    # The weights are those of `saved` or of --init_from, or None for random ones. origins says for
    # each setting what has decided it, such as "flag" or "preset".
    gpt_config, config, weights, tokenizer, origins = resolve(
        given, sources, saved, process, GPT, TrainConfig
    )
    T = gpt_config.block_size
    # A set is validated on its val shards, or without them on its last tokens (val_fraction).
    data = Data(sources, tokenizer, gpt_config)
    loader = DataLoaderLite(data.train, data.shares, T, config.seed, config.shuffle)
    val_loaders = [make_val_loader(tokens, T, config) for tokens in data.val]
    # sizes[s] is (n, B): step s has n sequences, and B of them are in a micro-batch of one process.
    # The last pair is for all later steps. On 8 GPUs without a ramp: [(512, 64)].
    has_batch_size = origins["batch_size"] == "flag"
    sizes = plan_steps(config, T, sum(loader.lengths), process.dp_size, has_batch_size)
    n_bytes_of_id = torch.from_numpy(tokenizer.text_bytes(gpt_config.vocab_size)).to(process.device)
    evals = load_evals(import_benchmarks(config), tokenizer, gpt_config)

    training = make_training(gpt_config, config, process, weights)
    raw_model = training.raw_model
    saver = Saver(training, data, config, process)  # also compares data and flags of the processes
    if not has_batch_size:  # a GPU halves B until it fits into memory; no weights change
        B, sizes = fit_batch_size(training, config, T, sizes, process)
        config = replace(config, batch_size=B)
    # In a new run, restore returns (0, 0). It loads no weights, because the model has them.
    first_step, position = saver.restore(saved)
    saved = weights = None  # lets go of the memory and of the file of the checkpoint
    step = first_step
    log = RunLog(config, gpt_config, first_step, process)  # at step 0, moves an old run aside
    on_rank0(write_facts, step, training.whole_gpt, config, origins, data, process)  # run.json
    progress = Progress(config, training.whole_gpt.flops_per_token(), process)
    batches = loader.batches(range(first_step, config.max_steps), position, sizes, process)
    batches = prefetch(batches, process.device)  # a thread prepares the next step
    stopping = False
    stop = StopRequest("finishing this step", config.max_minutes)
    with stop, batch_size_advice(config.batch_size):
        while True:
            done = step == config.max_steps  # step is never larger, see restore
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
            loss, norm, stopping = train_step(
                training, n_targets, micro_batches, config.grad_clip, process, stop
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
