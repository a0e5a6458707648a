"""Gradients on several processes: their scale, their mean and their norm."""

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

    # If one process finds an overflow in its part of the gradient, all processes lower their scale.
    return ShardedGradScaler(process.device.type)


def set_gradient_sync(model, is_on):
    """Sets whether the next backward pass averages the gradients over the processes."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = is_on
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP
        model.set_requires_gradient_sync(is_on)


class GradientClipper:
    """Clips the gradients of a model, which may be split. With TP, also compares gradients once.

    model: a Pipeline, or a GPT, possibly compiled and inside DDP. tp: number of processes that
    compute one layer.
    """

    def __init__(self, model, tp):
        self.model = model
        self.must_compare = tp > 1

    def clip(self, max_norm):
        """Clips the norm of the whole model's gradient. Returns the norm before clipping.

        Raises UserError if the copies of a parameter have different gradients with TP.
        """
        model = self.model
        parameters = [p for p in model.parameters() if p.grad is not None]
        for p in parameters:
            # RowwiseParallel returns a gradient with all rows, but the parameter has only some
            # rows. With torch 2.11, a gradient may also be one term of a sum over the TP group.
            if is_dtensor(p) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        if isinstance(model, Pipeline):
            sum_tied_gradients(model)
            norm = norm_of_pipeline(model, parameters)
        else:
            norm = norm_of(parameters)
        if self.must_compare and norm.isfinite():  # compares only once, in a finite step
            compare_gradients(model)
            self.must_compare = False
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


def norm_of(parameters):
    """Returns the norm of the gradient of these parameters, on all processes."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    return norm.full_tensor() if is_dtensor(norm) else norm


def sum_tied_gradients(model):
    """Sets the gradients of both copies of the tied matrix to their sum, in a Pipeline.

    The matrix is the embedding on the first stage, and the head on the last stage.
    """
    if model.has_tied:
        tied = model.part.transformer.wte.weight
        grad = tied.grad.to_local() if is_dtensor(tied) else tied.grad
        dist.all_reduce(grad, group=model.tied_group)


def norm_of_pipeline(model, parameters):
    """Returns the norm of the gradient of all stages. parameters: the parameters of this stage."""
    if model.has_tied and model.is_last:
        # The copies of the tied matrix on the first and the last stage have the same gradient,
        # which counts once.
        tied = model.part.transformer.wte.weight
        parameters = [p for p in parameters if p is not tied]
    squares = norm_of(parameters) ** 2
    dist.all_reduce(squares, group=model.group)
    return squares.sqrt()


def compare_gradients(model):
    """Raises UserError if TP gives different gradients to the copies of a whole parameter.

    With an edited model, the gradients can differ, and the copies would drift apart.
    """
    norms = []  # [(name, norm)] of this process
    for name, p in model.named_parameters():
        if p.grad is not None and p.placements[-1].is_replicate():  # -1 is the dimension of TP
            norms.append((name, p.grad.full_tensor().norm().item()))
    norms_of_processes = [None] * dist.get_world_size()
    dist.all_gather_object(norms_of_processes, norms)  # all processes must raise the error
    found = []
    for each in norms_of_processes:
        found += each
    found.sort()  # the norms of one parameter are now neighbours, in increasing order
    for (name, norm), (next_name, next_norm) in zip(found, found[1:]):
        if name == next_name and next_norm - norm > 1e-4 * next_norm:
            raise UserError(f"--tp: the processes have different gradients of {name}; remove --tp")
