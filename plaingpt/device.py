"""Chooses the device of a process, its dtype, and whether to use torch.compile.

The dtypes have these numbers of bits for sign, exponent and mantissa: FP32 1+8+23, TF32 1+8+10,
BF16 1+8+7, FP16 1+5+10. FP16 has a small range, so small gradients underflow unless a gradient
scaler multiplies the loss by a large factor.

Two functions at the end of this file return the name and the peak FLOP/s of the hardware.
"""

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Literal

from plaingpt.errors import UserError, explaining
from plaingpt.terminal import print0

import torch

Dtype = Literal["auto", "bfloat16", "float16", "float32"]  # choices of --dtype


def find_device(name, local_rank=0, world_size=1):
    """Returns the torch.device of this process. name: value of --device.

    Raises UserError if torch cannot use the device.
    """
    n_gpus = torch.cuda.device_count()
    if name == "auto":
        name = choose_device(n_gpus, world_size)
    if name.startswith("cuda") and world_size > 1:
        # Each process needs its own GPU. If torch finds no GPU, the error below gives the reason.
        if ":" in name or local_rank >= n_gpus > 0:
            raise UserError(
                f"--device {name}: each process needs its own GPU, and torch finds {n_gpus}; use "
                f"--device cuda with at most --nproc_per_node={n_gpus}"
            )
    what = f"--device {name}: torch {torch.__version__} cannot use it"
    with explaining(what, "try --device cpu", (RuntimeError, AssertionError)):
        device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
        torch.ones(1, device=device)  # runs a kernel, which fails if the GPU is too old for torch
    return device


def set_deterministic():
    """Makes PyTorch use deterministic algorithms, or raise an error if an operation has none.

    Identical runs then return bitwise identical results. On a GPU, nondeterministic algorithms are
    faster, but add numbers in the order in which threads finish. Call this function before any code
    uses the GPU.
    """
    # cuBLAS reads this variable when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = (
        False  # True is slow, and helps only with debugging
    )


def choose_device(n_gpus, world_size):
    """Returns the device for --device auto: "cuda", "mps" or "cpu".

    n_gpus: number of GPUs that torch can use. world_size: number of processes.
    """
    if n_gpus > 0:
        return "cuda"
    # If a CUDA build of torch cannot use an existing GPU, chooses cuda. find_device then fails, and
    # gives the reason. Otherwise, the program would silently use the CPU.
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda and not is_hidden and Path("/dev/nvidia0").exists():
        return "cuda"
    if torch.backends.mps.is_available() and world_size == 1:
        return "mps"
    return "cpu"


def choose_compile(wanted, device):
    """Returns whether to use torch.compile. Raises UserError if a compiler or a header is missing.

    wanted: value of --compile, or None for the default. The default is True on CUDA, except on
    Windows, where Triton is missing. torch.compile needs a C++ compiler and Python's header files.
    """
    if wanted is None:
        wanted = device.type == "cuda" and sys.platform != "win32"
    if wanted:
        compilers = os.environ.get("CC", "gcc clang cl").split()
        has_compiler = any(shutil.which(compiler) for compiler in compilers)
        has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
        if not (has_compiler and has_headers):
            raise UserError(
                "--compile: needs g++ and python3-dev; install them, or pass --no-compile"
            )
        print0(
            "torch.compile: the first validation and the first micro-batch each take a minute or "
            "more"
        )
    return wanted


def choose_dtype(name, device):
    """Returns the torch.dtype for a value of --dtype.

    "auto" chooses bfloat16 if bfloat16 is fast on the device. Otherwise, it chooses float16 on
    CUDA, and float32 on other devices.
    """
    if name == "auto":
        if has_bfloat16(device):
            name = "bfloat16"
        elif device.type == "cuda":
            name = "float16"
        else:
            name = "float32"
    return getattr(torch, name)


def has_bfloat16(device):
    """Returns whether the device has instructions for bfloat16. Older GPUs emulate bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()  # {name of an instruction set extension: bool}
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def set_matmul_precision(dtype, device):
    """Sets the precision of the matrix multiplications whose inputs are float32.

    dtype: the dtype that autocast uses. If autocast rounds to 16 bits, the matrix multiplications
    outside autocast may round their inputs, too, but not their sums.
    """
    if dtype == torch.float32:
        precision = "highest"  # rounds nothing
    elif device.type == "cuda":
        precision = "high"  # rounds the inputs to TF32
    else:
        # Rounds the inputs to bfloat16. If the CPU does not support bfloat16, PyTorch rounds
        # nothing, but uses oneDNN, which is twice as fast as MKL.
        precision = "medium"
    torch.set_float32_matmul_precision(precision)


# The peak FLOP/s of dense 16-bit matrix multiplications, from NVIDIA's data sheets.
# peak_flops uses the first key, a regular expression, that occurs in the name of the GPU.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "4090(?! Laptop)": 165e12,
    "3090": 71e12,
    "T4": 65e12,
}


def hardware_name(device):
    """Returns the type and the name of the hardware as a string."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {torch.cpu.get_capabilities().get('cpu_name')}, {os.cpu_count()} cores"


def peak_flops(process):
    """Returns the peak FLOP/s of all processes together.

    Returns None if the peak is unknown, or if the dtype is float32.
    """
    if process.dtype == torch.float32:
        return None
    hardware = hardware_name(process.device)
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{name}\b", hardware):
            return peak * process.n_processes
    return None
