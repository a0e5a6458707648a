"""GPT-2's initialization: the residual stream does not grow with the depth.

Check it with: python lesson/check.py 04
"""

import math

import torch
import torch.nn as nn


def init_weights(model, n_layer):
    """Sets the parameters of a GPT-2 to their initial values. Returns nothing.

    model: a GPT-2 with n_layer blocks and PyTorch's initial values. Its parameters have the names
    of the lesson:

      wte.weight  wpe.weight  ln_f.weight  ln_f.bias             and for each block i:
      h.i.ln_1.weight  h.i.attn.c_attn.weight  h.i.attn.c_proj.weight
      h.i.ln_2.weight  h.i.mlp.c_fc.weight     h.i.mlp.c_proj.weight
                       and a bias for each of these six

    lm_head.weight is the same matrix as wte.weight, and must stay so. GPT-2's initial values:

    - biases are 0, and weights of LayerNorms are 1;
    - matrices are drawn from a normal distribution with mean 0 and standard deviation 0.02;
    - but each block adds two outputs to the residual stream, which attn.c_proj and mlp.c_proj
      compute. Choose the standard deviation of these two matrices so that the sum of all these
      outputs has the same variance as a single output of a matrix with 0.02.

    Example: with n_layer = 8, the standard deviation of h.0.attn.c_proj.weight is 0.005.
    """
    raise NotImplementedError
