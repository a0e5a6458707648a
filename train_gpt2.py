"""Trains a GPT-2: text or token shards in, a log and checkpoints out.

  python train_gpt2.py                       a small model of bytes on input.txt
  python train_gpt2.py --data my.txt         the same on your own text
  torchrun --nproc_per_node=8 train_gpt2.py  GPT-2 124M on edu_fineweb10B/
  python train_gpt2.py --resume              continue the run in log/baby

Every flag is a field of GPTConfig (model.py) or TrainConfig (this file). A
preset overrides the defaults below, and a flag overrides the preset.
"""

import gc
import importlib
import itertools
import math
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import plaingpt.device as devices
from model import PRESETS, GPTConfig
from plaingpt.batches import check_batch_size, load_batch, micro_batch, micro_batches
from plaingpt.checkpoint import Saver, fill, find_checkpoint, init_model, restore
from plaingpt.cli import UserError, catch_stop_signals, parse_flags, print0, restoring_signals, run
from plaingpt.evaluation import load_evals, run_evals
from plaingpt.mixture import Mixture, open_splits, read_shares
from plaingpt.runlog import RunLog
from plaingpt.shards import count_tokens, is_text, mix, permute


@dataclass
class TrainConfig:
    preset: Annotated[Literal[("auto", *PRESETS, "finetune")], "auto: by data and device"] = "auto"
    data: Annotated[list[str] | None, "shards or text; a mixture: DIR=WEIGHT DIR=WEIGHT"] = None
    tokenizer: Annotated[str | None, "for text data: gpt2 or a tokenizer.json [bytes]"] = None
    val_fraction: Annotated[float | None, "validation part, if no val shards [0.01; text: 0.1]",
                            "above 0 and at most 0.5"] = None
    batch_size: Annotated[int, "sequences that a process computes at a time", "above 0"] = 64
    total_batch_size: Annotated[int, "tokens in a step, of all processes", "above 0"] = 2**19
    max_steps: Annotated[int, "steps in the run; the default is 10B tokens", "above 0"] = 19073
    max_minutes: Annotated[float | None, "save and end after this time", "above 0"] = None
    warmup_steps: Annotated[int, "steps of linear warm-up", "at least 0"] = 715
    optimizer: Annotated[Literal["adamw", "muon"], "muon: Muon for matrices of blocks"] = "adamw"
    max_lr: Annotated[float, "peak learning rate", "above 0"] = 6e-4
    muon_lr: Annotated[float | None, "peak learning rate of Muon [max_lr]", "above 0"] = None
    schedule: Annotated[Literal["cosine", "linear", "wsd", "constant"], "after warm-up"] = "cosine"
    decay_steps: Annotated[int | None, "length of wsd's decay [max_steps / 5]", "above 0"] = None
    min_lr: Annotated[float | None, "learning rate at the end [max_lr / 10]", "at least 0"] = None
    weight_decay: Annotated[float, "of matrices and embeddings", "at least 0"] = 0.1
    grad_clip: Annotated[float, "maximum gradient norm; 0: no clipping", "at least 0"] = 1.0
    rampup_steps: Annotated[int, "steps during which the batch grows", "at least 0"] = 0
    rampup_batch_size: Annotated[int, "tokens in the first step of the ramp", "above 0"] = 32768
    seed: Annotated[int, "random seed", f"at least 0 and at most {2**32 - 1}"] = 1337
    shuffle: Annotated[bool, "new random order of the sequences in each epoch"] = True
    val_every: Annotated[int | None, "steps between validations; 0: first and last step only "
                         "[max_steps / 10, at most 250]", "at least 0"] = None
    val_tokens: Annotated[int, "tokens of a validation", "above 0"] = 20 * 2**19
    eval_every: Annotated[int, "steps between benchmarks; 0: never", "at least 0"] = 250
    evals: Annotated[str, "benchmarks, each NAME or NAME=FILE"] = "hellaswag,lambada,storycloze"
    sample_every: Annotated[int, "steps between samples; 0: last step only", "at least 0"] = 250
    sample_tokens: Annotated[int | None, "length of a sample [64; bytes: 500]", "above 0"] = None
    save_every: Annotated[int, "steps between saves; 0: at evals and end", "at least 0"] = 500
    keep: Annotated[int, "number of checkpoints to keep; 0: all", "at least 0"] = 2
    keep_best: Annotated[bool, "also save the step of lowest val loss, model_best.pt"] = False
    log_every: Annotated[int, "steps between printed lines; log.txt has all", "above 0"] = 1
    log_dir: Annotated[str | None, "run directory [log/PRESET]"] = None
    tensorboard: Annotated[bool, "also write TensorBoard event files into log_dir"] = False
    wandb: Annotated[str | None, "also log to this project of Weights & Biases"] = None
    resume: Annotated[bool, "continue the run in log_dir, or start if there is none"] = False
    init_from: Annotated[str | None, "start from a checkpoint, run, or Hugging Face GPT-2"] = None
    device: Annotated[str, "cuda, cuda:1, mps or cpu"] = "auto"
    dtype: Annotated[devices.Dtype, "number format of matrix products"] = "auto"
    compile: Annotated[bool | None, "use torch.compile [on for cuda]"] = None
    deterministic: Annotated[bool, "use only deterministic algorithms"] = False
    activation_checkpointing: Annotated[bool, "recompute activations to save memory"] = False
    parallel: Annotated[Literal["ddp", "fsdp"], "replicate the model or shard it"] = "ddp"
    tp: Annotated[int, "tensor parallel processes; divides n_head", "above 0"] = 1
    pp: Annotated[int, "pipeline stages; at most n_layer", "above 0"] = 1


# GPT-3 paper, table 2.1. mini and baby: the best recipes that we measured on two CPU cores.
LARGE = dict(total_batch_size=2**20, max_steps=9537, warmup_steps=358)
HUGE = dict(total_batch_size=2**21, max_steps=4768, warmup_steps=179)
SMALL = dict(optimizer="muon", max_lr=4e-3, batch_size=16, warmup_steps=100, val_tokens=65536,
             eval_every=0, log_every=100)
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
    "mini": dict(total_batch_size=2048, max_steps=2500, dropout=0.1, **SMALL),
    "finetune": dict(max_lr=5e-5, batch_size=4, total_batch_size=4096, max_steps=100,
                     warmup_steps=10, dropout=0.1, val_tokens=65536, eval_every=0, log_every=10),
}
SHARDS = "edu_fineweb10B"
TEXT = Path(__file__).with_name("input.txt")
EVALS = ("hellaswag", "lambada", "storycloze", "wikitext", "core")  # the benchmarks: one file each


def parse_args(argv=None):
    """argv -> (GPTConfig, TrainConfig, names of the flags given). Raises UserError."""
    given = parse_flags(__doc__, GPTConfig, TrainConfig, argv=argv)
    preset, data, reason = given.get("preset", "auto"), given.get("data"), ""
    if data is None:
        text = TEXT.name if TEXT.parent == Path.cwd() else str(TEXT)
        auto = preset == "auto" and not Path(SHARDS).is_dir()
        data = [text if auto or preset in ("baby", "mini", "finetune") else SHARDS]
    sets = read_shares(data)
    counted = sets if preset in ("auto", "mini") else ()
    n_tokens = sum(count_tokens(path, given.get("tokenizer")) for path in counted)
    if preset == "auto":
        preset, reason = devices.choose_preset(given, n_tokens, all(map(is_text, sets)))
    recipe = {**PRESETS.get(preset, {}), **RECIPES[preset]}
    if preset == "mini":
        steps = 10 * n_tokens // recipe["total_batch_size"]  # 10 epochs
        recipe["max_steps"] = max(200, min(steps, recipe["max_steps"]))
    values = {**asdict(GPTConfig()), **asdict(TrainConfig()), **recipe}
    if "evals" in given:
        values["eval_every"] = TrainConfig.eval_every  # baby, mini and finetune have 0
    values.update(given, preset=preset, data=data)
    values["log_dir"] = values["log_dir"] or f"log/{preset}"
    if values["min_lr"] is None:
        values["min_lr"] = values["max_lr"] / 10
    if values["val_every"] is None:
        values["val_every"] = min(250, max(1, values["max_steps"] // 10))
    if "warmup_steps" not in given:  # leaves steps for the decay in a short run
        values["warmup_steps"] = min(values["warmup_steps"], values["max_steps"] // 5)
    if preset == "finetune":
        reason = ": " + ", ".join(f"{k} {values[k]}" for k in recipe if k not in given)
    print0(f"preset {preset} on {', '.join(sets)}, {values['max_steps']:,} steps{reason}")
    g = GPTConfig(**{f.name: values[f.name] for f in fields(GPTConfig)})
    c = TrainConfig(**{f.name: values[f.name] for f in fields(TrainConfig)})
    return g, c, set(given)


class DataLoaderLite:
    """The stream of sequences: a pure function of (tokens, T, seed, epoch).

    Sequence i is the T+1 tokens from iT to iT+T. Its last token is the first one of sequence i+1,
    so each token is a target once. An epoch is a random permutation of all sequences. A position
    counts sequences from the start of the run, so nothing depends on the number of processes.
    tokens: has name, len() and read(start, count, check). Raises UserError if len() < T+1.
    """

    def __init__(self, tokens, T, seed=1337, shuffle=True):
        self.tokens = tokens
        self.T = T
        self.seed = seed
        self.shuffle = shuffle
        self.n_sequences = (len(tokens) - 1) // T
        if self.n_sequences < 1:
            raise UserError(f"{tokens.name}: {len(tokens)} tokens are too few for one sequence "
                            f"of block_size {T} + 1; give more data, or a smaller --block_size")

    def sequence(self, position, check=True):
        """The T+1 tokens at a position: (T+1,). check: also check that the file is unchanged."""
        epoch, i = divmod(position, self.n_sequences)
        if self.shuffle:
            i = permute(i, self.n_sequences, self.seed, epoch)
        return self.tokens.read(i * self.T, self.T + 1, check)

    def batch(self, position, B, device="cpu"):
        """B sequences from a position on -> x, y: (B, T) int64; y is x one token later."""
        return load_batch(self, position, B, device)


def get_lr(step, config):
    """Linear warm-up to max_lr, then a decay to min_lr. constant: no decay.

    cosine: half a period (GPT-3 paper, appendix B). wsd: constant, then linear in the last
    decay_steps (Hu et al. 2024, arXiv:2404.06395). A longer run can resume from before the decay.
    """
    if step < config.warmup_steps:
        return config.max_lr * (step + 1) / config.warmup_steps
    first = config.warmup_steps  # the first step of the decay
    if config.schedule == "wsd":
        first = max(first, config.max_steps - (config.decay_steps or config.max_steps // 5))
    progress = max(0.0, min(1.0, (step - first) / max(1, config.max_steps - first)))
    shares = dict(cosine=0.5 * (1 + math.cos(math.pi * progress)), constant=1.0)
    share = shares.get(config.schedule, 1 - progress)  # linear, wsd
    return config.min_lr + share * (config.max_lr - config.min_lr)


class Trainer:
    """Trains with the whole model on every process: one process, or DDP.

    Validation, benchmarks, samples and checkpoints use eval_model, which is not wrapped; only its
    loss_fn is compiled. ShardedTrainer in plaingpt/parallel.py has the same members.
    """

    def __init__(self, model, config, rates, device, dtype, weights):
        if weights:
            fill(model, weights, device)
        self.autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.eval_model = model.to(device)
        self.optimizers = model.configure_optimizers(*rates)
        self.groups = [optimizer.state_dict()["param_groups"] for optimizer in self.optimizers]
        self.model = model
        if config.compile:
            self.model = torch.compile(model, dynamic=False, fullgraph=True)
            model.loss_fn.compile(dynamic=False, fullgraph=True)  # for validation
        if dist.is_initialized():
            self.model = DDP(self.model, gradient_as_bucket_view=True)
            if config.optimizer == "muon":
                muon = importlib.import_module("plaingpt.parallel").Muon
                self.optimizers[0] = muon(self.optimizers[0].param_groups)

    def forward_backward(self, x, y, micro_steps, last):
        """Adds the gradients of a micro-batch. Returns its part of the step's loss.

        last: True for the step's last micro-batch. DDP then averages the gradients.
        """
        if isinstance(self.model, DDP):
            self.model.require_backward_grad_sync = last  # DDP reads it in the forward
        with self.autocast:
            _, loss = self.model(x, y)
        loss = loss / micro_steps  # cross-entropy is a mean: average over the micro-batches
        self.scaler.scale(loss).backward()
        return loss.detach()

    def clip(self, max_norm):
        """Clips the gradient norm to max_norm. Returns the norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def full_state(self):
        """Returns (model state dict, list of optimizer state dicts); all processes must call."""
        return self.eval_model.state_dict(), [o.state_dict() for o in self.optimizers]

    def load_optimizer_states(self, states):
        """Loads the moments of each optimizer. The flags set learning rate and weight decay."""
        for optimizer, groups, state in zip(self.optimizers, self.groups, states):
            optimizer.load_state_dict(dict(state=state, param_groups=groups))


def prepare(model, config, device, dtype, weights=None):
    """GPT -> Trainer, or ShardedTrainer if the flags ask for FSDP, TP or PP.

    weights: pairs (name, tensor) if the model is on the meta device. Raises UserError if the model
    does not fit into memory.
    """
    model.activation_checkpointing = config.activation_checkpointing
    config = replace(config, compile=devices.choose_compile(config.compile, device))
    rates = config.weight_decay, config.max_lr, config.optimizer, config.muon_lr
    trainer = Trainer
    if dist.is_initialized() and (config.parallel == "fsdp" or config.tp * config.pp > 1):
        trainer = importlib.import_module("plaingpt.parallel").ShardedTrainer
    with devices.memory_advice("the model does not fit into memory; choose a smaller one"):
        return trainer(model, config, rates, device, dtype, weights)


def train_step(trainer, batches, micro_steps, grad_clip, stop_signals=()):
    """One step: accumulate, average, clip, update. Returns (loss, gradient norm, stop).

    batches: iterator of (x, y); takes micro_steps of them. A step with a non-finite gradient
    changes nothing. stop: True on all processes if stop_signals is not empty on any of them.
    """
    loss_sum = 0.0
    for i, (x, y) in enumerate(itertools.islice(batches, micro_steps), start=1):
        loss_sum += trainer.forward_backward(x, y, micro_steps, last=i == micro_steps)
    for optimizer in trainer.optimizers:
        trainer.scaler.unscale_(optimizer)  # clipping needs the true gradient
    norm = trainer.clip(grad_clip or math.inf)
    fused = [o for o in trainer.optimizers if o.defaults.get("fused") and norm.device.type != "mps"]
    for optimizer in fused:  # the device computes the update while the CPU waits below
        optimizer.found_inf = norm.isfinite().logical_not().float()  # 1: the step changes nothing
        optimizer.step()
    stop = torch.full_like(loss_sum, len(stop_signals) > 0)
    sums = torch.stack([loss_sum, stop, torch.ones_like(loss_sum)])
    if dist.is_initialized():
        dist.all_reduce(sums)
    # Here the CPU waits for the device. It does so once per step.
    loss_sum, stop, processes, norm = torch.cat([sums, norm.view(1)]).tolist()
    if math.isfinite(norm):  # scaler.step would wait for the device again
        for optimizer in trainer.optimizers:
            if optimizer not in fused:
                optimizer.step()
    trainer.scaler.update()
    for optimizer in trainer.optimizers:
        optimizer.zero_grad(set_to_none=True)
    return loss_sum / processes, norm, stop > 0


@torch.no_grad()
def estimate_loss(trainer, loader, text_bytes, config, dp_rank, dp_size, device):
    """Loss of the first val_tokens tokens -> (nats per token, bits per byte of text).

    text_bytes: (vocab_size,), the bytes of each id. Special ids have 0: they count for the first
    result only. The results do not depend on the number of processes.
    """
    B, model = config.batch_size, trainer.eval_model
    model.eval()
    n_sequences = max(1, min(config.val_tokens // loader.T, loader.n_sequences))
    sums = torch.zeros(3, device=device)  # nats, nats of text, bytes of text
    for start in range(0, n_sequences, dp_size * B):
        first = start + dp_rank * B
        rows = min(B, max(0, n_sequences - first))
        # A process without rows runs one forward with weight 0, so that the collectives match.
        x, y = loader.batch(min(first, n_sequences - 1), max(rows, 1), device)  # (B, T) each
        with trainer.autocast:
            losses = model.loss(model.hidden(x), y, reduction="none")  # (B, T)
        n_bytes = text_bytes[y]  # (B, T)
        parts = torch.stack([losses, losses * (n_bytes > 0), n_bytes.float()])  # (3, B, T)
        sums += parts[:, :rows].sum(dim=(1, 2))
    model.train()
    nats, text_nats, n_bytes = devices.sum_over_data(sums, device, dp_size).tolist()
    return nats / (n_sequences * loader.T), text_nats / max(1, n_bytes) / math.log(2)


def due(step, every):
    return every > 0 and step > 0 and step % every == 0


@restoring_signals()
@devices.lost_process_advice()
def main(argv=None):
    gpt_config, config, given = parse_args(argv)
    rank, world_size, device = devices.setup(
        config.device, keep_memory=config.parallel != "fsdp", deterministic=config.deterministic)
    stop_signals = catch_stop_signals("finishing this step, then saving", config.max_minutes)
    dtype = devices.choose_dtype(config.dtype, device)
    dp_rank, dp_size = devices.data_parallel_rank(config, rank, world_size)
    checkpoint = find_checkpoint(config)
    model, weights, tokenizer = init_model(gpt_config, config, given, checkpoint)
    T = model.config.block_size
    train_sets, val_sets, fingerprints = open_splits(config, model.config.vocab_size, tokenizer)
    loader = Mixture([DataLoaderLite(tokens, T, config.seed, config.shuffle)
                      for tokens in train_sets], read_shares(config.data))
    val_loaders = [DataLoaderLite(tokens, T, shuffle=False) for tokens in val_sets]
    text_bytes = torch.from_numpy(tokenizer.text_bytes(model.config.vocab_size)).to(device)
    check_batch_size(config, T, dp_size, loader.n_sequences)
    evals = load_evals(config, EVALS, tokenizer, model.config)
    trainer = prepare(model, config, device, dtype, weights)
    first_step, position = restore(checkpoint, trainer, config, fingerprints)
    saver = Saver(trainer, config, tokenizer, fingerprints, checkpoint)
    del checkpoint  # frees the memory of its tensors
    log = RunLog(config, model.config, first_step, rank)
    log.start(tokenizer, device, dtype, sum(map(len, train_sets)))
    batches = micro_batches(loader, config, first_step, position, dp_rank, dp_size, device)
    batches = devices.prefetch(batches, device)
    stop = save = False
    for step in range(first_step, config.max_steps + 1):
        last = step == config.max_steps
        n_sequences, B = micro_batch(step, config, T, dp_size)
        evaluate = evals and (last or due(step, config.eval_every))
        due_now = last or stop or evaluate or due(step, config.save_every)
        save = step > first_step and (save or due_now)
        # While gradients are not finite, a save is delayed: it may delete an older, good file.
        if save and (last or stop or not log.bad_in_a_row):
            saver.save(step, position)
            save = False
        if stop:
            saver.wait()
            print0(f"stopped by a signal or --max_minutes; step {step} is saved, and --resume "
                   f"continues; {log.summary()}")
            break
        if last or step == 0 or due(step, config.val_every):
            with devices.batch_size_advice(config.batch_size, n_sequences // dp_size):
                losses = [estimate_loss(trainer, val_loader, text_bytes, config, dp_rank, dp_size,
                                        device) for val_loader in val_loaders]
            saver.save_best(log.write_losses(step, losses, loader, position), step, position)
        if evaluate:
            log.write(step, **run_evals(evals, trainer, config, step, device, dp_rank, dp_size))
        if last or due(step, config.sample_every):
            log.write_samples(step, trainer.eval_model, tokenizer, device)
        if last:
            saver.wait()
            print0(f"done: {log.summary()}; the log and checkpoints are in {config.log_dir}; "
                   f"python generate.py --checkpoint {config.log_dir} writes text")
            break
        if step == first_step + 1:
            gc.collect()
            gc.freeze()  # later garbage collections skip the objects that exist by now
        start = time.perf_counter()  # evaluating and saving are not timed
        lr = get_lr(step, config)
        for group in (g for optimizer in trainer.optimizers for g in optimizer.param_groups):
            group["lr"] = group["initial_lr"] * lr / config.max_lr
        # Dropout depends on (seed, step, rank // tp) alone: a resumed run has the same masks.
        torch.manual_seed(mix(mix(mix(config.seed) + step) + rank // config.tp))
        with devices.batch_size_advice(min(B, config.batch_size), n_sequences // dp_size):
            loss, norm, stop = train_step(
                trainer, batches, n_sequences // (B * dp_size), config.grad_clip, stop_signals)
        position += n_sequences
        log.write_step(step, loss, lr, norm, n_sequences * T, position * T, start)
    devices.shut_down(world_size)


if __name__ == "__main__":
    run(main)
