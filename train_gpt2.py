"""Trains a GPT-2: text or token shards in, a log and checkpoints out.

  python train_gpt2.py                  a small model of bytes on input.txt,
                                        if there is no edu_fineweb10B/
  python train_gpt2.py --data my.txt    the same on your own text
  torchrun --nproc_per_node=8 train_gpt2.py
                                        with edu_fineweb10B/ from fineweb.py
                                        and GPUs: GPT-2 124M

The same command with --resume continues a run. Brackets [] contain the default
of a flag. A preset overrides the defaults, and a flag overrides the preset.
--no-NAME turns a switch off. The presets, with their numbers of parameters:

  baby      0.4M, reads bytes; auto for a text
  gpt2      124M; auto for shards of 10^9 tokens or more, if there is a GPU
  mini      11M with GPT-2's ids; auto for all other shards
  finetune  100 steps at a low rate; auto with --init_from
  gpt2-medium, -large, -xl: 355M, 774M, 1.6B; gpt3-SIZE: of the GPT-3 paper

A run writes into --log_dir: run.json at its start (and changes.patch, if files
of this clone differ from its commit), log.txt in every step,
model_STEP.pt every save_every steps, after the last step and when it is
stopped, model_best.pt with --keep_best. Rank 0 writes them. Samples are only
printed. --tensorboard and --wandb get all figures and samples, too. A new run
first moves the files of an old one to another directory: log/baby.1.
"""

import math
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

# On a CPU: threads that wait soon sleep. Else a step takes many times as long beside a busy
# program. torch reads this when it is imported.
os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "10000")

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import plaingpt.device as devices
from model import GPT, PRESETS, GPTConfig
from plaingpt import parallel
from plaingpt.checkpoint import Saver, choose_start, load_newest, load_weights
from plaingpt.cli import catch_stop_signals, parse_flags, print0, run_program
from plaingpt.data import Data, check_batch_size, sequences_in_step, tokens_in_step
from plaingpt.evaluation import load_evals, run_evals
from plaingpt.order import hash_numbers, order_of_sets, permute
from plaingpt.runlog import RunLog


@dataclass
class TrainConfig:
    preset: Annotated[Literal[("auto", *PRESETS, "finetune")], "auto: by data and device"] = "auto"
    data: Annotated[list[str] | None, "shards or text; a mixture: DIR=WEIGHT DIR=WEIGHT"] = None
    tokenizer: Annotated[str | None, "for text data: gpt2 or a tokenizer.json [bytes]"] = None
    val_fraction: Annotated[float | None, "held out [0.01; text 0.1]", "above 0 and below 1"] = None
    shuffle: Annotated[bool, "new random order of the sequences in each epoch"] = True
    seed: Annotated[int, "random seed", f"at least 0 and at most {2**32 - 1}"] = 1337
    init_from: Annotated[str | None, "start from a checkpoint, run, or Hugging Face GPT-2"] = None
    batch_size: Annotated[int, "sequences per process at once; fewer: less memory", "above 0"] = 64
    total_batch_size: Annotated[int, "tokens in a step, of all processes", "above 0"] = 2**19
    rampup_steps: Annotated[int, "steps of a growing batch", "at least 0 and at most 1e6"] = 0
    rampup_batch_size: Annotated[int, "tokens in the first step of the ramp", "above 0"] = 32768
    max_steps: Annotated[int, "steps in the run; gpt2: 10B tokens", "above 0"] = 19073
    max_minutes: Annotated[float | None, "save and end then", "above 0 and at most 1e6"] = None
    optimizer: Annotated[Literal["adamw", "muon"], "muon: Muon for matrices of blocks"] = "adamw"
    max_lr: Annotated[float, "peak learning rate", "above 0"] = 6e-4
    muon_lr: Annotated[float | None, "peak learning rate of Muon [max_lr]", "above 0"] = None
    schedule: Annotated[Literal["cosine", "linear", "wsd", "constant"], "after warm-up"] = "cosine"
    warmup_steps: Annotated[int, "steps of linear warm-up", "at least 0"] = 715
    decay_steps: Annotated[int | None, "length of wsd's decay [max_steps / 5]", "above 0"] = None
    min_lr: Annotated[float | None, "learning rate at the end [max_lr / 10]", "at least 0"] = None
    weight_decay: Annotated[float, "of matrices and embeddings", "at least 0"] = 0.1
    grad_clip: Annotated[float, "maximum gradient norm; 0: no clipping", "at least 0"] = 1.0
    val_every: Annotated[int, "steps between validations; less in a short run", "at least 0"] = 500
    val_tokens: Annotated[int, "tokens of a validation", "above 0"] = 20 * 2**19
    eval_every: Annotated[int, "steps between benchmarks; 0: never", "at least 0"] = 500
    evals: Annotated[str, "benchmarks, each NAME or NAME=FILE"] = "hellaswag,lambada,storycloze"
    sample_every: Annotated[int, "steps between samples; 0: last step only", "at least 0"] = 500
    sample_tokens: Annotated[int | None, "length of a sample [64; bytes: 500]", "above 0"] = None
    log_dir: Annotated[str | None, "run directory [log/PRESET]"] = None
    resume: Annotated[bool, "continue the run in log_dir, or start if there is none"] = False
    save_every: Annotated[int, "steps between saves; 0: last step only", "at least 0"] = 1000
    keep: Annotated[int, "number of checkpoints to keep; 0: all", "at least 0"] = 2
    keep_best: Annotated[bool, "also save the step of lowest val loss, model_best.pt"] = False
    log_every: Annotated[int, "steps between printed lines; log.txt has all", "above 0"] = 1
    tensorboard: Annotated[bool, "also write TensorBoard event files into log_dir"] = False
    wandb: Annotated[str | None, "also log to this project of Weights & Biases"] = None
    device: Annotated[str, "cuda, cuda:1, mps or cpu"] = "auto"
    dtype: Annotated[devices.Dtype, "number format of matrix products"] = "auto"
    compile: Annotated[bool | None, "use torch.compile [cuda: on, else off]"] = None
    activation_checkpointing: Annotated[bool, "recompute activations to save memory"] = False
    parallel: Annotated[Literal["ddp", "fsdp"], "processes replicate or shard the model"] = "ddp"
    tp: Annotated[int, "tensor parallel processes; divides n_head", "above 0"] = 1
    pp: Annotated[int, "pipeline stages; at most n_layer", "above 0"] = 1


# Groups in --help: the first flag of each, and its title.
GROUPS = dict(n_layer="model", preset="preset and data", batch_size="batch and steps",
              optimizer="optimizer", val_every="evaluation", log_dir="output", device="hardware")
# Learning rates and total batch sizes: GPT-3 paper, table 2.1, from the model of about that size;
# gpt2-xl has half of its batch. mini and baby: the best recipes that we measured on two CPU cores.
LARGE = dict(total_batch_size=2**20, max_steps=9537, warmup_steps=358)
HUGE = dict(total_batch_size=2**21, max_steps=4768, warmup_steps=179)
SMALL = dict(optimizer="muon", max_lr=8e-3, min_lr=0.0, schedule="linear", batch_size=16,
             warmup_steps=100, val_tokens=65536, eval_every=0, save_every=500, log_every=100)
RECIPES = {
    "gpt2": dict(),
    "gpt2-medium": dict(max_lr=3e-4, batch_size=32),
    "gpt2-large": dict(max_lr=2.5e-4, batch_size=16),
    "gpt2-xl": dict(max_lr=2e-4, batch_size=8),
    "gpt3-350m": dict(max_lr=3e-4, batch_size=16),
    "gpt3-760m": dict(max_lr=2.5e-4, batch_size=8),
    "gpt3-1.3b": dict(max_lr=2e-4, batch_size=8, **LARGE),
    "gpt3-2.7b": dict(max_lr=1.6e-4, batch_size=4, **LARGE),
    "gpt3-6.7b": dict(max_lr=1.2e-4, batch_size=2, **HUGE),
    "gpt3-13b": dict(max_lr=1e-4, batch_size=1, **HUGE),
    "baby": dict(total_batch_size=1024, max_steps=2700, sample_every=900, **SMALL),
    "mini": dict(total_batch_size=2048, max_steps=2500, **SMALL),
    "finetune": dict(SMALL, optimizer="adamw", max_lr=5e-5, batch_size=4, total_batch_size=4096,
                     max_steps=100, warmup_steps=10, dropout=0.1, log_every=10),
}
SHARDS = "edu_fineweb10B"
TEXT = Path(__file__).with_name("input.txt")


def find_data(given):
    """--data. Without it: the shards if there are any; for mini, baby, fine-tuning: input.txt."""
    for_text = given.get("preset") in ("baby", "mini", "finetune") or "init_from" in given
    no_shards = given.get("preset", "auto") == "auto" and not Path(SHARDS).is_dir()
    text = TEXT.name if TEXT.parent == Path.cwd() else str(TEXT)  # short in the log
    return given.get("data") or [text if for_text or no_shards else SHARDS]


def choose_preset(given, data):
    """--preset auto: by --init_from, by the kind and size of the data, and by the device."""
    if "init_from" in given:
        return "finetune"
    if data.is_text:
        return "baby"
    # --device cuda:1 is a GPU, too.
    cuda = given.get("device", "auto").startswith(("auto", "cuda")) and torch.cuda.is_available()
    return "gpt2" if cuda and data.count_train_tokens() >= 10**9 else "mini"


def make_configs(given, data):
    """Defaults, then the preset, then the flags given -> (GPTConfig, TrainConfig)."""
    preset = given.get("preset", "auto")
    if preset == "auto":
        preset = choose_preset(given, data)
    recipe = {**PRESETS.get(preset, {}), **RECIPES[preset]}
    if preset == "mini":
        # 10 epochs of the data at this batch size, but from 200 steps to those of the recipe.
        n_tokens, batch = max(1, data.count_train_tokens()), recipe["total_batch_size"]
        recipe["max_steps"] = max(200, min(10 * n_tokens // batch, recipe["max_steps"]))
        # The more often the data are read, the more dropout: 0.1 for 10 epochs.
        recipe["dropout"] = round(min(0.1, recipe["max_steps"] * batch / n_tokens / 100), 2)
    values = {**asdict(GPTConfig()), **asdict(TrainConfig()), "log_dir": f"log/{preset}", **recipe}
    if "evals" in given:
        values["eval_every"] = TrainConfig.eval_every  # baby, mini and finetune have 0
    values.update(given, preset=preset, data=data.sources)
    steps = values["max_steps"]
    if values["min_lr"] is None:
        values["min_lr"] = values["max_lr"] / 10
    # In a short run: ten validations, and steps for the decay.
    for name, most in ("val_every", max(1, steps // 10)), ("warmup_steps", steps // 5):
        if name not in given:
            values[name] = min(values[name], most)
    print0(f"preset {preset} on {', '.join(data.shares)} ({data.tokenizer.n_vocab:,} ids), "
           f"{steps:,} steps; --preset chooses another one: mini is small, gpt2 is GPT-2 124M")
    return [kind(**{f.name: values[f.name] for f in fields(kind)})
            for kind in (GPTConfig, TrainConfig)]


class DataLoaderLite:
    """The stream of sequences of a run: a pure function of (data, shares, T, seed, shuffle).

    Sequence j of a data set is the T+1 tokens from jT to jT+T. Its last token is the first one of
    sequence j+1, so no token is a target twice. An epoch of a data set is a random permutation of
    its sequences. Several data sets take turns, each as often as its share says.

    A position counts sequences from the start of the run. A step of n sequences that begins at
    position p takes p to p+n-1, on any number of processes. The next step begins at p+n. If the
    batch never changes, step s begins at s x total_batch_size / T.

    sets: a Tokens object for each data set. shares: Fractions that add up to 1. Raises UserError if
    a set has fewer than T+1 tokens.
    """

    def __init__(self, sets, shares, T, seed=1337, shuffle=True):
        self.sets, self.shares = sets, list(shares)
        self.T, self.seed, self.shuffle = T, seed, shuffle
        self.lengths = [tokens.count_sequences(T) for tokens in sets]  # in sequences
        self.turns = order_of_sets(self.shares)  # a period: [(set, its turns before this one)]
        self.turns_of = [int(share * len(self.turns)) for share in self.shares]  # exact: Fractions

    def sequence(self, position):
        """The T+1 tokens at a position: (T+1,)."""
        periods, i = divmod(position, len(self.turns))
        k, before = self.turns[i]  # the data set
        taken = periods * self.turns_of[k] + before  # sequences of this set before this one
        epoch, j = divmod(taken, self.lengths[k])
        if self.shuffle:
            j = permute(j, self.lengths[k], self.seed, epoch)
        return self.sets[k].read(j * self.T, self.T + 1)

    def batch(self, position, B, device):
        """B sequences from a position on -> x, y: (B, T) int64; y is x one token later."""
        sequences = [self.sequence(position + b) for b in range(B)]
        tokens = torch.from_numpy(np.stack(sequences).astype(np.int64))  # (B, T+1)
        if device.type == "cuda":
            tokens = tokens.pin_memory()  # pinned memory is copied while the GPU computes
        tokens = tokens.to(device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]  # (B, T) each

    def batches(self, step, position, config, run):
        """Yields the micro-batches of each step, from `step` on: a list of (x, y), (B, T) each.

        A step has n = total_batch_size / T sequences. The process with dp_rank 0 gets the first
        B = batch_size of them, dp_rank 1 gets the next B, and so on, round and round. dp_rank is
        the rank. With TP or PP, it is the number of a group: the processes of a group share a model
        and have the same batches.
        """
        while step < config.max_steps:
            # n is a multiple of dp_size x B. A ramp begins with a smaller n. All its steps have one
            # B, which is at most n / dp_size of the first. With --pp, B is n / dp_size.
            n, B = sequences_in_step(step, config, self.T, run.dp_size)
            starts = range(position + run.dp_rank * B, position + n, run.dp_size * B)
            yield [self.batch(start, B, run.device) for start in starts]
            step, position = step + 1, position + n


def get_lr(step, config):
    """Linear warm-up to max_lr, then a decay to min_lr. constant: no decay.

    cosine: half a period (GPT-3 paper, appendix B). wsd: constant, then linear in the last
    decay_steps (Hu et al. 2024, arXiv:2404.06395).
    """
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    first = config.warmup_steps  # the first step of the decay
    if config.schedule == "wsd":
        first = max(first, config.max_steps - (config.decay_steps or config.max_steps // 5))
    progress = max(0.0, min(1.0, (step - first) / max(1, config.max_steps - first)))
    heights = dict(cosine=0.5 * (1 + math.cos(math.pi * progress)), linear=1 - progress,
                   wsd=1 - progress, constant=1.0)  # between min_lr and max_lr
    return config.min_lr + heights[config.schedule] * (config.max_lr - config.min_lr)


def set_lr(optimizers, lr, config):
    """Sets the rate of each parameter group to its peak x lr / max_lr. Muon has its own peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # In the first call "lr" is the peak that configure_optimizers has set.
            peak = group.setdefault("initial_lr", group["lr"])
            group["lr"] = peak * lr / config.max_lr


@torch.no_grad()
def estimate_loss(model, loader, text_bytes, config, run):
    """Loss of the first val_tokens tokens -> (nats per token, bits per byte of text).

    text_bytes: (vocab_size,), the bytes of each id. Special ids have 0: they count for the first
    result only. Except for rounding, the number of processes does not matter.
    """
    B, T = config.batch_size, loader.T
    n_sequences = max(1, min(config.val_tokens // T, loader.lengths[0]))
    model.eval()
    sums = torch.zeros(3, device=run.device)  # nats, nats of text, bytes of text
    for start in range(0, n_sequences, run.dp_size * B):
        first = start + run.dp_rank * B
        # Always B sequences; those from n_sequences on do not count. torch.compile compiles each
        # shape, and every process must take part in the collectives of a sharded model.
        x, y = loader.batch(first, B, run.device)  # (B, T) each
        with run.autocast:
            losses = model.loss(model.hidden(x), y, reduction="none")  # (B, T)
        n_bytes = text_bytes[y]  # (B, T)
        parts = torch.stack([losses, losses * (n_bytes > 0), n_bytes.float()])  # (3, B, T)
        sums += parts[:, : max(0, n_sequences - first)].sum(dim=(1, 2))
    model.train()
    nats, text_nats, n_bytes = run.sum(sums).tolist()  # each sequence counts once, also with TP
    return nats / (n_sequences * T), text_nats / max(1, n_bytes) / math.log(2)


def train_step(model, optimizers, scaler, micro_batches, grad_clip, run):
    """One step: forward, backward, clip, update -> (mean loss, norm of the mean gradient).

    micro_batches: list of (x, y), (B, T) each. scaler: does nothing unless the dtype is float16. A
    step with a non-finite gradient leaves parameters and optimizers as they are, but counts.
    """
    loss_sum = 0.0
    for i, (x, y) in enumerate(micro_batches, start=1):
        # DDP and ShardedGPT average the gradients over the processes if this is True, in backward.
        model.require_backward_grad_sync = i == len(micro_batches)
        with run.autocast:
            # With --pp there is one micro-batch, and this call also computes its gradients, scaled
            # by the same scaler. backward() below then only reaches the loss itself, a leaf.
            _, loss = model(x, y)
        loss = loss / len(micro_batches)  # cross-entropy is a mean: average over the micro-batches
        scaler.scale(loss).backward()
        loss_sum += loss.detach()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)  # clipping needs the true gradient
    norm = parallel.clip_grad_norm(model, grad_clip or math.inf)  # inf: only measures it
    # Floats. Here, and only here, the CPU waits for the device. The norm is the same on all
    # processes. run.mean also sets run.stopping on all of them, if one was told to stop.
    loss, norm = run.mean(loss_sum, norm)
    for optimizer in optimizers:
        if math.isfinite(norm):
            optimizer.step()  # scaler.step would wait again
        optimizer.zero_grad()
    scaler.update()  # from what unscale_ has found
    return loss, norm


def due(step, every):
    return every > 0 and step > 0 and step % every == 0


def main(argv=None):
    given = parse_flags(__doc__, GPTConfig, TrainConfig, argv=argv, groups=GROUPS)
    data = Data(find_data(given), given.get("tokenizer"), given.get("val_fraction"))
    gpt_config, config = make_configs(given, data)
    run = devices.start(config.device, config.dtype, config.tp, config.pp, config.parallel)
    config.compile = devices.choose_compile(config.compile, run.device)
    saved = load_newest(config.log_dir) if config.resume else None  # a checkpoint, or None
    # Shape and weights: of `saved`, else of --init_from, else of the flags, with weights None.
    gpt_config, weights = choose_start(saved, gpt_config, config, given, data)

    T = gpt_config.block_size
    # Validation data of each set: its val shards; without them, its last tokens (val_fraction).
    train_sets, val_sets = data.open(gpt_config.vocab_size)
    loader = DataLoaderLite(train_sets, data.shares.values(), T, config.seed, config.shuffle)
    val_loaders = [DataLoaderLite([tokens], [1], T, shuffle=False) for tokens in val_sets]
    check_batch_size(config, T, sum(loader.lengths), run.dp_size)
    text_bytes = torch.from_numpy(data.tokenizer.text_bytes(gpt_config.vocab_size)).to(run.device)
    evals = load_evals(config, data.tokenizer, gpt_config)  # empty if eval_every is 0

    with torch.device("meta"):  # shapes without memory; load_weights gives them memory and values
        raw_model = GPT(gpt_config)
    raw_model.activation_checkpointing = config.activation_checkpointing
    is_sharded = run.world_size > 1 and (config.parallel == "fsdp" or config.tp * config.pp > 1)
    if is_sharded:  # each process keeps a part, compiled if asked for; the methods are GPT's
        raw_model = parallel.ShardedGPT(raw_model, config, run)
    load_weights(raw_model, weights, config.seed, run.device)  # moves; without weights: random
    optimizers = raw_model.configure_optimizers(
        config.weight_decay, config.max_lr, config.optimizer, config.muon_lr)
    model = raw_model  # model: for training, wrapped below; raw_model: for everything else
    if config.compile and not is_sharded:
        model = torch.compile(raw_model, dynamic=False, fullgraph=True)
        raw_model.loss_fn.compile(dynamic=False, fullgraph=True)  # validation calls it alone
    if run.world_size > 1 and not is_sharded:
        model = DDP(model, gradient_as_bucket_view=True)  # a view: no second copy of the gradients
        optimizers[0].n_shares = run.world_size  # for Muon: each updates some matrices
    scaler = parallel.grad_scaler(raw_model, run)

    saver = Saver(raw_model, optimizers, scaler, data, config, run)
    # Loads the state of optimizers and scaler; the weights are loaded above. Rates and all other
    # settings are those of this command. (0, 0) in a new run. Refuses a step beyond max_steps.
    first_step, position = saver.restore(saved)
    log = RunLog(config, raw_model, data, first_step, run)  # run.json; moves an old run aside
    batches = devices.prefetch(loader.batches(first_step, position, config, run), run.device)
    step, signals = first_step, catch_stop_signals("finishing this step", config.max_minutes)
    with signals as run.stop_signals, devices.batch_size_advice(config.batch_size):
        while True:
            last = step == config.max_steps  # all updates are done
            # A signal or max_minutes makes run.stopping true in train_step, on all processes alike.
            # A run that stops here leaves what is due below to its resume. A resumed run removes
            # the lines after its step from log.txt. What log.txt has is not written twice.
            if step > first_step and (last or run.stopping or due(step, config.save_every)):
                saver.save(step, position)
            if run.stopping and not last:
                break
            if last or step == 0 or due(step, config.val_every):
                losses = [estimate_loss(raw_model, v, text_bytes, config, run) for v in val_loaders]
                val = log.write_losses(step, losses, loader, position)  # and epochs of the sets
                saver.save_best(val, step, position)
            if evals and (last or due(step, config.eval_every)):
                log.write(step, **run_evals(evals, raw_model, run, config, step))
            if last or due(step, config.sample_every):
                log.write_samples(step, raw_model)
            if last:
                break
            start = time.perf_counter()  # evaluating and saving are not timed
            lr = get_lr(step, config)
            set_lr(optimizers, lr, config)
            # For dropout. The processes of a TP group need the same masks.
            torch.manual_seed(hash_numbers(config.seed, step, run.rank // config.tp))
            loss, norm = train_step(model, optimizers, scaler, next(batches), config.grad_clip, run)
            n_tokens = tokens_in_step(step, config)  # `batches` counts the same, a step ahead
            position += n_tokens // T
            log.write_step(step, n_tokens, time.perf_counter() - start, train=loss, lr=lr,
                           norm=norm, tokens=position * T)
            step += 1
    log.finish(step)
    run.barrier()
    return log.figures  # {stream: last value}


if __name__ == "__main__":
    run_program(main)
