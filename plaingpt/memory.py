"""Memory: settings of glibc and of the garbage collector, and advice if memory runs out."""

import contextlib
import ctypes
import gc
import re
import sys

from plaingpt.errors import UserError

# The numbers of two options of mallopt, from glibc's malloc.h. Both options are sizes in bytes.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MOST = 2**31 - 1  # the largest C int


def keep_freed_memory(limit=MOST):
    """Makes glibc keep freed blocks of up to `limit` bytes.

    By default, glibc returns large blocks to the operating system. If the process needs memory
    again, the operating system first zeroes the memory, which would take time in each step.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # otherwise, libc is not glibc
        libc.mallopt(M_TRIM_THRESHOLD, limit)
        libc.mallopt(M_MMAP_THRESHOLD, limit)


@contextlib.contextmanager
def frozen_gc():
    """Context manager in which Python's garbage collector ignores all objects that already exist.

    Otherwise, the collector sometimes scans all objects of the imported modules, while the GPU
    waits 0.1 s or longer.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def memory_advice(message):
    """Context manager that raises a UserError with the text `message` if memory runs out."""
    try:
        yield
    except RuntimeError as error:
        # CPU, MPS, Triton and cuBLAS do not raise torch.OutOfMemoryError, so only the text of the
        # error shows that memory ran out.
        if re.search("DefaultCPUAllocator|out of memory|STATUS_ALLOC_FAILED", str(error)):
            raise UserError(message) from error
        raise


def batch_size_advice(B):
    """Returns memory_advice with a message about --batch_size, for training and validation."""
    return memory_advice(
        f"--batch_size {B}: out of memory; try half of this size, or --activation_checkpointing"
    )
