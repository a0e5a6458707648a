"""Packs a small model into a page that runs the model: the weights, and PyTorch's losses.

gpt.js implements only GPT-2, so the weights must have the names and shapes of GPT-2's weights. The
page also compares its losses with PyTorch's losses, because a changed model.py may compute
something different from the same weights.
"""

import inspect
import sys

from plaingpt.look.page import pack_array

import numpy as np
import torch
import torch.nn.functional as F

MOST_PARAMETERS = 1_000_000  # this many parameters take 5 MB in a page
LONGEST_CONTEXT = 1024  # a page needs about a second to compare the losses of a text this long
# The hidden states are multiplied by these factors. With the factor 30, the logits are so large
# that a soft-cap changes the losses.
FACTORS = (1, 30)
# {part of the model: a piece of the line of model.py that computes this part}
LINES = {
    "wte": "t.wte(idx)",
    "wpe": "t.wpe(pos)",
    "ln_1": "self.ln_1(x)",
    "c_attn": "self.c_attn(x)",
    "head": "F.scaled_dot_product_attention(",
    "attn.c_proj": "self.resid_dropout(self.c_proj(",
    "ln_2": "self.ln_2(x)",
    "mlp": "self.mlp(",
    "c_fc": "self.c_fc(x)",
    "gelu": "self.gelu(",
    "mlp.c_proj": "self.dropout(self.c_proj(",
    "block": "x = block(x,",
    "ln_f": "self.transformer.ln_f(x)",
    "lm_head": "return self.lm_head(x)",
    "loss": "return self.loss_fn(x,",
}


def find_reason(model, tokenizer, n_runs):
    """Returns the reason why a page cannot run the model, or "" if the page can run the model.

    The reason is the end of a sentence, which the page completes. model: the GPT of the last
    checkpoint. n_runs: how many runs the page shows.
    """
    c = model.config
    n_parameters = sum(p.numel() for p in model.parameters())
    if n_runs > 1:
        return "the page shows two runs"
    if n_parameters > MOST_PARAMETERS:
        return f"the model has {n_parameters:,} parameters, more than {MOST_PARAMETERS:,}"
    if tokenizer.name != "bytes":
        return "the tokens are not bytes"
    if tokenizer.source == "lines":
        return "the model was trained on pairs"
    if c.block_size > LONGEST_CONTEXT:
        return f"the model's context has {c.block_size:,} tokens, more than {LONGEST_CONTEXT:,}"
    expected = gpt2_shapes(c)
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            there = found.get(name, "missing")
            return (
                f"model.py was changed: {name} is {there}; "
                f"in GPT-2, it is {expected.get(name, 'missing')}"
            )
    return ""


def gpt2_shapes(c):
    """Returns {name: shape} of all weights of a GPT-2. c: a GPTConfig."""
    C = c.n_embd
    shapes = {
        "transformer.wte.weight": (c.vocab_size, C),
        "transformer.wpe.weight": (c.block_size, C),
    }
    for i in range(c.n_layer):
        h = f"transformer.h.{i}"
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{h}.{norm}.weight": (C,), f"{h}.{norm}.bias": (C,)}
        for layer, n_out, n_in in (
            ("attn.c_attn", 3 * C, C),
            ("attn.c_proj", C, C),
            ("mlp.c_fc", 4 * C, C),
            ("mlp.c_proj", C, 4 * C),
        ):
            shapes |= {f"{h}.{layer}.weight": (n_out, n_in), f"{h}.{layer}.bias": (n_out,)}
    shapes |= {"transformer.ln_f.weight": (C,), "transformer.ln_f.bias": (C,)}
    return shapes | {"lm_head.weight": (c.vocab_size, C)}


def pack_model(model, ids):
    """Returns a dict for JSON: the weights, losses to compare with, and lines of model.py.

    model: a GPT on the CPU, in float32, in eval mode. ids: the ids of the page's text.
    """
    c = model.config
    # named_parameters yields a tied weight once, so the page stores it once.
    weights = {name: pack_array(p.detach(), "<f4") for name, p in model.named_parameters()}
    # Sliding-window attention changes only the losses of texts that are longer than its window.
    # Therefore, the page also compares the losses of random ids that fill the context.
    other = np.random.default_rng(0).integers(c.vocab_size, size=c.block_size + 1).tolist()
    checks = []
    for text in (ids, other):
        losses = {factor: pack_array(losses_of(model, text, factor), "<f4") for factor in FACTORS}
        checks.append(dict(ids=text, losses=losses))
    config = {name: getattr(c, name) for name in ("n_layer", "n_head", "n_embd", "block_size")}
    return dict(config=config, weights=weights, checks=checks, lines=find_lines(type(model)))


@torch.no_grad()
def losses_of(model, ids, factor):
    """Returns the loss of each id after the first id, (n,). factor: see FACTORS."""
    x = model.hidden(torch.tensor([ids[:-1]]))[0].float() * factor  # (n, C)
    targets = torch.tensor(ids[1:])  # (n)
    return F.cross_entropy(model.logits(x).float(), targets, reduction="none").numpy()


def find_lines(GPT):
    """Returns {part: [line number, line]} for the parts in LINES that model.py contains."""
    source = inspect.getsource(sys.modules[GPT.__module__]).splitlines()
    lines = {}
    for part, words in LINES.items():
        for number, line in enumerate(source, start=1):
            if words in line:
                lines[part] = [number, line.strip()]
                break
    return lines
