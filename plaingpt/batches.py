"""How many tokens a step and a micro-batch have."""

from plaingpt.cli import UserError


def get_batch_tokens(step, config):
    """Tokens in a step: rises linearly to total_batch_size, in multiples of rampup_batch_size."""
    if step >= config.rampup_steps:
        return config.total_batch_size
    first = config.rampup_batch_size
    growth = (config.total_batch_size - first) * step // config.rampup_steps
    return first + growth // first * first


def micro_batch(step, config, T, dp_size):
    """Returns (sequences in a step, B). B: of a micro-batch; with PP, of a process's whole step."""
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
            raise UserError(
                f"--{name} {getattr(config, name)}: must be a multiple of {unit} (block_size {T} x "
                f"{dp_size} processes), from {config.pp * unit} to the {n_sequences * T} tokens of "
                "the data")
        share = size // unit  # sequences of a process in this step
        if share % min(config.batch_size, share // config.pp):
            raise UserError(
                f"--batch_size {config.batch_size}: each process has {share} sequences in a step; "
                f"give a divisor of {share} that makes at least {config.pp} micro-batches")
