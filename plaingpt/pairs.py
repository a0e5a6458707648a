"""Reads pairs of a prompt and a response. The loss includes only the responses.

The tokens of a pair are end_of_text, prompt, response. The tokenizer encodes prompt and response
separately, so that generate.py computes the same ids for the prompt. If a response ends with
<|endoftext|>, this mark is removed. Only the response and the end_of_text after it are targets. A
pair always lies within one sequence of T tokens. If the next pair does not fit into a sequence,
end_of_text fills the rest. This example for T = 8 shows the first sequence and the start of the
second sequence. <> is end_of_text, p is a token of a prompt, and r is a token of a response:

    token     <>  p   p   r   <>  p   r   <>   |   <>  p   p   p   r
    counted   0   0   0   1   1   0   1   1    |   0   0   0   0   1
"""

import random
from array import array

from plaingpt.documents import read_records
from plaingpt.errors import UserError
from plaingpt.shards import find_cut
from plaingpt.terminal import print0
from plaingpt.tokenizer import END_OF_TEXT, note_unknown

import numpy as np


def encode_pair(record, tokenizer):
    """Returns the ids of the prompt and the ids of the response in a record, as two lists.

    record: a dict from read_records. Raises UserError if the record contains no valid pair.
    """
    where = record["where"]
    prompt = record.get("prompt")
    response = record.get("response")
    if isinstance(response, str):
        response = response.removesuffix(END_OF_TEXT)
    if not (isinstance(prompt, str) and isinstance(response, str) and response):
        raise UserError(
            f"{where}: needs strings in the fields prompt and response; see docs/data.md, or use "
            "fineweb.py"
        )
    if tokenizer.name == "bytes" and "\n" in prompt + response:
        raise UserError(
            f"{where}: contains a line break, which is the end-of-text token of the tokenizer "
            "bytes; remove it, or train with --tokenizer gpt2"
        )
    return tokenizer.encode(prompt), tokenizer.encode(response)


def read_pairs(path, tokenizer, T, val_fraction):
    """Reads a file of pairs. Returns [(ids, counted) for training, (ids, counted) for validation].

    ids: the token ids of all sequences, concatenated, (n,). n - 1 is a multiple of T. counted:
    whether each token is a target, (n,) bool.

    Shuffles the pairs with a fixed random seed. The last val_fraction of the pairs are for
    validation. The split depends only on the file and val_fraction, so runs with different
    tokenizers or T validate on the same pairs.
    """
    if path.stat().st_size > 2**26:  # pairs need up to 40 times as much memory as disk space
        raise UserError(f"--data {path}: is larger than 64 MiB; give fewer pairs")
    records = read_records([path], columns=("prompt", "response"))
    pairs = [encode_pair(record, tokenizer) for record in records]
    note_unknown(tokenizer, [ids for pair in pairs for ids in pair], path)
    random.Random(0).shuffle(pairs)
    note_long(path, pairs, T)
    cut = find_cut(pairs, val_fraction)
    parts = []
    for name, part in (("training", pairs[:cut]), ("validation", pairs[cut:])):
        ids, counted = join_pairs(part, tokenizer, T)
        if not counted.any():
            raise UserError(
                f"--data {path}: contains no {name} pairs of at most {T} tokens; give more pairs, "
                "or a larger --block_size"
            )
        parts.append((ids, counted))
    return parts


def count_tokens(prompt, response):
    """Returns the number of tokens of a pair, including the end_of_text before the prompt."""
    return 1 + len(prompt) + len(response)


def note_long(path, pairs, T):
    """Prints how many pairs are longer than T tokens. pairs: the results of encode_pair."""
    sizes = [count_tokens(prompt, response) for prompt, response in pairs]
    n_long = sum(size > T for size in sizes)
    if n_long:
        print0(
            f"note: {path}: {n_long:,} of {len(pairs):,} pairs have more than {T} tokens and are "
            f"skipped; --block_size {max(sizes)} keeps all pairs"
        )


def join_pairs(pairs, tokenizer, T):
    """Packs pairs into sequences of T tokens. Skips each pair that is longer than T tokens.

    pairs: the results of encode_pair. Returns (ids, counted), as in read_pairs.
    """
    end = tokenizer.end_of_text
    ids = array("I", [end])
    counted = bytearray(1)
    for prompt, response in pairs:
        size = count_tokens(prompt, response)
        if size > T:
            continue
        # The last token so far is the end_of_text before this pair. `place` is the index of this
        # token in its sequence. A pair that does not fit there begins in the next sequence.
        place = (len(ids) - 1) % T
        n_fill = T - place if place + size > T else 0
        ids.extend([end] * n_fill + prompt + response + [end])
        counted.extend(bytes(n_fill + len(prompt)))  # zeros
        counted.extend(b"\1" * (len(response) + 1))
    n_fill = -(len(ids) - 1) % T
    ids.extend([end] * n_fill)
    counted.extend(bytes(n_fill))
    return np.array(ids, tokenizer.dtype), np.frombuffer(counted, bool)
