"""DTensors: tensors of which each process has a part."""


def scatter(name, whole, p, device):
    """Returns this process's part of a whole tensor, on the device, split like parameter p."""
    if whole.shape != p.shape or not is_dtensor(p):  # the shape of AdamW's count of steps is ()
        return whole.to(device, copy=True)  # a copy lets the file of the checkpoint go
    from torch.distributed.tensor import distribute_tensor

    whole = by_heads(name, whole, p.device_mesh)
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).clone()


def by_heads(name, tensor, mesh, back=False):
    """Reorders c_attn's rows (first q, then k, then v) into tp parts of whole heads, or back."""
    if ".c_attn." not in name or "tp" not in mesh.mesh_dim_names:
        return tensor
    tp = mesh["tp"].size()
    shape = (tp, 3, -1) if back else (3, tp, -1)
    return tensor.unflatten(0, shape).transpose(0, 1).flatten(0, 2)  # (3C, ...)


def is_dtensor(tensor):
    """Returns whether a tensor or a parameter is a DTensor."""
    return hasattr(tensor, "placements")
