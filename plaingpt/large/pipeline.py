"""Pipeline parallelism: each process holds some of the blocks of a GPT."""

from plaingpt.process import add_metrics
from plaingpt.terminal import print0

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten


class Pipeline(nn.Module):
    """A GPT whose blocks are split over several processes. `part` is the GPT of this process.

    A call of the Pipeline with the micro-batches of a step runs the forward and the backward pass.
    The methods hidden, logits and loss are for evaluation. On every process, these methods return
    the same results as the methods of GPT.
    """

    def __init__(self, part, mesh, is_tied, process):
        super().__init__()
        self.config = part.config
        self.part = part
        self.process = process
        self.group = mesh.get_group("pp")
        self.n_stages = mesh["pp"].size()
        self.index = mesh.get_local_rank("pp")  # index of this stage
        self.is_first = self.index == 0
        self.is_last = self.index == self.n_stages - 1
        self.size = None  # (n_micro, B, T) of the previous step
        self.schedule = None  # PyTorch's schedule for `size`, with buffers for all micro-batches
        self.names = None  # names of the metrics, in the order in which `forward` sends the values
        # If embedding and head are one matrix, the first and the last stage each hold a copy of the
        # matrix.
        self.has_tied = is_tied and (self.is_first or self.is_last)
        ends = mesh.mesh.flatten(1)[[0, -1]].t()  # (pipelines, 2): ranks of first and last stage
        self.tied_group, _ = dist.new_subgroups_by_enumeration(ends.tolist())
        keep_stage(part, self.index, self.n_stages)
        self.stage = Stage(part, process, self.is_last)

    def named_parameters(self, *args, **kwargs):
        """Yields the parameters of this process, with their names in the whole model."""
        return self.part.named_parameters(*args, **kwargs)

    def state_dict(self, **options):
        """Returns the state dict of this process's GPT, with the names of the whole model."""
        return self.part.state_dict(**options)

    def configure_optimizers(self, *args):
        """Returns the optimizers for the parameters of this process. args: as in model.py."""
        return self.part.configure_optimizers(*args)

    def forward(self, micro_batches, weights, scaler):
        """Runs the forward and the backward pass of a step.

        Returns {name: weighted sum over the micro-batches}. The loss has the name "train". The
        other names are the metrics that GPT.forward returns. micro_batches: list of (x, y), as in
        train_step of train_gpt2.py. weights: the result of Training.loss_weights. scaler: the
        gradient scaler.
        """
        n_micro = len(micro_batches)
        B, T = micro_batches[0][0].shape
        x = torch.cat([x for x, _ in micro_batches])  # (n_micro x B, T)
        y = torch.cat([y for _, y in micro_batches])  # (n_micro x B, T)
        self.metrics = {}  # the metrics of the step; only the last stage computes them
        zero = torch.zeros((), device=x.device)
        scaler.scale(zero)  # creates the scale factor, which stages without a loss also need
        size = (n_micro, B, T)
        if size != self.size:  # n_micro grows during the batch-size ramp-up
            self.schedule = None  # frees the buffers of the old schedule
            self.schedule = self.make_schedule(n_micro, B, T, scaler)
            self.size = size
        # The schedule passes `targets` to Stage.forward, and `target` as `weight` to scaled_loss.
        self.schedule.step(x, targets=y, target=weights, return_outputs=False)
        if self.names is None:  # in the first step
            self.names = self.gather_stages(list(self.metrics))[-1]
        values = torch.stack([self.metrics.get(name, zero) for name in self.names])
        dist.broadcast(values, group=self.group, group_src=self.n_stages - 1)
        return dict(zip(self.names, values))

    def make_schedule(self, n_micro, B, T, scaler):
        """Returns the 1F1B schedule for n_micro micro-batches of shape (B, T) per step."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        print0(f"pipeline: {self.n_stages} stages, {n_micro} micro-batches of {B}")
        # GPT.hidden keeps the residual stream in this dtype.
        is_bfloat16 = self.process.device.type == "cuda" and self.process.dtype == torch.bfloat16
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
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

        def scaled_loss(loss, weight):
            # Scales the loss as Training.accumulate of train_gpt2.py does. weight: (1,)
            add_metrics(self.metrics, loss, self.stage.more, weight[0])
            return scaler.scale(loss * weight[0])

        return Schedule1F1B(stage, n_micro, scaled_loss, scale_grads=False)

    def gather_stages(self, value):
        """Returns a list with the `value` of each stage. All stages must call this method."""
        values = [None] * self.n_stages
        dist.all_gather_object(values, value, group=self.group)
        return values

    def hidden(self, idx, *args, **kwargs):
        """Returns what GPT.hidden returns: ids (B, T) -> (B, T, C)."""
        shape = (*idx.shape, self.config.n_embd)
        x = idx
        for index in range(self.n_stages):
            x = self.on_stage(index, shape, "hidden", x, *args, **kwargs)  # (B, T, C)
        return x

    def logits(self, x):
        """Returns what GPT.logits returns: (..., C) -> (..., vocab_size)."""
        shape = (*x.shape[:-1], self.config.vocab_size)
        return self.on_stage(self.n_stages - 1, shape, "logits", x)

    def loss(self, x, targets, reduction="mean"):
        """Returns what GPT.loss returns: (B, T, C) and (B, T) -> scalar, or (B, T)."""
        shape = () if reduction == "mean" else targets.shape
        return self.on_stage(self.n_stages - 1, shape, "loss", x, targets, reduction)

    def on_stage(self, index, shape, method, *args, **kwargs):
        """Calls a method on stage `index`. All stages return the result, whose shape is `shape`."""
        if index == self.index:
            result = self.stage.call(method, *args, **kwargs).float().contiguous()
        else:
            result = torch.empty(shape, device=self.process.device)
        dist.broadcast(result, group=self.group, group_src=index)
        return result


class Stage(nn.Module):
    """A stage of a pipeline, which PyTorch's schedule calls.

    The first stage receives token ids, and all later stages receive the residual stream. The last
    stage returns the loss, and all earlier stages return the residual stream.
    """

    def __init__(self, part, process, is_last):
        super().__init__()
        self.part = part
        self.process = process
        self.is_last = is_last
        self.more = []  # [the third value of GPT.forward], or [] if there is no third value

    def forward(self, x, targets=None):
        """Runs the forward pass of training."""
        with self.process.autocast:
            if not self.is_last:
                return self.part.hidden(x)
            # The schedule passes only tensors to scaled_loss, so scaled_loss reads the third value
            # from self.more.
            _, loss, *self.more = self.part(x, targets)
            return loss

    def call(self, method, *args, **kwargs):
        """Calls a method of `part`. Before the call, FSDP all-gathers the parameters of `part`."""
        return getattr(self.part, method)(*args, **kwargs)


def send_to_rank0(stage, value, pipeline):
    """Sends a value from the stage with the index `stage` to rank 0. All stages must call this.

    value: on the sending stage, a tensor, or dicts and lists with tensors. Other stages pass None.
    Rank 0 returns the value, with its tensors on the CPU. Other ranks return None.
    """
    tensors = tree_leaves(value)
    # First sends copies on the meta device, which tell rank 0 the shapes and dtypes. Then sends one
    # tensor after the other, because pickling all tensors would take several times as long.
    outline = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), value)
    leaves, spec = tree_flatten(pipeline.gather_stages(outline)[stage])
    device = pipeline.process.device
    for i, leaf in enumerate(leaves):
        if torch.is_tensor(leaf):
            is_here = stage == pipeline.index
            tensor = tensors[i].to(device) if is_here else torch.empty_like(leaf, device=device)
            dist.broadcast(tensor, group=pipeline.group, group_src=stage)
            leaves[i] = tensor.cpu() if pipeline.process.is_main else None
    return tree_unflatten(leaves, spec) if pipeline.process.is_main else None


class NoPositions(nn.Module):
    """Replaces wpe on each stage except the first: later inputs already contain the positions."""

    def forward(self, pos):
        return 0


def keep_stage(model, stage, n_stages):
    """Removes the modules of other stages from a GPT. The remaining modules keep their names."""
    t = model.transformer
    first = first_block(stage, n_stages, model.config)
    last = first_block(stage + 1, n_stages, model.config)  # the first block of the next stage
    for i in range(len(t.h)):
        if not first <= i < last:
            delattr(t.h, str(i))  # del t.h[i] would rename the other blocks
    if stage > 0:
        t.wte = nn.Identity()
        t.wpe = NoPositions()
        t.drop = nn.Identity()
    if stage < n_stages - 1:
        t.ln_f = nn.Identity()
        model.lm_head = None


def first_block(stage, n_stages, config):
    """Returns the index of the first block of a stage, or n_layer if stage is n_stages."""
    n = config.n_layer
    if stage == n_stages:
        return n
    # The head takes as much time as this many blocks, so the last stage holds fewer blocks.
    head = config.vocab_size / (12 * config.n_embd)
    even = round(stage * (n + head) / n_stages)
    return min(n - n_stages + stage, max(stage, even))  # each stage gets at least one block
