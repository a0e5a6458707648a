"""Reads pairs of a prompt and a response. Only the responses are trained.

A pair is end_of_text, prompt, response. Both texts are encoded separately, so that generate.py
gives the same ids for the prompt. The response and the end_of_text after it are targets; other
tokens do not count. A pair lies in one sequence of T tokens, and end_of_text fills the rest. For
T = 8, this is the first sequence and the start of the second one; <> is end_of_text:

    token     <>  p   p   r   <>  p   r   <>   |   <>  p   p   p   r
    counted   0   0   0   1   1   0   1   1    |   0   0   0   0   1
"""

import random
from array import array

import numpy as np

from plaingpt.cli import UserError, print0
from plaingpt.text import read_records


def encode_pair(record, tokenizer):
    """Returns the ids of the prompt and of the response in a record, two lists. Raises UserError.

    The field `where` of the record is its place, for the message.
    """
    where = f"--data {record['where']}"
    texts = [record.get(name) for name in ("prompt", "response")]
    if not all(isinstance(text, str) for text in texts) or not texts[1]:
        raise UserError(f"{where}: needs prompt and response texts; see docs/data.md or fineweb.py")
    if tokenizer.name == "bytes" and "\n" in "".join(texts):
        raise UserError(f"{where}: has a line break, which ends bytes; use --tokenizer gpt2")
    return [tokenizer.encode(text) for text in texts]


def read_pairs(path, tokenizer, T):
    """Returns the pairs of a file as sequences of T tokens: (ids, counted), (n,) each.

    n is a multiple of T, plus 1. counted: bool, whether a token is a target. The order is random,
    but always the same. So the last pairs, which are for validation, are training pairs of no other
    run. Raises UserError.
    """
    if path.stat().st_size > 2**26:  # in memory, pairs take up to 40 times as much as in the file
        raise UserError(f"--data {path}: has more than 64 MiB; give fewer pairs")
    pairs = [encode_pair(record, tokenizer) for record in read_records([path])]
    random.Random(0).shuffle(pairs)
    end = tokenizer.end_of_text
    ids, counted, sizes = array("I", [end]), bytearray(1), [0]
    for prompt, response in pairs:
        begin, size = len(ids) - 1, 1 + len(prompt) + len(response)
        sizes.append(size)
        if size <= T:
            fill = -begin % T if begin % T + size > T else 0
            ids.extend([end] * fill + prompt + response + [end])
            counted += bytes(fill + len(prompt)) + b"\1" * (len(response) + 1)
    n_long, size = sum(size > T for size in sizes), sorted(sizes)[-(-len(pairs) * 99 // 100)]
    message = (
        f"{path}: {n_long:,} of {len(pairs):,} pairs have more than {T} tokens and are left "
        f"out; --block_size {1 << max(T, size - 1).bit_length()} keeps 99% of them"
    )
    if n_long == len(pairs):
        raise UserError(message if pairs else f"--data {path}: has no pairs; give another file")
    if n_long:
        print0(f"note: {message}")
    fill = -(len(ids) - 1) % T
    ids.extend([end] * fill)
    return np.array(ids, tokenizer.dtype), np.frombuffer(counted + bytes(fill), bool)
