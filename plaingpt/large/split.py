"""Splits a GPT over processes, before the GPT allocates memory.

The processes form a mesh of size pp x dp x tp. PyTorch's FSDP and tensor parallelism change a GPT
in place: the parameters become DTensors, and each process holds a part of each DTensor. The method
full_tensor() returns the whole tensor. If only some processes call full_tensor(), these processes
wait forever. With --pp, each process holds a Pipeline, which contains a GPT with only some blocks.
"""

import logging
import warnings

from plaingpt.checkpoint import make_whole_gpt
from plaingpt.errors import UserError
from plaingpt.large.check_split import check_stages, check_tensor_parallel
from plaingpt.large.parts import fill_split_model, tie_head
from plaingpt.large.pipeline import Pipeline, Stage
from plaingpt.large.tensor_parallel import split_gpt

import torch
import torch.distributed.fsdp as fsdp
from torch.distributed.device_mesh import init_device_mesh


def split_model(GPT, gpt_config, weights, config, process):
    """Creates this process's part of a GPT. Returns a GPT, or with --pp a Pipeline.

    No process ever holds the whole model. The methods hidden, logits and loss of a part return the
    result of the whole model. If one process calls such a method, all processes must call it.

    GPT: the class of the model. weights: a state dict, or None for GPT-2's initialization. Raises
    UserError if tp or pp does not fit the model.
    """
    meta_gpt = make_whole_gpt(GPT, gpt_config)
    model = make_whole_gpt(GPT, gpt_config, config.activation_checkpointing)
    result = cut_model(model, config, process)
    # cut_model has changed `model` in place: `model` is now the GPT of this process.
    fill_split_model(model, meta_gpt, weights, config.seed, process.device)
    return result


def cut_model(model, config, process):
    """Splits a GPT on the meta device, in place. Returns the GPT, or with --pp a Pipeline."""
    if config.pp > model.config.n_layer:
        raise UserError(
            f"--pp {config.pp}: is above --n_layer {model.config.n_layer}; give fewer stages"
        )
    if model.config.n_head % config.tp:
        raise UserError(
            f"--tp {config.tp}: must be a divisor of --n_head, which is {model.config.n_head}"
        )
    check_shared(model, config)
    if config.pp > 1:
        check_stages(model, config.pp)
    silence_warnings()
    # Tensor parallelism communicates most, so the processes of a tensor-parallel group have
    # consecutive ranks.
    shape = (config.pp, process.world_size, config.tp)
    mesh = init_device_mesh(process.device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    # If one process failed below while other processes still connect to the mesh, these other
    # processes would fail, too.
    process.barrier()
    # torch.compile does not accept two mesh objects of the same processes, so use one object twice.
    tp_mesh = mesh["tp"]
    if config.tp > 1:
        check_tensor_parallel(model, tp_mesh, process.device)
    is_tied = model.lm_head.weight is model.transformer.wte.weight
    result = model
    root = model  # the module whose forward FSDP wraps
    if config.pp > 1:
        result = Pipeline(model, mesh, is_tied, process)
        root = result.stage
    if config.tp > 1:
        split_gpt(model, tp_mesh)
    if is_tied:
        tie_head(model)
    if config.compile:
        for module in (*list_blocks(model), model.loss_fn):
            module.compile(dynamic=False, fullgraph=True)
    apply_fsdp(root, list_blocks(model), mesh["dp"], process)
    return result


def list_blocks(model):
    """Returns the blocks of a GPT. A block that several layers share occurs only once."""
    return list(dict.fromkeys(model.transformer.h))


def check_shared(model, config):
    """Raises UserError if the split would separate two modules that share a parameter.

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
    first_names = {}  # {parameter: the first of its names}
    for name, p in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(p, name)
        in_two_stages = config.pp > 1 and name != "lm_head.weight"
        in_two_blocks = len(blocks_of.get(p, [])) > 1  # FSDP shards each block by itself
        # TP replaces the parameters of each layer, so two layers no longer share a parameter.
        in_two_layers = config.tp > 1 and len(layers_of[p]) > 1 and name != "lm_head.weight"
        if first != name and (in_two_stages or in_two_blocks or in_two_layers):
            raise UserError(
                f"{first} and {name} are the same parameter, but a split model cannot share a "
                "parameter between these two modules; use train_gpt2.py"
            )


def silence_warnings():
    """Turns off four messages of PyTorch that do not matter here.

    The first message says that FSDP and TP gather a tensor in two steps. The second message says
    that training does not call lm_head: loss_fn reads the weight of lm_head instead. The third
    message is the traceback of an error that check_tensor_parallel explains. The fourth message
    says that a module returns a view, which matters only if GPT changes the view in place.
    """
    for name in ("distributed.tensor._redistribute", "distributed.fsdp.fully_shard"):
        logging.getLogger(f"torch.{name}").setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def apply_fsdp(root, blocks, mesh, process):
    """Shards the parameters of a model over a mesh. FSDP averages the gradients over the mesh."""
    # FSDP all-gathers blocks in the dtype of their matrix multiplications, and so rounds even the
    # weights of norms. On a CPU, FSDP all-gathers in float32, because layer_norm on a CPU rejects
    # bfloat16 weights if the residual stream is float32.
    param_dtype = process.dtype if process.device.type != "cpu" else None
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    # FSDP shards embeddings, final norm and head as one group, in float32. After a forward pass,
    # this group stays unsharded, because logits and loss need these layers. Therefore,
    # named_parameters() returns the whole tensors of this group until a backward pass ends.
    fsdp.fully_shard(root, mesh=mesh, reshard_after_forward=False)
    # Validation and generation call the method named here instead of forward.
    fsdp.register_fsdp_forward_method(root, "call" if isinstance(root, Stage) else "hidden")
