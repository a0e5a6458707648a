"""Processes, devices and number formats: the Process of a program.

The formats have these bits for sign, exponent and mantissa: FP32 1+8+23, TF32 1+8+10, BF16 1+8+7,
FP16 1+5+10. FP16 has a small range: small gradients become zero unless a scaler enlarges them.
"""

import atexit
import contextlib
import ctypes
import os
import re
import shutil
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

# This import comes before torch, which ignores Ctrl-C while it imports numpy itself.
import numpy  # noqa: F401
import torch
import torch.distributed as dist

from plaingpt import parallel
from plaingpt.cli import UserError, explaining, print0
from plaingpt.muon import has_bfloat16

Dtype = Literal["auto", "bfloat16", "float16", "float32"]  # of --dtype


@dataclass
class Process:
    """This process among the processes of a program, its device and its number format.

    The processes form a mesh of pp x dp x tp. Each of the dp_size data parallel groups has its own
    sequences. The processes of one group (TP, PP) share a model and have the same sequences.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    dtype: torch.dtype  # of matrix products

    @property
    def dtype_name(self):
        """ "bfloat16", "float16" or "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def autocast(self):
        """Context in which matrix products are computed in dtype."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def mean(self, *scalars):
        """Takes the means of 0-dimensional tensors over all processes -> list of floats.

        It sends them in one message. The CPU waits here for the device.
        """
        return (self.sum(torch.stack(scalars)) / self.dp_size).tolist()

    def sum(self, tensor):
        """Sums a tensor over the data parallel groups."""
        if self.world_size == 1:
            return tensor
        tensor = tensor.to(self.device)
        dist.all_reduce(tensor)
        # The processes of one group have the same values, and all_reduce has added them all.
        return tensor / (self.world_size // self.dp_size)

    def barrier(self):
        """Waits for all processes."""
        if self.world_size > 1:
            dist.barrier()


def start(device, dtype, tp=1, pp=1, parallel="ddp"):
    """Chooses device and dtype, and joins the process group -> Process. Raises UserError.

    The arguments are the values of the flags.
    """
    # torchrun sets these variables.
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    n_parts = pp * tp  # processes that share one model
    if world_size % n_parts:
        raise UserError(f"--tp {tp} --pp {pp}: use torchrun with a multiple of {n_parts} processes")
    device = find_device(device, local_rank, world_size)
    set_malloc(keep_memory=parallel != "fsdp")
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        # Otherwise NCCL warns about the messages of PyTorch's pipelines.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            device_id=device if cuda else None,
            timeout=timedelta(hours=1),
        )  # rank 0 may need long to download
        # These two run at exit, also after an error, the last one first. gloo's threads need some
        # time after destroy_process_group. Otherwise, they may crash (pytorch/pytorch#179291).
        atexit.register(time.sleep, 0.5)
        atexit.register(dist.destroy_process_group)
    dp_size = world_size // n_parts
    dp_rank = rank // tp % dp_size  # tp varies fastest, then dp, then pp
    return Process(rank, world_size, dp_rank, dp_size, device, choose_dtype(dtype, device))


def find_device(name, local_rank=0, world_size=1):
    """--device -> the torch.device of this process. Raises UserError if it cannot be used."""
    n_gpus = torch.cuda.device_count()
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() and world_size == 1 else "cpu"
        # If there is a GPU that this CUDA build of torch cannot use, chooses cuda all the same: it
        # fails below and says why. Otherwise, the program would silently use the CPU.
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not torch.version.cuda
        name = "cuda" if n_gpus or Path("/dev/nvidia0").exists() and not hidden else name
    if name.startswith("cuda") and world_size > 1 and (":" in name or local_rank >= n_gpus > 0):
        raise UserError(f"--device {name}: use cuda with at most --nproc_per_node={n_gpus}")
    what = f"--device {name}: torch {torch.__version__} cannot use it"
    with explaining(what, "try --device cpu", (RuntimeError, AssertionError)):
        device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
        torch.ones(1, device=device)  # starts a kernel, and fails if the GPU is too old for torch
    return device


def choose_compile(wanted, device):
    """Turns --compile into a bool. The default is True on CUDA, but not on Windows: Triton is
    missing there.

    Raises UserError if it is True, but a C++ compiler or Python's headers are missing.
    """
    if wanted is None:
        wanted = device.type == "cuda" and sys.platform != "win32"
    if wanted:
        has_compiler = any(map(shutil.which, os.environ.get("CC", "gcc clang cl").split()))
        if not (has_compiler and Path(sysconfig.get_path("include"), "Python.h").exists()):
            raise UserError("--compile: needs g++ and python3-dev; install them or --no-compile")
        print0("torch.compile: the first validation and micro-batch take a minute or more each")
    return wanted


def set_malloc(keep_memory):
    """Sets whether glibc keeps large freed blocks (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD).

    By default, it gives them back to the system. To get them again, zeroed, takes a third of a
    step. So glibc keeps them, except with FSDP, which frees whole tensors all the time. There, kept
    blocks would fragment the memory.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        if keep_memory:
            libc.mallopt(-1, 2**31 - 1)
        libc.mallopt(-3, 2**31 - 1 if keep_memory else 2**17)


def choose_dtype(name, device):
    """Turns --dtype into a torch.dtype. Sets the precision of float32 products.

    auto is bfloat16 where it is fast. Otherwise, it is float16 on CUDA, and float32 elsewhere.
    """
    if name == "auto":
        slow = "float16" if device.type == "cuda" else "float32"
        name = "bfloat16" if has_bfloat16(device) else slow
    # Unless the dtype is float32, float32 products may round their inputs: on CUDA to TF32, on a
    # CPU to bfloat16. Sums stay float32. A CPU without bfloat16 rounds nothing, but oneDNN replaces
    # MKL and is twice as fast.
    rounded = "high" if device.type == "cuda" else "medium"
    torch.set_float32_matmul_precision("highest" if name == "float32" else rounded)
    return getattr(torch, name)


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


def fit_batch_size(training, config, T, sizes, process):
    """Finds the largest micro-batch that all GPUs have memory for -> its number of sequences.

    All processes must call this before the first step. It begins with the largest B of `sizes`,
    which is from plan_steps, and halves it. Each size that it tries divides the sequences that a
    process has in a step. On a CPU, and with FSDP, TP or PP, it tries nothing and returns
    config.batch_size: a process of a split model that runs out of memory would leave the others
    waiting. Raises UserError if not even one sequence fits.
    """
    if process.device.type != "cuda" or config.parallel == "fsdp" or config.tp * config.pp > 1:
        return config.batch_size
    most, found = max(B for _, B in sizes), 0
    halves = [
        B
        for B in (most >> i for i in range(most.bit_length()))
        if not any(n // process.dp_size % min(B, own) for n, own in sizes)
    ]
    # To compile takes a minute for each size, so eager code searches first. Compiled code needs
    # less memory, so it begins with the last size for which eager code has too little.
    for stance in ("force_eager", "default"):
        with torch.compiler.set_stance(stance):
            left = range(max(0, found - 1), len(halves))
            fitting = (i for i in left if has_memory(training, halves[i], T, process))
            found = next(fitting, len(halves))
    if found == len(halves):
        raise UserError(
            "no sequence fits into memory; try --activation_checkpointing, a smaller "
            "--preset, or more GPUs with --parallel fsdp"
        )
    torch.cuda.reset_peak_memory_stats()  # bench.py reads them
    print0(f"--batch_size {halves[found]} fits into memory; warnings of OOM are from larger ones")
    return halves[found]


def has_memory(training, B, T, process):
    """Returns whether all processes have memory to train with micro-batches of (B, T).

    It runs two of them, beside as much memory as AdamW's moments will take, and some more. It
    leaves the gradients and the random state as they are before a step.
    """
    torch.cuda.empty_cache()  # frees what the attempt before this one has left
    n_fit = torch.zeros(())
    parallel.set_gradient_sync(training.model, False)  # one process may fail, so none may wait
    with (
        contextlib.suppress(UserError),
        batch_size_advice(B),
        torch.random.fork_rng(range(torch.cuda.device_count())),
    ):
        # AdamW's moments take 8 bytes a parameter. The first step puts them between activations,
        # which leaves gaps that are too small for others. These took up to 2 bytes a parameter.
        moments = [
            p.new_empty(10, *p.shape, dtype=torch.uint8) for p in training.raw_model.parameters()
        ]
        x, y = torch.zeros((2, B, T), dtype=torch.long, device=process.device)  # (B, T) each
        for _ in range(2):  # the second one begins when there are gradients, as in a step
            with process.autocast:
                _, loss = training.model(x, y)
            loss.backward()
        del moments
        n_fit += 1
    training.raw_model.zero_grad()
    return process.sum(n_fit) == process.dp_size


def on_rank0(function, *args, **kwargs):
    """Calls a function on rank 0. Returns its result, or raises its UserError, on all processes."""
    results = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            results = [function(*args, **kwargs)]
        except UserError as error:
            results = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(results)
    if isinstance(results[0], UserError):
        raise results[0]
    return results[0]


def check_equal(value, message):
    """Raises a UserError with this message on all processes if their values differ."""
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        if any(other != values[0] for other in values):
            raise UserError(message)


def prefetch(batches, device):
    """Yields the same batches; a thread prepares the next one while the current one is used."""
    with ThreadPoolExecutor(1) as thread:
        if device.type == "cuda":  # otherwise, the thread would also take memory of GPU 0
            thread.submit(torch.cuda.set_device, device)
        future = thread.submit(next, batches, None)
        while (batch := future.result()) is not None:
            future = thread.submit(next, batches, None)
            yield batch


def hardware_name(device):
    """The type and the name of the hardware, as people read them."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {torch.cpu.get_capabilities().get('cpu_name')}, {os.cpu_count()} cores"


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


def peak_flops(process):
    """Peak FLOP/s of all processes together, or None if it is unknown or the dtype is float32."""
    hardware = hardware_name(process.device)
    peaks = [peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", hardware)]
    return peaks[0] * process.world_size if peaks and process.dtype != torch.float32 else None
