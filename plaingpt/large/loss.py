"""The cross-entropy with tensor parallelism, which splits the vocabulary over processes.

Source: Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3.
"""

import math

from plaingpt.loss import ChunkedCrossEntropy, recomputed_losses

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate


class ParallelCrossEntropy(ChunkedCrossEntropy):
    """Computes the cross-entropy of an output head whose rows are split over a mesh of processes.

    Each process computes the logits of its part of the vocabulary, one chunk of positions at a
    time, and stores only the logits of one chunk. The backward pass recomputes the logits.
    """

    def __init__(self, vocab_size, mesh):
        super().__init__(vocab_size)
        self.mesh = mesh
        rows_per_process = math.ceil(vocab_size / mesh.size())
        # The part of the vocabulary on this process begins with this id.
        self.first_id = rows_per_process * mesh.get_local_rank()

    def losses(self, x, targets, counted, head):
        """Returns the same results as ChunkedCrossEntropy.losses. A weight `head` is a DTensor."""
        if not torch.is_tensor(head):  # `head` returns the logits of all ids
            return super().losses(x, targets, counted, head)
        weight = head.to_local()  # (V of this process, C)
        V = len(weight)
        # Pads the weight to a multiple of 128 rows, because matrix multiplications use tiles.
        weight = F.pad(weight, (0, 0, 0, -V % 128))
        # In the backward pass, the gradient of x is the sum of the gradients of all processes.
        x = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])

        def losses_of_chunk(x, targets):
            logits = F.linear(x, weight)[:, :V].float()  # (rows, V)
            logits = logits - self.max_of_all(logits.detach().amax(1, keepdim=True))
            y = targets[:, None] - self.first_id  # (rows, 1)
            local = (0 <= y) & (y < V)  # (rows, 1): True if this process has the target's logit
            target_logit = logits.gather(1, y.where(local, 0)) * local  # (rows, 1)
            sums = torch.cat([logits.exp().sum(1, keepdim=True), target_logit], dim=1)  # (rows, 2)
            denominator, target_logit = self.sum_of_all(sums).unbind(1)  # (rows) each
            return (denominator.log() - target_logit).masked_fill(targets == -100, 0)

        losses = recomputed_losses(x, targets, V, losses_of_chunk)
        return losses, losses.sum() / counted.sum().clamp(min=1)  # 0 if no target is counted

    def max_of_all(self, x):
        """Returns the elementwise maximum of x over the processes. x has no gradient."""
        return DTensor.from_local(x, self.mesh, [Partial("max")]).full_tensor()

    def sum_of_all(self, x):
        """Returns the sum of x over the processes. The gradient of x is the gradient of the sum."""
        return DTensor.from_local(x, self.mesh, [Partial()]).full_tensor()
