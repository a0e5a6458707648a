"""Trains a model that is split over processes. PyTorch does the work; model.py stays unchanged.

  --parallel fsdp  A process keeps a shard of each tensor and all-gathers one block at a time:
                   ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054).
  --tp N           Tensor parallelism: N processes split the heads, the width of the MLP and the
                   vocabulary (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053).
  --pp N           Pipeline parallelism: N processes have some blocks each. Micro-batches pass
                   through in the order 1F1B (Narayanan et al. 2021, arXiv:2104.04473, 2.2).

The flags can be combined in a mesh of pp x dp x tp processes. TP communicates most, so its
processes have consecutive ranks. The processes read different data only along dp.

FSDP and TP change a GPT in place: its parameters become DTensors, of which each process has a part.
full_tensor() gives the whole of a DTensor. All processes must call it. If some do not, the others
wait for ever. With PP, each process has a Pipeline around a GPT with some of the blocks. Together
they compute the whole.
"""

# It takes two seconds to import PyTorch's parallel modules. So the functions import what they need.

import logging
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn

from plaingpt.cli import UserError, print0
from plaingpt.loss import stream_dtype


def split(model, config, process):
    """Splits a GPT on the meta device, in place. Returns it, or with --pp a Pipeline around it.

    All processes must call hidden, logits and loss. All get the complete result. Raises
    UserError if tp or pp do not fit the model.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if model.config.n_head % config.tp:
        raise UserError(f"--tp {config.tp} does not divide the model's {model.config.n_head} heads")
    if config.pp > model.config.n_layer:
        raise UserError(f"--pp {config.pp} is more than the model's {model.config.n_layer} blocks")
    # PyTorch would warn of three things that do no harm here: FSDP and TP gather a tensor in two
    # steps; training does not call lm_head, because loss_fn reads its weight; and a module returns
    # a view, which would be wrong only if GPT changed the view in place.
    for name in ("tensor._redistribute", "fsdp.fully_shard"):
        logging.getLogger(f"torch.distributed.{name}").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    n_shards = process.dp_size if config.parallel == "fsdp" else 1
    mesh = init_device_mesh(
        process.device.type,
        (config.pp, process.dp_size // n_shards, n_shards, config.tp),
        mesh_dim_names=("pp", "copies", "shards", "tp"),
    )
    is_tied = model.lm_head.weight is model.transformer.wte.weight
    whole = root = model
    if config.pp > 1:
        whole = Pipeline(model, mesh, is_tied, process)
        root = whole.stage
    if config.tp > 1:
        split_layers(model, mesh["tp"])
    if is_tied and model.lm_head is not None:
        # TP splits both layers, so they are tied again. The last stage of a pipeline has the matrix
        # under the name that it has on the first stage.
        model.transformer.wte.weight = model.lm_head.weight
    if config.compile:
        for module in (*model.transformer.h, model.loss_fn):
            module.compile(dynamic=False, fullgraph=True)
    if process.dp_size > 1:
        apply_fsdp(root, model.transformer.h, mesh, config.parallel == "fsdp", process)
    whole.has_compared_gradients = config.tp == 1  # without TP, none are compared
    return whole


def apply_fsdp(root, blocks, mesh, is_fsdp, process):
    """Applies FSDP. Without --parallel fsdp, it does what DDP does: one shard, several copies."""
    import torch.distributed.fsdp as fsdp

    mesh = mesh["shards"] if is_fsdp else mesh["copies", "shards"]
    # Blocks are all-gathered in the dtype of their products, but in float32 on a CPU. The CPU's
    # layer_norm rejects bfloat16 weights with the float32 residual stream.
    param_dtype = process.dtype if is_fsdp and process.device.type != "cpu" else None
    policy = fsdp.MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    # Embeddings, norm and head are one group, in float32. After forward it stays whole, for logits
    # and loss, until a backward pass ends. Until then, named_parameters() gives whole tensors.
    fsdp.fully_shard(root, mesh=mesh, reshard_after_forward=False)
    # Validation and generation call this method and not forward.
    fsdp.register_fsdp_forward_method(root, "call" if isinstance(root, Stage) else "hidden")


def split_layers(model, mesh):
    """Splits the layers over a mesh: each process computes its share, from the same input.

    A block's forward has two all-reduces, after attention and MLP. The processes draw the same
    random numbers, because dropout on the residual stream must be equal. So the attention dropout
    of their heads is equal, too.
    """
    import torch.distributed.tensor.parallel as tp
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

    styles = dict(
        # For a short time, its backward holds the gradient of all rows.
        wte=tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        c_attn=tp.ColwiseParallel(),
        c_fc=tp.ColwiseParallel(),
        c_proj=tp.RowwiseParallel(),
        lm_head=tp.ColwiseParallel(output_layouts=Replicate()),
    )
    layers = [pair for pair in model.named_modules() if hasattr(pair[1], "weight")]
    for name, module in layers:
        if style := styles.get(name.rpartition(".")[2]):
            # The weights are on the meta device and have no values yet, so none are sent.
            tp.parallelize_module(module, mesh, style, src_data_rank=None)
        else:  # norms and positions stay whole on every process
            # Their input is whole, too, in model.py as it is. If you add norms of q and k, their
            # input (B, nh, T, hs) has only the heads of this process. The gradient of such a norm
            # is then the sum of the gradients of all processes.
            distribute_module(
                module,
                mesh,
                output_fn=lambda _, output, mesh: output.to_local(),
                input_fn=lambda _, inputs, mesh: DTensor.from_local(
                    inputs[0], mesh, [Shard(1) if inputs[0].dim() == 4 else Replicate()]
                ),
            )
    if direct := [name for name, p in model.named_parameters() if not is_dtensor(p)]:
        raise UserError(f"--tp: {direct[0]} is in no layer; make it the weight of an nn.Module")


# Pipeline parallelism


class Pipeline(nn.Module):
    """A GPT whose blocks are in several processes. `part` is the GPT that this process has.

    It is called with the micro-batches of a step, and computes their gradients, too. hidden,
    logits and loss are for evaluation. On all processes, they return the same as the methods of
    GPT.
    """

    def __init__(self, part, mesh, is_tied, process):
        super().__init__()
        self.config, self.part, self.process = part.config, part, process
        self.group, self.index = mesh.get_group("pp"), mesh.get_local_rank("pp")
        self.n_stages, self.schedules = mesh["pp"].size(), {}
        self.is_first, self.is_last = self.index == 0, self.index == self.n_stages - 1
        # Embedding and head are one matrix. The first and the last stage have a copy each.
        self.has_tied = is_tied and (self.is_first or self.is_last)
        ends = mesh.mesh.flatten(1)[[0, -1]].t()  # (pipelines, 2)
        self.tied_group, _ = dist.new_subgroups_by_enumeration(ends.tolist())
        keep_stage(part, self.index, self.n_stages)
        self.stage = Stage(part, process, self.is_last)

    def named_parameters(self, *args, **kwargs):
        """Yields the parameters of this process, with their names in the whole model."""
        return self.part.named_parameters(*args, **kwargs)

    def configure_optimizers(self, *args):
        """Does what GPT.configure_optimizers does, for the parameters of this process."""
        return self.part.configure_optimizers(*args)

    def forward(self, micro_batches, mean_count, scaler):
        """Runs the forward and the backward pass of a step -> mean loss of its micro-batches.

        micro_batches: list of (x, y), (B, T) each. mean_count: as in train_gpt2.accumulate.
        """
        x, y = (torch.cat(tensors) for tensors in zip(*micro_batches))  # (n, T) each
        self.loss_sum, self.mean_count = torch.zeros((), device=x.device), mean_count
        scaler.scale(self.loss_sum)  # makes its scale also on stages that compute no loss
        shape = len(micro_batches), *micro_batches[0][0].shape
        if shape not in self.schedules:  # the batch may grow
            self.schedules[shape] = self.make_schedule(*shape, scaler)
        self.schedules[shape].step(x, targets=y, target=y, return_outputs=False)
        dist.broadcast(self.loss_sum, group=self.group, group_src=self.n_stages - 1)
        return self.loss_sum

    def make_schedule(self, n_micro, B, T, scaler):
        """Makes the 1F1B schedule for n_micro micro-batches in a step, (B, T) each."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        print0(f"pipeline: {self.n_stages} stages, {n_micro} micro-batches of {B}")
        with self.process.autocast:
            dtype = stream_dtype(self.loss_sum)
        shape = (B, T, self.config.n_embd)
        residual = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        x = torch.empty((B, T), dtype=torch.long, device="meta") if self.is_first else residual
        y = torch.empty((), device="meta") if self.is_last else residual
        stage = PipelineStage(
            self.stage,
            self.index,
            self.n_stages,
            self.process.device,
            input_args=x,
            output_args=y,
            group=self.group,
        )

        def scaled_loss(loss, y):
            loss = loss / n_micro / (self.mean_count / (y != -100).sum())
            self.loss_sum += loss.detach()
            return scaler.scale(loss)

        return Schedule1F1B(stage, n_micro, scaled_loss, scale_grads=False)

    def hidden(self, idx, *args, **kwargs):
        """As GPT.hidden: ids (B, T) -> (B, T, C)."""
        x, shape = idx, (*idx.shape, self.config.n_embd)
        for index in range(self.n_stages):
            x = self.on_stage(index, shape, "hidden", x, *args, **kwargs)  # (B, T, C)
        return x

    def logits(self, x):
        """As GPT.logits: (..., C) -> (..., vocab_size)."""
        shape = (*x.shape[:-1], self.config.vocab_size)
        return self.on_stage(self.n_stages - 1, shape, "logits", x)

    def loss(self, x, targets, reduction="mean"):
        """As GPT.loss: (B, T, C) and (B, T) -> scalar, or (B, T)."""
        shape = () if reduction == "mean" else targets.shape
        return self.on_stage(self.n_stages - 1, shape, "loss", x, targets, reduction)

    def on_stage(self, index, shape, method, *args, **kwargs):
        """Calls a method on one stage. Returns its result, of this shape, on all stages."""
        if index == self.index:
            result = self.stage.call(method, *args, **kwargs).float().contiguous()
        else:
            result = torch.empty(shape, device=self.process.device)
        dist.broadcast(result, group=self.group, group_src=index)
        return result

    def total_norm(self, parameters):
        """Sums the gradient of embedding and head. Returns the norm of the gradient of all stages.

        parameters: those of this stage.
        """
        if self.has_tied:
            tied = self.part.transformer.wte.weight
            grad = tied.grad.to_local() if is_dtensor(tied) else tied.grad
            dist.all_reduce(grad, group=self.tied_group)
            if self.is_last:  # its copy has the same gradient as the first one, and counts once
                parameters = [p for p in parameters if p is not tied]
        squares = norm_of(parameters) ** 2
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()


class Stage(nn.Module):
    """PyTorch's schedule calls this module with ids or with the residual stream.

    It returns the residual stream, or on the last stage the loss.
    """

    def __init__(self, part, process, is_last):
        super().__init__()
        self.part, self.process, self.is_last = part, process, is_last

    def forward(self, x, targets=None):
        """Runs the forward pass of training."""
        with self.process.autocast:
            return self.part(x, targets)[1] if self.is_last else self.part.hidden(x)

    def call(self, method, *args, **kwargs):
        """Calls a method of the part. Before that, FSDP all-gathers its parameters."""
        return getattr(self.part, method)(*args, **kwargs)


class NoPositions(nn.Module):
    """Replaces the position embedding of later stages. Their input already contains positions."""

    def forward(self, pos):
        return 0


def keep_stage(model, stage, n_stages):
    """Removes the modules of other stages from a GPT. The rest keeps its names."""
    t, n = model.transformer, len(model.transformer.h)
    cost = n + model.config.vocab_size / (12 * model.config.n_embd)  # in units of a block
    # Each stage gets at least one block.
    ends = [min(n - n_stages + s, max(s, round(s * cost / n_stages))) for s in range(n_stages)]
    for i in set(range(n)) - set(range(ends[stage], [*ends, n][stage + 1])):
        delattr(t.h, str(i))  # unlike del t.h[i], this does not rename the others
    if stage > 0:
        t.wte, t.wpe, t.drop = nn.Identity(), NoPositions(), nn.Identity()
    if stage < n_stages - 1:
        t.ln_f, model.lm_head = nn.Identity(), None


# Gradients


def grad_scaler(process):
    """The gradient scaler of a run. It does nothing unless the dtype is float16."""
    if process.dtype != torch.float16 or process.world_size == 1:
        return torch.amp.GradScaler(process.device.type, enabled=process.dtype == torch.float16)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    # If one process finds an overflow in its part of the gradient, all lower their scale.
    return ShardedGradScaler(process.device.type)


def set_gradient_sync(model, is_on):
    """Sets whether the next backward pass averages the gradients over the processes."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = is_on
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP
        model.set_requires_gradient_sync(is_on)


def clip_grad_norm(model, max_norm):
    """Clips the norm of the whole model's gradient. Returns the norm before clipping."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    for p in parameters:
        # RowwiseParallel gives a gradient with all rows, but the parameter has only some of them.
        # With torch 2.11, a gradient may also be a part of a sum over the TP group's processes.
        if is_dtensor(p) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)
    norm = model.total_norm(parameters) if isinstance(model, Pipeline) else norm_of(parameters)
    if not getattr(model, "has_compared_gradients", True) and norm.isfinite():
        compare_gradients(model)
        model.has_compared_gradients = True
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def norm_of(parameters):
    """Returns the norm of the gradient of these parameters, on all processes."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    return norm.full_tensor() if is_dtensor(norm) else norm


def compare_gradients(model):
    """Raises UserError if TP gives different gradients to the copies of a whole parameter.

    The copies would drift apart. An edited model can cause that, so this runs in the first step
    with a finite gradient.
    """
    norms = [
        (name, p.grad.full_tensor().norm().item())
        for name, p in model.named_parameters()
        if p.grad is not None and p.placements[-1].is_replicate()
    ]  # -1 is tp
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, norms)  # all processes get all norms, so that all of them stop
    found = sorted(sum(found, []))
    for (name, a), (other, b) in zip(found, found[1:]):
        if name == other and b - a > 1e-4 * b:
            raise UserError(f"--tp: the processes have different gradients of {name}; use no --tp")


# Whole tensors, for checkpoints


def scatter(name, whole, p, device):
    """Returns this process's part of a whole tensor, on the device, split like parameter p."""
    if whole.shape != p.shape or not is_dtensor(p):  # the shape of AdamW's count of steps is ()
        return whole.to(device)
    from torch.distributed.tensor import distribute_tensor

    whole = by_heads(name, whole, p.device_mesh)
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).clone()


def gather(model, parts, process):
    """The inverse of scatter: {name: part} -> {name: whole tensor} on rank 0, {} on the others.

    Gathers the split tensors on the device one at a time, and moves each to the CPU before the next
    one, to save memory. All processes must call this.
    """
    is_pipeline, found = isinstance(model, Pipeline), {}
    for stage in range(model.n_stages if is_pipeline else 1):
        shapes = [{name: (part.shape, part.dtype) for name, part in parts.items()}]
        if is_pipeline:
            dist.broadcast_object_list(shapes, group=model.group, group_src=stage)
        for name, (shape, dtype) in shapes[0].items():
            if not is_pipeline or stage == model.index:
                whole = parts[name].detach()
                if is_dtensor(whole):
                    whole = by_heads(name, whole.full_tensor(), whole.device_mesh, back=True)
            else:
                whole = torch.empty(shape, dtype=dtype)
            if is_pipeline:
                whole = whole.to(process.device)  # AdamW's count of steps may be on the CPU
                dist.broadcast(whole, group=model.group, group_src=stage)
            if process.rank == 0:
                found[name] = whole.cpu()
    return found


def by_heads(name, tensor, mesh, back=False):
    """Reorders c_attn's rows (first q, then k, then v) into tp parts of whole heads, or back."""
    if ".c_attn." not in name or "tp" not in mesh.mesh_dim_names:
        return tensor
    tp = mesh["tp"].size()
    shape = (tp, 3, -1) if back else (3, tp, -1)
    return tensor.unflatten(0, shape).transpose(0, 1).flatten(0, 2)  # (3C, ...)


def is_dtensor(tensor):
    return hasattr(tensor, "placements")
