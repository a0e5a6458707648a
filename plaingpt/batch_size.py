"""Checks the batch sizes, and finds a micro-batch size that fits into the memory of a GPU."""

import contextlib

from plaingpt.errors import UserError
from plaingpt.memory import batch_size_advice
from plaingpt.terminal import print0

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def check_step_size(config, T, n_sequences, process, is_B_given):
    """Raises UserError unless every process reads whole micro-batches in every step.

    n_sequences: number of sequences in the training data. is_B_given: whether the user has given
    --batch_size, which must then divide the number of sequences per process and step.
    """
    names = ["total_batch_size"]
    if config.rampup_steps:
        names.append("rampup_batch_size")
        if config.rampup_batch_size > config.total_batch_size:
            raise UserError(
                f"--rampup_batch_size {config.rampup_batch_size}: is above --total_batch_size "
                f"{config.total_batch_size}; give a smaller number"
            )
    unit = T * process.world_size  # tokens of one sequence on every process
    least = config.min_micro_batches
    for name in names:
        size = getattr(config, name)  # tokens per step
        if size % unit or not unit <= size <= n_sequences * T:
            raise UserError(
                f"--{name} {size}: must be a multiple of {unit} (--block_size {T} x "
                f"{process.world_size} data-parallel processes) and at most {n_sequences * T}, the "
                "number of training tokens"
            )
        own = size // unit  # sequences per process
        if own < least:
            raise UserError(
                f"--{name} {size}: a step needs {least} micro-batches, but each process has only "
                f"{own} sequences; give a multiple of {least * unit}"
            )
        if is_B_given and own % min(config.batch_size, own // least):
            limit = f", at most {own // least}" if least > 1 else ""
            raise UserError(
                f"--batch_size {config.batch_size}: each process has {own} sequences in a step "
                f"(--{name} {size} / --block_size {T} / {process.world_size} data-parallel "
                f"processes); give a divisor of {own}{limit}"
            )


def find_batch_size(training, sizes, T):
    """Returns the largest micro-batch size in `sizes` that fits into the memory of every GPU.

    sizes: micro-batch sizes in sequences, the largest first. All processes must call this
    function before the first step. Raises UserError if no size fits.
    """
    found = 0  # index of the current attempt in `sizes`
    # torch.compile takes a minute per micro-batch size, so the first search runs in eager mode.
    # Compiled code needs less memory, so the second search begins with the smallest size that did
    # not fit in eager mode.
    for stance in ("force_eager", "default") if training.config.compile else ("default",):
        found = max(0, found - 1)
        with torch.compiler.set_stance(stance):
            while found < len(sizes) and not has_memory(training, sizes[found], T):
                found += 1
    if found == len(sizes):
        raise UserError(
            "no sequence fits into memory; try --activation_checkpointing, a smaller "
            "--preset, or train_large.py on more GPUs"
        )
    torch.cuda.reset_peak_memory_stats()  # bench.py reads these statistics
    print0(f"--batch_size {sizes[found]} fits into memory; ignore out-of-memory warnings above")
    return sizes[found]


def has_memory(training, B, T):
    """Returns whether all processes have enough memory for micro-batches of the shape (B, T).

    This function allocates slightly more memory than AdamW's moments need, then runs two
    micro-batches. Afterwards, the gradients, the buffers and the RNG state are as before the call.
    """
    process = training.process
    # The forward pass may change, replace or create a buffer. The end of this function restores all
    # buffers from this list: (module, name, buffer, copy of the buffer's values) for each buffer.
    buffers = []
    for module in training.raw_model.modules():
        for name, buffer in module._buffers.items():
            buffers.append((module, name, buffer, None if buffer is None else buffer.clone()))
    torch.cuda.empty_cache()  # frees the memory of the previous attempt
    n_fit = torch.zeros(())  # 1 if this process has enough memory
    training.sync_gradients(False)  # otherwise, the others would wait if one fails
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
        # were too small for other tensors took up to 2 bytes per parameter in total. Therefore,
        # this function allocates 10 bytes per parameter.
        moments = [
            p.new_empty(10, *p.shape, dtype=torch.uint8) for p in training.raw_model.parameters()
        ]
        x, y = torch.zeros((2, B, T), dtype=torch.long, device=process.device)  # (B, T) each
        for _ in range(2):  # gradients use memory during the second pass, as in a real step
            with process.autocast:
                loss = training.model(x, y)[1]
            loss.backward()
        del moments
        n_fit += 1
    training.raw_model.zero_grad()
    for module, name, buffer, values in buffers:
        setattr(module, name, None if buffer is None else buffer.copy_(values))
    return process.sum(n_fit).item() == process.world_size
