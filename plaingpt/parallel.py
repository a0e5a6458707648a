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

import logging

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from model import GPT
from plaingpt.cli import UserError, print0


class ShardedTrainer(nn.Module):
    """Has the members of train_gpt2.Trainer, for a model that is split over processes.

    eval_model is the trainer itself. All processes must call hidden, logits, loss and generate, and
    all get the complete result. The trainer is an nn.Module because FSDP and PipelineStage need
    one. Raises UserError if tp does not divide the heads, or pp is more than the blocks.
    """

    eval_model = property(lambda self: self)  # as an attribute, self would be its own submodule

    def __init__(self, model, config, rates, device, dtype, weights):
        super().__init__()
        n_head, n_layer = model.config.n_head, model.config.n_layer
        if n_head % config.tp:
            raise UserError(f"--tp {config.tp} does not divide the model's {n_head} heads")
        if config.pp > n_layer:
            raise UserError(f"--pp {config.pp} is more than the model's {n_layer} blocks")
        self.model, self.config, self.device = model, model.config, device
        self.batch_size, self.n_stages = config.batch_size, config.pp
        self.autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        self.scaler = ShardedGradScaler(device.type, enabled=dtype == torch.float16)
        self.schedules = {}
        # full_state needs the shapes and the parameter groups of the whole model.
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.groups = [optimizer.state_dict()["param_groups"]
                       for optimizer in model.configure_optimizers(*rates)]
        self.make_mesh(config)
        keep_stage(model, self.stage, config.pp)
        if config.tp > 1:
            split_layers(model, self.tp)
        blocks = [block for block in model.transformer.h if not isinstance(block, Absent)]
        if config.compile:
            for module in (*blocks, model.loss_fn):
                module.compile(dynamic=False, fullgraph=True)
        self.shard(blocks, config.parallel, dtype)
        self.fill(weights)
        self.optimizers = model.configure_optimizers(*rates)

    def make_mesh(self, config):
        """Creates the mesh of processes and stores the coordinates of this process."""
        dp_size = dist.get_world_size() // (config.pp * config.tp)
        sizes = (1, dp_size) if config.parallel == "fsdp" else (dp_size, 1)
        if config.parallel == "fsdp" and dp_size == 1:
            print0("note: --parallel fsdp has no effect with one data parallel process")
        # PyTorch would warn that FSDP and TP gather a tensor in two steps.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        mesh = init_device_mesh(self.device.type, (config.pp, *sizes, config.tp),
                                mesh_dim_names=("pp", "copies", "shards", "tp"))
        self.mesh, self.tp, self.pp_group = mesh, mesh["tp"], mesh.get_group("pp")
        self.stage = mesh.get_local_rank("pp")
        self.first, self.last = self.stage == 0, self.stage == config.pp - 1
        if config.pp > 1:  # embedding and head are one matrix, on the first and the last stage
            ends = mesh.mesh.flatten(1)[[0, -1]].t()  # (pipelines, 2)
            self.tied_group, _ = dist.new_subgroups_by_enumeration(ends.tolist())

    def fill(self, weights):
        """Fills the parameters, on the meta device until now, with the parts of this process."""
        own = dict(self.model.named_parameters())
        for name, whole in weights:
            name = name if name in own else name.replace("transformer.wte", "lm_head")
            if name in own:
                part = self.scatter(name, whole, own[name])
                torch.utils.swap_tensors(own[name], nn.Parameter(part))  # keeps tied weights tied

    def shard(self, blocks, parallel, dtype):
        """Applies FSDP. DDP is implemented as FSDP with one shard and several copies of it."""
        mesh, param_dtype = self.mesh["copies", "shards"], None
        if parallel == "fsdp":
            mesh = self.mesh["shards"]
            # Blocks are all-gathered in the dtype of their products, but in float32 on a CPU. The
            # CPU's layer_norm rejects bfloat16 weights with the float32 residual stream.
            param_dtype = None if self.device.type == "cpu" else dtype
        if mesh.size() == 1:
            return
        policy = fsdp.MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
        for block in blocks:
            fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
        fsdp.fully_shard(self, mesh=mesh)  # the rest, in float32: embeddings, last norm and head
        fsdp.register_fsdp_forward_method(self, "on_stage")
        for module in (self, *blocks):  # gloo has no average
            module.set_force_sum_reduction_for_comms(self.device.type == "cpu")

    def forward(self, x, targets=None):
        """Training. Takes ids or residual stream. Returns residual stream or the scaled loss."""
        with self.autocast:
            if not self.last:
                return self.model.hidden(x)
            _, loss = self.model(x, targets)
        loss = loss / self.micro_steps
        self.loss_sum += loss.detach()
        return self.scaler.scale(loss)

    def forward_backward(self, x, y, micro_steps, last):
        """Adds the gradients of a micro-batch. Returns its part of the step's loss.

        last: whether it is the step's last micro-batch. A pipeline gets all sequences of the step
        in one call and splits them into micro-batches.
        """
        self.loss_sum = torch.zeros((), device=self.device)
        self.scaler.scale(self.loss_sum)  # creates the scale, also on stages without a loss
        if self.n_stages == 1:
            self.micro_steps = micro_steps
            if isinstance(self, fsdp.FSDPModule):
                self.set_requires_gradient_sync(last)
            self(x, y).backward()
            return self.loss_sum
        B = min(self.batch_size, len(x) // self.n_stages)  # every stage gets work
        self.micro_steps = len(x) // B
        if len(x) not in self.schedules:  # the batch may grow
            self.schedules[len(x)] = self.make_schedule(B, x.size(1))
        inputs = (x.contiguous(),) if self.first else ()
        targets = dict(targets=y, target=y) if self.last else {}
        self.schedules[len(x)].step(*inputs, return_outputs=False, **targets)
        if self.first or self.last:  # these stages have the same matrix: sum its gradients
            p = self.model.lm_head.weight if self.last else self.model.transformer.wte.weight
            grad = p.grad
            if isinstance(p, DTensor):  # RowwiseParallel gives the gradient of all rows
                p.grad = grad.redistribute(placements=p.placements)
                grad = p.grad.to_local()
            dist.all_reduce(grad, group=self.tied_group)
        return self.loss_sum * self.n_stages  # train_step takes the mean over all processes

    def make_schedule(self, B, T):
        """1F1B for micro-batches of (B, T)."""
        idle = (self.n_stages - 1) / (self.micro_steps + self.n_stages - 1)
        print0(f"pipeline: {self.micro_steps} micro-batches of {B}; {self.n_stages} stages are "
               f"idle {idle:.0%} of the time")
        stream = torch.empty((B, T, self.config.n_embd), device="meta", requires_grad=True)
        x = torch.empty((B, T), dtype=torch.long, device="meta") if self.first else stream
        y = torch.empty((), device="meta") if self.last else stream
        stage = PipelineStage(self, self.stage, self.n_stages, self.device, input_args=x,
                              output_args=y, group=self.pp_group)
        return Schedule1F1B(stage, self.micro_steps, lambda loss, _: loss, scale_grads=False)

    def clip(self, max_norm):
        """Clips the norm of the whole model's gradient. Returns the norm before clipping."""
        # Counts the tied matrix on the first stage only. On the last stage it is lm_head.weight.
        norm = torch.nn.utils.get_total_norm(
            [p.grad for name, p in self.model.named_parameters()
             if p.grad is not None and name != "lm_head.weight"])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.n_stages > 1:
            squares = norm**2
            dist.all_reduce(squares, group=self.pp_group)
            norm = squares.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm

    def hidden(self, idx, *args, **kwargs):
        """GPT.hidden: ids (B, T) -> (B, T, C)."""
        x, shape = idx, (*idx.shape, self.config.n_embd)
        for stage in range(self.n_stages):
            x = self.on_stage(stage, shape, self.model.hidden, x, *args, **kwargs)  # (B, T, C)
        return x

    def logits(self, x):
        """GPT.logits: (..., C) -> (..., vocab_size)."""
        # GPT.logits pads the matrix on a GPU, which a DTensor does not support.
        method = self.model.lm_head if self.tp.size() > 1 else self.model.logits
        shape = (*x.shape[:-1], self.config.vocab_size)
        return self.on_stage(self.n_stages - 1, shape, method, x)

    def loss(self, x, targets, reduction="mean"):
        """GPT.loss: (B, T, C) and (B, T) -> scalar, or (B, T)."""
        shape = () if reduction == "mean" else targets.shape
        return self.on_stage(self.n_stages - 1, shape, self.model.loss, x, targets, reduction)

    stream = GPT.stream

    def generate(self, *args, **kwargs):
        """GPT.generate: (B, T) -> (B, T + max_new_tokens)."""
        with self.autocast:  # FSDP gathers parameters in autocast's dtype
            return GPT.generate(self, *args, **kwargs)

    def on_stage(self, stage, shape, method, *args, **kwargs):
        """Calls a method on one stage. Returns its result, of this shape, on all stages."""
        if stage == self.stage:
            with torch.compiler.set_stance("force_eager"):  # the inputs have many shapes
                result = method(*args, **kwargs).float().contiguous()
        else:
            result = torch.empty(shape, device=self.device)
        if self.n_stages > 1:
            dist.broadcast(result, group=self.pp_group, group_src=stage)
        return result

    @torch.no_grad()
    def full_state(self):
        """Returns (model state dict, list of optimizer state dicts), whole on rank 0's CPU."""
        own = dict(self.model.named_parameters())
        model_state = {name: self.gather(name, own.get(name)) for name in self.shapes}
        model_state["lm_head.weight"] = model_state["transformer.wte.weight"]
        return model_state, list(map(self.gather_optimizer, self.optimizers, self.groups))

    def gather_optimizer(self, optimizer, groups):
        """The state dict that one process with the whole model would have."""
        own = {name: optimizer.state[p] for name, p in by_name(optimizer.param_groups).items()}
        example = next(iter(own.values()))  # all parameters have the same entries
        state = {}
        for name, i in by_name(groups).items():
            part = own.get(name, {})
            state[i] = {key: self.gather(name, part.get(key)) if value.dim() else value.clone()
                        for key, value in example.items()}
        groups = [{**group, "lr": now["lr"]} for group, now in zip(groups, optimizer.param_groups)]
        return dict(state=state, param_groups=groups)

    def gather(self, name, part):
        """Returns a whole tensor on rank 0's CPU, else None. part: of this stage, or None."""
        whole = torch.zeros(self.shapes[name], device=self.device)
        if part is not None:
            part = part.full_tensor() if isinstance(part, DTensor) else part
            whole += by_heads(name, part, self.tp.size(), back=True)
        if self.n_stages > 1:
            dist.all_reduce(whole, group=self.pp_group)  # the other stages add zeros
        return whole.cpu() if dist.get_rank() == 0 else None

    def load_optimizer_states(self, states):
        """Loads the moments of each optimizer: the parts that this process has."""
        for optimizer, groups, state in zip(self.optimizers, self.groups, states):
            numbers = by_name(groups)
            for name, p in by_name(optimizer.param_groups).items():
                entry = state.get(numbers[name.replace("lm_head", "transformer.wte")], {})
                optimizer.state[p] = {k: self.scatter(name, v, p) for k, v in entry.items()}

    def scatter(self, name, whole, p):
        """The inverse of gather: this process's part of a whole tensor, split like parameter p."""
        if whole.dim() == 0 or not isinstance(p, DTensor):
            return whole.to(self.device)
        whole = by_heads(name, whole, self.tp.size())
        return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).clone()


class Muon(torch.optim.Muon):
    """Muon for DDP: each process updates its share of the matrices and sends them to the others.

    The orthogonalization takes most of the time, and DDP would repeat it on every process. All
    processes keep the momentum of all matrices: a checkpoint fits any number of processes.
    """

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        matrices = sorted(group["params"], key=lambda p: -p.numel())
        owners = [i % dist.get_world_size() for i in range(len(matrices))]
        for p, owner in zip(matrices, owners):
            if owner != dist.get_rank():
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                p.grad = None  # torch.optim.Muon skips it
        super().step()
        sent = [dist.broadcast(p, owner, async_op=True) for p, owner in zip(matrices, owners)]
        for work in sent:
            work.wait()


class Absent(nn.Module):
    """Replaces a module of another stage. Returns the residual stream x, or 0 for positions."""

    def forward(self, x, *args):
        return x if x.is_floating_point() else 0


def keep_stage(model, stage, n_stages):
    """Removes the modules of other stages. The rest keeps its names."""
    t, n = model.transformer, len(model.transformer.h)
    cost = n + model.config.vocab_size / (12 * model.config.n_embd)  # blocks + head; unit: a block
    # Each stage gets at least one block.
    ends = [min(n - n_stages + s, max(s, round(s * cost / n_stages))) for s in range(n_stages)]
    own = range(ends[stage], [*ends, n][stage + 1])
    for i in range(n):
        if i not in own:
            t.h[i] = Absent()
    if stage > 0:
        t.wte, t.wpe, t.drop = Absent(), Absent(), Absent()
    if stage < n_stages - 1:
        t.ln_f, model.lm_head = Absent(), Absent()


def split_layers(model, mesh):
    """Splits the layers over a mesh: each process computes its share, from the same input.

    A block's forward has two all-reduces, after attention and MLP. The processes draw the same
    random numbers, because dropout on the residual stream must be equal. So the attention dropout
    of their heads is equal, too.
    """
    replicate = Replicate()
    styles = dict(
        # For a short time, its backward holds the gradient of all rows.
        wte=RowwiseParallel(input_layouts=replicate, output_layouts=replicate),
        c_attn=ColwiseParallel(), c_fc=ColwiseParallel(), c_proj=RowwiseParallel(),
        lm_head=ColwiseParallel(output_layouts=replicate))
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
    for name, module in modules.items():
        if style := styles.get(name.rpartition(".")[2]):
            # All processes have the same weights, so none are sent.
            parallelize_module(module, mesh, style, src_data_rank=None)
        else:  # norms and positions: whole on every process
            distribute_module(
                module, mesh, input_fn=lambda _, inputs, mesh: DTensor.from_local(
                    inputs[0], mesh, [replicate], run_check=False),
                output_fn=lambda _, output, mesh: output.to_local())
    if "lm_head" in modules and "transformer.wte" in modules:
        model.transformer.wte.weight = model.lm_head.weight  # tied again


def by_heads(name, tensor, tp, back=False):
    """Reorders c_attn's rows (first q, then k, then v) into tp parts of whole heads, or back."""
    if ".c_attn." not in name:
        return tensor
    shape = (tp, 3, -1) if back else (3, tp, -1)
    return tensor.unflatten(0, shape).transpose(0, 1).flatten(0, 2)  # (3C, ...)


def by_name(groups):
    """Groups of an optimizer -> {name: parameter}; groups of a state dict -> {name: index}."""
    return {name: p for group in groups for name, p in zip(group["param_names"], group["params"])}
