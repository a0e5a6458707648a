"""Checks, before the first step, that GPT.loss is the cross-entropy of GPT.logits."""

from plaingpt.errors import UserError
from plaingpt.sampling import attention_for_many_shapes

import torch
import torch.nn.functional as F

MOST_COMPARED = 128  # check_loss compares the logits of at most this many positions


@torch.no_grad()
def check_loss(model, idx, autocast):
    """Raises UserError unless GPT.loss is the cross-entropy of GPT.logits.

    Training and validation call GPT.loss; benchmarks and generation call GPT.logits. If a user
    edits only one of these two methods, training and scoring use different models. Like validation,
    this function calls GPT.hidden in eval mode and with autocast.

    model: a GPT. idx: token ids, (1, T). autocast: a context manager for the call of GPT.hidden.
    """
    idx = idx[:, :MOST_COMPARED]  # (1, n); also used as targets, which may be any ids
    precision = torch.get_float32_matmul_precision()
    model.eval()
    with attention_for_many_shapes():  # torch.compile would take longer than this one forward pass
        with autocast:
            x = model.hidden(idx)  # (1, n, C)
        # In float32, without autocast, rounding errors stay below the threshold of the comparison
        # below, so only an edit can exceed the threshold. The factor 30 also reveals an edit that
        # changes only large logits, such as a soft-cap.
        torch.set_float32_matmul_precision("highest")
        x = 30 * x.float()
        losses = model.loss(x, idx, reduction="none")[0]  # (n)
        logits = model.logits(x)[0].float()  # (n, vocab_size)
        names = find_untrained(model, x, idx)
    torch.set_float32_matmul_precision(precision)
    model.train()
    expected = F.cross_entropy(logits, idx[0], reduction="none")  # (n)
    difference = (losses - expected).abs().max().item()
    what = None
    if difference > 1e-4 * (1 + logits.abs().max().item()):
        what = f"GPT.loss and the cross-entropy of GPT.logits differ by {difference:.2g} nats"
    elif names:
        what = f"GPT.logits uses {', '.join(names)}, but GPT.loss does not"
    if what:
        raise UserError(
            f"model.py: {what}; in GPT.loss, pass self.logits to loss_fn instead of "
            "self.lm_head.weight (if the loss is an auxiliary loss for training, add it in "
            "GPT.forward)"
        )


def find_untrained(model, x, targets):
    """Returns the names of the parameters that GPT.logits uses and GPT.loss does not use.

    Training would not change such a parameter. A bias of zero or a scale of one does not change the
    logits yet, so a comparison of losses cannot reveal such a parameter. x: hidden states,
    (1, n, C). targets: (1, n).
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inputs = [x.requires_grad_(), *parameters.values()]
    used = []
    with torch.enable_grad():
        loss = model.loss(x, targets)
        if isinstance(loss, tuple):  # an edited GPT.loss may also return metrics
            loss = loss[0]
        for result in (model.logits(x).sum(), loss):
            _, *gradients = torch.autograd.grad(result, inputs, allow_unused=True)
            used.append({name for name, g in zip(parameters, gradients) if g is not None})
    return sorted(used[0] - used[1])
