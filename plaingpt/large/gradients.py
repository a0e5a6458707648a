"""Gradient norms of a model that is split over processes."""

import torch.distributed as dist
import torch.nn as nn


def norm_of(parameters):
    """Returns the global gradient norm of `parameters`, including the parts on other processes."""
    return nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor()


def sum_tied_gradients(model):
    """Adds the gradients of the two copies of the tied matrix in a Pipeline, in place.

    One copy is the embedding of the first stage, and the other copy is the head of the last stage.
    Afterwards, the gradient of each copy is the sum of both gradients.
    """
    if model.has_tied:
        tied = model.part.transformer.wte.weight
        dist.all_reduce(tied.grad.to_local(), group=model.tied_group)


def norm_of_pipeline(model, parameters):
    """Returns the global gradient norm over all stages of a Pipeline.

    parameters: the parameters of this stage.
    """
    if model.has_tied and model.is_last:
        # The copies of the tied matrix on the first and the last stage have the same gradient. Only
        # the first stage includes this gradient in the norm.
        tied = model.part.transformer.wte.weight
        parameters = [p for p in parameters if p is not tied]
    squares = norm_of(parameters) ** 2
    dist.all_reduce(squares, group=model.group)
    return squares.sqrt()
