"""Batches: how many tokens a step and a micro-batch have, and the tensors of a micro-batch."""

import numpy as np
import torch

from plaingpt.cli import UserError


def load_batch(loader, position, B, device):
    """B sequences of a loader -> x, y on the device: (B, T) int64 each; y is x one token later."""
    sequences = [loader.sequence(position + b, check=b == 0) for b in range(B)]
    tokens = torch.from_numpy(np.stack(sequences).astype(np.int64))  # (B, T+1)
    if torch.device(device).type == "cuda":
        tokens = tokens.pin_memory()  # pinned memory is copied while the GPU computes
    tokens = tokens.to(device, non_blocking=True)
    return tokens[:, :-1], tokens[:, 1:]  # (B, T) each


def micro_batches(loader, config, first_step, position, dp_rank, dp_size, device):
    """Yields (x, y), (B, T) each, of this process for all steps from first_step on."""
    for step in range(first_step, config.max_steps):
        n_sequences, B = micro_batch(step, config, loader.T, dp_size)
        for start in range(position + dp_rank * B, position + n_sequences, dp_size * B):
            yield load_batch(loader, start, B, device)
        position += n_sequences


def get_batch_tokens(step, config):
    """Tokens in a step: rises linearly to total_batch_size, in multiples of rampup_batch_size."""
    if step >= config.rampup_steps:
        return config.total_batch_size
    first = config.rampup_batch_size
    growth = (config.total_batch_size - first) * step // config.rampup_steps
    return first + growth // first * first


def micro_batch(step, config, T, dp_size):
    """Returns (sequences in a step, B). B: a micro-batch; with PP, all sequences of a process."""
    n_sequences = get_batch_tokens(step, config) // T
    # A ramp has one micro-batch size, because torch.compile compiles each size.
    share = get_batch_tokens(0 if step < config.rampup_steps else step, config) // (T * dp_size)
    return n_sequences, n_sequences // dp_size if config.pp > 1 else min(config.batch_size, share)


def check_batch_size(config, T, dp_size, n_sequences):
    """Raises UserError unless every process gets whole micro-batches in every step.

    n_sequences: in the training data.
    """
    unit = T * dp_size  # tokens: one sequence on every process
    for step in range(config.rampup_steps + 1):
        size = get_batch_tokens(step, config)
        if size % unit or not config.pp * unit <= size <= n_sequences * T:
            first = step < config.rampup_steps and size <= config.rampup_batch_size
            name = "rampup_batch_size" if first else "total_batch_size"
            also = ", and at most --total_batch_size" if first else ""
            raise UserError(
                f"--{name} {getattr(config, name)}: must be a multiple of {unit} (block_size {T} x "
                f"{dp_size} processes), from {config.pp * unit} to the {n_sequences * T} tokens of "
                f"the data{also}")
        share = size // unit  # sequences of a process in this step
        if share % min(config.batch_size, share // config.pp):
            raise UserError(
                f"--batch_size {config.batch_size}: each process has {share} sequences in a step; "
                f"give a divisor of {share}, at most {share // config.pp}")
