"""The processes of a program: sets them up, joins them, and exchanges values between them."""

import atexit
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta

from plaingpt.base.errors import UserError, explaining
from plaingpt.base.machine import read_ranks
from plaingpt.base.signals import Stopped, StopRequest
from plaingpt.base.source import hash_of_program
from plaingpt.distributed.device import (
    choose_dtype,
    find_device,
    set_deterministic,
    set_matmul_precision,
)
from plaingpt.distributed.memory import set_malloc

import torch
import torch.distributed as dist


@dataclass
class Process:
    """This process among the processes of a program, its device and its dtype.

    The processes form a mesh of pp x dp x tp with dp_size replicas of the model. Each replica reads
    its own sequences. With TP or PP, several processes share one replica and read the same
    sequences.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    dtype: torch.dtype  # of matrix multiplications
    tp_group_index: int = 0  # the processes of a TP group draw equal dropout masks
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def dtype_name(self):
        """The dtype as a text: bfloat16, float16 or float32."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def autocast(self):
        """A context in which matrix multiplications use dtype."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def mean(self, scalars):
        """Computes means over all processes: {name: scalar tensor} -> {name: float}.

        One message contains all scalars, so all processes need the same names in the same order.
        Here, the CPU waits for the device.
        """
        values = torch.stack(list(scalars.values()))  # (number of names)
        return dict(zip(scalars, (self.sum(values) / self.dp_size).tolist()))

    def sum(self, tensor):
        """Sums a tensor over the replicas of the model."""
        if self.world_size == 1:
            return tensor
        tensor = tensor.to(self.device, copy=True)  # a copy, because all_reduce works in place
        dist.all_reduce(tensor)
        # The processes of one replica have the same values, and all_reduce has added all of them.
        return tensor / (self.world_size // self.dp_size)

    def check_stop(self):
        """Raises Stopped on all processes if one process has received a signal.

        Validation, benchmarks and samples call this before each batch, all processes together.
        """
        if self.sum(torch.tensor(float(self.stop.has_signal))).item() > 0:
            raise Stopped

    def barrier(self):
        """Waits for all processes."""
        if self.world_size > 1:
            dist.barrier()


def setup(device, dtype, tp=1, pp=1, parallel="ddp", deterministic=False):
    """Prepares PyTorch, and joins the processes of a program -> Process. Raises UserError.

    Chooses the device and the dtype. Sets PyTorch's deterministic algorithms, the precision of
    float32 matrix multiplications, and how glibc frees memory. Checks that all processes run the
    same code. The arguments are the values of the flags of the same name.
    """
    if deterministic:
        set_deterministic()
    rank, local_rank, world_size = read_ranks()
    n_parts = pp * tp  # processes of one replica
    if world_size % n_parts:
        raise UserError(
            f"--tp {tp} --pp {pp}: needs a multiple of {n_parts} processes, and there "
            f"{'is' if world_size == 1 else 'are'} {world_size}; use torchrun "
            f"--nproc_per_node={n_parts}"
        )
    device = find_device(device, local_rank, world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = choose_dtype(dtype, device)
    set_matmul_precision(dtype, device)
    set_malloc(keep_memory=parallel != "fsdp" or world_size == 1)
    if world_size > 1:
        join_processes(rank, world_size, device)
        check_equal(hash_of_program(), "the processes have different code; give all the same clone")
    dp_size = world_size // n_parts
    tp_group_index = rank // tp  # in the mesh, tp varies fastest, then dp, then pp
    dp_rank = tp_group_index % dp_size
    return Process(rank, world_size, dp_rank, dp_size, device, dtype, tp_group_index)


def join_processes(rank, world_size, device):
    """Joins PyTorch's process group, and leaves the group at exit."""
    is_cuda = device.type == "cuda"
    # Without this, NCCL warns about the messages of PyTorch's pipelines.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    # MASTER_ADDR or MASTER_PORT may be missing.
    with explaining("the processes cannot join", "use torchrun", ValueError):
        timeout = timedelta(hours=1)  # a download on rank 0 may take long
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # On one machine, torchrun --max_restarts keeps the addresses of dead processes.
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=device if is_cuda else None,
            timeout=timeout,
        )
    # Both functions run at exit, even after an error, in reverse order. gloo's threads need some
    # time after destroy_process_group; otherwise, they may crash (pytorch/pytorch#179291).
    atexit.register(time.sleep, 0.5)
    atexit.register(dist.destroy_process_group)


def on_rank0(function, *args, **kwargs):
    """Calls a function on rank 0. Returns its result, or raises its UserError, on all processes."""
    results = [None]  # [the result or the UserError], which the broadcast replaces
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
