"""Reads batches ahead, so that a step does not wait for its data."""

from concurrent.futures import ThreadPoolExecutor

import torch


def prefetch(batches, device):
    """Yields the same batches; a thread prepares the next one while the current one is used.

    On MPS, there is no such thread.
    """
    if device.type == "mps":
        # Two threads that use it may crash the process (pytorch/pytorch#197805).
        yield from batches
        return
    with ThreadPoolExecutor(1) as thread:
        if device.type == "cuda":  # without this, the thread would also take memory of GPU 0
            thread.submit(torch.cuda.set_device, device)
        future = thread.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = thread.submit(next, batches, None)
            yield batch
