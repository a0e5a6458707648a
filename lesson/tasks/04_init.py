"""GPT-2's initialization: the scale of the residual stream does not grow with the depth.

Check it with: python lesson/check.py 04
"""

import math

import torch
import torch.nn as nn


def init_weights(model, n_layer):
    """Sets the parameters of a GPT-2 to their initial values. Returns nothing.

    model: a GPT-2 with n_layer blocks and PyTorch's initial values. The names of the parameters are
    the same as in the lesson:

      wte.weight  wpe.weight  ln_f.weight  ln_f.bias             and, for each block i:
      h.i.ln_1.weight  h.i.attn.c_attn.weight  h.i.attn.c_proj.weight
      h.i.ln_2.weight  h.i.mlp.c_fc.weight     h.i.mlp.c_proj.weight
                       and a bias for each of these six

    lm_head.weight and wte.weight are the same parameter, and must remain the same parameter. GPT-2
    initializes

    - biases to 0, and weights of LayerNorms to 1;
    - matrices from a normal distribution with mean 0 and standard deviation 0.02;
    - the matrices of attn.c_proj and mlp.c_proj with a smaller standard deviation, because each
      block adds the outputs of these two layers to the residual stream. Choose the standard
      deviation so that the sum of these outputs over all blocks has the same variance as the output
      of one such layer with a standard deviation of 0.02.

    Example: with n_layer = 8, the standard deviation of h.0.attn.c_proj.weight is 0.005.
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
