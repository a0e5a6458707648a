"""Splits a model over processes. PyTorch does the work; model.py stays unchanged.

  --parallel fsdp  A process keeps a shard of each tensor and all-gathers one block at a time:
                   ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054).
  --tp N           Tensor parallelism: N processes split the heads, the width of the MLP and the
                   vocabulary (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053).
  --pp N           Pipeline parallelism: N processes hold some blocks each. Micro-batches pass
                   through in the order 1F1B (Narayanan et al. 2021, arXiv:2104.04473, 2.2).

Users can combine the flags in a mesh of pp x dp x tp processes. TP communicates most, so its
processes have consecutive ranks. The processes read different data only along dp. A process holds:

                     of the model           of the data
  --parallel ddp     all                    its own sequences; DDP averages the gradients
  --parallel fsdp    a shard of each        its own sequences; FSDP gathers the weights of a block
                     tensor                 just before it is used, and averages the gradients
  --tp N             a part of each         the same as N-1 others, which compute the other heads
                     matrix                 and the rest of the MLP
  --pp N             some of the blocks     the same as N-1 others; a micro-batch goes from one
                                            process to the next, and its gradient back

With --tp or --pp and --parallel ddp, FSDP averages the gradients and shards nothing.

FSDP and TP change a GPT in place: its parameters become DTensors, of which each process holds a
part. full_tensor() returns the whole tensor. All processes must call full_tensor(), otherwise those
that do wait for ever. With PP, each process holds a Pipeline around a GPT with some of the blocks.
"""

import logging
import warnings

from plaingpt.base.errors import UserError
from plaingpt.distributed.parts import fill_split_model, make_whole_gpt
from plaingpt.distributed.pipeline import Pipeline, Stage, check_stages
from plaingpt.ops.dtensors import is_dtensor

import torch


def is_split(config, process):
    """Returns whether a process holds only a part of the model."""
    is_fsdp = config.parallel == "fsdp"
    return process.world_size > 1 and (is_fsdp or config.tp * config.pp > 1)


def split_model(GPT, gpt_config, weights, config, process):
    """Creates this process's part of a GPT -> a GPT, or with --pp a Pipeline.

    The model is split before it allocates memory, so no process ever holds the whole model. All
    processes must call hidden, logits and loss of their parts, which return the complete result.

    GPT: the class. weights: a state dict, or None for GPT-2's initialization. Raises UserError if
    tp or pp do not fit the model.
    """
    meta_gpt = make_whole_gpt(GPT, gpt_config)
    model = make_whole_gpt(GPT, gpt_config, config.activation_checkpointing)
    part = cut_model(model, config, process)
    fill_split_model(part, meta_gpt, weights, config.seed, process.device)
    return part


def cut_model(model, config, process):
    """Splits a GPT on the meta device, in place. Returns it, or with --pp a Pipeline around it."""
    from torch.distributed.device_mesh import init_device_mesh

    if config.pp > model.config.n_layer:
        raise UserError(
            f"--pp {config.pp} is more than the model's {model.config.n_layer} blocks; give fewer"
        )
    check_shared(model, config, process)
    if config.pp > 1:
        check_stages(model, config.pp)
    if config.tp > 1:
        check_heads(model, config.tp)
        for name, _ in model.named_buffers():  # a buffer may need other values with fewer heads
            raise UserError(
                f"--tp: {name} is a buffer, which --tp cannot split; use one GPU or DDP"
            )
    silence_warnings()
    n_shards = process.dp_size if config.parallel == "fsdp" else 1
    mesh = init_device_mesh(
        process.device.type,
        (config.pp, process.dp_size // n_shards, n_shards, config.tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"),
    )
    is_tied = model.lm_head.weight is model.transformer.wte.weight
    result = model
    root = model  # the module whose forward FSDP wraps
    if config.pp > 1:
        result = Pipeline(model, mesh, is_tied, process)
        root = result.stage
    if config.tp > 1:
        split_layers(model, mesh["tp"])
    if is_tied and model.lm_head is not None:
        # Ties both layers again, which TP has split. On the last stage of a pipeline, the matrix
        # has the same name as on the first stage.
        model.transformer.wte.weight = model.lm_head.weight
    if config.compile:
        for module in (*model.blocks(), model.loss_fn):
            module.compile(dynamic=False, fullgraph=True)
    if process.dp_size > 1:
        apply_fsdp(root, model.blocks(), mesh, config.parallel == "fsdp", process)
    return result


def check_shared(model, config, process):
    """Raises UserError if a parameter is in two parts of the model that the cut separates.

    The matrix of embedding and head may be in two parts: PyTorch and Pipeline handle this case.
    """
    blocks_of = {}  # {parameter: the blocks that contain it}
    for block in model.blocks():
        for p in block.parameters():
            blocks_of.setdefault(p, []).append(block)
    layers_of = {}  # {parameter: the modules that contain it}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            layers_of.setdefault(p, []).append(module)
    first_names = {}  # {parameter: its first name}
    for name, p in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(p, name)
        in_two_stages = config.pp > 1 and name not in (first, "lm_head.weight")
        # FSDP, which averages the gradients of a split model, needs each parameter in one block.
        in_two_blocks = process.dp_size > 1 and len(blocks_of.get(p, [])) > 1
        # TP gives each layer its own parameters.
        in_two_layers = config.tp > 1 and len(layers_of[p]) > 1 and name != "lm_head.weight"
        if first != name and (in_two_stages or in_two_blocks or in_two_layers):
            raise UserError(
                f"{first} and {name} are one parameter, which a split model cannot share; "
                "use --parallel ddp without --tp and --pp"
            )


def check_heads(model, tp):
    """Raises UserError unless tp processes can hold equally many heads of each layer."""
    model.qkv_names()  # raises UserError for grouped queries
    hs = model.config.n_embd // model.config.n_head
    for name, module in model.named_modules():
        word = model.tp_plan.get(name.rpartition(".")[2])
        if word in ("heads", "qkv"):
            n_heads = len(module.weight) // hs // (3 if word == "qkv" else 1)
            if n_heads % tp:
                raise UserError(
                    f"--tp {tp} does not divide the {n_heads} heads of {name}; give a divisor"
                )


def silence_warnings():
    """Turns off three warnings of PyTorch that are harmless here.

    FSDP and TP gather a tensor in two steps. Training does not call lm_head, because loss_fn reads
    its weight. A module returns a view, which would be wrong only if GPT changed the view in place.
    """
    for name in ("tensor._redistribute", "fsdp.fully_shard"):
        logging.getLogger(f"torch.distributed.{name}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def apply_fsdp(root, blocks, mesh, is_fsdp, process):
    """Applies FSDP. Without --parallel fsdp, FSDP works like DDP: one shard, several copies."""
    import torch.distributed.fsdp as fsdp

    mesh = mesh["dp_shard"] if is_fsdp else mesh["dp_replicate", "dp_shard"]
    # FSDP all-gathers blocks in the dtype of their matrix multiplications, which also rounds the
    # weights of norms. On a CPU, FSDP uses float32, because the CPU's layer_norm rejects bfloat16
    # weights with the float32 residual stream.
    param_dtype = process.dtype if is_fsdp and process.device.type != "cpu" else None
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    # Embeddings, norm and head are one group, in float32. After forward, the group stays whole for
    # logits and loss, and named_parameters() returns whole tensors, until a backward pass ends.
    fsdp.fully_shard(root, mesh=mesh, reshard_after_forward=False)
    # Validation and generation call this method and not forward.
    fsdp.register_fsdp_forward_method(root, "call" if isinstance(root, Stage) else "hidden")


def split_layers(model, mesh):
    """Splits the layers in GPT.tp_plan over a mesh: each process computes its share of a layer.

    A block's forward has two all-reduces, after attention and MLP. The processes draw the same
    random numbers, because dropout on the residual stream must be equal. Therefore, the attention
    dropout of their heads is also equal.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "weight"):
            continue
        word = model.tp_plan.get(name.rpartition(".")[2])
        if word is None:
            keep_whole(module, mesh)
        else:
            split_layer(module, word, mesh)
    for name, p in model.named_parameters():
        if not is_dtensor(p):
            raise UserError(f"--tp: {name} is in no layer; make it the weight of an nn.Module")


def split_layer(module, word, mesh):
    """Splits a layer over a mesh, as a word of GPT.tp_plan says.

    - vocabulary: a process holds the rows of some ids. An all-reduce sums the results of an
      nn.Embedding; an all-gather joins the results of an nn.Linear.
    - colwise: a process computes some of the outputs.
    - heads: a process computes the outputs of some heads, n_embd / n_head per head.
    - qkv: the same, for an nn.Linear that returns all queries, then all keys, then all values.
    - rowwise: a process holds some of the inputs, such as the outputs of a colwise layer. An
      all-reduce sums the results.
    """
    import torch.distributed.tensor.parallel as tp
    from torch.distributed.tensor import Replicate

    is_embedding = isinstance(module, torch.nn.Embedding)
    if is_embedding:
        # For a short time, the backward pass holds the gradient of all rows.
        rows = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    else:
        rows = tp.ColwiseParallel(output_layouts=Replicate())
    styles = dict(
        vocabulary=rows,
        colwise=tp.ColwiseParallel(),
        heads=tp.ColwiseParallel(),
        qkv=tp.ColwiseParallel(),
        rowwise=tp.RowwiseParallel(),
    )
    # The weights are on the meta device and have no values yet, so rank 0 sends none.
    tp.parallelize_module(module, mesh, styles[word], src_data_rank=None)


def keep_whole(module, mesh):
    """Keeps a layer whole on every process: norms and positions.

    In the unchanged model.py, the input of these layers is also whole. If you add norms of q and k,
    their input (B, nh, T, hs) contains only the heads of this process, and the gradient of such a
    norm is the sum of the gradients of all processes.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

    def wrap_input(_, inputs, mesh):
        x = inputs[0]
        placement = Shard(1) if x.dim() == 4 else Replicate()  # 1 is the dimension of the heads
        return DTensor.from_local(x, mesh, [placement])

    def unwrap_output(_, output, mesh):
        return output.to_local()

    distribute_module(module, mesh, input_fn=wrap_input, output_fn=unwrap_output)
