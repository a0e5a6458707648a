"""Tests lesson/check.py: right answers pass, and a sentence explains each common mistake."""

import re
import runpy

import pytest
from conftest import ROOT

CHECK = runpy.run_path(str(ROOT / "lesson" / "check.py"))
NUMBERS = sorted(CHECK["CHECKS"])


def solution(number):
    return CHECK["find"](CHECK["SOLUTIONS"], number).read_text(encoding="utf-8")


def sentence_about(number, text):
    """Returns None if the answer in `text` is right, and "open" if it is not written yet.

    Otherwise, returns a sentence about the mistake.
    """
    return CHECK["check"](number, text, CHECK["find"](CHECK["TASKS"], number))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_task_is_open_and_its_solution_is_right(number):
    task = CHECK["find"](CHECK["TASKS"], number)
    assert task.name == CHECK["find"](CHECK["SOLUTIONS"], number).name
    text = task.read_text(encoding="utf-8")
    assert text.startswith('"""') and f"lesson/check.py {number}\n" in text
    assert sentence_about(number, text) == "open"
    assert sentence_about(number, solution(number)) is None


# Common mistakes, as edits of our solutions: (number of the task, old text, new text, a part of the
# sentence about the mistake).
MISTAKES = [
    # 01: cross-entropy
    ("01", "shifted = logits - largest", "shifted = logits", "exp(1000) is inf"),
    ("01", "logits.max(dim=2, keepdim=True).values", "logits.max()", "its own maximum"),
    ("01", ".mean()", ".sum()", "the sum over the positions, not their mean"),
    ("01", "(log_sum - of_target)", "(of_target - log_sum)", "the loss is negative"),
    (
        "01",
        "return (log_sum - of_target)",
        "return (-((of_target - log_sum).exp() + 1e-9).log())",
        "is 20.7233 and not 200",
    ),
    ("01", ".mean()", ".mean().item()", "returns float, not a tensor of shape ()"),
    ("01", ".mean()", ".mean().detach()", "the loss has no gradient"),
    ("01", "shifted = logits - largest", "shifted = logits.sub_(largest)", "of its caller"),
    (
        "01",
        "shifted.gather(",
        "logits.gather(",
        "in the sum, but not from the logit of the target",
    ),
    (
        "01",
        "    return (",
        "    log_sum, of_target = log_sum[:, :-1], shifted[:, :-1].gather(2, targets[:, 1:, None])"
        "[..., 0]\n    return (",
        "the targets are shifted by one position",
    ),
    # 02: the mask
    (
        "02",
        "scores.masked_fill(is_later, -torch.inf)",
        "scores",
        "token 1 changes: the mask is missing",
    ),
    ("02", "triu(1)", "triu(2)", "position 0 looks at position 1, but not at position 2"),
    ("02", "triu(1)", "triu(0)", "row 0 is nan"),
    ("02", "-torch.inf", "0", "a masked score is 0"),
    ("02", "-torch.inf", "-10", "a masked score is -10, but exp(-10) = 4.5e-05, so its weight"),
    ("02", "-torch.inf", "-20", "a masked score is -20, but exp(-20) = 2.1e-09, so its weight"),
    (
        "02",
        "scores.masked_fill(is_later, -torch.inf)",
        "(scores + is_later * -10)",
        "position 0 looks at position 1: the mask adds -10 to the scores of later positions",
    ),
    (
        "02",
        "scores.masked_fill(is_later, -torch.inf)",
        "(scores + is_later * -100)",
        "position 0 looks at position 1 if its score is 200: the mask adds a number",
    ),
    ("02", "triu(1)", "tril(-1)", "hides earlier positions"),
    ("02", "softmax(dim=2)", "softmax(dim=1)", "the columns add up to 1"),
    (
        "02",
        "scores.masked_fill(is_later, -torch.inf).softmax(dim=2)",
        "scores.softmax(dim=2).masked_fill(is_later, 0)",
        "not to 1: the mask comes after the softmax",
    ),
    ("02", ".softmax(dim=2)", "", "is the softmax missing?"),
    (
        "02",
        "return scores.masked_fill(is_later, -torch.inf).softmax(dim=2)",
        "w = scores.softmax(dim=2).tril()\n    return w / w.sum(dim=2, keepdim=True)",
        "the scores of row 0 are [0, 200], its weights are [nan, nan] and not [1, 0]",
    ),
    (
        "02",
        "return scores.masked_fill(is_later, -torch.inf).softmax(dim=2)",
        "w = scores.exp().tril()\n    return w / w.sum(dim=2, keepdim=True)",
        "the scores of row 1 are [200, 0], its weights are [nan, 0.0] and not [1, 0]",
    ),
    (
        "02",
        "return scores.masked_fill(is_later, -torch.inf).softmax(dim=2)",
        "w = scores.softmax(dim=2).tril()\n    return w / (w.sum(dim=2, keepdim=True) + 1e-6)",
        "row 0 adds up to 0.99998",
    ),
    (
        "02",
        "scores.masked_fill(is_later, -torch.inf)",
        "(scores + is_later * -torch.inf)",
        "0 * (-inf) is nan",
    ),
    ("02", "(is_later,", "(~is_later,", "the last row is nan: all its scores are -inf"),
    ("02", "softmax(dim=2)", "softmax(dim=0)", "all rows except the last one are nan"),
    # 03: heads
    (
        "03",
        "view(B, T, n_head, C // n_head).transpose(1, 2)",
        "view(B, n_head, T, C // n_head)",
        "view(B, n_head, T, hs) mixes the positions",
    ),
    (
        "03",
        "y.transpose(1, 2).flatten(2)",
        "y.reshape(B, T, C)",
        "the heads are concatenated wrong",
    ),
    ("03", "sqrt(C // n_head)", "sqrt(C)", "divided by sqrt(C)"),
    ("03", " / math.sqrt(C // n_head)", "", "not divided by sqrt(hs)"),
    ("03", "scores.masked_fill(is_later, -math.inf)", "scores", "position 0 changes if token 1"),
    ("03", "triu(1)", "triu(2)", "if token 1 changes: the mask is shifted"),
    ("03", "    q = q.view", "    n_head = 1\n    q = q.view", "there is only one head"),
    (
        "03",
        "softmax(dim=3)",
        "softmax(dim=2)",
        "softmax runs over the queries, not over the keys",
    ),
    ("03", "softmax(dim=3)", "softmax(dim=1)", "softmax does not run over the positions"),
    ("03", "triu(1)", "triu(0)", "row 0 is nan"),
    (
        "03",
        "    q = q.view",
        "    q = q * n_head**0.5\n    n_head = 1\n    q = q.view",
        "there is only one head, which uses all C channels",
    ),
    (
        "03",
        "sqrt(C // n_head)",
        "sqrt(4)",
        "wrong for (B, T, C) = (1, 7, 8) with n_head = 1",
    ),
    (
        "03",
        "view(B, T, n_head, C // n_head)",
        "view(B, T, C // n_head, n_head)",
        "there are 4 heads of 3 channels",
    ),
    ("03", "q @ k.transpose(2, 3)", "k @ q.transpose(2, 3)", "Are q and k swapped?"),
    ("03", "    k = k.view", "    k = k.roll(1, 2)\n    k = k.view", "belong to different heads"),
    ("03", "    v = v.view", "    v = v.roll(-1, 1)\n    v = v.view", "if token 1 changes in v"),
    ("03", "    k = k.view", "    k = k * (torch.arange(C) < 11)\n    k = k.view", "has no effect"),
    (
        "03",
        "scores.masked_fill(is_later, -math.inf)",
        "(scores * math.sqrt(C // n_head))",
        "there are 2 mistakes: (1) the scores are not divided by sqrt(hs); (2) position 0 changes "
        "if token 1 changes: the mask is missing",
    ),
    (
        "03",
        "softmax(dim=3)  # (B, nh, T, T)\n    y = weights @ v  # (B, nh, T, hs)\n",
        "softmax(dim=2)\n    y = weights @ v\n    return y.reshape(B, T, C)\n",
        "there are 2 mistakes: (1) the heads are concatenated wrong",
    ),
    (
        "03",
        "scores.masked_fill(is_later, -math.inf).softmax(dim=3)",
        "scores.softmax(dim=3).masked_fill(is_later, 0)",
        "the mask comes after softmax",
    ),
    ("03", "softmax(dim=3)", "softmax(dim=3) ** 2", "look at the scores and the softmax"),
    # 04: initialization
    ("04", " / math.sqrt(2 * n_layer)", "", "would grow with n_layer"),
    ("04", "sqrt(2 * n_layer)", "sqrt(n_layer)", "8 blocks add 16 outputs"),
    ("04", "math.sqrt(2 * n_layer)", "(2 * n_layer)", "a root is missing"),
    ("04", "math.sqrt(2 * n_layer)", "4", "does not change with n_layer. With n_layer = 3"),
    ("04", '"c_proj.weight"', '"attn.c_proj.weight"', "h.0.mlp.c_proj.weight has a standard"),
    ("04", "p.dim() == 2", "True", "h.0.ln_1.weight is not 1"),
    ("04", "nn.init.zeros_(p)", "pass", "h.0.attn.c_attn.bias is not 0"),
    (
        "04",
        '        if name.endswith("bias"):',
        '        nn.init.torch.manual_seed(1)\n        if name.endswith("bias"):',
        "have the same values: set the random seed once",
    ),
    (
        "04",
        "    for name, p in",
        "    return\n    for name, p in",
        "change the parameters themselves",
    ),
    (
        "04",
        "        elif p.dim() == 2:",
        '        elif name.startswith("w"):\n            pass\n        elif p.dim() == 2:',
        "skips wte.weight, or changes a copy of it. Embeddings are matrices, too",
    ),
    (
        "04",
        "nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer))",
        "p = 0.005 * p",
        "h.0.attn.c_proj.weight still has PyTorch's initial values, but other matrices",
    ),
    # 05: AdamW
    ("05", "m_hat = m / (1 - beta1**step)", "m_hat = m", "m is not divided by 1 - beta1^step"),
    ("05", "v_hat = v / (1 - beta2**step)", "v_hat = v", "v is not divided by 1 - beta2^step"),
    ("05", "**step", "**(step + 1)", "uses step + 1"),
    ("05", "v_hat.sqrt() + eps", "(v_hat + eps).sqrt()", "inside the root"),
    (
        "05",
        "p = p * (1 - lr * weight_decay)",
        "grad = grad + weight_decay * p",
        "step 1 of a matrix: the decay is added to the gradient",
    ),
    ("05", "if p.dim() == 2", "if True", "the vector also decays"),
    ("05", "lr * weight_decay", "weight_decay", "the decay is not multiplied by lr"),
    ("05", "v_hat.sqrt()", "v.sqrt() / (1 - beta2**step)", "v_hat is under the root"),
    ("05", "eps), m, v", "eps), m_hat, v_hat", "already divided by the bias correction"),
    ("05", "beta1**step", "beta1", "m is divided by 1 - beta1, and not"),
    ("05", "beta2**step", "beta1**step", "The returned m is right, and v is right"),
    ("05", "grad**2", "m**2", "The returned m is right, and v is wrong"),
    ("05", "(1 - beta1) * grad", "beta1 * grad", "The returned m is wrong, and v is right"),
    ("05", "beta2**step", "beta2 * step", "step 2 of a matrix: p contains nan"),
    (
        "05",
        "    if p.dim() == 2",
        "    beta1, beta2 = beta2, beta1\n    if p.dim() == 2",
        "p is right, but the returned m is wrong: beta1 and beta2 are swapped",
    ),
    (
        "05",
        "    m_hat = ",
        "    beta1, beta2 = beta2, beta1\n    m_hat = ",
        "beta1 and beta2 are swapped in the bias correction",
    ),
    (
        "05",
        "    m = beta1 * m + (1 - beta1) * grad\n    v = beta2 * v + (1 - beta2) * grad**2\n",
        "    m = beta2 * m + (1 - beta2) * grad\n    v = beta1 * v + (1 - beta1) * grad**2\n",
        "beta1 and beta2 are swapped in the averages",
    ),
    # 06: micro-batches
    (
        "06",
        'reduction="sum") / n_targets',
        'reduction="mean") / len(micro_batches)',
        "2 micro-batches with 12, 3 targets: this is the gradient of the mean of the",
    ),
    (
        "06",
        'reduction="sum") / n_targets',
        'reduction="mean") * (y != -100).sum() / n_targets',
        "the returned loss is nan. A mean over no targets is 0 / 0",
    ),
    ("06", 'reduction="sum") / n_targets', 'reduction="sum")', "divide by their number"),
    ("06", "(y != -100).sum()", "y.numel()", "divided by all 24 positions"),
    (
        "06",
        "        loss.backward()",
        "        model.zero_grad()\n        loss.backward()",
        "is lost",
    ),
    ("06", "    mean_loss = 0.0", "    model.zero_grad()\n    mean_loss = 0.0", "is lost"),
    ("06", "        loss.backward()\n", "", "has not changed: call backward"),
    (
        "06",
        "        loss.backward()\n        mean_loss += loss.item()\n",
        "    loss.backward()\n    mean_loss = loss.item()\n",
        "only the last",
    ),
    (
        "06",
        "    for x, y in micro_batches:\n",
        "    n_targets = 0\n    for x, y in micro_batches:\n"
        "        n_targets += (y != -100).sum()\n",
        "divided by the number of targets so far",
    ),
    ("06", "loss.item()", "loss", "the returned loss still has a graph"),
    ("06", "    return mean_loss", "    return loss.item()", "but the returned loss is"),
    (
        "06",
        "        loss.backward()\n        mean_loss += loss.item()\n    return mean_loss",
        "        mean_loss += loss\n    mean_loss.backward()\n    return mean_loss.item()",
        "all their graphs are in memory at once",
    ),
    # 07: ranks
    ("07", " + rank * B", "", "rank 0 and rank 1 both read position 100"),
    ("07", "rank * B", "rank", "rank 0 and rank 1 both read position 101"),
    ("07", "world_size * B", "B", "rank 0 and rank 1 both read position 102"),
    ("07", "position + rank * B, position + n", "rank * B, n", "rank 0 read position 0, but the"),
    ("07", "position + n,", "position + n - B,", "no rank reads position 4"),
    ("07", "world_size * B", "world_size * B * 2", "no rank reads position 4"),
    ("07", "position + n,", "n,", "no rank has a micro-batch"),
    ("07", "return range(", "yield from range(", "returns generator, not a list or a range"),
    (
        "07",
        "return range(position + rank * B, position + n, world_size * B)",
        "return [float(i) for i in range(position + rank * B, position + n, world_size * B)]",
        "rank 0 begins at 0.0, which is not an int",
    ),
    # 08: save and resume
    (
        "08",
        "return copy.deepcopy(checkpoint)  # the",
        "return checkpoint  #",
        "the checkpoint of step 5 changes while the run continues",
    ),
    (
        "08",
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n',
        "",
        "the optimizer has no running averages",
    ),
    (
        "08",
        "    checkpoint = copy.deepcopy(checkpoint)\n",
        "",
        "after a second load_checkpoint of the same checkpoint, step of the optimizer",
    ),
    ("08", 'return checkpoint["step"]', "return 0", "load_checkpoint returns 0, but 5 steps"),
    ("08", '    model.load_state_dict(checkpoint["model"])\n', "", "0.weight of the model differs"),
    ("08", "step=step)", "step=step + 1)", "load_checkpoint returns 6, but 5 steps"),
    # 09: the backward pass of LayerNorm
    ("09", "dx_hat - along_mean - x_hat * along_x_hat", "dx_hat", "treated as constants"),
    ("09", " - x_hat * along_x_hat", "", "the variance is treated as a constant"),
    ("09", "dx_hat = dy * weight", "dx_hat = dy", "dy is not multiplied by weight"),
    ("09", "(dy * x_hat).sum", "dy.sum", "dweight equals dbias"),
    ("09", "dy.sum(dim=(0, 1))", "dy.mean(dim=(0, 1))", "dbias is wrong"),
    ("09", "unbiased=False", "unbiased=True", "in x_hat, the variance is divided by C - 1"),
    ("09", "+ eps).sqrt()", ").sqrt()", "in x_hat, eps is missing"),
    ("09", " + eps).sqrt()", ").sqrt() + eps", "in x_hat, eps is added outside the root"),
    ("09", "- along_mean - ", "+ along_mean + ", "the terms for the mean and for the variance"),
    ("09", "along_x_hat = (dx_hat ", "along_x_hat = (dy ", "dbias and dweight are right"),
    ("09", "dx_hat.mean(", "dx_hat.sum(", "the sum in the term for the mean"),
    ("09", "x_hat * along_x_hat) /", "0.5 * x_hat * along_x_hat) /", "variance is half as large"),
    ("09", "along_x_hat) / std", "along_x_hat)", "the division by the standard deviation"),
    # 10: Muon
    ("10", "    x = x / x.norm()\n", "", "the norm first"),
    ("10", "x.norm()", "x.abs().max()", "the norm first"),
    ("10", "(-4.7750", "(4.7750", "the signs and the powers"),
    ("10", "gram @ gram)", "gram @ gram @ gram)", "the signs and the powers"),
    ("10", "range(5)", "range(3)", "Check the number of iterations"),
    (
        "10",
        "    x = x / x.norm()\n",
        "    u, _, v = x.svd()\n    return u @ v.T\n",
        "without a singular value decomposition",
    ),
    ("10", "for _ in range(5)", "for _ in range(0)", "multiplied by the same factor"),
    ("10", "range(5)", "range(2)", "Check the number of iterations"),
    ("10", "range(5)", "range(1)", "Are there five iterations?"),
    (
        "10",
        "    return x\n",
        "    return x * x.size(1) ** 0.5\n",
        "the root of the number of columns",
    ),
    # 11: byte pair encoding
    ("11", "(-counts[pair], pair)", "-counts[pair]", "choose the smaller pair, (32, 258)"),
    (
        "11",
        "(-counts[pair], pair)",
        "(counts[pair], pair)",
        "the count of your pair (32, 99) is 1, but",
    ),
    ("11", "i += 2", "i += 1", "does not occur"),
    ("11", "        ids = merged\n", "", "does not occur"),
    ("11", "range(256, 256 +", "range(257, 257 +", "no token has the id 257 of your pair"),
    (
        "11",
        "counts.get(pair, 0) + 1",
        "''.join(map(chr, ids)).count(''.join(map(chr, pair)))",
        "because overlapping occurrences also count",
    ),
    # 12: a cache of keys and values
    ("12", "triu(T - n + 1)", "triu(1)", "the mask begins at the left"),
    ("12", "scores.masked_fill(is_later, -math.inf)", "scores", "inside one call, the mask is"),
    ("12", "return weights @ v, (k, v)", "return weights @ v, None", "the cache is not used"),
    (
        "12",
        "[cache[0], k]",
        "[k, cache[0]]",
        "the keys and the values are in different orders",
    ),
    (
        "12",
        "    n, T = ",
        "    n = q.size(1)\n    k, v = k.roll(n, 1), v.roll(n, 1)\n    n, T = ",
        "tokens 3 to 6 in one call, after 3 tokens in the cache: the mask expects the new keys",
    ),
    ("12", "return weights @ v, (k, v)", "return weights @ v, (k[:, -n:], v[:, -n:])", "are lost"),
    (
        "12",
        "triu(T - n + 1)",
        "triu(T - n + 2)",
        "with an empty cache: each query also sees the next",
    ),
    ("12", "triu(T - n + 1)", "triu(T - n)", "row 0 is nan"),
    ("12", "softmax(dim=2)", "softmax(dim=1)", "softmax runs over the queries"),
    ("12", " / math.sqrt(q.size(2))", "", "not divided by sqrt(C)"),
]


@pytest.mark.parametrize(
    "number, old, new, words", MISTAKES, ids=[f"{number} {words}" for number, *_, words in MISTAKES]
)
def test_a_usual_mistake_gets_a_sentence_of_its_own(number, old, new, words):
    text = solution(number)
    assert old in text
    found = sentence_about(number, text.replace(old, new))
    assert found and words in found, found


# {number of a task: a right answer that looks different from our solution}
ANSWERS = {
    "01": """
import torch

def cross_entropy(logits, targets):
    shifted = logits.double() - logits.amax(-1, keepdim=True)
    B, T = torch.meshgrid(*map(torch.arange, targets.shape), indexing="ij")
    return (torch.log(torch.exp(shifted).sum(-1)) - shifted[B, T, targets]).float().mean()
""",
    "02": """
import torch

def causal_weights(scores):
    weights = torch.zeros_like(scores)
    for i in range(scores.size(1)):
        weights[:, i, : i + 1] = scores[:, i, : i + 1].softmax(dim=1)
    return weights
""",
    "03": """
import torch

def attention(q, k, v, n_head):
    T, hs = q.size(1), q.size(2) // n_head
    mask = torch.full((T, T), -1e9).triu(1)
    heads = zip(q.split(hs, dim=2), k.split(hs, dim=2), v.split(hs, dim=2))
    outputs = [(q @ k.mT * hs**-0.5 + mask).softmax(-1) @ v for q, k, v in heads]
    return torch.cat(outputs, dim=2)
""",
    "04": """
import torch

def init_weights(model, n_layer):
    torch.manual_seed(7)
    for p in model.parameters():
        p.data = torch.randn(p.shape) * 0.02 if p.dim() == 2 else p.data
    for module in model.modules():
        if getattr(module, "bias", None) is not None:
            module.bias.data.zero_()
    for block in model.h:
        block.attn.c_proj.weight.data *= (2 * n_layer) ** -0.5
        block.mlp.c_proj.weight.data *= (2 * n_layer) ** -0.5
""",
    "05": """
def adamw_step(p, grad, m, v, step, lr, beta1, beta2, eps, weight_decay):
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    size = (v / (1 - beta2**step)).sqrt().add(eps)
    p -= lr * weight_decay * p * (p.ndim > 1)
    p.addcdiv_(m, size, value=-lr / (1 - beta1**step))
    return p, m, v
""",
    "06": """
import torch
import torch.nn.functional as F

def backward_of_step(model, micro_batches):
    total = torch.stack([(y >= 0).sum() for _, y in micro_batches]).sum()
    loss_of_step = 0
    for x, y in micro_batches:
        n = (y >= 0).sum()
        if n > 0:
            loss = F.cross_entropy(model(x).transpose(1, 2), y) * n / total
            loss.backward()
            loss_of_step = loss_of_step + loss.detach()
    return loss_of_step
""",
    "07": """
def starts_of_rank(rank, world_size, position, n, B):
    share = n // world_size
    return [position + rank * share + i for i in range(0, share, B)]
""",
    "08": """
import io
import torch

def save_checkpoint(model, optimizer, step):
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), step], file)
    return {"file": file.getvalue()}

def load_checkpoint(checkpoint, model, optimizer):
    weights, state, step = torch.load(io.BytesIO(checkpoint["file"]))
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return step
""",
    "09": """
import torch

def layer_norm_backward(x, weight, dy, eps):
    C = x.size(2)
    centered = x - x.mean(2, keepdim=True)
    r = ((centered**2).mean(2, keepdim=True) + eps).rsqrt()
    x_hat = centered * r
    eye = torch.eye(C)
    jacobian = r[..., None] * (eye - 1 / C - x_hat[..., None] * x_hat[..., None, :] / C)
    dx = (jacobian @ (dy * weight)[..., None])[..., 0]
    return dx, (dy * x_hat).flatten(0, 1).sum(0), dy.flatten(0, 1).sum(0)
""",
    "10": """
import torch

def orthogonalize(x):
    y = x.bfloat16() / (x.norm() + 1e-7)
    for _ in range(5):
        y = 3.4445 * y - 4.7750 * y @ y.mT @ y + 2.0315 * y @ y.mT @ y @ y.mT @ y
    return y
""",
    "11": """
from collections import Counter

def learn_merges(text, n_merges):
    ids, merges = list(text), []
    for new in range(256, 256 + n_merges):
        counts = Counter(zip(ids, ids[1:])).most_common()
        best = sorted(pair for pair, count in counts if count == counts[0][1])[0]
        merges.append(best)
        i = 0
        while i < len(ids) - 1:
            if (ids[i], ids[i + 1]) == best:
                ids[i : i + 2] = [new]
            i += 1
    return merges
""",
    "12": """
import torch

def attention_with_cache(q, k, v, cache):
    cache = cache or {"k": [], "v": []}
    outputs = []
    for i in range(q.size(1)):
        cache["k"].append(k[:, i])
        cache["v"].append(v[:, i])
        keys, values = torch.stack(cache["k"], 1), torch.stack(cache["v"], 1)
        weights = (keys @ q[:, i, :, None] / q.size(2) ** 0.5).softmax(1)
        outputs.append((weights * values).sum(1))
    return torch.stack(outputs, 1), cache
""",
}


def test_each_task_has_mistakes_with_different_sentences():
    for number in NUMBERS:
        assert len({words for task, *_, words in MISTAKES if task == number}) >= 3, number


def test_no_file_imports_more_than_torch():
    allowed = {"copy", "math", "torch"}
    for path in (ROOT / "lesson").glob("*/*.py"):
        lines = re.findall(r"^ *(?:import|from) (\w+)", path.read_text(encoding="utf-8"), re.M)
        assert set(lines) <= allowed, path
    text = (ROOT / "lesson" / "check.py").read_text(encoding="utf-8")
    found = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M))
    assert found <= allowed | {
        "_thread",
        "ast",
        "collections",
        "itertools",
        "pathlib",
        "sys",
        "threading",
        "traceback",
        "types",
    }


@pytest.mark.parametrize("number", NUMBERS)
def test_a_right_answer_may_look_different(number):
    assert sentence_about(number, ANSWERS[number]) is None


def test_what_the_check_says_about_a_file_that_python_cannot_run():
    assert sentence_about("07", "def starts_of_rank(:\n") == (
        "line 1 of 07_ranks.py is not valid Python: invalid syntax"
    )
    assert sentence_about("07", "") == "07_ranks.py does not contain the function starts_of_rank"
    text = "def starts_of_rank(*arguments):\n    return 1 / 0\n"
    assert sentence_about("07", text) == (
        "line 2 of 07_ranks.py raises ZeroDivisionError: division by zero"
    )
    found = sentence_about("11", "def learn_merges(*arguments): return 4 * [None]")
    assert found.startswith("the check cannot use the result: TypeError: ")
    # PyTorch also raises NotImplementedError, for example for a softmax of integers. Such an answer
    # is wrong, not open.
    text = "def causal_weights(scores):\n    return scores.long().softmax(dim=2)\n"
    assert sentence_about("02", text).startswith("line 2 of 02_mask.py raises ")


@pytest.mark.parametrize(
    "number, line, name",
    [
        ("01", "F.cross_entropy(logits.flatten(0, 1), targets.flatten())", "cross_entropy"),
        ("01", "-logits.log_softmax(2).gather(2, targets[..., None]).mean()", "log_softmax"),
        ("01", "torch.logsumexp(logits, 2).mean()", "logsumexp"),
        ("03", "F.scaled_dot_product_attention(q, k, v)", "scaled_dot_product_attention"),
        ("09", "torch.autograd.grad(x, x)", "autograd"),
    ],
)
def test_a_function_that_the_task_forbids_is_refused(number, line, name):
    text = f"import torch\nimport torch.nn.functional as F\ndef f(*arguments):\n    return {line}\n"
    path = CHECK["find"](CHECK["TASKS"], number)
    assert sentence_about(number, text) == (
        f"line 4 of {path.name} uses {name}, but this task asks you to compute the result without "
        "it"
    )
    assert name in path.read_text(encoding="utf-8")


def test_a_forbidden_function_is_refused_under_another_name():
    text = "from torch.nn.functional import cross_entropy as f\n"
    assert "line 1 of 01_cross_entropy.py uses cross_entropy," in sentence_about("01", text)


def test_an_endless_loop_ends_with_a_sentence(monkeypatch):
    monkeypatch.setitem(CHECK["check"].__globals__, "LIMIT", 0.5)
    text = "def starts_of_rank(*arguments):\n    while True:\n        pass\n"
    found = sentence_about("07", text)
    assert re.fullmatch(
        r"line [23] of 07_ranks\.py still runs after 0\.5 seconds\. Is its loop endless\?", found
    )
    monkeypatch.undo()  # on a busy machine, the right answer may need more than 0.5 seconds
    assert sentence_about("07", solution("07")) is None


def test_the_list_of_all_tasks_goes_on_after_an_endless_loop(capsys, tmp_path, monkeypatch):
    names = CHECK["main"].__globals__
    few = {number: CHECK["CHECKS"][number] for number in ("07", "11")}
    endless = "def starts_of_rank(*arguments):\n    while True:\n        pass\n"
    (tmp_path / "07_ranks.py").write_text(endless, encoding="utf-8")
    (tmp_path / "11_merges.py").write_text(solution("11"), encoding="utf-8")
    for name, value in (("TASKS", tmp_path), ("CHECKS", few), ("LIMIT", 3)):
        monkeypatch.setitem(names, name, value)
    status, out = run_check(capsys)
    assert status == 1 and "still runs after 3 seconds" in out and "1 of 2 tasks are solved" in out


def test_ctrl_c_ends_the_check():
    with pytest.raises(KeyboardInterrupt):
        sentence_about("07", "raise KeyboardInterrupt")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_task_that_is_run_by_itself_says_how_it_is_checked(capsys, number):
    runpy.run_path(str(CHECK["find"](CHECK["TASKS"], number)), run_name="__main__")
    assert capsys.readouterr().out.endswith(f"\nCheck it with: python lesson/check.py {number}\n\n")


def run_check(capsys, *arguments):
    return CHECK["main"](list(arguments)), capsys.readouterr().out


def test_the_commands_of_the_check(capsys, tmp_path, monkeypatch):
    names = CHECK["main"].__globals__
    for path in CHECK["TASKS"].glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setitem(names, "TASKS", tmp_path)
    status, out = run_check(capsys)
    assert status == 1 and out.count(" open ") == len(NUMBERS) and f"0 of {len(NUMBERS)}" in out
    status, out = run_check(capsys, "02", "--solution")
    assert status == 1 and out.startswith("02 is open: ") and "masked_fill" not in out
    wrong = solution("02").replace("triu(1)", "triu(2)")
    (tmp_path / "02_mask.py").write_text(wrong, encoding="utf-8")
    status, out = run_check(capsys, "2")
    assert status == 1 and out.startswith("02 is not right yet: position 0 looks at position 1,")
    (tmp_path / "07_ranks.py").write_text(solution("07"), encoding="utf-8")
    status, out = run_check(capsys, "07", "--solution")
    assert status == 0 and out == f"07 is right.\n{solution('07')}\n"
    status, out = run_check(capsys)
    assert out.count("WRONG") == out.count("solved  ") == 1 and f"1 of {len(NUMBERS)}" in out
    assert run_check(capsys, "lesson/tasks/02_mask.py", "--solution")[0] == 1
    assert run_check(capsys, "13") == (
        2,
        f"There is no task 13. The tasks are {', '.join(NUMBERS)}.\n",
    )
    for second in ("03", "--answer"):
        status, out = run_check(capsys, "02", second)
        assert (status, out) == (2, f"After 02, only --solution can follow, not {second}.\n")
    assert run_check(capsys, "--help")[0] == 2
    # check.py adds no period after a question mark, and no second period to a message of PyTorch.
    wrong = solution("10").replace("range(5)", "range(1)")
    (tmp_path / "10_orthogonalize.py").write_text(wrong, encoding="utf-8")
    assert run_check(capsys, "10")[1].endswith("five iterations?\n")
    wrong = "import torch\ndef causal_weights(scores):\n    return torch.ones(2) @ torch.ones(3)\n"
    (tmp_path / "02_mask.py").write_text(wrong, encoding="utf-8")
    assert not run_check(capsys, "02")[1].endswith("..\n")
