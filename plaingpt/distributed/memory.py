"""Memory: how glibc keeps it, and what to say when there is too little."""

import contextlib
import ctypes
import re
import sys

from plaingpt.base.errors import UserError

# These numbers are from glibc's malloc.h. The options take a number of bytes.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MOST = 2**31 - 1  # the largest int


def set_malloc(keep_memory):
    """Sets whether glibc keeps large freed blocks.

    By default, glibc gives them back to the system. To get them again, zeroed, takes a third of a
    step, so they should be kept. FSDP is the exception: it frees whole tensors all the time, and
    kept blocks would fragment the memory.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # another libc than glibc
        return
    if keep_memory:
        libc.mallopt(M_TRIM_THRESHOLD, MOST)
        libc.mallopt(M_MMAP_THRESHOLD, MOST)
    else:
        libc.mallopt(M_MMAP_THRESHOLD, 2**17)  # the default, which glibc would otherwise raise


@contextlib.contextmanager
def memory_advice(message):
    """Raises a UserError with this message if the block runs out of memory."""
    try:
        yield
    except RuntimeError as error:
        # Not all are a torch.OutOfMemoryError: CPU, MPS, Triton and cuBLAS have no class for this.
        if re.search("DefaultCPUAllocator|out of memory|STATUS_ALLOC_FAILED", str(error)):
            raise UserError(message) from error
        raise


def batch_size_advice(B):
    """Returns memory_advice with the message for training and validation."""
    return memory_advice(f"--batch_size {B}: out of memory; try half or --activation_checkpointing")
