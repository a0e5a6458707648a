"""Cores and GPUs of this machine, and the ranks that torchrun assigns."""

import os

from plaingpt.errors import UserError


def count_cores():
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def count_gpus():
    """Returns the number of CUDA GPUs that this process may use."""
    import torch  # imported here, because a program that counts no GPUs then starts faster

    return torch.cuda.device_count()


def read_ranks():
    """Returns (rank, local_rank, world_size) from RANK, LOCAL_RANK and WORLD_SIZE.

    If these environment variables are missing, the program runs in one process. If only LOCAL_RANK
    is missing, one process runs on each machine.

    Raises UserError if the variables contradict each other. Only rank 0 prints and saves, so a run
    with wrong ranks could save nothing.
    """
    world_size = read_number("WORLD_SIZE", default=1)
    if world_size > 1 and "RANK" not in os.environ:
        raise UserError(
            f"WORLD_SIZE is {world_size}, but RANK is missing; use torchrun, or unset WORLD_SIZE"
        )
    if world_size < 1:
        raise UserError(f"WORLD_SIZE is {world_size}; use torchrun, or unset WORLD_SIZE")
    ranks = []
    for name in ("RANK", "LOCAL_RANK"):
        rank = read_number(name, default=0)
        if not 0 <= rank < world_size:
            raise UserError(
                f"{name} is {rank}, but WORLD_SIZE is {world_size}; use torchrun, or unset {name}"
            )
        ranks.append(rank)
    return *ranks, world_size


def read_number(name, default):
    """Returns the integer in an environment variable, or the default if the variable is missing."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"{name} is {text!r}, not an integer; use torchrun, or unset {name}"
        ) from None
