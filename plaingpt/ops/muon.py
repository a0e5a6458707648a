"""Muon, which is SGD with momentum that makes its updates orthogonal (Jordan et al. 2024)."""

import math

from plaingpt.ops.precision import has_bfloat16

import torch
import torch.distributed as dist

MOST_NUMBERS = 2**26  # in a stack of matrices, such as 64 of 1024 x 1024


class Muon(torch.optim.Optimizer):
    """Like torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but fast on every device and in
    several processes.

    torch.optim.Muon computes in bfloat16. On a device without instructions for bfloat16, that takes
    about ten times as long as float32. This class uses float32 there. It computes matrices of one
    shape together, because a GPU needs longer to start a product of small matrices than to compute
    it.

    params: pairs of a name and a matrix. The c_attn of attention is three matrices, those of query,
    key and value, and each of them is made orthogonal by itself. All processes must make a Muon.

    With DDP, each process makes its share of the matrices orthogonal and sends it to the others,
    because this takes most of the time. All processes keep the momentum of all matrices, so that a
    checkpoint fits any number of processes.
    """

    def __init__(self, params, lr, weight_decay=0.1, momentum=0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.n_processes = count_copies(self.param_groups[0])

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        stacks = {}  # {(rows, columns): [(name, p)]}
        for name, p in zip(group["param_names"], group["params"]):
            if p.grad is not None:
                sides = [p.size(1) if is_qkv(name, p) else p.size(0), p.size(1)]
                stacks.setdefault(tuple(sorted(sides)), []).append((name, p))
        for (rows, columns), named in stacks.items():
            n = max(1, MOST_NUMBERS // (3 * rows * columns))
            for start in range(0, len(named), n):
                self.step_stack(named[start : start + n], group)

    def step_stack(self, named, group):
        """Makes the step of parameters whose matrices have one shape. named: pairs as in params."""
        parameters = [p for _, p in named]
        gradients = [p.grad for p in parameters]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        matrices = []  # (1 or 3, rows, columns) of each parameter
        for (name, p), gradient, momentum in zip(named, gradients, momenta):
            update = gradient.lerp(momentum, group["momentum"])  # Nesterov momentum
            if has_bfloat16(p.device):
                update = update.bfloat16()
            matrices.append(to_matrices(name, update))
        stack = self.orthogonalize(torch.cat(matrices))  # (n, rows, columns)
        # The mean square of an orthogonal matrix is 1 / its longer side. So the root mean square of
        # the update is 0.2 lr, about that of AdamW.
        alpha = -0.2 * group["lr"] * math.sqrt(stack.size(2))
        parts = stack.split([len(each) for each in matrices])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for (name, p), part in zip(named, parts):
            p.add_(from_matrices(name, part, p), alpha=alpha)

    def orthogonalize(self, stack):
        """Makes the matrices of a stack (n, rows, columns) orthogonal. Processes share the work."""
        if self.n_processes == 1:
            return orthogonalize(stack)
        n = math.ceil(len(stack) / self.n_processes)  # of each process
        own = stack[n * dist.get_rank() :][:n]  # the last processes may have fewer
        done = stack.new_zeros(n, *stack.shape[1:])
        done[: len(own)] = orthogonalize(own)
        all_done = stack.new_empty(n * self.n_processes, *stack.shape[1:])
        dist.all_gather_into_tensor(all_done, done)
        return all_done[: len(stack)]


def count_copies(group):
    """Returns how many processes have a copy of these parameters: all with DDP, otherwise one."""
    if not dist.is_initialized() or hasattr(group["params"][0], "placements"):  # they are DTensors
        return 1
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, group["param_names"])
    # The stages of a pipeline have parameters of different names.
    return len(names) if all(each == names[0] for each in names) else 1


def is_qkv(name, p):
    """Returns whether a parameter is the matrices of query, key and value, one below the other."""
    return "c_attn" in name and p.size(0) == 3 * p.size(1)


def to_matrices(name, x):
    """Returns the matrices of a parameter, (1 or 3, rows, columns), with rows <= columns.

    Orthogonal together, query, key and value would share their directions, and get smaller updates
    than Muon's authors give them. x: (rows, columns); of a DTensor, this takes the whole.
    """
    tp = count_tp(x)
    if hasattr(x, "placements"):
        x = x.full_tensor()
    if is_qkv(name, x):  # with TP, the rows are tp parts of whole heads
        return x.unflatten(0, (tp, 3, -1)).transpose(0, 1).flatten(1, 2)  # (3, C, C)
    return (x.T if x.size(0) > x.size(1) else x)[None]  # (1, rows, columns)


def from_matrices(name, x, p):
    """The inverse of to_matrices: (1 or 3, rows, columns) -> a tensor that is split as p is."""
    if is_qkv(name, p):
        x = x.unflatten(1, (count_tp(p), -1)).transpose(0, 1).flatten(0, 2)  # (3C, C)
    else:
        x = x[0].T if p.size(0) > p.size(1) else x[0]
    if hasattr(p, "placements"):
        from torch.distributed.tensor import distribute_tensor

        x = distribute_tensor(x.contiguous(), p.device_mesh, p.placements, src_data_rank=None)
    return x


def count_tp(x):
    """Returns over how many processes tensor parallelism splits a tensor."""
    mesh = getattr(x, "device_mesh", None)
    return mesh["tp"].size() if mesh is not None and "tp" in mesh.mesh_dim_names else 1


def orthogonalize(x):
    """Makes matrices nearly orthogonal, by five steps of Newton-Schulz.

    They keep the singular vectors and bring the singular values near 1. x: (n, rows, columns), with
    rows <= columns. The source is kellerjordan.github.io/posts/muon.
    """
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # now no singular value is above 1
    for _ in range(5):
        gram = x @ x.mT  # (n, rows, rows)
        factor = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, factor, x, beta=3.4445)
    return x
