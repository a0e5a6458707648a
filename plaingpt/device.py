"""Processes, devices and number formats.

Bits for sign, exponent and mantissa: FP32 1+8+23, TF32 1+8+10, BF16 1+8+7, FP16 1+5+10. FP16 has a
small range: small gradients become zero unless a scaler enlarges them.
"""

import contextlib
import ctypes
import gc
import os
import platform
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from plaingpt.cli import UserError, first_line

Dtype = Literal["auto", "bfloat16", "float16", "float32"]  # of --dtype


def ranks():
    """Returns (rank, local rank, world size) as torchrun sets them; (0, 0, 1) without torchrun."""
    values = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    if not any(values):
        return 0, 0, 1
    if not all(value.isdecimal() for value in values):
        raise UserError("RANK, LOCAL_RANK and WORLD_SIZE: must all be numbers, or all be unset; "
                        "torchrun sets them")
    return tuple(map(int, values))


def data_parallel_rank(config, rank, world_size):
    """Returns (dp_rank, dp_size) of this process in the pp x dp x tp mesh. Raises UserError."""
    model_size = config.pp * config.tp  # processes that share one model
    if world_size % model_size:
        raise UserError(f"--tp {config.tp} x --pp {config.pp}: needs a multiple of {model_size} "
                        f"processes, not {world_size}; use torchrun --nproc_per_node={model_size}")
    dp_size = world_size // model_size
    return rank // config.tp % dp_size, dp_size


def describe(device):
    """Name of the hardware, for a person."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = torch.cpu.get_capabilities().get("cpu_name", platform.machine())
    return f"{cpu}, {os.cpu_count()} cores"


def find_device(name, local_rank=0, world_size=1):
    """--device -> the torch.device of this process. Raises UserError if it cannot be used."""
    if name == "auto":
        mps = torch.backends.mps.is_available() and world_size == 1
        name = "mps" if mps else "cpu"
        name = "cuda" if torch.cuda.is_available() else name
    try:
        device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise UserError(f"--device {name}: cannot be used ({reason}); try --device cpu") from error
    if device.type == "mps" and world_size > 1:
        raise UserError(f"--device {name}: works for one process only; use --device cpu")
    return device


def choose_preset(given, n_tokens, is_text):
    """--preset auto -> (preset, reason as text). given: flags. n_tokens: of the training data."""
    if "init_from" in given:
        return "finetune", ""
    if is_text:
        return "baby", "; --preset mini is a larger model"
    cuda = given.get("device", "auto").startswith(("auto", "cuda")) and torch.cuda.is_available()
    if cuda and n_tokens >= 10**9:
        return "gpt2", ": a GPU and at least 1B tokens; --preset mini is the small model"
    return "mini", ": no GPU, or fewer than 1B tokens; --preset gpt2 is GPT-2 124M"


def setup(name, keep_memory=True, deterministic=False):
    """Chooses the device and joins the process group. Returns (rank, world_size, device)."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # we never read it
    rank, local_rank, world_size = ranks()
    device = find_device(name, local_rank, world_size)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if device.type == "cpu" and hasattr(libc, "mallopt"):
        # glibc returns large freed blocks to the system and gets zeroed pages back. This takes a
        # third of a step. So keep the blocks (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD), except with
        # FSDP: it frees whole tensors all the time, and kept blocks would fragment its memory.
        if keep_memory:
            libc.mallopt(-1, 2**31 - 1)
        libc.mallopt(-3, 2**31 - 1 if keep_memory else 2**17)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        if world_size > 1:
            cuda = device.type == "cuda"
            dist.init_process_group(
                "nccl" if cuda else "gloo", device_id=device if cuda else None,
                timeout=timedelta(hours=1))  # rank 0 may download or save for long
    except ValueError as error:  # MASTER_ADDR or MASTER_PORT is missing
        raise UserError(f"no process group ({first_line(error)}); use torchrun") from error
    return rank, world_size, device


@contextlib.contextmanager
def memory_advice(message):
    """Raises a UserError with this message if the block runs out of memory."""
    try:
        yield
    except RuntimeError as error:
        on_cpu = "DefaultCPUAllocator" in str(error)  # it has no exception class of its own
        if not (on_cpu or isinstance(error, torch.OutOfMemoryError)):
            raise
        raise UserError(message) from error


def batch_size_advice(batch_size, share):
    """memory_advice with a smaller --batch_size that divides share: sequences of a process."""
    smaller = max((b for b in range(1, batch_size) if share % b == 0), default=0)
    hint = f"--batch_size {smaller} or " if smaller else ""
    return memory_advice(f"--batch_size {batch_size} does not fit into memory; try {hint}"
                         "--activation_checkpointing")


@contextlib.contextmanager
def lost_process_advice():
    """Turns a failed collective into a UserError. Also a decorator: @lost_process_advice()."""
    try:
        yield
    except RuntimeError as error:
        # NCCL raises a DistError; gloo a RuntimeError that starts with the line of its C++ source.
        gloo = re.match(r"\[\S*/gloo/\S+:\d+\] ", str(error))
        if not (gloo or isinstance(error, dist.DistError)):
            raise
        detail = first_line(error)[gloo.end() if gloo else 0 :].split(". ")[0]
        raise UserError(
            f"lost the connection to another process of this run ({detail}); see what it printed, "
            "then start again (training: --resume)", status=1) from error


def on_rank0(function, *args, **kwargs):
    """Calls a function on rank 0. Returns its result, or raises its UserError, on all processes."""
    results = [None]
    if ranks()[0] == 0:
        try:
            results = [function(*args, **kwargs)]
        except UserError as error:
            results = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(results)
    if isinstance(results[0], UserError):
        raise results[0]
    return results[0]


def prefetch(batches, device):
    """Yields the same batches; a thread prepares the next one while the current one is used."""
    use = {}
    if device.type == "cuda":  # else the thread would also take memory of GPU 0
        use = dict(initializer=torch.cuda.set_device, initargs=(device,))
    with ThreadPoolExecutor(1, **use) as thread:
        future = thread.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = thread.submit(next, batches, None)
            yield batch


def sum_over_data(tensor, device, dp_size):
    """Sums over the data parallel processes. Processes with the same rows (TP, PP) count once."""
    if not dist.is_initialized():
        return tensor
    tensor = tensor.to(device)
    dist.all_reduce(tensor)
    return tensor / (dist.get_world_size() // dp_size)


def shut_down(world_size):
    """Waits for all processes, then closes the process group. Undoes gc.freeze()."""
    gc.unfreeze()
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.5)  # exiting at once may crash in gloo's threads (pytorch/pytorch#179291)


def choose_compile(flag, device):
    """--compile -> bool; the default is True on CUDA. Raises UserError without a compiler."""
    compiler = device.type != "cpu" or shutil.which(os.environ.get("CXX", "g++"))
    if flag and not (compiler or shutil.which("clang++")):
        raise UserError("--compile: needs a C++ compiler on a CPU; install g++, or set CXX")
    return device.type == "cuda" if flag is None else flag


def choose_dtype(name, device):
    """--dtype -> torch.dtype. auto: bfloat16 where it is fast, else float16 on CUDA or float32."""
    if name == "auto":
        cpu = torch.cpu.get_capabilities()
        fast = device.type == "cpu" and (cpu.get("avx512_bf16") or cpu.get("amx_bf16"))
        if device.type == "cuda":  # GPUs before Ampere emulate bfloat16 slowly
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        slow = "float16" if device.type == "cuda" else "float32"
        name = "bfloat16" if fast else slow
    if device.type == "cuda":  # TF32, unless float32 was asked for
        torch.set_float32_matmul_precision("highest" if name == "float32" else "high")
    if name == "bfloat16" and device.type == "cpu":
        # Allows float32 products to round their inputs to bfloat16; sums stay float32. Without
        # bfloat16 hardware nothing is rounded, but oneDNN replaces MKL and is twice as fast.
        torch.set_float32_matmul_precision("medium")
    return getattr(torch, name)


# Dense 16-bit peak in FLOP/s, from NVIDIA's data sheets. The first name that matches counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "4090": 165e12, "3090": 71e12,
    "V100": 125e12, "T4": 65e12}


def peak_flops(device, dtype, world_size=1):
    """Peak FLOP/s of all processes together, or None if unknown or for float32."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{name}\b", torch.cuda.get_device_name(device)):
            return peak * world_size
