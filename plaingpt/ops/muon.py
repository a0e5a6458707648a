"""Muon, which is SGD with momentum that makes its updates orthogonal (Jordan et al. 2024)."""

import math

from plaingpt.ops.precision import has_bfloat16

import torch
import torch.distributed as dist


class Muon(torch.optim.Optimizer):
    """Like torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but fast on every device and in
    several processes.

    torch.optim.Muon computes in bfloat16. On a device without instructions for bfloat16, that takes
    about ten times as long as float32. This class uses float32 there.

    params: pairs of a name and a matrix. The c_attn of attention is three matrices, those of query,
    key and value, and each of them is made orthogonal by itself. All processes must make a Muon.

    With DDP, each process updates its share of the matrices and sends them to the others, because
    the orthogonalization takes most of the time. All processes keep the momentum of all matrices,
    so that a checkpoint fits any number of processes.
    """

    def __init__(self, params, lr, weight_decay=0.1, momentum=0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.n_processes = count_copies(self.param_groups[0])

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        rank = dist.get_rank() if self.n_processes > 1 else 0
        named = zip(group["param_names"], group["params"])
        matrices = [(name, p) for name, p in named if p.grad is not None]
        # The largest matrices come first, so that all shares take about the same time.
        matrices.sort(key=lambda pair: -pair[1].numel())
        for i, (name, p) in enumerate(matrices):
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            if i % self.n_processes == rank:
                update = p.grad.lerp(momentum, group["momentum"])  # Nesterov momentum
                if has_bfloat16(p.device):
                    update = update.bfloat16()
                is_qkv = "c_attn" in name and p.size(0) == 3 * p.size(1)
                update = orthogonalize_qkv(update) if is_qkv else orthogonalize(update)
                longer_side = p.size(1) if is_qkv else max(p.shape)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                # The mean square of an orthogonal matrix is 1 / its longer side. So the root mean
                # square of the update is 0.2 lr, about that of AdamW.
                p.add_(update, alpha=-0.2 * group["lr"] * math.sqrt(longer_side))
        if self.n_processes > 1:
            for i, (_, p) in enumerate(matrices):
                dist.broadcast(p, i % self.n_processes)


def count_copies(group):
    """Returns how many processes have a copy of these parameters: all with DDP, otherwise one."""
    if not dist.is_initialized() or hasattr(group["params"][0], "placements"):  # they are DTensors
        return 1
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, group["param_names"])
    # The stages of a pipeline have parameters of different names.
    return len(names) if all(each == names[0] for each in names) else 1


def orthogonalize_qkv(x):
    """Makes query, key and value nearly orthogonal, each by itself. x: (3C, C), also a DTensor.

    Orthogonal together, the three would share their directions, and get smaller updates than Muon's
    authors give them.
    """
    tp = 1
    if hasattr(x, "device_mesh"):
        from torch.distributed.tensor import Replicate

        mesh = x.device_mesh
        x = x.redistribute(placements=[Replicate()] * mesh.ndim)  # the whole, on each process
        if "tp" in mesh.mesh_dim_names:  # the rows are then tp parts of whole heads
            tp = mesh["tp"].size()
    qkv = x.unflatten(0, (tp, 3, -1)).transpose(0, 1).flatten(1, 2)  # (3, C, C)
    qkv = torch.stack([orthogonalize(matrix) for matrix in qkv.unbind()])
    return qkv.unflatten(1, (tp, -1)).transpose(0, 1).flatten(0, 2)  # (3C, C)


def orthogonalize(x):
    """Makes a matrix nearly orthogonal, by five steps of Newton-Schulz.

    They keep the singular vectors and bring the singular values near 1. x: (rows, columns).
    The source is kellerjordan.github.io/posts/muon.
    """
    if x.size(0) > x.size(1):
        return orthogonalize(x.T).T
    x = x / x.norm().clamp(min=1e-7)  # now no singular value is above 1
    for _ in range(5):
        gram = x @ x.T
        factor = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, factor, x, beta=3.4445)
    return x
