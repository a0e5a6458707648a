"""Creates and initializes the parts of a split model, and joins the parts for checkpoints.

The parameters of a split model are DTensors: each process holds a part of each tensor.
"""

import functools
import itertools

from plaingpt.large.tensor_parallel import count_parts, is_qkv, reorder_rows
from plaingpt.memory import memory_advice

import torch
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_map_only

# Initialization


def fill_split_model(part, meta_gpt, weights, seed, device):
    """Allocates the parameters and buffers of a split model on the device, and fills them.

    Creates one whole layer at a time, so no process ever holds the whole model in memory. Each
    process draws the random numbers of all layers, and keeps its own part of each layer. Therefore,
    the initialization depends only on the seed, not on how the model is split.

    part: the GPT of this process, on the meta device. meta_gpt: the result of make_whole_gpt. If
    weights are given, meta_gpt may be any GPT of the same class and config. weights: a state dict,
    or None for GPT-2's initialization. Raises UserError if the device has too little memory.
    """

    @functools.cache
    def constructed():
        """Builds the whole GPT. Returns all its parameters and buffers: {name: tensor}.

        Some parameters and buffers may be initialized only in the constructor of their module.
        """
        with (
            memory_advice(
                "a constructor in model.py initializes a parameter or a buffer, so each process "
                "first builds the whole model, which does not fit into memory; use one GPU or DDP"
            ),
            torch.random.fork_rng([]),
            torch.device(device),
        ):
            gpt = type(meta_gpt)(meta_gpt.config, seed=seed)
        return dict(gpt.named_parameters()) | dict(gpt.named_buffers())

    own = dict(part.named_parameters())
    values = weights.items() if weights else init_layers(meta_gpt, seed, constructed)
    with memory_advice("the model does not fit into memory; choose a smaller model"):
        for name, whole in values:
            if name in own:
                sliced = slice_like(own[name], name, whole.detach(), device)
                # swap_tensors keeps tied weights tied.
                torch.utils.swap_tensors(own[name], torch.nn.Parameter(sliced))
    for name, buffer in list(part.named_buffers()):
        whole = weights[name] if weights and name in weights else constructed()[name]
        layer, _, attribute = name.rpartition(".")
        # The module has a buffer named `attribute`, so setattr stores the tensor as a buffer.
        setattr(part.get_submodule(layer), attribute, whole.to(device, buffer.dtype, copy=True))


def init_layers(meta_gpt, seed, constructed):
    """Yields (name, tensor) for each parameter, on the CPU, as GPT.init_weights initializes them.

    Allocates one layer at a time. constructed: the function in fill_split_model. The other
    arguments are as in fill_split_model.
    """
    first_names = {name for name, _ in meta_gpt.named_parameters()}  # a tied matrix has two names
    torch.manual_seed(seed)
    for layer, module in meta_gpt.named_modules():
        names = [name for name, _ in module.named_parameters(layer, recurse=False)]
        if not first_names.intersection(names):
            continue
        module.to_empty(device="cpu", recurse=False)
        is_known = meta_gpt.init_layer(layer, module)
        values = dict(module.named_parameters(layer, recurse=False)) if is_known else constructed()
        for name in names:
            if name in first_names:
                yield name, values[name]
        module.to_empty(device="meta", recurse=False)  # frees the memory


def tie_head(model):
    """Ties the embedding and the head of a GPT, if the GPT on this process has a head.

    On the last stage of a pipeline, the embedding is an nn.Identity. The nn.Identity gets the tied
    matrix as its weight, so that the matrix has the same name as on the first stage.
    """
    if model.lm_head is not None:
        model.transformer.wte.weight = model.lm_head.weight


# One tensor


def slice_like(p, name, whole, device):
    """Returns this process's part of a whole tensor, split in the same way as parameter p.

    name: the name of p. device: the device of the result. The processes do not communicate.
    """
    if is_qkv(name):
        whole = reorder_rows(whole, 3, count_parts(p))  # (3C, ...)
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).clone()


# The state of optimizers. Here, a state dict is a result of torch.optim.Optimizer.state_dict in
# which each tensor is whole. The state dict numbers the parameters. Its groups contain the numbers
# and the names of the parameters.


def names_by_number(state):
    """Returns {number: name} of the parameters in a state dict."""
    names = {}
    for group in state["param_groups"]:
        names.update(zip(group["params"], group["param_names"]))
    return names


def slice_state(optimizer, saved):
    """Slices the tensors of a state dict in the same way as the parameters of an optimizer.

    saved: the state dict. Returns a new state dict.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = dict(saved["state"])
    for p, (i, name) in zip(parameters, names_by_number(saved).items()):
        if i in state:
            state[i] = slice_values(state[i], p, name)
    return dict(saved, state=state)


def slice_values(values, p, name):
    """Slices the values that an optimizer stores for a parameter p. name: the name of p.

    A tensor whose shape is not the shape of p, such as AdamW's step count, stays whole.
    """

    def slice_tensor(tensor):
        if tensor.shape != p.shape:
            return tensor
        return slice_like(p, name, tensor, p.device)

    return tree_map_only(torch.Tensor, slice_tensor, values)


def restore_qkv(state, n_parts):
    """Restores the original order of the rows of query, key and value, in place.

    Tensor parallelism needs a different order, see reorder_rows.
    state: a result of Training.state_dict. n_parts: the number of processes of tensor parallelism.
    """
    model = state["model"]
    for optimizer in state["optimizers"]:
        names = names_by_number(optimizer)
        for i, values in optimizer["state"].items():
            if i in names and is_qkv(names[i]):
                shape = model[names[i]].shape
                optimizer["state"][i] = restore_rows(values, shape, n_parts)
    for name, tensor in model.items():
        if is_qkv(name):
            model[name] = restore_rows(tensor, tensor.shape, n_parts)


def restore_rows(values, shape, n_parts):
    """Restores the original order of the rows in each tensor whose shape is `shape`.

    values: a tensor, or what an optimizer stores for a parameter. n_parts: as in restore_qkv.
    """

    def restore(tensor):
        return reorder_rows(tensor, 3, n_parts, back=True) if tensor.shape == shape else tensor

    return tree_map_only(torch.Tensor, restore, values)


def join_stages(stages, meta_gpt):
    """Joins the states of all pipeline stages. Returns the state of the whole model.

    stages: for each stage, a result of Training.state_dict. meta_gpt: the result of make_whole_gpt.
    """
    model = {}
    for state in stages:
        # If several stages contain the same module, only the last stage uses the module.
        model.update(state["model"])
    if meta_gpt.lm_head.weight is meta_gpt.transformer.wte.weight:
        model["lm_head.weight"] = model["transformer.wte.weight"]
    optimizers = []
    for states in zip(*(state["optimizers"] for state in stages)):
        optimizers.append(join_optimizer(states, meta_gpt))
    return dict(stages[0], model=model, optimizers=optimizers)


def join_optimizer(states, meta_gpt):
    """Joins the state dicts that one optimizer has on the stages. Returns one state dict.

    The result numbers the parameters as in a run with one process. states: the state dict of each
    stage.
    """
    values = {}  # {name of a parameter: its values}, and the values that belong to no parameter
    for state in states:
        names = names_by_number(state)
        for key, value in state["state"].items():
            values[names.get(key, key)] = value
    groups = []
    numbers = {}  # {name of a parameter: its number in the whole model}
    for stages in zip(*(state["param_groups"] for state in states)):
        names = join_names([group["param_names"] for group in stages], meta_gpt)
        first = len(numbers)
        numbers.update(zip(names, itertools.count(first)))
        groups.append(dict(stages[0], params=[*range(first, len(numbers))], param_names=names))
    state = {numbers.get(name, name): value for name, value in values.items()}
    return dict(state=state, param_groups=groups)


def join_names(stages, meta_gpt):
    """Joins the parameter names of one group. Returns one list, in the order of the whole model.

    stages: for each stage, the list of parameter names of the group.
    """
    found = set(itertools.chain(*stages))
    return [name for name, _ in meta_gpt.named_parameters() if name in found]


def select_parameters(saved, optimizer):
    """Returns the part of a state dict that belongs to the parameters of one stage.

    saved: the state dict of an optimizer of the whole model. optimizer: the optimizer of the stage.
    """
    numbers = {name: i for i, name in names_by_number(saved).items()}
    state = dict(saved["state"])
    groups = []
    for group, own in zip(saved["param_groups"], optimizer.param_groups):
        names = own["param_names"]
        groups.append(dict(group, params=[numbers[name] for name in names], param_names=names))
        for name in set(group["param_names"]).difference(names):
            state.pop(numbers[name], None)
    return dict(state=state, param_groups=groups)
