"""Trains a GPT-2 on text or on token shards. Writes a log and checkpoints.

  python train_gpt2.py                  trains a small model on the bytes of
                                        input.txt if edu_fineweb10B/ is missing
  python train_gpt2.py --data my.txt    does the same on your own text
  torchrun --nproc_per_node=8 train_gpt2.py
                                        trains GPT-2 124M on 8 GPUs, if
                                        fineweb.py has made edu_fineweb10B/

The same command with --resume continues a run. In --help, [x] is the default of
a flag. A preset overrides the defaults, and a flag overrides the preset.
--no-NAME turns a switch off. These are the presets, with their numbers of
parameters:

  baby      0.4M, reads bytes; --preset auto chooses it for a text
  gpt2      124M; auto chooses it for shards of 10^9 tokens or more, if there is
            a GPU
  mini      11M with GPT-2's ids; auto chooses it for all other shards
  finetune  trains for 100 steps at a low rate, or weights with fewer than 768
            channels for 400 steps; auto chooses it with --init_from
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
"""

import math
import operator
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

# This import must come before torch: plaingpt sets a variable that torch reads when it is imported
# (see plaingpt/__init__.py).
import plaingpt.device as devices

# isort: split
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig
from plaingpt import cli, parallel
from plaingpt.checkpoint import Saver, choose_start, load_newest, load_weights
from plaingpt.cli import EMPTY, FREE, REPEAT, UserError, print0
from plaingpt.data import Data, Sources, plan_steps
from plaingpt.evaluation import load_evals, run_evals
from plaingpt.order import hash_numbers, order_of_sets, permute
from plaingpt.presets import PRESETS
from plaingpt.runlog import RunLog
from plaingpt.sampling import answer, attention_for_many_shapes, generate_tokens


# Each field is a flag. FREE means that losses and scores do not depend on the flag (except for
# rounding and the masks of dropout), so a resume may change it without a note. REPEAT means that
# runs which differ in the flag repeat one experiment.
@dataclass
class TrainConfig:
    preset: Annotated[Literal[("auto", *PRESETS)], "auto fits data and device"] = "auto"
    data: Annotated[list[str] | None, "shards, text or pairs; a mixture: A=WEIGHT B=WEIGHT"] = None
    tokenizer: Annotated[str | None, "for text data: gpt2 or a tokenizer.json [bytes]"] = None
    val_fraction: Annotated[float | None, "held out [0.01; text 0.1]", "above 0 and below 1"] = None
    shuffle: Annotated[bool, "new random order of the sequences in each epoch"] = True
    seed: Annotated[int, "random seed", f"at least 0 and at most {2**32 - 1}", REPEAT] = 1337
    init_from: Annotated[str | None, "start from a checkpoint, run, or Hugging Face GPT-2"] = None
    batch_size: Annotated[int, "sequences in a micro-batch; cut to fit a GPU", "above 0", FREE] = 64
    total_batch_size: Annotated[int, "tokens in a step, of all processes", "above 0"] = 2**19
    rampup_steps: Annotated[int, "steps of a growing batch", "at least 0 and at most 1e6"] = 0
    rampup_batch_size: Annotated[int, "tokens in the first step of the ramp", "above 0"] = 32768
    max_steps: Annotated[int, "steps in the run; gpt2: 10B tokens", "above 0"] = 19073
    max_minutes: Annotated[float | None, "end with a save", "above 0 and at most 1e6", FREE] = None
    optimizer: Annotated[Literal["adamw", "muon"], "muon: Muon for matrices of blocks"] = "adamw"
    max_lr: Annotated[float, "peak learning rate", "above 0"] = 6e-4
    muon_lr: Annotated[float | None, "peak learning rate of Muon [max_lr]", "above 0"] = None
    schedule: Annotated[Literal["cosine", "linear", "wsd", "constant"], "after warm-up"] = "cosine"
    warmup_steps: Annotated[int, "steps of linear warm-up", "at least 0"] = 715
    decay_steps: Annotated[int | None, "length of wsd's decay [max_steps / 5]", "above 0"] = None
    min_lr: Annotated[float | None, "learning rate at the end [max_lr / 10]", "at least 0"] = None
    weight_decay: Annotated[float, "decay of matrices and embeddings", "at least 0"] = 0.1
    grad_clip: Annotated[float, "maximum gradient norm; 0: no clipping", "at least 0"] = 1.0
    val_every: Annotated[int, "steps between validations; 0: first and last", "at least 0"] = 500
    val_tokens: Annotated[int, "validation tokens of each data set", "above 0"] = 20 * 2**19
    eval_every: Annotated[int, "steps between benchmarks; 0: never", "at least 0"] = 500
    evals: Annotated[str, "benchmarks, NAME or NAME=FILE", EMPTY] = "hellaswag,lambada,storycloze"
    sample_every: Annotated[int, "steps between samples; 0: at the end", "at least 0", FREE] = 500
    sample_tokens: Annotated[int | None, "of a sample [64; bytes: 500]", "above 0", FREE] = None
    log_dir: Annotated[str | None, "run directory [log/PRESET]", FREE] = None
    resume: Annotated[bool, "continue the run in log_dir; starts it if there is none", FREE] = False
    save_every: Annotated[int, "steps between saves; 0: at the end", "at least 0", FREE] = 1000
    keep: Annotated[int, "number of checkpoints to keep; 0: all", "at least 0", FREE] = 2
    keep_best: Annotated[bool, "also save the step of lowest val loss, model_best.pt", FREE] = False
    log_every: Annotated[int, "steps between printed lines; log.txt has all", "above 0", FREE] = 1
    tensorboard: Annotated[bool, "also write TensorBoard event files into log_dir", FREE] = False
    wandb: Annotated[str | None, "also log to this project of Weights & Biases", FREE] = None
    device: Annotated[str, "cuda, cuda:1, mps or cpu", FREE] = "auto"
    dtype: Annotated[devices.Dtype, "number format of matrix products"] = "auto"
    compile: Annotated[bool | None, "use torch.compile [on for cuda only]", FREE] = None
    activation_checkpointing: Annotated[bool, "recompute activations to save memory", FREE] = False
    parallel: Annotated[Literal["ddp", "fsdp"], "replicate or shard the model", FREE] = "ddp"
    tp: Annotated[int, "tensor parallel processes; divides n_head", "above 0", FREE] = 1
    pp: Annotated[int, "pipeline stages; at most n_layer", "above 0", FREE] = 1


# --help shows the flags in groups. Each key is the first flag of a group, each value its title.
GROUPS = dict(
    n_layer="model",
    preset="preset and data",
    batch_size="batch and steps",
    optimizer="optimizer",
    val_every="evaluation",
    log_dir="output",
    device="hardware",
)
SHARDS = "edu_fineweb10B"
TEXT = Path(__file__).with_name("input.txt")


def choose_data(given):
    """Returns --data. If it is not given, returns input.txt for baby, mini and fine-tuning, and for
    --preset auto if there are no shards. Otherwise, returns the directory of shards.

    given: {name: value} of the flags on the command line.
    """
    for_text = given.get("preset") in ("baby", "mini", "finetune") or "init_from" in given
    no_shards = given.get("preset", "auto") == "auto" and not Path(SHARDS).is_dir()
    # The log shows a short name if it can.
    text = TEXT.name if TEXT.parent == Path.cwd() else str(TEXT)
    return given.get("data") or [text if for_text or no_shards else SHARDS]


def choose_preset(given, sources):
    """Makes the choice of --preset auto. It depends on --init_from, the data and the device."""
    if "init_from" in given:
        return "finetune"
    if sources.is_text:
        return "baby"
    # --device cuda:1 is a GPU, too.
    cuda = given.get("device", "auto").startswith(("auto", "cuda")) and torch.cuda.is_available()
    return "gpt2" if cuda and sources.count_train_tokens() >= 10**9 else "mini"


def make_configs(given, sources):
    """Makes the configurations from the flags that are given -> (GPTConfig, TrainConfig).

    Takes the other values from the preset, and those that it lacks from the defaults.

    given: {name: value} of the flags on the command line. choose_start completes the GPTConfig: its
    vocab_size is that of the data or of the weights. Raises UserError if flags contradict each
    other.
    """
    preset = given.get("preset", "auto")
    if preset == "auto":
        preset = choose_preset(given, sources)
    recipe = {**PRESETS[preset]}
    if preset == "mini":
        # Trains for ten epochs with the recipe's batch, but for at least 200 steps and at most
        # those of the recipe.
        T = given.get("block_size", recipe["block_size"])
        n_tokens, batch = max(1, sources.count_train_tokens(T)), recipe["total_batch_size"]
        recipe["max_steps"] = max(200, min(10 * n_tokens // batch, recipe["max_steps"]))
        # The more often the model reads the data, the more dropout it gets: 0.1 for 10 epochs.
        recipe["dropout"] = round(min(0.1, recipe["max_steps"] * batch / n_tokens / 100), 2)
    values = {**asdict(GPTConfig()), **asdict(TrainConfig()), "log_dir": f"log/{preset}", **recipe}
    if "evals" in given:
        values["eval_every"] = TrainConfig.eval_every  # baby, mini and finetune set 0
    values.update(given, preset=preset, data=sources.items)
    steps = values["max_steps"]
    if values["min_lr"] is None:
        values["min_lr"] = values["max_lr"] / 10
    # In a short run, validate about ten times, and warm up for at most a fifth of the steps.
    for name, most in (("val_every", max(1, steps // 10)), ("warmup_steps", steps // 5)):
        if name not in given:
            values[name] = min(values[name], most)
    if values["n_embd"] % values["n_head"]:
        raise UserError(f"--n_head: must be a divisor of --n_embd, which is {values['n_embd']}")
    for flag, other, need in (("muon_lr", "optimizer", "muon"), ("decay_steps", "schedule", "wsd")):
        if values[flag] and values[other] != need:
            raise UserError(f"--{flag}: needs --{other} {need}; give both, or leave it out")
    print0(
        f"preset {preset} on {', '.join(sources.shares)} ({sources.tokenizer.n_vocab:,} ids), "
        f"{steps:,} steps; --preset chooses another one: mini is small, gpt2 is GPT-2 124M"
    )
    return cli.pick(GPTConfig, values), cli.pick(TrainConfig, values)


class DataLoaderLite:
    """The stream of sequences of a run. It depends on data, shares, T, seed and shuffle only.

    Sequence j of a data set is the T+1 tokens from jT to jT+T. Its last token is the first one of
    sequence j+1, so no token is a target twice in an epoch. An epoch of a data set is a random
    permutation of its sequences. Several data sets take turns, each as often as its share says.

    A position counts sequences from the start of the run. A step of n sequences that begins at
    position p takes p to p+n-1, on any number of processes. The next step begins at p+n. If all
    steps have the same n, step s begins at s x total_batch_size / T.

    sets: a Tokens object for each data set, which joins its shards. shares: Fractions that add up
    to 1. Raises UserError if a set has fewer than T+1 tokens.
    """

    def __init__(self, sets, shares, T, seed=1337, shuffle=True):
        self.sets, self.shares = sets, shares
        self.T, self.seed, self.shuffle = T, seed, shuffle
        self.lengths = [tokens.count_sequences(T) for tokens in sets]  # in sequences
        # `turns` holds one period of the mixture: for each turn, the data set, and how many turns
        # it had earlier in the period. Shares 2/3 and 1/3 give [(0, 0), (0, 1), (1, 0)].
        self.turns = order_of_sets(self.shares)
        self.turns_per_period = [int(share * len(self.turns)) for share in self.shares]

    def sequence(self, position):
        """Returns the inputs and targets at a position: (2, T). Target -100 does not count."""
        periods, i = divmod(position, len(self.turns))
        k, earlier = self.turns[i]  # k is the index of the data set
        # `taken` is the number of sequences of this data set that came before this position.
        taken = periods * self.turns_per_period[k] + earlier
        epoch, j = divmod(taken, self.lengths[k])
        if self.shuffle:
            j = permute(j, self.lengths[k], self.seed, epoch)
        return self.sets[k].read_sequence(j * self.T, self.T)

    def count_targets(self, position, n):
        """Returns how many targets of the n sequences from a position on count."""
        if all(tokens.counted is None for tokens in self.sets):  # without pairs, all count
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
        """Yields the micro-batches of each step: (n, n_targets, list of (x, y)), (B, T) each.

        A step has n sequences on all processes together, with n_targets targets that count. Every
        process knows both, without communication. The process with dp_rank 0 gets the first B
        sequences, dp_rank 1 gets the next B, and so on. After the last process, it is the turn of
        dp_rank 0 again, until all n are given out. n is a multiple of dp_size x B. Without TP and
        PP, dp_rank is the rank, and dp_size is the number of processes. With them, tp x pp
        processes form a group, which computes one model together and has the same batches. dp_rank
        is then the index of the group, (rank // tp) % dp_size, and dp_size is the number of groups.

        steps: the range of steps. position: where the first of them begins. sizes: from plan_steps.
        """
        for step in steps:
            n, B = sizes[min(step, len(sizes) - 1)]  # steps after the ramp have the last size
            starts = range(position + process.dp_rank * B, position + n, process.dp_size * B)
            micro_batches = [self.batch(start, B, process.device) for start in starts]
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
    progress = max(0.0, min(1.0, (step - first) / max(1, config.max_steps - first)))
    # The heights are between 0 and 1. 0 stands for min_lr, and 1 for max_lr.
    heights = dict(
        cosine=0.5 * (1 + math.cos(math.pi * progress)),
        linear=1 - progress,
        wsd=1 - progress,
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
    """Measures the loss on the first val_tokens tokens of a data set -> (nats per token, bits per
    byte of text, or nan without text).

    loader: the loader of this data set, without shuffling. n_bytes_of_id: (vocab_size,), how many
    bytes of text each id stands for. Special ids have 0, so they count in nats per token and not in
    bits per byte. The number of processes does not change the result, except for rounding. All
    processes must call this.
    """
    B, T = config.batch_size, loader.T
    n_sequences = max(1, min(config.val_tokens // T, loader.lengths[0]))
    model.eval()
    sums = torch.zeros(3, device=process.device)  # nats, nats of text, bytes of text
    for start in range(0, n_sequences, process.dp_size * B):
        first = start + process.dp_rank * B
        # Every process runs the same number of full batches, for two reasons. The compiled parts
        # (the loss, and the blocks of a split model) then see one shape only. And a split model
        # needs all processes. So a batch may go beyond n_sequences; the surplus is cut off below.
        x, y = loader.batch(first, B, process.device)  # (B, T) each
        with process.autocast:
            losses = model.loss(model.hidden(x), y, reduction="none")  # (B, T)
        n_bytes = n_bytes_of_id[y.clamp(min=0)] * (y != -100)  # (B, T)
        parts = torch.stack([losses, losses * (n_bytes > 0), n_bytes.float()])  # (3, B, T)
        # Leaves out the sequences from n_sequences on.
        sums += parts[:, : max(0, n_sequences - first)].sum(dim=(1, 2))
    model.train()
    # Adds one value per group, not per process, so that each sequence counts once.
    nats, text_nats, n_bytes = process.sum(sums).tolist()
    bits_per_byte = text_nats / (n_bytes or math.nan) / math.log(2)
    return nats / loader.count_targets(0, n_sequences), bits_per_byte


def validate(model, loaders, shares, n_bytes_of_id, config, process):
    """Measures the loss on each data set -> (means, losses of the sets).

    losses: a (nats per token, bits per byte) for each loader. means: the means of both, weighted by
    the shares of the data sets. The arguments are those of estimate_loss.
    """
    losses = []
    for loader in loaders:
        losses.append(estimate_loss(model, loader, n_bytes_of_id, config, process))
    nats, bits_per_byte = zip(*losses)
    means = [sum(map(operator.mul, shares, each)) for each in (nats, bits_per_byte)]
    return means, losses


def draw_samples(model, data, config, process):
    """Returns two texts that the model writes. All processes must call this.

    With pairs, the model answers validation prompts, and the texts have the expected responses.
    """
    tokenizer, T = data.tokenizer, model.config.block_size
    pairs = [
        tokens.read_sequence(start, T)
        for tokens in data.val
        if tokens.counted is not None
        for start in range(0, len(tokens) - 1, T)[:2]
    ]
    model.eval()
    with process.autocast, attention_for_many_shapes():
        texts = [answer(model, x, y, tokenizer, process.device) for x, y in pairs[:2]]
        if not pairs:
            idx = torch.full((2, 1), tokenizer.end_of_text, device=process.device)  # (2, 1)
            n = config.sample_tokens or (500 if tokenizer.name == "bytes" else 64)
            new = generate_tokens(model, idx, n, temperature=0.8, top_k=50, seed=42)
            texts = [tokenizer.decode(ids).strip() for ids in torch.cat([*new], dim=1).tolist()]
    model.train()
    return texts


class Training(NamedTuple):
    """A model and what trains it."""

    # raw_model and model share their parameters. `model`, which may be compiled and in DDP, is only
    # for train_step. Validation, samples and checkpoints use `raw_model`.
    raw_model: torch.nn.Module
    model: torch.nn.Module
    optimizers: list
    scaler: torch.amp.GradScaler  # does nothing unless the dtype is float16


def make_training(gpt_config, config, process, weights=None):
    """Makes a model and what trains it -> Training. weights: a state dict, or None for random ones.

    The order of the steps has reasons:
    - A GPT on the device meta has shapes, but no memory. So parallel.split can split it before any
      process holds all of it, and each process then allocates only its own part.
    - load_weights replaces the meta parameters. So the optimizers are made after it.
    - torch.compile compiles at the first call. parallel.split wraps each block in it. A model that
      is not split is wrapped as a whole, before DDP. The compiler then cuts its code where a bucket
      of DDP's gradients is full, and DDP sends the bucket while the backward pass still computes.
    - DDP is last, because it registers hooks on the final parameters.
    """
    with torch.device("meta"):
        raw_model = GPT(gpt_config)
    raw_model.activation_checkpointing = config.activation_checkpointing
    is_split = process.world_size > 1 and (config.parallel == "fsdp" or config.tp * config.pp > 1)
    if is_split:
        # With FSDP, the GPT is the same, but each process has a shard of each tensor. With TP, each
        # process of a group has a part of each matrix; LayerNorms and positions stay whole. With
        # PP, raw_model is a Pipeline. Like a GPT, it has the methods hidden, logits and loss. Its
        # first stage has the embeddings, its last stage has the head, and each stage has some of
        # the blocks. A split model is never put into DDP. PyTorch's FSDP averages its gradients
        # over the dp_size groups, also with --parallel ddp, where it shards nothing. Muon works on
        # split matrices, too, but it communicates for each of them.
        raw_model = parallel.split(raw_model, config, process)
    # Allocates the parameters on the device. Copies `weights` into them, or draws random ones,
    # which depend on the seed only: they are the same for any number of processes.
    load_weights(raw_model, weights, config.seed, process.device)
    optimizers = raw_model.configure_optimizers(
        config.weight_decay, config.max_lr, config.optimizer, config.muon_lr
    )
    model = raw_model
    if config.compile and not is_split:
        model = torch.compile(raw_model, dynamic=False, fullgraph=True)
        # Validation calls raw_model.loss, and so loss_fn, outside of the compiled model.
        raw_model.loss_fn.compile(dynamic=False, fullgraph=True)
    if process.world_size > 1 and not is_split:
        model = DDP(model, gradient_as_bucket_view=True)  # views need no second copy
        # If Muon is used, it is optimizers[0], and each process then updates some of the matrices.
        # AdamW does not read n_processes.
        optimizers[0].n_processes = process.world_size
    return Training(raw_model, model, optimizers, parallel.grad_scaler(process))


def accumulate(model, scaler, micro_batches, mean_count, process):
    """Sums the gradients of the micro-batches, one after the other. Returns their mean loss.

    mean_count: how many targets count in a micro-batch, on average over all of the step.
    """
    mean_loss = 0.0
    for i, (x, y) in enumerate(micro_batches, start=1):
        # DDP and FSDP average the gradients over the processes only in the step's last backward.
        parallel.set_gradient_sync(model, i == len(micro_batches))
        with process.autocast:
            _, loss = model(x, y)
        # Each loss is the mean over the targets of its micro-batch. The step needs the mean over
        # all targets. So a micro-batch weighs as much as its targets, which is 1 if all count.
        loss = loss / len(micro_batches) / (mean_count / (y != -100).sum())
        scaler.scale(loss).backward()
        mean_loss += loss.detach()
    return mean_loss


def train_step(training, n_targets, micro_batches, grad_clip, signals, process):
    """Makes one optimizer step -> (mean loss, gradient norm, whether any process has signals).

    n_targets: how many targets count, on all processes together. micro_batches: list of (x, y),
    (B, T) each. signals: a list, to which a signal handler may append at any time. A step with a
    non-finite gradient leaves parameters and optimizers as they are, but `step` and `position` go
    on.
    """
    _, model, optimizers, scaler = training
    mean_count = n_targets / process.dp_size / len(micro_batches)
    if isinstance(model, parallel.Pipeline):
        # Does the same as accumulate, but its stages work on different micro-batches at the same
        # time. All stages get the mean loss.
        mean_loss = model(micro_batches, mean_count, scaler)
    else:
        mean_loss = accumulate(model, scaler, micro_batches, mean_count, process)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)  # clipping needs the true gradient
    norm = parallel.clip_grad_norm(model, grad_clip or math.inf)  # inf only measures it
    # These are means over all processes, as Python floats. (The norm was equal on all of them.) In
    # a step, the CPU waits for the device only here (and once more in the first step with TP).
    loss, norm, stopping = process.mean(mean_loss, norm, torch.full_like(norm, len(signals) > 0))
    for optimizer in optimizers:
        if math.isfinite(norm):
            optimizer.step()  # not scaler.step(): it would wait for the device again
        optimizer.zero_grad()
    scaler.update()  # lowers the scale if unscale_ has seen inf or NaN
    return loss, norm, stopping > 0


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
#   a resume     begins at the step of the checkpoint, and does not save it again. First, log.txt
#                loses the lines of this step and of all later ones, except this step's validation
#                and benchmarks. Then all that is due at this step is computed, even if the old run
#                has done it. A validation or benchmark that log.txt has gets no second line.
#   ten steps in a row with a non-finite gradient: the run ends with an error, without a save
#
# All processes call save, estimate_loss, run_evals, draw_samples and the methods of log. Rank 0
# prints, and writes the files.
def main(argv=None):
    given = cli.parse_flags(__doc__, GPTConfig, TrainConfig, argv=argv, groups=GROUPS)
    sources = Sources(choose_data(given), given.get("tokenizer"), given.get("val_fraction"))
    gpt_config, config = make_configs(given, sources)
    # `process` holds the rank of this process, its group, its device and its number format.
    process = devices.start(config.device, config.dtype, config.tp, config.pp, config.parallel)
    saved = load_newest(config.log_dir) if config.resume else None  # a checkpoint, or None
    # Shape and weights come from `saved`, otherwise from --init_from. Without both, flags give
    # the shape, and weights is None, for random ones. A resume keeps warmup_steps and val_every of
    # the first start, which are in `kept`, unless they are given.
    gpt_config, weights, tokenizer, kept = choose_start(saved, gpt_config, config, given, sources)
    config = replace(config, **kept, compile=devices.choose_compile(config.compile, process.device))

    T = gpt_config.block_size
    # A set is validated on its val shards, or without them on its last tokens (val_fraction).
    data = Data(sources, tokenizer, gpt_config)
    loader = DataLoaderLite(data.train, data.shares, T, config.seed, config.shuffle)
    val_loaders = [DataLoaderLite([tokens], [1], T, shuffle=False) for tokens in data.val]
    # [(n, B)]: a step has n sequences, and a micro-batch of one process has B, which is batch_size
    # or less. Each step of the ramp has a pair, and the last pair is for all later steps.
    sizes = plan_steps(config, T, sum(loader.lengths), process.dp_size)
    n_bytes_of_id = torch.from_numpy(tokenizer.text_bytes(gpt_config.vocab_size)).to(process.device)
    evals = load_evals(config, tokenizer, gpt_config)  # empty if eval_every is 0

    training = make_training(gpt_config, config, process, weights)
    saver = Saver(training, data, config, process)  # all processes must have the same flags
    # Without --batch_size, a GPU takes the largest micro-batches that it has memory for.
    B = given.get("batch_size") or devices.fit_batch_size(training, config, T, sizes, process)
    config, sizes = replace(config, batch_size=B), [(n, min(B, own)) for n, own in sizes]
    # Loads optimizers and scaler, but no learning rates. Returns (0, 0) in a new run.
    first_step, position = saver.restore(saved)
    log = RunLog(gpt_config, config, data, first_step, process)  # at step 0, moves an old run aside
    batches = loader.batches(range(first_step, config.max_steps), position, sizes, process)
    batches = devices.prefetch(batches, process.device)  # a thread prepares the next step
    step, raw_model, stopping = first_step, training.raw_model, False
    deadline = time.monotonic() + 60 * (config.max_minutes or math.inf)
    with (
        cli.catch_stop_signals("finishing this step") as signals,
        devices.batch_size_advice(config.batch_size),
    ):
        while True:
            done = step == config.max_steps  # no step is left to do
            if step > first_step and (done or stopping or due(step, config.save_every)):
                saver.save(step, position)
            if stopping and not done:
                break
            if done or step == 0 or due(step, config.val_every):
                means, losses = validate(
                    raw_model, val_loaders, data.shares, n_bytes_of_id, config, process
                )
                saver.save_best(means[0], step, position)  # does nothing without --keep_best
                # For a mixture, this also prints the epochs.
                log.write_losses(step, means, losses, loader, position)
            if evals and (done or due(step, config.eval_every)):
                log.write(step, **run_evals(evals, raw_model, process, config, step))
            if done or due(step, config.sample_every):
                log.write_samples(step, draw_samples(raw_model, data, config, process))
            if done:
                break
            began = time.perf_counter()  # evaluating and saving are not timed
            lr = get_lr(step, config)
            set_lr(training.optimizers, lr, config)
            # The seed belongs to the step, so that a resumed run draws the same dropout masks.
            # The processes of a TP group need equal masks.
            torch.manual_seed(hash_numbers(config.seed, step, process.rank // config.tp))
            n, n_targets, micro_batches = next(batches)  # n and n_targets are of all processes
            if time.monotonic() > deadline:
                signals.append(0)  # as if a signal had come
            # A signal to one process makes `stopping` true on all.
            loss, norm, stopping = train_step(
                training, n_targets, micro_batches, config.grad_clip, signals, process
            )
            position += n
            seconds = time.perf_counter() - began
            figures = dict(train=loss, lr=lr, norm=norm, tokens=position * T)
            log.write_step(step, n * T, seconds, **figures)
            step += 1
    log.finish(step)  # prints how the run has ended
    process.barrier()
    return log.figures  # {stream: last value}


if __name__ == "__main__":
    cli.run_program(main)
