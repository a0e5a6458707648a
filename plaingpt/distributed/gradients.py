"""Scales, averages and clips gradients, on one process or several."""

from plaingpt.base.errors import UserError
from plaingpt.distributed.pipeline import Pipeline
from plaingpt.ops.dtensors import is_dtensor

import torch
import torch.distributed as dist
import torch.nn as nn


def grad_scaler(process):
    """Returns the gradient scaler of a run, which does nothing unless the dtype is float16."""
    is_float16 = process.dtype == torch.float16
    if not is_float16 or process.world_size == 1:
        return torch.amp.GradScaler(process.device.type, enabled=is_float16)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    # If one process finds an overflow in its gradients, all processes lower their scale factor.
    return ShardedGradScaler(process.device.type)


def set_gradient_sync(model, is_on):
    """Sets whether the next backward pass averages the gradients over the processes."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = is_on
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP
        model.set_requires_gradient_sync(is_on)


class GradientClipper:
    """Clips the gradients of a model, which may be split over processes.

    With tensor parallelism, also compares the gradients of different processes once.

    model: a Pipeline, or a GPT, which may be compiled and wrapped in DDP. tp: number of processes
    that share the computation of a layer.
    """

    def __init__(self, model, tp):
        self.model = model
        self.must_compare = tp > 1

    def clip(self, max_norm):
        """Clips the global gradient norm. Returns the norm before clipping.

        Raises UserError if compare_gradients finds different gradients.
        """
        model = self.model
        parameters = [p for p in model.parameters() if p.grad is not None]
        for p in parameters:
            # RowwiseParallel returns a gradient with all rows, but this process holds only some
            # rows of the parameter. With torch 2.11, the gradient may also be a partial sum: the
            # full gradient is the sum over the TP group.
            if is_dtensor(p) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        if isinstance(model, Pipeline):
            sum_tied_gradients(model)
            norm = norm_of_pipeline(model, parameters)
        else:
            norm = norm_of(parameters)
        if self.must_compare and norm.isfinite():  # only in the first finite step
            compare_gradients(model)
            self.must_compare = False
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


def norm_of(parameters):
    """Returns the total gradient norm of these parameters, including all parts of DTensors."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    return norm.full_tensor() if is_dtensor(norm) else norm


def sum_tied_gradients(model):
    """Adds the gradients of the two copies of the tied matrix in a Pipeline, in place.

    The first stage uses the matrix as its embedding, and the last stage uses its copy as its head.
    Afterwards, the gradient of each copy is the sum of both gradients.
    """
    if model.has_tied:
        tied = model.part.transformer.wte.weight
        grad = tied.grad.to_local() if is_dtensor(tied) else tied.grad
        dist.all_reduce(grad, group=model.tied_group)


def norm_of_pipeline(model, parameters):
    """Returns the global gradient norm over all stages. parameters: parameters of this stage."""
    if model.has_tied and model.is_last:
        # The copies of the tied matrix on the first and the last stage have the same gradient. Only
        # the first stage includes this gradient in the norm.
        tied = model.part.transformer.wte.weight
        parameters = [p for p in parameters if p is not tied]
    squares = norm_of(parameters) ** 2
    dist.all_reduce(squares, group=model.group)
    return squares.sqrt()


def compare_gradients(model):
    """Raises UserError if the processes have different gradients of a parameter that is not split.

    With TP, each process holds a copy of such a parameter. If a user edits model.py, the gradients
    of the copies may differ, and the copies would then drift apart.
    """
    norms = []  # [(name, gradient norm)] on this process
    for name, p in model.named_parameters():
        if p.grad is not None and p.placements[-1].is_replicate():  # -1 is TP's mesh dimension
            norms.append((name, p.grad.full_tensor().norm().item()))
    norms_of_processes = [None] * dist.get_world_size()
    dist.all_gather_object(norms_of_processes, norms)  # so that all processes raise the error
    found = []
    for each in norms_of_processes:
        found += each
    found.sort()  # the norms of one parameter are now next to each other, the smallest first
    for (name, norm), (next_name, next_norm) in zip(found, found[1:]):
        if name == next_name and next_norm - norm > 1e-4 * next_norm:
            raise UserError(f"--tp: the processes have different gradients of {name}; remove --tp")
