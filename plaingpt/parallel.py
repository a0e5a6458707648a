"""Trains a model that is split over processes. PyTorch does the work; model.py stays unchanged.

  --parallel fsdp  A process keeps a shard of each tensor and all-gathers one block at a time:
                   ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054).
  --tp N           Tensor parallelism: N processes split the heads, the width of the MLP and the
                   vocabulary (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053).
  --pp N           Pipeline parallelism: N processes have some blocks each. Micro-batches pass
                   through in the order 1F1B (Narayanan et al. 2021, arXiv:2104.04473, 2.2).

The flags can be combined in a mesh of pp x dp x tp processes. TP communicates most, so its
processes have consecutive ranks. The processes read different data only along dp.
"""

# PyTorch's parallel modules take two seconds to import. So the functions import what they need.

import logging

import torch
import torch.distributed as dist
import torch.nn as nn

from model import GPT
from plaingpt.cli import UserError, print0
from plaingpt.loss import stream_dtype


def grad_scaler(model, run):
    """The gradient scaler of a model; it does nothing unless the dtype is float16."""
    if isinstance(model, ShardedGPT):
        return model.scaler
    return torch.amp.GradScaler(run.device.type, enabled=run.dtype == torch.float16)


def clip_grad_norm(model, max_norm):
    """Clips the norm of the whole model's gradient. Returns the norm before clipping."""
    if not isinstance(model, ShardedGPT):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    # The last stage's copy of the embedding is not counted: its own name is lm_head.weight.
    own = [p for name, p in model.named_parameters() if name in model.own]
    for p in own:
        place_gradient(p)
    if not model.is_compared:
        compare_gradients(model.own)
        model.is_compared = True
    norm = torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])
    norm = norm.full_tensor() if is_dtensor(norm) else norm
    if model.n_stages > 1:
        squares = norm**2
        dist.all_reduce(squares, group=model.pp_group)
        norm = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def place_gradient(p):
    """Splits the gradient of a parameter like the parameter, and does the sums that are left to do.

    RowwiseParallel gives the gradient of all rows. torch 2.11 leaves sums over the TP group.
    """
    if is_dtensor(p.grad) and p.grad.placements != p.placements:
        p.grad = p.grad.redistribute(placements=p.placements)


def compare_gradients(parameters):
    """Raises UserError if TP gives different gradients to the copies of a whole parameter.

    The copies would drift apart. parameters: {name: parameter}.
    """
    norms = [(name, p.grad.full_tensor().norm().item()) for name, p in parameters.items()
             if p.placements[-1].is_replicate() and p.grad is not None]  # -1: tp
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, norms)  # of all processes, so that all of them stop
    found = sorted(sum(found, []))
    for (name, a), (other, b) in zip(found, found[1:]):
        if name == other and b - a > 1e-4 * b:
            raise UserError(f"--tp: each process has its own gradient of {name}, which must be the "
                            "same on all; leave out --tp")


@torch.no_grad()
def whole_state(model, optimizers):
    """(model state dict, list of optimizer state dicts), whole on rank 0; all processes call it."""
    if not isinstance(model, ShardedGPT):
        return model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]
    model_state = {name: model.gather(name, p) for name, p in model.named_parameters()}
    model_state.setdefault("lm_head.weight", model_state["transformer.wte.weight"])  # if tied
    return model_state, [model.gather_optimizer(optimizer) for optimizer in optimizers]


def load_parameter(name, p, whole, device):
    """Replaces parameter p by `whole`, a CPU tensor, or by the part of it that the process has."""
    if not isinstance(p, Elsewhere):
        part = nn.Parameter(scatter(name, whole, p, device))
        torch.utils.swap_tensors(p, part)  # keeps tied weights tied


def load_optimizers(optimizers, states):
    """Loads the moments of each optimizer. The flags set learning rate and weight decay."""
    for optimizer, state in zip(optimizers, states):
        for i, (name, p) in enumerate(named_params(optimizer)):
            if i in state and not isinstance(p, Elsewhere):
                optimizer.state[p] = {key: scatter(name, whole, p, p.device)
                                      for key, whole in state[i].items()}


def named_params(optimizer):
    """[(name, parameter)] of an optimizer, in the order of the numbers in its state dict."""
    return [pair for group in optimizer.param_groups
            for pair in zip(group["param_names"], group["params"])]


def scatter(name, whole, p, device):
    """The part that this process has of a whole tensor, on the device, split like parameter p."""
    if whole.shape != p.shape or not is_dtensor(p):  # the shape of AdamW's count of steps is ()
        return whole.to(device)
    from torch.distributed.tensor import distribute_tensor

    whole = by_heads(name, whole, p.device_mesh)
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).clone()


class Elsewhere(nn.Parameter):
    """Stands for a parameter that another stage of the pipeline has. It stays on device meta."""


class Stage(nn.Module):
    """What a process has of a GPT: the root of FSDP, and the stage of a pipeline."""

    def __init__(self, part, run, is_last):
        super().__init__()
        self.part, self.run, self.is_last = part, run, is_last

    def forward(self, x, targets=None):
        """Training. Takes ids or residual stream. Returns residual stream or the loss."""
        with self.run.autocast:
            return self.part(x, targets)[1] if self.is_last else self.part.hidden(x)

    def call(self, method, *args, **kwargs):
        """Calls a method of the part. FSDP all-gathers the parameters before."""
        with torch.compiler.set_stance("force_eager"):  # the inputs have many shapes
            return getattr(self.part, method)(*args, **kwargs).float().contiguous()


class ShardedGPT(GPT):
    """A GPT of which each process has a part. It is called and trained like a GPT.

    model: a GPT on the meta device, which is changed. All processes must call hidden, logits, loss
    and generate, and all get the complete result. With a pipeline, forward also computes the
    gradients: backward of its loss does nothing. Raises UserError if tp or pp do not fit the model.
    """

    require_backward_grad_sync = True  # False: gradients stay on this process, as in DDP

    def __init__(self, model, config, run):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        n_head, n_layer = model.config.n_head, model.config.n_layer
        if n_head % config.tp:
            raise UserError(f"--tp {config.tp} does not divide the model's {n_head} heads")
        if config.pp > n_layer:
            raise UserError(f"--pp {config.pp} is more than the model's {n_layer} blocks")
        nn.Module.__init__(self)  # GPT.__init__ would make a second model
        self.config, self.run = model.config, run
        self.n_stages, self.batch_size, self.schedules = config.pp, config.batch_size, {}
        self.is_compared = config.tp == 1  # whether compare_gradients is done, or not needed
        self.scaler = ShardedGradScaler(run.device.type, enabled=run.dtype == torch.float16)

        # PyTorch would warn that FSDP and TP gather a tensor in two steps.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        n_shards = run.dp_size if config.parallel == "fsdp" else 1
        mesh = init_device_mesh(
            run.device.type, (config.pp, run.dp_size // n_shards, n_shards, config.tp),
            mesh_dim_names=("pp", "copies", "shards", "tp"))
        self.pp_group, self.index = mesh.get_group("pp"), mesh.get_local_rank("pp")
        self.is_first, self.is_last = self.index == 0, self.index == config.pp - 1
        self.whole = {name: Elsewhere(p) for name, p in model.named_parameters()}
        self.is_tied = "lm_head.weight" not in self.whole  # embedding and head are one matrix
        if config.pp > 1:  # they are on the first and the last stage
            ends = mesh.mesh.flatten(1)[[0, -1]].t()  # (pipelines, 2)
            self.tied_group, _ = dist.new_subgroups_by_enumeration(ends.tolist())

        blocks = keep_stage(model, self.index, self.n_stages)
        if config.tp > 1:
            split_layers(model, mesh["tp"])
        if config.compile:
            for module in (*blocks, model.loss_fn):
                module.compile(dynamic=False, fullgraph=True)
        self.stage = Stage(model, run, self.is_last)
        if run.dp_size > 1:
            self.apply_fsdp(blocks, mesh, config.parallel == "fsdp")
        self.own = dict(model.named_parameters())
        for name, p in self.own.items():
            # The last stage of a pipeline has a copy of the embedding: its lm_head.weight.
            self.whole[name if name in self.whole else "transformer.wte.weight"] = p

    def named_parameters(self, *args, **kwargs):
        """The names of the whole model. Parameters of other pipeline stages are Elsewhere."""
        return iter(self.whole.items())

    def apply_fsdp(self, blocks, mesh, is_fsdp):
        """Applies FSDP. DDP is implemented as FSDP with one shard and several copies of it."""
        import torch.distributed.fsdp as fsdp

        on_cpu = self.run.device.type == "cpu"
        mesh = mesh["shards"] if is_fsdp else mesh["copies", "shards"]
        # Blocks are all-gathered in the dtype of their products, but in float32 on a CPU. The
        # CPU's layer_norm rejects bfloat16 weights with the float32 residual stream.
        param_dtype = self.run.dtype if is_fsdp and not on_cpu else None
        policy = fsdp.MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
        for block in blocks:
            fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
        fsdp.fully_shard(self.stage, mesh=mesh)  # the rest, in float32: embeddings, norm, head
        fsdp.register_fsdp_forward_method(self.stage, "call")
        for module in (self.stage, *blocks):  # gloo has no average
            module.set_force_sum_reduction_for_comms(on_cpu)

    def forward(self, idx, targets=None):
        """As GPT.forward."""
        if targets is None:
            return self.logits(self.hidden(idx)), None
        if self.n_stages > 1:
            return None, self.run_pipeline(idx, targets)
        if self.run.dp_size > 1:
            self.stage.set_requires_gradient_sync(self.require_backward_grad_sync)
        return None, self.stage(idx, targets)

    def run_pipeline(self, idx, targets):
        """Forward and backward pass of all micro-batches of a step. Returns their mean loss."""
        self.loss_sum = torch.zeros((), device=idx.device)
        if len(idx) not in self.schedules:  # the batch may grow
            self.schedules[len(idx)] = self.make_schedule(*idx.shape)
        with torch.autocast(idx.device.type, enabled=False):  # Stage.forward has its own
            self.schedules[len(idx)].step(
                idx.contiguous(), targets=targets, target=targets, return_outputs=False)
        if self.is_tied and (self.is_first or self.is_last):
            # Sums the gradient of embedding and head.
            p = self.whole["transformer.wte.weight"]
            place_gradient(p)
            dist.all_reduce(p.grad.to_local() if is_dtensor(p) else p.grad, group=self.tied_group)
        dist.broadcast(self.loss_sum, group=self.pp_group, group_src=self.n_stages - 1)
        return self.loss_sum.requires_grad_()

    def make_schedule(self, n, T):
        """1F1B for the micro-batches of a step of n sequences."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        B = min(self.batch_size, n // self.n_stages)  # every stage gets work
        n_micro = n // B
        print0(f"pipeline: {self.n_stages} stages, {n_micro} micro-batches of {B}")
        with self.run.autocast:
            dtype = stream_dtype(self.loss_sum)
        shape = (B, T, self.config.n_embd)
        stream = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        x = torch.empty((B, T), dtype=torch.long, device="meta") if self.is_first else stream
        y = torch.empty((), device="meta") if self.is_last else stream
        stage = PipelineStage(self.stage, self.index, self.n_stages, self.run.device, input_args=x,
                              output_args=y, group=self.pp_group)

        def scaled_loss(loss, _):
            self.loss_sum += loss.detach() / n_micro
            return self.scaler.scale(loss / n_micro)

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
            result = self.stage.call(method, *args, **kwargs)
        else:
            result = torch.empty(shape, device=self.run.device)
        dist.broadcast(result, group=self.pp_group, group_src=index)
        return result

    def gather_optimizer(self, optimizer):
        """The state dict that one process with the whole model would have."""
        whole = optimizer.state_dict()  # has all groups, but the moments of this process
        example = next(iter(optimizer.state.values()), {})  # all parameters have the same entries
        for i, (name, p) in enumerate(named_params(optimizer)):
            part = optimizer.state.get(p, {})
            whole["state"][i] = {k: self.gather(name, part.get(k)) if value.dim() else value.clone()
                                 for k, value in example.items()}
        return whole

    def gather(self, name, part):
        """The inverse of scatter. Returns a whole tensor on rank 0's CPU, else None."""
        if is_dtensor(part):
            part = by_heads(name, part.full_tensor(), part.device_mesh, back=True)
        whole = torch.zeros(self.whole[name].shape, device=self.run.device)
        if name in self.own and part is not None:
            whole += part
        dist.all_reduce(whole, group=self.pp_group)  # the other stages add zeros
        return whole.cpu() if self.run.rank == 0 else None


def is_dtensor(tensor):
    return hasattr(tensor, "placements")


class Absent(nn.Module):
    """Replaces a module of another stage. Returns the residual stream x, or 0 for positions."""

    def forward(self, x, *args):
        return x if x.is_floating_point() else 0


def keep_stage(model, stage, n_stages):
    """Removes the modules of other stages. The rest keeps its names. Returns its blocks."""
    t, n = model.transformer, len(model.transformer.h)
    cost = n + model.config.vocab_size / (12 * model.config.n_embd)  # blocks + head; unit: a block
    # Each stage gets at least one block.
    ends = [min(n - n_stages + s, max(s, round(s * cost / n_stages))) for s in range(n_stages)]
    own = range(ends[stage], [*ends, n][stage + 1])
    for i in set(range(n)) - set(own):
        t.h[i] = Absent()
    if stage > 0:
        t.wte, t.wpe, t.drop = Absent(), Absent(), Absent()
    if stage < n_stages - 1:
        t.ln_f, model.lm_head = Absent(), Absent()
    return [t.h[i] for i in own]


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
        c_attn=tp.ColwiseParallel(), c_fc=tp.ColwiseParallel(), c_proj=tp.RowwiseParallel(),
        lm_head=tp.ColwiseParallel(output_layouts=Replicate()))
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
    is_tied = "lm_head" in modules and "lm_head.weight" not in dict(model.named_parameters())
    for name, module in modules.items():
        if style := styles.get(name.rpartition(".")[2]):
            # All processes have the same weights, so none are sent.
            tp.parallelize_module(module, mesh, style, src_data_rank=None)
        else:  # norms and positions: whole on every process
            # So is their input. But in attention, (B, nh, T, hs) has the heads of this process.
            # Their weight's gradient is then the sum over the processes.
            distribute_module(
                module, mesh, input_fn=lambda _, inputs, mesh: DTensor.from_local(
                    inputs[0], mesh, [Shard(1) if inputs[0].dim() == 4 else Replicate()]),
                output_fn=lambda _, output, mesh: output.to_local())
    if direct := [name for name, p in model.named_parameters() if not is_dtensor(p)]:
        raise UserError(f"--tp: {direct[0]} is in no layer; make it the weight of an nn.Module")
    if is_tied:
        model.transformer.wte.weight = model.lm_head.weight  # tied again


def by_heads(name, tensor, mesh, back=False):
    """Reorders c_attn's rows (first q, then k, then v) into tp parts of whole heads, or back."""
    if ".c_attn." not in name or "tp" not in mesh.mesh_dim_names:
        return tensor
    tp = mesh["tp"].size()
    shape = (tp, 3, -1) if back else (3, tp, -1)
    return tensor.unflatten(0, shape).transpose(0, 1).flatten(0, 2)  # (3C, ...)
