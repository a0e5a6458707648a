"""Muon for parameters that are split over processes."""

from plaingpt.large.tensor_parallel import count_parts, reorder_rows
from plaingpt.muon import Muon, orthogonalize

from torch.distributed.tensor import distribute_tensor


class ShardedMuon(Muon):
    """Muon for DTensors. Each process gathers and orthogonalizes whole matrices."""

    def to_matrices(self, x, n_stacked):
        n_parts = count_parts(x)
        x = reorder_rows(x.full_tensor(), n_stacked, n_parts, back=True)
        return super().to_matrices(x, n_stacked)

    def from_matrices(self, x, p):
        n_stacked = len(x)
        x = reorder_rows(super().from_matrices(x, p), n_stacked, count_parts(p))
        return distribute_tensor(x.contiguous(), p.device_mesh, p.placements, src_data_rank=None)

    def orthogonalize(self, stack):
        # The processes do not share the work, because each pipeline stage has different matrices.
        return orthogonalize(stack)
