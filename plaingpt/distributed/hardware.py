"""Names and peak speeds of hardware."""

import os
import re

import torch

# These are dense 16-bit peaks in FLOP/s, from NVIDIA's data sheets. The first name that matches
# counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "4090": 165e12,
    "3090": 71e12,
    "T4": 65e12,
}


def hardware_name(device):
    """Returns the type and the name of the hardware, as people read them."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {torch.cpu.get_capabilities().get('cpu_name')}, {os.cpu_count()} cores"


def peak_flops(process):
    """Returns the peak FLOP/s of all processes together.

    Returns None if it is unknown, or if the dtype is float32.
    """
    if process.dtype == torch.float32:
        return None
    hardware = hardware_name(process.device)
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{name}\b", hardware):
            return peak * process.world_size
    return None
