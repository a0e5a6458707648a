"""Computes logits and their cross-entropy in one function, one chunk of positions at a time.

Only the logits of one chunk are in memory. In float32, N positions need N x V x 4 bytes: with 64
sequences of T = 1024 and V = 50257, all logits would need 13.2 GB, and a chunk of 16384 positions
needs 3.3 GB. If matrix multiplications are bfloat16, a chunk also needs 1.65 GB for bfloat16
logits, which the gradient of the logits then overwrites. With torch.compile, a chunk needs only the
1.65 GB, because float32 logits exist only inside a kernel.

If the head is a weight, the forward pass computes both the loss and the gradients of a chunk (Hsu
et al. 2024, "Liger Kernel", arXiv:2410.10989, section 3.2). If the head is a function, the backward
pass recomputes the logits of each chunk.
"""

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_SIZE = {"cpu": 384, "cuda": 16384, "mps": 8192}  # positions in a chunk


class ChunkedCrossEntropy(torch.nn.Module):
    """Computes the cross-entropy in nats of an output head with V = vocab_size rows, in chunks."""

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, x, targets, head, reduction="mean"):
        """Returns the cross-entropy of hidden states x (B, T, C) and targets (B, T).

        head: the weight (V, C) if the logits are x @ head.T. For any other logits, a function
        (N, C) -> (N, V). Both the forward and the backward pass call this function for each chunk,
        so a function is slower than a weight.

        The loss ignores positions with the target -100. All other targets must be in the
        vocabulary. reduction: "mean" returns the mean over all positions that are not ignored, or 0
        if there are none. "none" returns the loss at each position, (B, T), which is 0 at an
        ignored position. These losses cannot be differentiated: compute them in a block
        `with torch.no_grad():`.
        """
        shape = targets.shape
        x = x.flatten(0, 1)  # (N, C)
        targets = targets.flatten()  # (N)
        counted = targets != -100  # (N); -100 is PyTorch's ignore_index
        in_range = (0 <= targets) & (targets < self.vocab_size) | ~counted  # (N)
        if x.device.type == "cpu":  # on CUDA, a failed assertion would make the GPU unusable
            torch._assert_async(in_range.all(), "a target is outside the vocabulary")
        if torch.is_grad_enabled() and reduction == "none":
            raise ValueError(
                'the loss with reduction="none" cannot be differentiated; compute it in a block '
                "`with torch.no_grad():`"
            )
        losses, mean = self.losses(x, targets, counted, head)
        return mean if reduction == "mean" else losses.view(shape)

    def losses(self, x, targets, counted, head):
        """Returns the loss at each position, (N), and the mean loss of the counted positions.

        The loss is 0 at a position that is not counted. The mean is the sum of the losses, divided
        by the number of counted positions. x: (N, C). targets: (N). counted: (N), bool. head: as in
        forward.
        """
        if torch.is_tensor(head):
            return LinearCrossEntropy.apply(x, head, targets, counted, torch.is_grad_enabled())

        def losses_of_chunk(x, targets):
            return F.cross_entropy(head(x).float(), targets, reduction="none")  # 0 if ignored

        losses = recomputed_losses(x, targets, self.vocab_size, losses_of_chunk)
        return losses, losses.sum() / counted.sum().clamp(min=1)  # 0 if no target is counted


def recomputed_losses(x, targets, vocab_size, losses_of_chunk):
    """Returns the loss at each position, (N). Only the logits of one chunk are in memory at a time.

    x: (N, C). targets: (N). losses_of_chunk: a function that computes the losses for some rows of x
    and targets. The backward pass calls this function again.
    """
    rows = rows_of_chunk(x.device.type, matmul_dtype(x), vocab_size)
    losses = []
    for x_chunk, y in zip(x.split(rows), targets.split(rows)):
        losses.append(checkpoint(losses_of_chunk, x_chunk, y, use_reentrant=False))
    return torch.cat(losses)


def matmul_dtype(x):
    """Returns the dtype in which x is multiplied: autocast's dtype, or x.dtype without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rows_of_chunk(device, dtype, V):
    """Returns the number of positions in a chunk.

    device: the device type. dtype: the dtype of matrix multiplications. V: vocab_size.
    """
    rows = CHUNK_SIZE[device]
    if device == "cpu" and torch.compiler.is_compiling():
        # torch.compile unrolls the loop. On a CPU, more than a few chunks take minutes to compile.
        rows *= 4
    if dtype == torch.float16:
        # p.t() @ x_chunk would overflow if all positions of a large chunk had the same target.
        rows = min(rows, 2048)
    # If V is above 65,536, a chunk contains fewer positions, so that its logits need as much memory
    # as with V = 65,536.
    return max(1, rows * 2**16 // max(V, 2**16))


class LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of the logits x @ weight.T, computed in chunks of positions.

    forward returns the two results of ChunkedCrossEntropy.losses. x: (N, C). weight: (V, C).
    targets: (N). counted: (N), bool. with_gradient: whether forward also computes the gradients of
    x and weight, which backward then returns.

    Matrix multiplications use autocast's dtype. The sums are float32, because sums of 50,000 terms
    would be inexact in bfloat16. The gradients are divided by n, the number of counted targets,
    only in backward, because float16 gradients could underflow if forward divided them by n.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, counted, with_gradient):
        device = x.device.type
        V = weight.size(0)
        dtype = matmul_dtype(x)
        # Pads the weight to a multiple of 128 rows, because matrix multiplications use tiles.
        w = weight.new_zeros(V + -V % 128, weight.size(1), dtype=dtype)  # (padded V, C)
        w[:V] = weight
        losses = torch.zeros(len(x), device=x.device)
        if with_gradient:
            dx = torch.empty_like(x)  # (N, C)
            dw = torch.zeros(w.shape, device=x.device)  # (padded V, C)
        rows = rows_of_chunk(device, dtype, V)
        for start in range(0, len(x), rows):
            x_chunk = x[start : start + rows].to(dtype)  # (rows, C)
            y = targets[start : start + rows, None]  # (rows, 1)
            ignored = ~counted[start : start + rows, None]  # (rows, 1)
            logits = x_chunk @ w.t()  # (rows, padded V)
            logits[:, V:] = -math.inf
            p = logits.float()
            p -= p.amax(1, keepdim=True)
            is_id = (0 <= y) & (y < V)  # (rows, 1): False if the target is ignored
            y = y.where(is_id, 0)
            target_logit = p.gather(1, y) * is_id  # (rows, 1)
            # cat and split change no number. Without them, torch.compile gathers the logits of the
            # targets of all chunks in one kernel, at the end. All logits stay in memory until then,
            # and the kernel's 32-bit indices overflow if N x V is above 2^31 ("illegal memory
            # access" on CUDA).
            sums = torch.cat([p.exp_().sum(1, keepdim=True), target_logit], dim=1)  # (rows, 2)
            denominator, target_logit = sums.split(1, dim=1)  # (rows, 1) each
            loss = denominator.log() - target_logit  # (rows, 1)
            losses[start : start + rows] = loss.masked_fill(ignored, 0)[:, 0]
            if with_gradient:  # the gradient w.r.t. the logits is softmax - one_hot(target)
                p.div_(denominator.masked_fill(ignored, math.inf))  # the gradient is 0 if ignored
                if torch.compiler.is_compiling():  # the compiler can fuse this, unlike scatter_add_
                    p = p - (is_id & (torch.arange(p.size(1), device=p.device) == y)).float()
                else:
                    p.scatter_add_(1, y, -is_id.float())
                p = logits.copy_(p)  # (rows, padded V), in the dtype of the logits
                dx[start : start + rows] = p @ w
                dw += p.t() @ x_chunk  # (padded V, C)
        n = counted.sum().clamp(min=1)  # the mean is 0 if no target is counted
        if with_gradient:
            ctx.save_for_backward(dx, dw[:V], n)
        ctx.mark_non_differentiable(losses)
        return losses, losses.sum() / n

    @staticmethod
    def backward(ctx, _, grad):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph is True
            raise RuntimeError(
                "the loss in chunks has no second derivative; compute it from the logits of all "
                "positions"
            )
        dx, dw, n = ctx.saved_tensors
        return grad / n * dx, grad / n * dw, None, None, None
