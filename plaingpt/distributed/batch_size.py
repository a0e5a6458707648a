"""Chooses the number of sequences in a step and in a micro-batch. On a GPU, these must fit."""

import contextlib

from plaingpt.base.errors import UserError
from plaingpt.base.terminal import print0
from plaingpt.distributed.gradients import set_gradient_sync
from plaingpt.distributed.memory import batch_size_advice
from plaingpt.distributed.split import is_split

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def plan_steps(config, T, n_sequences, dp_size, keeps_batch_size=True):
    """Returns the plan of a run: an (n, B) for each step of the ramp, and one for all later steps.

    n: sequences in a step, on all processes. In the ramp, it rises linearly to
    total_batch_size / T, in multiples of the first n.

    B: sequences in a micro-batch of one process: batch_size, or less if a process has too few
    sequences for batch_size, or for pp micro-batches. In a ramp, n grows, but B keeps its value of
    the first step, so that torch.compile compiles one shape.

    n_sequences: sequences in the training data. keeps_batch_size: whether batch_size must divide
    the sequences of a process in a step, because the user has given the flag. Otherwise, B is the
    next smaller divisor. Raises UserError unless every process reads whole micro-batches.
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
    plan = []
    for step in range(config.rampup_steps):
        more = (n - first) * step // config.rampup_steps
        more -= more % first  # n stays a multiple of the first n
        plan.append((first + more, first_B))
    plan.append((n, B))
    return plan


def step_size(config, flag, T, n_sequences, dp_size, keeps_batch_size):
    """Returns (n, B) of a step with the number of tokens that the flag says.

    flag: "total_batch_size" or "rampup_batch_size". Other arguments: as in plan_steps.
    """
    size = getattr(config, flag)  # tokens
    unit = T * dp_size  # tokens of one sequence on every process
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


def fit_batch_size(training, config, T, plan, process):
    """Finds the largest micro-batch that fits into the memory of all GPUs -> (B, plan).

    All processes must call this before the first step. plan: from plan_steps. The result is the
    same plan, with at most B sequences in a micro-batch. The search begins with the largest B of
    `plan`, and halves B. On a CPU, or with a split model, this changes nothing: if one process of
    a split model ran out of memory, the others would wait for it. Raises UserError if even one
    sequence does not fit.
    """
    if process.device.type != "cuda" or is_split(config, process):
        return config.batch_size, plan
    candidates = halved_batch_sizes(plan, process.dp_size)
    found = 0  # index in candidates
    # torch.compile takes a minute per size, so eager code searches first. Compiled code needs less
    # memory, so its search begins with the last size that did not fit in eager mode.
    for stance in ("force_eager", "default") if config.compile else ("default",):
        found = max(0, found - 1)
        with torch.compiler.set_stance(stance):
            while found < len(candidates):
                if has_memory(training, candidates[found], T, process):
                    break
                found += 1
    if found == len(candidates):
        raise UserError(
            "no sequence fits into memory; try --activation_checkpointing, a smaller "
            "--preset, or more GPUs with --parallel fsdp"
        )
    torch.cuda.reset_peak_memory_stats()  # bench.py reads them
    B = candidates[found]
    print0(f"--batch_size {B} fits into memory; warnings of OOM are from larger ones")
    return B, limit_plan(plan, B)


def limit_plan(plan, B):
    """Returns the same plan with at most B sequences in a micro-batch."""
    return [(n, min(B, planned)) for n, planned in plan]


def halved_batch_sizes(plan, dp_size):
    """Returns the micro-batches to try, from large to small.

    The first B is the largest B of `plan`, which is from plan_steps. Each later B is at most half
    of the B before, and the largest that divides the sequences of a process in every step.
    """
    found = []
    B = max(B for _, B in plan)
    while B > 0:
        while any(n // dp_size % micro_B for n, micro_B in limit_plan(plan, B)):
            B -= 1
        found.append(B)
        B //= 2
    return found


def has_memory(training, B, T, process):
    """Returns whether all processes have enough memory to train with micro-batches of (B, T).

    Allocates the memory of AdamW's moments, and some more, then runs two micro-batches. Keeps the
    gradients, the buffers and the RNG state as they are before a step.
    """
    # (module, name, buffer, its values): forward may change, replace or create a buffer.
    buffers = []
    for module in training.raw_model.modules():
        for name, buffer in module._buffers.items():
            buffers.append((module, name, buffer, None if buffer is None else buffer.clone()))
    torch.cuda.empty_cache()  # frees the memory of the previous attempt
    n_fit = torch.zeros(())  # 1 if this process has enough memory
    set_gradient_sync(training.model, False)  # one process may fail, so no other may wait
    if isinstance(training.model, DDP):
        training.model.require_forward_param_sync = False  # DDP would also broadcast buffers
    # batch_size_advice turns an out-of-memory error into a UserError.
    with (
        contextlib.suppress(UserError),
        batch_size_advice(B),
        torch.random.fork_rng(range(torch.cuda.device_count())),
    ):
        # AdamW's moments need 8 bytes per parameter. The first step allocates them between
        # activations. The gaps, too small for other tensors, were up to 2 bytes per parameter.
        moments = [
            p.new_empty(10, *p.shape, dtype=torch.uint8) for p in training.raw_model.parameters()
        ]
        x, y = torch.zeros((2, B, T), dtype=torch.long, device=process.device)  # (B, T) each
        for _ in range(2):  # during the second forward pass, gradients exist, as in a step
            with process.autocast:
                loss = training.model(x, y)[1]
            loss.backward()
        del moments
        n_fit += 1
    training.raw_model.zero_grad()
    for module, name, buffer, values in buffers:
        setattr(module, name, None if buffer is None else buffer.copy_(values))
    return process.sum(n_fit).item() == process.dp_size
