"""Tensor parallelism: the processes of a group compute different heads, and parts of the MLP.

Source: Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053. In this file, PLAN
says how to split each layer, and PyTorch splits the layers.
"""

from plaingpt.errors import UserError
from plaingpt.large.loss import ParallelCrossEntropy

import torch.distributed.tensor.parallel as tp
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

# How to split the layers of GPT-2. A key is the last part of a layer's name. Layers that are not in
# this table are not split: each process computes the whole layer.
# - vocabulary: a process holds the rows of some token ids. An all-reduce sums the results of an
#   nn.Embedding; an all-gather joins the results of an nn.Linear.
# - qkv: a process computes some heads. The layer returns all queries, then all keys, then all
#   values.
# - colwise: a process computes some of the outputs.
# - rowwise: a process holds some of the inputs, which are the outputs of a qkv layer or of a
#   colwise layer. An all-reduce sums the results.
PLAN = dict(wte="vocabulary", c_attn="qkv", c_fc="colwise", c_proj="rowwise", lm_head="vocabulary")


def split_gpt(model, mesh):
    """Splits a GPT over a mesh, in place. Unties embedding and head, which tie_head ties again.

    The forward pass of a block has two all-reduces: one after attention, one after the MLP. The
    processes of a group draw the same random numbers, because their dropout masks for the residual
    stream must be the same. Therefore, heads on different processes also use the same masks.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "weight"):
            continue
        word = PLAN.get(name.rpartition(".")[2])
        if word is None:
            keep_whole(module, mesh)
        else:
            split_layer(module, word, mesh)
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            raise UserError(f"--tp: {name} is not in a layer; make it the weight of an nn.Module")
    model.loss_fn = ParallelCrossEntropy(model.config.vocab_size, mesh)


def split_layer(module, word, mesh):
    """Splits a layer over a mesh. word: how to split the layer, a value of PLAN."""
    if isinstance(module, nn.Embedding):
        # In the backward pass, each process holds the gradient of all rows for a short time.
        rows = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    else:
        rows = tp.ColwiseParallel(output_layouts=Replicate())
    styles = dict(
        vocabulary=rows,
        qkv=tp.ColwiseParallel(),
        colwise=tp.ColwiseParallel(),
        rowwise=tp.RowwiseParallel(),
    )
    # The weights are on the meta device and have no values yet, so rank 0 sends no values.
    tp.parallelize_module(module, mesh, styles[word], src_data_rank=None)


def keep_whole(module, mesh):
    """Keeps a whole copy of a layer, such as a norm or the position embedding, on every process.

    In the unchanged model.py, the input of these layers is also whole. If you add norms of q and k,
    their input (B, nh, T, hs) contains only the heads of this process, and the gradient of such a
    norm is the sum of the gradients of all processes.
    """

    def wrap_input(_, inputs, mesh):
        x = inputs[0]
        placement = Shard(1) if x.dim() == 4 else Replicate()  # 1 is the dimension of the heads
        return DTensor.from_local(x, mesh, [placement])

    def unwrap_output(_, output, mesh):
        return output.to_local()

    distribute_module(module, mesh, input_fn=wrap_input, output_fn=unwrap_output)


def is_qkv(name):
    """Returns whether a parameter stacks the rows of query, key and value.

    A whole tensor contains all rows of q, then all rows of k, then all rows of v. Tensor
    parallelism reorders the rows into one part per process, which contains the rows of q, k and v
    of the heads of that process. name: the name of the parameter.
    """
    layer = name.rpartition(".")[0].rpartition(".")[2]
    return PLAN.get(layer) == "qkv"


def count_parts(tensor):
    """Returns the number of processes over which tensor parallelism splits a DTensor."""
    mesh = tensor.device_mesh
    return mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1


def reorder_rows(x, n_stacked, n_parts, back=False):
    """Reorders the rows of stacked matrices into n_parts parts.

    Each part contains the same whole heads of every matrix. x: (n_stacked * rows, ...). back:
    whether to restore the original order.
    """
    if n_stacked == 1 or n_parts == 1:
        return x
    shape = (n_parts, n_stacked, -1) if back else (n_stacked, n_parts, -1)
    return x.unflatten(0, shape).transpose(0, 1).flatten(0, 2)
