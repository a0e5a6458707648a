"""Sets whether glibc keeps freed memory, and adds advice to out-of-memory errors."""

import contextlib
import ctypes
import re
import sys

from plaingpt.base.errors import UserError

# These are the numbers of two options in glibc's malloc.h. The values of both options are in bytes.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MOST = 2**31 - 1  # the largest C int


def set_malloc(keep_memory):
    """Sets whether glibc keeps large freed blocks.

    By default, glibc returns such blocks to the operating system, which zeroes memory before a
    process can use it again. Zeroing takes a third of the time of a step, so glibc should keep the
    blocks. FSDP is an exception: FSDP often frees whole tensors, and kept blocks would fragment the
    memory.
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
        # This is the default value. If a program sets it, glibc no longer raises it.
        libc.mallopt(M_MMAP_THRESHOLD, 2**17)


@contextlib.contextmanager
def memory_advice(message):
    """Context manager: raises a UserError with this message if its block runs out of memory."""
    try:
        yield
    except RuntimeError as error:
        # CPU, MPS, Triton and cuBLAS do not raise torch.OutOfMemoryError, so the next
        # line searches the message.
        if re.search("DefaultCPUAllocator|out of memory|STATUS_ALLOC_FAILED", str(error)):
            raise UserError(message) from error
        raise


def batch_size_advice(B):
    """Returns memory_advice with the message for training and validation."""
    return memory_advice(
        f"--batch_size {B}: out of memory; try half of it, or --activation_checkpointing"
    )
