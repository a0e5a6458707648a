"""Chooses the number of sequences per step and micro-batch. Micro-batches must fit on the GPU."""

import contextlib

from plaingpt.base.errors import UserError
from plaingpt.base.terminal import print0
from plaingpt.distributed.memory import batch_size_advice

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def plan_steps(config, T, n_sequences, world_size, keeps_batch_size=True):
    """Returns a plan: (n, B) for each step of the batch-size ramp, then (n, B) for later steps.

    n: number of sequences per step, on all processes together. In the ramp, n rises linearly to
    total_batch_size / T, and is always a multiple of the first n.

    B: number of sequences per micro-batch of one process. B is smaller than batch_size if a process
    has fewer than min_micro_batches x batch_size sequences per step.
    During the ramp, n grows, but B does not change, so that torch.compile compiles only one shape.

    n_sequences: number of sequences in the training data. keeps_batch_size: whether the user has
    given --batch_size. If so, B must divide the number of sequences per process and step. If not,
    B is lowered to the next divisor of this number. Raises UserError unless every process reads
    whole micro-batches.
    """
    limits = (T, n_sequences, world_size, keeps_batch_size)
    n, B = step_size(config, "total_batch_size", *limits)
    if not config.rampup_steps:
        return [(n, B)]
    if config.rampup_batch_size > config.total_batch_size:
        raise UserError(
            f"--rampup_batch_size {config.rampup_batch_size}: is above --total_batch_size "
            f"{config.total_batch_size}; give a smaller number"
        )
    first, first_B = step_size(config, "rampup_batch_size", *limits)
    plan = []
    for step in range(config.rampup_steps):
        more = (n - first) * step // config.rampup_steps
        more -= more % first  # so that first + more is a multiple of first
        plan.append((first + more, first_B))
    plan.append((n, B))
    return plan


def step_size(config, flag, T, n_sequences, world_size, keeps_batch_size):
    """Returns (n, B) for a step whose number of tokens is the value of a flag.

    flag: "total_batch_size" or "rampup_batch_size". The other arguments are as in plan_steps.
    """
    size = getattr(config, flag)  # tokens
    unit = T * world_size  # tokens of one sequence on every process
    if size % unit or not unit <= size <= n_sequences * T:
        raise UserError(
            f"--{flag} {size}: must be a multiple of {unit} (--block_size {T} x {world_size} "
            f"data-parallel processes) and at most {n_sequences * T}, the number of training tokens"
        )
    share = size // unit  # sequences per process
    explanation = (
        f"each process has {share} sequences in a step (--{flag} {size} / --block_size {T} / "
        f"{world_size} data-parallel processes)"
    )
    least = config.min_micro_batches
    most = share // least  # the largest B with at least this number of micro-batches
    if most == 0:
        raise UserError(
            f"--{flag} {size}: a step needs {least} micro-batches, but each process has only "
            f"{share} sequences; give a multiple of {least * unit}"
        )
    B = min(config.batch_size, most)
    while share % B and not keeps_batch_size:
        B -= 1
    if share % B:
        limit = f", at most {most}" if least > 1 else ""
        raise UserError(
            f"--batch_size {config.batch_size}: {explanation}; give a divisor of {share}{limit}"
        )
    return share * world_size, B


def fit_batch_size(training, config, T, plan, process):
    """Finds the largest micro-batch that fits into the memory of every GPU -> (B, plan).

    All processes must call this function before the first step. plan: from plan_steps. Returns the
    same plan, but with at most B sequences per micro-batch. The search begins with the largest B of
    `plan`, and halves B until the micro-batch fits. Raises UserError if even one sequence does not
    fit. On a CPU, this function returns batch_size and `plan` unchanged.
    """
    if process.device.type != "cuda":
        return config.batch_size, plan
    candidates = halved_batch_sizes(plan, process.world_size)
    found = 0  # index in candidates
    # torch.compile takes a minute per micro-batch size, so the first search runs in eager mode.
    # Compiled code needs less memory, so the second search begins with the last size that did not
    # fit in eager mode.
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
            "--preset, or train_large.py on more GPUs"
        )
    torch.cuda.reset_peak_memory_stats()  # bench.py reads these statistics
    B = candidates[found]
    print0(f"--batch_size {B} fits into memory; out-of-memory warnings are from larger sizes")
    return B, limit_plan(plan, B)


def limit_plan(plan, B):
    """Returns the same plan, but with at most B sequences per micro-batch."""
    return [(n, min(B, planned)) for n, planned in plan]


def halved_batch_sizes(plan, world_size):
    """Returns the micro-batch sizes B to try, from the largest to the smallest.

    plan: from plan_steps. The first B is the largest B of `plan`. Each later B is the largest
    number that is at most half of the previous B and divides the number of sequences per process
    in every step.
    """
    found = []
    B = max(B for _, B in plan)
    while B > 0:
        while any(n // world_size % micro_B for n, micro_B in limit_plan(plan, B)):
            B -= 1
        found.append(B)
        B //= 2
    return found


def has_memory(training, B, T, process):
    """Returns whether all processes have enough memory to train with micro-batches of (B, T).

    Allocates slightly more memory than AdamW's moments need, then runs two micro-batches.
    Afterwards, the gradients, the buffers and the RNG state are as before the call.
    """
    # Rows of (module, name, buffer, copy of its values), because the forward pass may change,
    # replace or create a buffer.
    buffers = []
    for module in training.raw_model.modules():
        for name, buffer in module._buffers.items():
            buffers.append((module, name, buffer, None if buffer is None else buffer.clone()))
    torch.cuda.empty_cache()  # frees the memory of the previous attempt
    n_fit = torch.zeros(())  # 1 if this process has enough memory
    training.sync_gradients(False)  # if one process fails, no other waits for it
    if isinstance(training.model, DDP):
        training.model.require_forward_param_sync = False  # DDP then broadcasts no buffers
    # batch_size_advice turns an out-of-memory error into a UserError.
    with (
        contextlib.suppress(UserError),
        batch_size_advice(B),
        torch.random.fork_rng(range(torch.cuda.device_count())),
    ):
        # AdamW's moments need 8 bytes per parameter. In a run, the first step places the moments at
        # addresses between activations. This fragments the memory: in our measurements, gaps that
        # were too small for other tensors took up to 2 bytes per parameter in total.
        moments = [
            p.new_empty(10, *p.shape, dtype=torch.uint8) for p in training.raw_model.parameters()
        ]
        x, y = torch.zeros((2, B, T), dtype=torch.long, device=process.device)  # (B, T) each
        for _ in range(2):  # in the second forward pass, gradients use memory, as in a real step
            with process.autocast:
                loss = training.model(x, y)[1]
            loss.backward()
        del moments
        n_fit += 1
    training.raw_model.zero_grad()
    for module, name, buffer, values in buffers:
        setattr(module, name, None if buffer is None else buffer.copy_(values))
    return process.sum(n_fit).item() == process.world_size
