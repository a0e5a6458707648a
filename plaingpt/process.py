"""Sets up a process, joins the process group of the program, and exchanges values in it."""

import atexit
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta

from plaingpt.device import (
    choose_dtype,
    find_device,
    set_deterministic,
    set_matmul_precision,
)
from plaingpt.errors import UserError, explaining
from plaingpt.machine import read_ranks
from plaingpt.memory import keep_freed_memory
from plaingpt.signals import Stopped, StopRequest
from plaingpt.terminal import print0

import torch
import torch.distributed as dist


@dataclass
class Process:
    """This process of a program: its share of the data, its device and its dtype.

    The data are split over world_size processes. This process reads share number `rank`.
    """

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype  # the dtype of matrix multiplications
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def is_main(self):
        """Whether this process prints and writes files."""
        return self.rank == 0

    @property
    def n_processes(self):
        """The number of processes of the program."""
        return self.world_size

    @property
    def dtype_name(self):
        """The dtype as a string: bfloat16, float16 or float32."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def autocast(self):
        """A context manager in which matrix multiplications use `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def mean(self, scalars):
        """Returns the mean of each scalar over all processes: {name: float}.

        scalars: {name: scalar tensor}. One all-reduce sums all scalars, so all processes need the
        same names in the same order. The CPU waits for the result.
        """
        values = torch.stack(list(scalars.values()))  # (number of names)
        return dict(zip(scalars, (self.sum(values) / self.world_size).tolist()))

    def sum(self, tensor):
        """Returns the sum of a tensor over all processes."""
        if self.world_size == 1:
            return tensor
        tensor = tensor.to(self.device, copy=True)  # a copy, because all_reduce works in place
        dist.all_reduce(tensor)
        return tensor

    def check_stop(self):
        """Raises Stopped on all processes if one process got a signal or cannot read its data.

        All processes call this method before each batch of validation, benchmarks and sampling.
        """
        if self.any(self.stop.has_signal or self.stop.error is not None):
            raise Stopped

    def any(self, flag):
        """Returns whether a flag is True on at least one process."""
        return self.sum(torch.tensor(float(flag))).item() > 0

    def raise_error(self, step):
        """If one process could not read its data, raises its error on all processes.

        step: the step of the newest checkpoint, or 0 if there is no checkpoint.
        """
        errors = [self.stop.error]
        if dist.is_initialized():
            errors = [None] * dist.get_world_size()
            dist.all_gather_object(errors, self.stop.error)
        for error in (self.stop.error, *errors):  # first the error of this process
            if error is not None:
                if step > 0:
                    print0(f"a checkpoint is saved; --resume continues from step {step}")
                raise error

    def barrier(self):
        """Waits for all processes."""
        if dist.is_initialized():
            dist.barrier()


def setup(device, dtype, deterministic=False):
    """Prepares PyTorch, and creates the process group. Returns a Process.

    Chooses the device and the dtype. Sets whether PyTorch uses deterministic algorithms, the
    precision of float32 matrix multiplications, and how glibc frees memory. device, dtype,
    deterministic: the values of the flags with these names.
    """
    if deterministic:
        set_deterministic()
    rank, local_rank, world_size = read_ranks()
    device = find_device(device, local_rank, world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = choose_dtype(dtype, device)
    set_matmul_precision(dtype, device)
    keep_freed_memory()
    if world_size > 1:
        join_processes(rank, world_size, device)
    return Process(rank, world_size, device, dtype)


def join_processes(rank, world_size, device):
    """Joins PyTorch's process group. At exit, the process leaves the group.

    rank: the number of this process, from 0 to world_size - 1.
    """
    is_cuda = device.type == "cuda"
    # rendezvous raises ValueError if MASTER_ADDR or MASTER_PORT is missing.
    with explaining("the processes cannot join", "use torchrun", ValueError):
        timeout = timedelta(hours=1)  # a download takes long, and the other processes wait for it
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # On one machine, torchrun --max_restarts keeps the store after a restart. The store
            # still contains the addresses of dead processes, so each restart uses a new prefix.
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=device if is_cuda else None,
            timeout=timeout,
        )
    # At exit, even after an error, Python calls both functions in reverse order. After
    # destroy_process_group, gloo's threads need some time to end. Without the sleep, these threads
    # might crash (pytorch/pytorch#179291).
    atexit.register(time.sleep, 0.5)
    atexit.register(dist.destroy_process_group)


def on_rank0(function, *args, **kwargs):
    """Calls a function on rank 0. All processes return the result, or raise the UserError."""
    results = [None]  # [the result or the UserError]; the broadcast replaces the element
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
    """Raises a UserError with the text `message` if the processes have different values."""
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        if any(other != values[0] for other in values):
            raise UserError(message)


def add_metrics(metrics, loss, more, weight):
    """Adds the weighted loss and the weighted metrics of a micro-batch to the means of a step.

    metrics: {name: mean}, changed in place. more: [{name: scalar tensor}], the third value that
    GPT.forward returns, or [] if GPT.forward returns only two values. weight: the weight of the
    micro-batch, from Training.loss_weights.
    """
    extra = more[0] if more else {}
    for name, value in dict(train=loss, **extra).items():
        metrics[name] = metrics.get(name, 0.0) + value.detach() * weight
