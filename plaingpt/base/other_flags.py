"""The flags of other trainers, and which flag of ours means the same."""

import difflib
from typing import NamedTuple


class OtherFlag(NamedTuple):
    """A flag of nanoGPT, build-nanogpt, llm.c or Hugging Face's Trainer."""

    name: str
    ours: str  # our flag that means it, or where else it can be changed
    note: str = ""  # what is different


# A program suggests only flags that it has. A name that is almost ours needs no row. If a name has
# several rows, the last one whose flag the program has is suggested.
OTHER_FLAGS = (
    OtherFlag("max_iters", ours="--max_steps"),
    OtherFlag("lr_decay_iters", ours="--max_steps"),
    OtherFlag("num_iterations", ours="--max_steps"),
    OtherFlag("num_train_epochs", ours="--max_steps"),
    OtherFlag("epochs", ours="--max_steps"),
    OtherFlag("gradient_accumulation_steps", ours="--total_batch_size", note="in tokens"),
    OtherFlag("learning_rate", ours="--max_lr"),
    OtherFlag("lr", ours="--max_lr"),
    OtherFlag("eval_iters", ours="--val_tokens", note="in tokens"),
    OtherFlag("val_max_steps", ours="--val_tokens", note="in tokens"),
    OtherFlag("learning_rate_decay_frac", ours="--min_lr"),
    OtherFlag("eval_interval", ours="--val_every"),
    OtherFlag("eval_steps", ours="--val_every"),
    OtherFlag("wandb_log", ours="--wandb", note="with a project"),
    OtherFlag("wandb_project", ours="--wandb", note="with a project"),
    OtherFlag("log_interval", ours="--log_every"),
    OtherFlag("logging_steps", ours="--log_every"),
    OtherFlag("per_device_train_batch_size", ours="--batch_size"),
    OtherFlag("init_from", ours="--model", note="or --checkpoint"),
    OtherFlag("model_type", ours="--model", note="or --checkpoint"),
    OtherFlag("m", ours="--model", note="or --checkpoint"),
    OtherFlag("config", ours="--preset"),
    OtherFlag("model_type", ours="--preset"),
    OtherFlag("model", ours="--preset"),
    OtherFlag("out_dir", ours="--checkpoint"),
    OtherFlag("log_dir", ours="--checkpoint"),
    OtherFlag("start", ours="--prompt"),
    OtherFlag("beta1", ours="code in model.py"),
    OtherFlag("beta2", ours="code in model.py"),
    OtherFlag("bias", ours="code in model.py"),
    OtherFlag("sequence_length", ours="--block_size"),
    OtherFlag("max_grad_norm", ours="--grad_clip"),
    OtherFlag("save_steps", ours="--save_every"),
    OtherFlag("out_dir", ours="--log_dir"),
    OtherFlag("dataset", ours="--data"),
    OtherFlag("input_bin", ours="--data"),
    OtherFlag("decay_lr", ours="--schedule"),
)


def advise(text, flags):
    """Returns an unknown argument with what to use instead. flags: those of this program."""
    if not text.startswith("-"):
        return f"{text} (settings are flags; quote a value with spaces)"
    flag = text.split("=")[0]
    known = {}  # {name without dashes: what to use}
    for other in OTHER_FLAGS:
        if other.ours in flags or not other.ours.startswith("--"):
            known[other.name] = f"{other.ours}, {other.note}" if other.note else other.ours
    for name in flags:
        known[name.lstrip("-")] = name
    close = difflib.get_close_matches(flag.lstrip("-"), known, n=1, cutoff=0.7)
    if not close:
        return f"{flag} (not here)"
    return f"{flag} (use {known[close[0]]})"
