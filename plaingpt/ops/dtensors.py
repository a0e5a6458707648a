"""DTensors: tensors of which each process holds a part."""


def is_dtensor(tensor):
    """Returns whether a tensor or a parameter is a DTensor."""
    return hasattr(tensor, "placements")


def count_tp(tensor):
    """Returns the number of processes over which tensor parallelism splits a tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh["tp"].size() if mesh is not None and "tp" in mesh.mesh_dim_names else 1


def reorder_rows(x, n_stacked, tp, back=False):
    """Reorders the rows of stacked matrices into tp parts.

    Each part contains the same whole heads of every matrix. x: (n_stacked * rows, ...). back:
    whether to restore the original order.
    """
    shape = (tp, n_stacked, -1) if back else (n_stacked, tp, -1)
    return x.unflatten(0, shape).transpose(0, 1).flatten(0, 2)
