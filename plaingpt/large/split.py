"""Splits a model over processes. PyTorch does the work; model.py stays unchanged.

  --parallel fsdp  A process keeps a shard of each tensor, and all-gathers the weights of one
                   block at a time: ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054).
  --tp N           Tensor parallelism: N processes split the heads, the width of the MLP and the
                   vocabulary (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053).
  --pp N           Pipeline parallelism: each of N processes holds some of the blocks. The schedule
                   of the micro-batches is 1F1B (Narayanan et al. 2021, arXiv:2104.04473, 2.2).

These flags can be combined: the processes then form a mesh of size pp x dp x tp. TP communicates
most, so the processes of a TP group have consecutive ranks. Only processes with different dp ranks
read different data. This is what each process holds and reads:

                     of the model           of the data
  --parallel ddp     all                    its own sequences; DDP averages the gradients
  --parallel fsdp    a shard of each        its own sequences; FSDP gathers the weights of a block
                     tensor                 just before it is used, and averages the gradients
  --tp N             a part of each         the same sequences as N-1 other processes, which compute
                     matrix                 the other heads and the rest of the MLP
  --pp N             some of the blocks     the same sequences as N-1 other processes, which send
                                            each other activations and their gradients

If --parallel ddp is combined with --tp or --pp, FSDP averages the gradients, but shards nothing.

FSDP and TP change a GPT in place: its parameters become DTensors, of which each process holds a
part. full_tensor() returns the whole tensor. If only some processes call full_tensor(), these wait
forever. With PP, each process holds a Pipeline, which contains a GPT with only some blocks.
"""

import logging
import warnings

from plaingpt.base.errors import UserError
from plaingpt.large.parts import fill_split_model
from plaingpt.large.pipeline import Pipeline, Stage, check_stages
from plaingpt.ops.dtensors import is_dtensor
from plaingpt.weights.checkpoint import make_whole_gpt

import torch


def split_model(GPT, gpt_config, weights, config, process):
    """Creates this process's part of a GPT -> a GPT, or with --pp a Pipeline.

    The model is split before it allocates memory, so no process ever holds the whole model. The
    methods hidden, logits and loss of a part return the complete result. If one process calls such
    a method, all processes must call it.

    GPT: the class of the model. weights: a state dict, or None for GPT-2's initialization. Raises
    UserError if tp or pp does not fit the model.
    """
    meta_gpt = make_whole_gpt(GPT, gpt_config)
    model = make_whole_gpt(GPT, gpt_config, config.activation_checkpointing)
    result = cut_model(model, config, process)
    # cut_model has changed `model` in place: it is now the GPT of this process.
    fill_split_model(model, meta_gpt, weights, config.seed, process.device)
    return result


def cut_model(model, config, process):
    """Splits a GPT on the meta device, in place -> this GPT, or with --pp its Pipeline."""
    from torch.distributed.device_mesh import init_device_mesh

    if config.pp > model.config.n_layer:
        raise UserError(
            f"--pp {config.pp}: is above --n_layer {model.config.n_layer}; give fewer stages"
        )
    check_shared(model, config, process)
    if config.pp > 1:
        check_stages(model, config.pp)
    if config.tp > 1:
        check_heads(model, config.tp)
        for name, _ in model.named_buffers():  # a buffer may depend on the number of heads
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
    process.barrier()  # a process that fails below would disconnect processes that still connect
    is_tied = model.lm_head.weight is model.transformer.wte.weight
    result = model
    root = model  # the module whose forward FSDP wraps
    if config.pp > 1:
        result = Pipeline(model, mesh, is_tied, process)
        root = result.stage
    if config.tp > 1:
        split_layers(model, mesh["tp"])
    if is_tied and model.lm_head is not None:
        # TP has split embedding and head separately. The next line ties their weights again. On the
        # last stage of a pipeline, the tied matrix then has the same name as on the first stage.
        model.transformer.wte.weight = model.lm_head.weight
    if config.compile:
        for module in (*list_blocks(model), model.loss_fn):
            module.compile(dynamic=False, fullgraph=True)
    if process.dp_size > 1:
        apply_fsdp(root, list_blocks(model), mesh, config.parallel == "fsdp", process)
    return result


def list_blocks(model):
    """Lists the blocks of a GPT. Includes each block once, even if several layers share it."""
    return list(dict.fromkeys(model.transformer.h))


def check_shared(model, config, process):
    """Raises UserError if two modules share a parameter, and the split separates these modules.

    Embedding and head may share their matrix, because PyTorch and Pipeline handle this case.
    """
    blocks_of = {}  # {parameter: the blocks that contain it}
    for block in list_blocks(model):
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
        # FSDP, which averages the gradients of a split model, accepts no parameter in two blocks.
        in_two_blocks = process.dp_size > 1 and len(blocks_of.get(p, [])) > 1
        # TP replaces the parameters of each layer, so two layers no longer share a parameter.
        in_two_layers = config.tp > 1 and len(layers_of[p]) > 1 and name != "lm_head.weight"
        if first != name and (in_two_stages or in_two_blocks or in_two_layers):
            raise UserError(
                f"{first} and {name} are the same parameter, which a split model cannot share; "
                "use --parallel ddp without --tp and --pp"
            )


def check_heads(model, tp):
    """Raises UserError unless each layer can split its heads evenly over tp processes."""
    model.qkv_names()  # raises UserError for grouped-query attention
    hs = model.config.n_embd // model.config.n_head
    for name, module in model.named_modules():
        word = model.tp_plan.get(name.rpartition(".")[2])
        if word in ("heads", "qkv"):
            n_heads = len(module.weight) // hs // (3 if word == "qkv" else 1)
            if n_heads % tp:
                raise UserError(
                    f"--tp {tp} does not divide the {n_heads} heads of {name}; give a divisor of "
                    f"{n_heads}"
                )


def silence_warnings():
    """Turns off three warnings of PyTorch that are harmless here.

    The first warning says that FSDP and TP gather a tensor in two steps. The second warning says
    that training does not call lm_head: loss_fn reads the weight of lm_head instead. The third
    warning says that a module returns a view, which matters only if GPT changes the view in place.
    """
    for name in ("tensor._redistribute", "fsdp.fully_shard"):
        logging.getLogger(f"torch.distributed.{name}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def apply_fsdp(root, blocks, mesh, is_fsdp, process):
    """Wraps a model in FSDP. With --parallel fsdp, FSDP shards the parameters.

    With --parallel ddp, FSDP shards nothing, and only averages the gradients, as DDP does.
    """
    import torch.distributed.fsdp as fsdp

    mesh = mesh["dp_shard"] if is_fsdp else mesh["dp_replicate", "dp_shard"]
    # FSDP all-gathers blocks in the dtype of their matrix multiplications, and so rounds even the
    # weights of norms. On a CPU, FSDP all-gathers in float32, because layer_norm on a CPU rejects
    # bfloat16 weights if the residual stream is float32.
    param_dtype = process.dtype if is_fsdp and process.device.type != "cpu" else None
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    # Embeddings, final norm and head are one group, in float32. After a forward pass, the group
    # stays unsharded, because logits and loss need these layers. Therefore, named_parameters()
    # returns the whole tensors of this group until a backward pass ends.
    fsdp.fully_shard(root, mesh=mesh, reshard_after_forward=False)
    # Validation and generation call the method named here instead of forward.
    fsdp.register_fsdp_forward_method(root, "call" if isinstance(root, Stage) else "hidden")


def split_layers(model, mesh):
    """Splits the layers in GPT.tp_plan over a mesh: each process computes its share of a layer.

    The forward pass of a block has two all-reduces: one after attention, one after the MLP. The
    processes of a TP group draw the same random numbers, because their dropout masks for the
    residual stream must be the same. Therefore, heads on different processes also use the same
    masks.
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
            raise UserError(f"--tp: {name} is not in a layer; make it the weight of an nn.Module")


def split_layer(module, word, mesh):
    """Splits a layer over a mesh. word: how to split the layer, a value of GPT.tp_plan.

    - vocabulary: a process holds the rows of some token ids. An all-reduce sums the results of an
      nn.Embedding; an all-gather joins the results of an nn.Linear.
    - colwise: a process computes some of the outputs.
    - heads: a process computes the outputs of some heads. A head has n_embd / n_head outputs.
    - qkv: like heads, for an nn.Linear that returns all queries, then all keys, then all values.
    - rowwise: a process holds some of the inputs, such as the outputs of a colwise layer. An
      all-reduce sums the results.
    """
    import torch.distributed.tensor.parallel as tp
    from torch.distributed.tensor import Replicate

    is_embedding = isinstance(module, torch.nn.Embedding)
    if is_embedding:
        # For a short time, the backward pass holds the gradient of all rows on each process.
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
    # The weights are on the meta device and have no values yet, so rank 0 sends no values.
    tp.parallelize_module(module, mesh, styles[word], src_data_rank=None)


def keep_whole(module, mesh):
    """Keeps a whole copy of a layer, such as a norm or the position embedding, on every process.

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
