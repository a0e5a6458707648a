"""Gradient norms of a model that is split over processes."""

from plaingpt.base.errors import UserError
from plaingpt.ops.dtensors import is_dtensor

import torch.distributed as dist
import torch.nn as nn


def match_placements(parameters):
    """Gives each gradient the placements of its parameter.

    RowwiseParallel returns a gradient with all rows, but a process holds only some rows of the
    parameter. With torch 2.11, the gradient may also be a partial sum: the full gradient is the sum
    over the TP group.
    """
    for p in parameters:
        if is_dtensor(p) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


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
    """Returns the global gradient norm over all stages of a Pipeline.

    Adds up the gradients of the tied matrix first. parameters: the parameters of this stage.
    """
    sum_tied_gradients(model)
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
