"""Memory: how long glibc keeps freed blocks, and advice for an out-of-memory error."""

import contextlib
import ctypes
import re
import sys

from plaingpt.base.errors import UserError

# These numbers are from glibc's malloc.h. The values of the options are in bytes.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MOST = 2**31 - 1  # the largest int


def set_malloc(keep_memory):
    """Sets whether glibc keeps large freed blocks.

    By default, glibc returns these blocks to the system. Allocating them again, zeroed, takes a
    third of a step, so glibc should keep these blocks. FSDP is the exception: it often frees whole
    tensors, and kept blocks would fragment the memory.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # libc is not glibc
        return
    if keep_memory:
        libc.mallopt(M_TRIM_THRESHOLD, MOST)
        libc.mallopt(M_MMAP_THRESHOLD, MOST)
    else:
        libc.mallopt(M_MMAP_THRESHOLD, 2**17)  # the default; fixes it, or glibc would raise it


@contextlib.contextmanager
def memory_advice(message):
    """Raises a UserError with this message if the block runs out of memory."""
    try:
        yield
    except RuntimeError as error:
        # CPU, MPS, Triton and cuBLAS do not raise torch.OutOfMemoryError, so this matches the text.
        if re.search("DefaultCPUAllocator|out of memory|STATUS_ALLOC_FAILED", str(error)):
            raise UserError(message) from error
        raise


def batch_size_advice(B):
    """Returns memory_advice with the message for training and validation."""
    return memory_advice(f"--batch_size {B}: out of memory; try half or --activation_checkpointing")
