"""A solution of task 04: GPT-2's initialization."""

import math

import torch.nn as nn


def init_weights(model, n_layer):
    """Sets the parameters of a GPT-2 to their initial values. Returns nothing."""
    for name, p in model.named_parameters():  # yields the shared matrix only once
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif name.endswith("c_proj.weight"):
            # Each block adds two outputs to the residual stream, so 2 * n_layer variances add up.
            # Dividing by sqrt(2 * n_layer) keeps their sum from growing with n_layer.
            nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer))
        elif p.dim() == 2:
            nn.init.normal_(p, std=0.02)
        else:
            nn.init.ones_(p)  # the weight of a LayerNorm
