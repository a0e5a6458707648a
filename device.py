"""Which process this is, on which device, in which number format; and what that device promises.

  FP32 has 1+8+23 bits (sign, exponent, mantissa), TF32 1+8+10, BF16 1+8+7, FP16 1+5+10. So TF32 has FP32's range with
  FP16's precision; BF16 has FP32's range and less precision than FP16; FP16 is short of range, and its small gradients
  vanish unless a scaler lifts them.
"""

import os
import re
import time

import torch
import torch.distributed as dist

from cli import UserError, first_line


def setup(name):
    """Joins the processes that torchrun started, if any, and chooses the device.

    Returns (rank, world_size, device). torchrun says who we are in environment variables; one process needs none.
    """
    rank, local_rank, world_size = (int(os.environ.get(name, default)) for name, default in
                                    (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    if name == "auto":
        mps = torch.backends.mps.is_available() and world_size == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used by process {rank} ({first_line(error)}); --device cpu can") from error
    if world_size > 1 and device.type == "mps":
        raise UserError(f"--device {name} is one device, which {world_size} processes cannot share; use one process, or cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 on tensor cores: float32's range, 10 bits of mantissa
    if world_size > 1 and device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    elif world_size > 1:
        dist.init_process_group("gloo")
    return rank, world_size, device


def shut_down(world_size):
    """Takes leave of the other processes."""
    if world_size > 1:
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
