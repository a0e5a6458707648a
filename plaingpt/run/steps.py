"""Plans the sizes of the steps of a run."""

from plaingpt.base.errors import UserError


def plan_steps(config, T, n_sequences, dp_size, keeps_batch_size=True):
    """Returns the sizes of the steps: an (n, B) for each step of the ramp, and one for all others.

    n: sequences in a step, on all processes. In the ramp, it rises linearly to
    total_batch_size / T, in multiples of the first n.

    B: sequences in a micro-batch of one process. It is batch_size, or less if a process has too few
    sequences for that, or for pp micro-batches. In a ramp n grows and B stays: small enough for the
    first step, so that torch.compile compiles one shape.

    n_sequences: those of the training data. keeps_batch_size: whether batch_size must be a divisor
    of the sequences that a process has in a step, because a user has given it. Otherwise, B is the
    next smaller divisor. Raises UserError unless every process gets whole micro-batches.
    """
    limits = (T, n_sequences, dp_size, keeps_batch_size)
    n, B = step_size(config, "total_batch_size", *limits)
    if not config.rampup_steps:
        return [(n, B)]
    if config.rampup_batch_size > config.total_batch_size:
        raise UserError(
            f"--rampup_batch_size {config.rampup_batch_size}: is above --total_batch_size "
            f"{config.total_batch_size}; give a smaller one"
        )
    first, first_B = step_size(config, "rampup_batch_size", *limits)
    sizes = []
    for step in range(config.rampup_steps):
        more = (n - first) * step // config.rampup_steps
        more -= more % first  # a multiple of the first n
        sizes.append((first + more, first_B))
    sizes.append((n, B))
    return sizes


def step_size(config, flag, T, n_sequences, dp_size, keeps_batch_size):
    """Returns (n, B) of a step that has as many tokens as the flag says. Raises UserError.

    flag: "total_batch_size" or "rampup_batch_size". The other arguments are those of plan_steps.
    """
    size = getattr(config, flag)  # in tokens
    unit = T * dp_size  # in tokens: a sequence on every process
    if size % unit or not unit <= size <= n_sequences * T:
        raise UserError(
            f"--{flag} {size}: give a multiple of {unit} (--block_size {T} x {dp_size} processes), "
            f"at most the data's {n_sequences * T} tokens"
        )
    share = size // unit  # sequences of a process
    explanation = (
        f"each process has {share} sequences in a step (--{flag} {size} / --block_size {T} / "
        f"{dp_size} processes)"
    )
    most = share // config.pp  # pp micro-batches, so every stage has work
    if most == 0:
        raise UserError(f"--pp {config.pp}: {explanation}; give at most {share} stages")
    B = min(config.batch_size, most)
    while share % B and not keeps_batch_size:
        B -= 1
    if share % B:
        limit = f", at most {most}" if config.pp > 1 else ""
        raise UserError(
            f"--batch_size {config.batch_size}: {explanation}; give a divisor of {share}{limit}"
        )
    return share * dp_size, B
