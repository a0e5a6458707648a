"""Muon: SGD with momentum and orthogonalized updates (Jordan et al. 2024)."""

import math

from plaingpt.device import has_bfloat16

import torch
import torch.distributed as dist

MOST_NUMBERS = 2**26  # maximum number of elements in a stack, such as 64 matrices of 1024 x 1024


class Muon(torch.optim.Optimizer):
    """Like torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but fast on every device and in
    several processes.

    torch.optim.Muon always uses bfloat16. On a device without instructions for bfloat16, bfloat16
    is about ten times as slow as float32, so this class uses float32 on such a device. The class
    also stacks matrices of the same shape, because on a GPU, launching the kernel that multiplies
    two small matrices takes longer than the multiplication itself.

    params: parameters, pairs (name, parameter) or groups, as for any PyTorch optimizer. All
    parameters must be matrices. n_stacked is the number of matrices that are stacked by rows in
    each parameter of a group, such as 3 for query, key and value. Muon orthogonalizes each of these
    matrices separately. If query, key and value were orthogonalized as one matrix, they would share
    their singular directions, and their updates would be smaller than in the code of Muon's
    authors.

    With DDP, each process orthogonalizes its share of the matrices and sends the results to the
    other processes, because orthogonalization takes most of Muon's time. Each process stores the
    momentum of all matrices, so a checkpoint does not depend on the number of processes.

    If the attribute found_inf is a tensor of 1.0, a step changes nothing.
    """

    def __init__(self, params, lr, weight_decay=0.1, momentum=0.95, n_stacked=1):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, n_stacked=n_stacked)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        stacks = {}  # {(momentum, rows, columns): [(p, group)]}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sides = [p.size(0) // group["n_stacked"], p.size(1)]
                    key = (group["momentum"], *sorted(sides))
                    stacks.setdefault(key, []).append((p, group))
        for (_, rows, columns), members in stacks.items():
            n = max(1, MOST_NUMBERS // (3 * rows * columns))
            for start in range(0, len(members), n):
                self.step_stack(members[start : start + n])

    def step_stack(self, members):
        """Takes a step for parameters with the same momentum and matrices of the same shape.

        members: [(p, group)].
        """
        parameters = [p for p, _ in members]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        skip = getattr(self, "found_inf", torch.zeros((), device=parameters[0].device)) > 0
        # In a skipped step, the buffer replaces the gradient, so the next lerp does not change the
        # buffer.
        gradients = [torch.where(skip, buffer, p.grad) for p, buffer in zip(parameters, buffers)]
        momentum = members[0][1]["momentum"]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        matrices = []  # the matrices of each parameter: (n_stacked, rows, columns)
        for (p, group), gradient, buffer in zip(members, gradients, buffers):
            update = gradient.lerp(buffer, momentum)  # Nesterov momentum
            if has_bfloat16(p.device):
                update = update.bfloat16()
            matrices.append(self.to_matrices(update, group["n_stacked"]))
        stack = self.orthogonalize(torch.cat(matrices))  # (n, rows, columns)
        stack = stack.where(~skip, 0)
        for (p, group), part in zip(members, stack.split([len(each) for each in matrices])):
            # The numbers in an orthogonal matrix have a mean square of 1 / columns. The factor
            # makes the root mean square of this update 0.2 lr, about as large as AdamW's.
            alpha = -0.2 * group["lr"] * math.sqrt(stack.size(2))
            p.mul_(torch.where(skip, 1, 1 - group["lr"] * group["weight_decay"]))
            p.add_(self.from_matrices(part, p), alpha=alpha)

    def to_matrices(self, x, n_stacked):
        """Returns the matrices that are stacked in a tensor: (n_stacked, rows, columns).

        Transposes the matrices if they have more rows than columns. x: a tensor with the shape of a
        parameter, (n_stacked * rows, columns).
        """
        x = x.unflatten(0, (n_stacked, -1))
        return x.mT if x.size(1) > x.size(2) else x

    def from_matrices(self, x, p):
        """Stacks the matrices x as in parameter p: the inverse of to_matrices."""
        return (x.mT if x.size(2) != p.size(1) else x).flatten(0, 1)

    def orthogonalize(self, stack):
        """Orthogonalizes n matrices, (n, rows, columns). All processes share the work."""
        n_processes = dist.get_world_size() if dist.is_initialized() else 1
        if n_processes == 1:
            return orthogonalize(stack)
        n = math.ceil(len(stack) / n_processes)  # matrices per process
        own = stack[n * dist.get_rank() :][:n]  # the last processes may have fewer matrices
        done = stack.new_zeros(n, *stack.shape[1:])
        done[: len(own)] = orthogonalize(own)
        all_done = stack.new_empty(n * n_processes, *stack.shape[1:])
        dist.all_gather_into_tensor(all_done, done)
        return all_done[: len(stack)]


def orthogonalize(x):
    """Approximately orthogonalizes matrices with five Newton-Schulz iterations.

    The iterations keep the singular vectors, and move the singular values close to 1. x: (n, rows,
    columns), with rows <= columns. Source: kellerjordan.github.io/posts/muon.
    """
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # singular values are now at most 1
    for _ in range(5):
        gram = x @ x.mT  # (n, rows, rows)
        factor = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, factor, x, beta=3.4445)
    return x
