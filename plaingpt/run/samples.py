"""The answers that a model gives to prompts of the validation pairs."""

from plaingpt.ops.sampling import generate_tokens

import torch


def answer_prompts(model, data, process):
    """Returns two texts, each with an answer and the expected response, or [] without pairs.

    The prompts are the first ones of the first two sequences with pairs. All processes must call
    this.
    """
    T = model.config.block_size
    texts = []
    for tokens in data.val:
        if not tokens.has_pairs:
            continue
        starts = range(0, len(tokens) - 1, T)
        for start in starts[: 2 - len(texts)]:
            x, y = tokens.read_sequence(start, T)  # (T,) each
            texts.append(answer(model, x, y, data.tokenizer, process.device))
    return texts


def answer(model, x, y, tokenizer, device):
    """Answers the first prompt of a sequence of pairs -> text, also with the expected response.

    x, y: inputs and targets, (T,) each. The answer has as many tokens as the response.
    """
    first = int((y != -100).argmax())  # this position predicts the first token of the response
    last = y.tolist().index(tokenizer.end_of_text, first)  # a response ends with end_of_text
    n = last - first + 1
    idx = torch.from_numpy(x[None, : first + 1]).to(device)  # (1, first + 1)
    new = list(generate_tokens(model, idx, n, temperature=0))  # n x (1, 1)
    ids = torch.cat([idx, *new], dim=1)[0, 1:].tolist()  # without end_of_text
    return f"{tokenizer.decode(ids)}\nexpected: {tokenizer.decode(y[first : first + n])}"
