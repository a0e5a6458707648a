"""What this machine has."""

import os


def count_cores():
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def count_gpus():
    """Returns the number of CUDA GPUs that this process may use."""
    import torch  # only here: a program that never counts GPUs starts a second earlier

    return torch.cuda.device_count()
