"""The dtypes of matrix multiplications and of the residual stream."""

import torch


def matmul_dtype(x):
    """Returns the dtype in which x is multiplied: autocast's dtype if autocast is on, or x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def stream_dtype(x):
    """Returns the dtype in which the model keeps the residual stream x.

    On CUDA, if matrix multiplications use bfloat16, this dtype is bfloat16. In all other cases, x
    keeps its current dtype.
    """
    return torch.bfloat16 if x.is_cuda and matmul_dtype(x) == torch.bfloat16 else x.dtype


def has_bfloat16(device):
    """Returns whether the device has instructions for bfloat16. Older GPUs emulate bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()  # {name of an instruction set extension: bool}
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))
