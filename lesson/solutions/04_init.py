"""A solution of task 04: GPT-2's initialization."""

import math

import torch.nn as nn


def init_weights(model, n_layer):
    """Sets the parameters of a GPT-2 to their initial values. Returns nothing."""
    for name, p in model.named_parameters():  # yields the shared matrix only once
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif name.endswith("c_proj.weight"):
            # The residual stream is a sum of 2 n_layer outputs, whose variances add up.
            nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer))
        elif p.dim() == 2:
            nn.init.normal_(p, std=0.02)
        else:
            nn.init.ones_(p)  # the weight of a LayerNorm
