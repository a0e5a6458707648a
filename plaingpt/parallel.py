"""What DDP cannot do: train a model that no single GPU holds. All of it is PyTorch's own, put around model.py from outside.

  --parallel fsdp   every process keeps a share of each tensor and of its optimizer state, and borrows the rest of a block
                    while it computes with it: ZeRO-3 (Rajbhandari et al. 2020, arXiv:1910.02054), here fully_shard, FSDP2
  --tp N            N processes compute each layer together: heads, the MLP's width and the vocabulary are divided among
                    them (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053), here DTensor's parallelize_module
  --pp N            N processes have some blocks each, and micro-batches pass through them as along an assembly line: 1F1B
                    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), here torch.distributed.pipelining

They combine, on a mesh of pp x dp x tp processes; the last talk most, and so are neighbours. Only along dp do the data
differ. train_gpt2.py imports this file if one of the three is asked for, and then trains `Parts`, which has the methods of
its `Replica`. The raw model and its optimizers, asked for their states or a forward by all processes, answer as if whole.
"""

# Read next: fineweb.py, where shards come from.

import contextlib
import logging
import math
import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from model import LinearCrossEntropy
from plaingpt.cli import print0


class Parts:
    """A model that the processes train in parts: `model` is cut up in place. config: a TrainConfig."""

    def __init__(self, model, config, device, dtype, autocast):
        self.model, self.autocast, self.device, self.batch_size = model, autocast, device, config.batch_size
        self.scaler = ShardedGradScaler(device.type, enabled=dtype == torch.float16)
        # PyTorch would point out two things that are as they should be: FSDP's and TP's parts of a tensor are gathered one
        # after the other, and what the scaler finds is a tensor of one element.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1")
        self.n_stages, self.n_embd, self.vocab_size = config.pp, model.config.n_embd, model.config.vocab_size
        dp, fsdp = dist.get_world_size() // (config.pp * config.tp), config.parallel == "fsdp"
        mesh = init_device_mesh(device.type, (config.pp, 1 if fsdp else dp, dp if fsdp else 1, config.tp),
                                mesh_dim_names=("pp", "copies", "shards", "tp"))
        self.stage, self.column, self.tp, self.dp = mesh.get_local_rank("pp"), mesh.get_group("pp"), mesh["tp"], dp
        self.ranks = dist.get_process_group_ranks(self.column)  # the stages that have our part of the data and of the layers
        self.first, self.last, self.schedules, self.shares = self.stage == 0, self.stage == config.pp - 1, {}, None

        # The model from inside, in this order. It stays on the CPU until what is cut off is gone.
        if config.pp > 1:
            cut_into_stages(model, self.stage, config.pp)
        self.hidden, self.logits, self.loss = model.hidden, model.logits, model.loss  # those of this process
        if config.tp > 1:
            divide_layers(model, self.tp)
            self.first_row = self.tp.get_local_rank() * math.ceil(self.vocab_size / config.tp)  # of embedding and head
            self.logits, self.loss = lambda x: model.lm_head(x), self.divided_loss
            if self.first:
                model.transformer.wte.forward = self.divided_embedding
        blocks = [block for block in model.transformer.h if block is not None]
        self.compiled = config.compile
        if self.compiled:  # block by block: what is borrowed is called for in between
            self.loss = torch.compile(self.loss, dynamic=False, fullgraph=True)
            for block in blocks:
                block.compile(dynamic=False, fullgraph=True)
        if dp > 1:
            kind = dict(mesh=mesh["shards"] if fsdp else mesh["copies", "shards"])  # shards of 1 are whole copies: DDP
            policy = MixedPrecisionPolicy(dtype if fsdp else None, torch.float32, cast_forward_inputs=False)
            for block in blocks:
                fully_shard(block, **kind, mp_policy=policy)
            fully_shard(model, **kind)  # what is left, embedding and head together; float32, as is the residual stream
        else:
            model.to(device)
        for module in model.modules() if device.type == "cpu" else []:
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no average
            if isinstance(module, nn.LayerNorm):
                module.forward = partial(float_norm, module)

        # The model from outside: a call is a micro-batch in training, the methods are those of the whole model.
        model.forward, model.run = self.forward, lambda function, *args: function(*args)
        register_fsdp_forward_method(model, "run")
        model.hidden, model.logits, model.loss = self.whole_hidden, self.whole_logits, self.whole_loss
        names = self.on_all_stages({name: p.shape for name, p in model.named_parameters()})
        self.places = {name: (shape, stage) for stage, part in enumerate(names) for name, shape in part.items()}
        if config.pp > 1:
            del self.places["lm_head.weight"]  # the embedding's, on the first stage
        state_dict, configure = model.state_dict, model.configure_optimizers
        model.state_dict = lambda: self.gather_model(state_dict())
        model.configure_optimizers = lambda *args: self.share_states(configure(*args))

    # --- a step -------------------------------------------------------------------------------------------------------------

    def forward(self, x, targets=None):
        """A micro-batch through this stage: what the one before returned, or ids, in; the residual stream or the loss out."""
        with self.autocast:
            x = self.hidden(x)
            return self.loss(x, targets) if self.last else x

    def sync(self, on):
        """Whether the next backward averages the gradients over dp. A pipeline's schedule knows by itself."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(on)

    def forward_backward(self, x, y, micro_steps):
        """(B, T) ids and targets -> this process's part of the step's loss: the mean over all processes is the loss.

        A pipeline is given all of a step at once, and cuts it into micro-batches itself.
        """
        if self.n_stages == 1:
            loss = self.model(x, y) / micro_steps
            self.scaler.scale(loss).backward()
            return loss.detach()
        if len(x) not in self.schedules:  # while the batch grows there are several
            B = min(self.batch_size, len(x) // self.n_stages)  # so that no stage is without work
            self.schedules[len(x)] = self.make_schedule(len(x) // B, B, x.size(1))
        self.loss_sum = torch.zeros((), device=self.device)
        self.scaler.scale(self.loss_sum)  # makes the scale, on the stages too that have no loss
        ids, loss_of = (x.contiguous(),) if self.first else (), dict(targets=y, target=y) if self.last else {}
        self.schedules[len(x)].step(*ids, return_outputs=False, **loss_of)
        if self.first or self.last:  # embedding and head are one matrix in two places
            exchange_and_add(local(self.tied().grad), self.ranks[-1 if self.first else 0])
        return self.loss_sum * self.n_stages

    def make_schedule(self, n, B, T):
        """1F1B for n micro-batches of (B, T)."""
        print0(f"pipeline: {n} micro-batches of {B} through {self.n_stages} stages, which wait for each other "
               f"{(self.n_stages - 1) / (n + self.n_stages - 1):.0%} of the time; a smaller --batch_size makes more of them")

        def loss_of(loss, _):
            self.loss_sum += loss.detach() / n
            return self.scaler.scale(loss / n)

        ids = torch.empty((B, T), dtype=torch.long, device="meta")
        stream = torch.empty((B, T, self.n_embd), device="meta", requires_grad=True)
        stage = PipelineStage(self.model, self.stage, self.n_stages, self.device, group=self.column,
                              input_args=ids if self.first else stream,
                              output_args=torch.empty((), device="meta") if self.last else stream)
        return Schedule1F1B(stage, n, loss_of, scale_grads=False)

    def tied(self):
        """The matrix that a pipeline has twice."""
        return (self.model.transformer.wte or self.model.lm_head).weight if self.first or self.last else None

    def clip(self, max_norm):
        """Cuts the gradient's norm, that of all parts together, down to max_norm -> the norm it had, on the device."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        grads = [local(p.grad) for p in parameters]
        if self.shares is None:
            self.shares = torch.tensor([1 / self.holders(p) for p in parameters], device=self.device)
        norm = (torch.stack(torch._foreach_norm(grads)) ** 2 * self.shares).sum()
        dist.all_reduce(norm)
        norm = norm.sqrt()
        torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def holders(self, p):
        """How many processes hold the same part of a parameter."""
        n = self.dp * self.tp.size() * (2 if p is self.tied() and self.n_stages > 1 else 1)
        if isinstance(p, DTensor):
            n //= math.prod(size for size, kind in zip(p.device_mesh.shape, p.placements) if not kind.is_replicate())
        return n

    def divided_loss(self, x, targets):
        """GPT.loss where each process has some rows of the head."""
        def across(tensor, op):
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self.tp.get_group())
            return tensor

        weight, targets = self.model.lm_head.weight.to_local(), targets.flatten() - self.first_row  # (V of this process, C)
        return LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets, torch.is_grad_enabled(), across)

    def divided_embedding(self, idx):
        """wte where each process has some rows. (RowwiseParallel would form the gradient of all of them on each.)"""
        weight, idx = self.model.transformer.wte.weight.to_local(), idx - self.first_row
        here = (0 <= idx) & (idx < len(weight))  # (B, T)
        x = F.embedding(idx.where(here, 0), weight) * here[..., None]  # (B, T, C), zeros where another process has the row
        return DTensor.from_local(x, self.tp, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()

    # --- the whole model, for those who evaluate, sample, save and load: every process has to call ------------------------

    def of_stage(self, stage, shape, function, *args):
        """What a function returns on one stage, on all stages. Not compiled: rows of any length come through here."""
        if stage != self.stage:
            result = torch.empty(shape, device=self.device)
        else:
            with torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext():
                result = self.model.run(function, *args).float().contiguous()
        if self.n_stages > 1:
            dist.broadcast(result, self.ranks[stage], group=self.column)
        return result

    def whole_hidden(self, idx, *args, **kwargs):
        x = idx
        for stage in range(self.n_stages):
            with self.autocast:  # in whose dtype the shards are sent
                x = self.of_stage(stage, (*idx.shape, self.n_embd), partial(self.hidden, x, *args, **kwargs))
        return x

    def whole_logits(self, x):
        return self.of_stage(self.n_stages - 1, (*x.shape[:-1], self.vocab_size), self.logits, x)

    def whole_loss(self, x, targets):
        return self.of_stage(self.n_stages - 1, (), self.loss, x, targets)

    def on_all_stages(self, value):
        values = [None] * self.n_stages
        dist.all_gather_object(values, value, group=self.column)
        return values

    def gather(self, names, parts):
        """The parts that this stage has of some tensors -> on rank 0, all of these tensors, whole, on the CPU.

        One after the other: no GPU ever holds more than one of them beside its parts. {} on the other ranks.
        """
        whole = {}
        for name in names:
            shape, stage = self.places[name]
            if stage == self.stage:
                tensor = parts[name].full_tensor() if isinstance(parts[name], DTensor) else parts[name]
                tensor = by_heads(tensor, self.tp.size(), back=True) if ".c_attn." in name else tensor
                if stage > 0 and self.ranks[0] == 0:
                    dist.send(tensor.contiguous(), 0, group=self.column)
            elif dist.get_rank() == 0:
                tensor = torch.empty(shape, device=self.device)
                dist.recv(tensor, self.ranks[stage], group=self.column)
            if dist.get_rank() == 0:
                whole[name] = tensor.cpu()
        return whole

    def gather_model(self, state_dict):
        whole = self.gather(self.places, state_dict)
        return {**whole, "lm_head.weight": whole["transformer.wte.weight"]} if whole else whole

    def share_states(self, optimizers):
        """Lets the optimizers' states be saved and loaded as those of the whole model."""
        for optimizer in optimizers:
            groups = self.on_all_stages([group["param_names"] for group in optimizer.param_groups])
            names = [[name for part in parts for name in part if name in self.places] for parts in zip(*groups)]
            optimizer.register_state_dict_post_hook(partial(self.gather_optimizer, names))
            optimizer.register_load_state_dict_pre_hook(self.take_part)
        return optimizers

    def gather_optimizer(self, names, optimizer, state_dict):
        """A state dict of this process's parts -> one of the whole model, whose groups hold these names."""
        own = [name for group in optimizer.param_groups for name in group["param_names"]]
        state, order = state_dict["state"], [name for group in names for name in group]
        first = next(iter(state.values()), {})  # all have the same entries: moments, and the count of steps
        moments = {key: self.gather(order, {own[i]: entry[key] for i, entry in state.items()})
                   for key, value in first.items() if value.dim()}
        whole = {i: {key: moments[key][name] if key in moments else value.clone() for key, value in first.items()}
                 for i, name in enumerate(order) if dist.get_rank() == 0 and first}
        numbers = iter(range(len(order)))
        groups = [{**group, "param_names": part, "params": [next(numbers) for _ in part]}
                  for group, part in zip(state_dict["param_groups"], names)]
        return dict(state=whole, param_groups=groups)

    def take_part(self, optimizer, state_dict):
        """The inverse: what this process needs of a whole state dict."""
        number = {name: i for group in state_dict["param_groups"] for name, i in zip(group["param_names"], group["params"])}
        state, groups, i = {}, [], 0
        for group in optimizer.param_groups:
            groups.append({**group, "params": list(range(i, i + len(group["params"])))})
            for name, p in zip(group["param_names"], group["params"]):
                entry = state_dict["state"].get(number["transformer.wte.weight" if name == "lm_head.weight" else name], {})
                state[i] = {key: self.part(value, p, name) if value.dim() else value for key, value in entry.items()}
                i += 1
        return dict(state=state, param_groups=groups)

    def part(self, tensor, p, name):
        tensor = by_heads(tensor, self.tp.size()) if ".c_attn." in name else tensor
        return distribute_tensor(tensor, p.device_mesh, p.placements, src_data_rank=None).clone() if isinstance(p, DTensor) \
            else tensor


def cut_into_stages(model, stage, n_stages):
    """Leaves a model the modules of one stage: the others become None. The head counts as the blocks that cost as much."""
    t, n = model.transformer, len(model.transformer.h)
    cost = (n + model.config.vocab_size / (12 * model.config.n_embd)) / n_stages
    ends = [0, *(min(n - n_stages + s, max(s, round(s * cost))) for s in range(1, n_stages)), n]
    for i in range(n):
        if not ends[stage] <= i < ends[stage + 1]:
            t.h[i] = None
    if stage > 0:
        t.wte = t.wpe = None
    if stage < n_stages - 1:
        t.ln_f = model.lm_head = None


def divide_layers(model, mesh):
    """Divides the layers among the processes of a mesh, each of which then computes its share on the same input.

    Two collectives in the forward of a block: behind the attention and behind the MLP the shares are summed.
    """
    for name, p in model.named_parameters():
        if ".c_attn." in name:
            p.data = by_heads(p.data, mesh.size())
    column, row = ColwiseParallel(), RowwiseParallel()
    styles = dict(c_attn=column, c_fc=column, c_proj=row, lm_head=ColwiseParallel(output_layouts=Replicate()))
    wte, modules = model.transformer.wte, {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
    plan = {name: styles[kind] for name in modules if (kind := name.rpartition(".")[2]) in styles}
    parallelize_module(model, mesh, plan, src_data_rank=None)  # the weights are the same everywhere: none need be sent
    if wte:
        wte.weight = model.lm_head.weight if model.lm_head else nn.Parameter(
            distribute_tensor(wte.weight, mesh, [Shard(0)], src_data_rank=None))
    for name, module in modules.items():  # norms and positions, whole everywhere
        if name not in plan and module is not wte:
            distribute_module(module, mesh, None, lambda _, inputs, mesh: tuple(
                DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs), lambda _, x, mesh: x.to_local())


def by_heads(tensor, tp, back=False):
    """c_attn's rows, of query, key and value one below the other, in an order that gives each of tp processes all three of
    its heads as one piece; or back."""
    return tensor.unflatten(0, (tp, 3, -1) if back else (3, tp, -1)).transpose(0, 1).flatten(0, 2)


def float_norm(module, x):
    """A norm in float32, whatever its weights were sent as: on a GPU autocast does that."""
    return F.layer_norm(x, module.normalized_shape, module.weight.float(), module.bias.float(), module.eps)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def exchange_and_add(tensor, rank):
    """Adds the tensor of another process, which adds ours."""
    other = torch.empty_like(tensor)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, rank), dist.P2POp(dist.irecv, other, rank)]):
        work.wait()
    tensor += other
