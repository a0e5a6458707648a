"""Which process this is, on which device, in which number format; and what that device promises.

  FP32 has 1+8+23 bits (sign, exponent, mantissa), TF32 1+8+10, BF16 1+8+7, FP16 1+5+10. So TF32 has FP32's range with
  FP16's precision; BF16 has FP32's range and less precision than FP16; FP16 is short of range, and its small gradients
  vanish unless a scaler lifts them.
"""

# Read next: cli.py.

import contextlib
import ctypes
import os
import platform
import re
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from plaingpt.cli import UserError, first_line, print0


def ranks():
    """(rank, rank on this machine, world size), as torchrun says in environment variables; one process needs none."""
    values = {name: os.environ.get(name, default) for name, default in zip(("RANK", "LOCAL_RANK", "WORLD_SIZE"), "001")}
    for name, value in values.items():
        if not value.isdecimal():
            raise UserError(f"{name}={value} is no number; unset {name}, torchrun sets it itself")
    return tuple(map(int, values.values()))


def describe(device):
    """The hardware's name, for a person."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.cpu.get_capabilities().get('cpu_name', platform.machine())}, {os.cpu_count()} cores"


def find_device(name, rank=0, world_size=1):
    """--device -> the device of the process that is number `rank` on its machine. Raises UserError if it cannot be used."""
    if name == "auto":
        mps = torch.backends.mps.is_available() and world_size == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(f"cuda:{rank}" if name == "cuda" else name)
        torch.empty(1, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used by process {rank} ({first_line(error)}); --device cpu can") from error


def setup(name, keep_memory=True, deterministic=False):
    """Joins the processes that torchrun started, if any, and chooses the device -> (rank, world_size, device).

    keep_memory: whether a CPU's process is to hold on to what it has freed, for speed. deterministic: whether PyTorch may
    use only algorithms that always give the same bits, and is to refuse where it has none.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS wants for it, before its first product
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # we read none
    rank, local_rank, world_size = ranks()
    device = find_device(name, local_rank, world_size)
    if world_size > 1 and device.type == "mps":
        raise UserError(f"--device {name} is one device, which {world_size} processes cannot share; use one process, or cpu")
    if device.type == "cpu" and sys.platform == "linux":
        # glibc gives freed memory back to the system and gets it anew, page by page and zeroed, a third of a step's time.
        # Let it keep what it has: M_TRIM_THRESHOLD is -1, M_MMAP_THRESHOLD -3 (malloc.h). Or give back at once all of 128 KiB
        # or more: under FSDP, where whole tensors come and go between parts, what is kept falls to pieces, to three times
        # the memory.
        libc, most = ctypes.CDLL(None), 2**31 - 1
        for option, size in ({-1: most, -3: most} if keep_memory else {-3: 2**17}).items() if hasattr(libc, "mallopt") else ():
            libc.mallopt(option, size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 on tensor cores: float32's range, 10 bits of mantissa
        prefer_attention(torch.cuda.get_device_capability(device), torch.backends.cudnn.version() or 0)
    try:
        if world_size > 1 and device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        elif world_size > 1:
            dist.init_process_group("gloo")
    except ValueError as error:
        raise UserError(f"WORLD_SIZE={world_size} asks for other processes ({first_line(error)}); start them with torchrun, or "
                        "unset WORLD_SIZE") from error
    return rank, world_size, device


def prefer_attention(capability, cudnn):
    """On Hopper cuDNN's attention is the faster kernel, flash the second; elsewhere PyTorch's own order stands.

    1.7 to 2.3 times as fast in training on an H100, and slower than flash on the A100 and later chips than Hopper
    (huggingface/transformers#48163). cuDNN up to 9.15 is not preferred, as PyTorch itself would not.
    """
    if capability[0] == 9 and cudnn > 91500:
        order = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
        torch._C._set_sdp_priority_order([int(backend) for backend in order])  # what sdpa_kernel calls, for good
    elif capability[0] == 9:
        print0(f"note: cuDNN {cudnn} is older than 9.15.1, so attention takes the slower flash kernel; a newer one is used "
               "by itself: pip install -U nvidia-cudnn-cu13, or -cu12, as torch was built")


def out_of_memory(error):
    """A CPU has no exception of its own for it, only the allocator's name in the text."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextlib.contextmanager
def memory_advice(batch_size, share):
    """Turns running out of memory into a UserError that names the micro-batch to try.

    share: the sequences of a step that each process has; a divisor of it keeps the batch as it is.
    """
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        smaller = max((b for b in range(1, batch_size) if share % b == 0), default=0)
        try_this = f"--batch_size {smaller} keeps the batch of the step, and " if smaller else ""
        raise UserError(f"--batch_size {batch_size} does not fit into memory; {try_this}--activation_checkpointing takes less "
                        "memory and more time") from error


def shut_down(world_size):
    """Takes leave of the other processes, when all are done: a machine may be taken away as soon as its own have ended."""
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
        # gloo's threads drop their last tensors only while the interpreter is idle; if it ends first, they abort it
        # (pytorch/pytorch#179291; about one run in twenty without this)
        time.sleep(0.5)


def choose_dtype(name, device):
    """bfloat16 where the hardware multiplies it, else float16 on an older GPU, else float32. Raises UserError."""
    if name not in ("auto", "bfloat16", "float16", "float32"):
        raise UserError(f"--dtype {name} is none of auto, bfloat16, float16, float32")
    if name == "auto":
        if device.type == "cuda":  # cards before Ampere emulate bfloat16, slowly, and still say they support it
            name = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
        elif device.type == "cpu":
            has = torch.cpu.get_capabilities()
            name = "bfloat16" if has.get("avx512_bf16") or has.get("amx_bf16") else "float32"
        else:
            name = "float32"
    if name == "bfloat16" and device.type == "cpu":
        # A product that is left in float32 may round its factors to bfloat16, never its sum. Where the CPU has no unit for
        # that, it rounds nothing and is still twice as fast: oneDNN computes it instead of MKL.
        torch.set_float32_matmul_precision("medium")
    return getattr(torch, name)


# Dense 16-bit peak of each device, without sparsity, in FLOP/s, from NVIDIA's data sheets; the first name that fits counts.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12,
              "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "4090": 165e12, "3090": 71e12, "V100": 125e12, "T4": 65e12}


def peak_flops(device, dtype, world_size=1):
    """FLOP/s that the devices of all processes promise at this dtype, or None where we know of no data sheet."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * world_size for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name)), None)
