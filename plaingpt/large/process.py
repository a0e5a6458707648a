"""A process that holds a part of a model."""

from dataclasses import dataclass

from plaingpt.process import Process

import torch.distributed as dist


@dataclass
class SplitProcess(Process):
    """A Process of a program with --tp or --pp, in which n_parts processes compute one model.

    The n_parts processes read the same share of the data. Therefore, all n_parts processes have the
    same `rank`, and world_size is the number of shares.
    """

    n_parts: int = 1

    @property
    def is_main(self):
        return dist.get_rank() == 0

    @property
    def n_processes(self):
        return self.world_size * self.n_parts

    def sum(self, tensor):
        """Returns the sum of the tensors of all shares, in which each share counts once."""
        tensor = tensor.to(self.device, copy=True)  # a copy, because the next lines change it
        dist.all_reduce(tensor)
        # The n_parts processes of a share have equal values, and all_reduce has added all n_parts
        # values.
        return tensor.div_(self.n_parts)
