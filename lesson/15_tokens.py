"""Lesson 15: GPT-2's tokens. This program turns texts into shards, which lessons 12 to 14 read.

  python lesson/15_tokens.py                writes shards of input.txt to log/tokens
  python lesson/15_tokens.py a.txt b.txt    writes shards of other texts

Then set data = "log/tokens" and vocab_size = 50257 in lesson 14, and another path, so that the old
checkpoint stays. A token now has three to four bytes, so block_size tokens are more text.

GPT-3's small model read 300 billion tokens. fineweb.py in this repository writes 10 billion tokens
of the data set FineWeb-Edu: 100 shards, 20 GB. train_gpt2.py reads only what a batch needs. Lesson
12 loads all shards into memory, in each process, so it is for small data.

New: load_encoding, ids_of_texts, write_shard.
"""

import base64
import os
import sys
from glob import glob

import numpy as np

try:
    import tiktoken
except ImportError:
    raise SystemExit("this lesson needs tiktoken: pip install tiktoken") from None

folder = "log/tokens"
shard_size = 20_000  # ids per shard; 100 million in FineWeb-Edu


def load_encoding():
    """Loads GPT-2's tokenizer without the network, which tiktoken.get_encoding("gpt2") needs.

    The 50,257 tokens are 256 bytes, 50,000 merges of two tokens, and <|endoftext|>. OpenAI learned
    the merges from many texts: again and again, the most frequent pair of neighbours became a
    token. To encode a text, the pattern splits it into words (with the space before them), numbers,
    signs and white space. Then tiktoken merges neighbours in each piece, in the order in which
    OpenAI found the merges, which is the order of their ids.
    """
    ids = {}
    with open("plaingpt/data/gpt2.tiktoken", "rb") as file:
        for line in file:
            token, id = line.split()
            ids[base64.b64decode(token)] = int(id)
    # At each place of the text, the pattern tries its alternatives from left to right:
    #   '(?:[sdmt]|ll|ve|re)   the 's of "it's", the 'll of "we'll"
    #    ?\p{L}+               letters, with a space before them: " boat"
    #    ?\p{N}+               digits: " 12"
    #    ?[^\s\p{L}\p{N}]+     other signs: " --"
    #   \s+(?!\S)             white space without its last character, which may belong to a word:
    #                         before "boat", the first two of three spaces
    #   \s+                   the rest: a line break before a word
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks=ids,
        special_tokens={"<|endoftext|>": 50256},
    )


def ids_of_texts(paths):
    """Yields the ids of each text in turn, with <|endoftext|> before them.

    Sequences are cut from one long row of ids, so a sequence may contain parts of two texts.
    <|endoftext|> tells the model that a new text begins. To write a new text, the model starts from
    this token.
    """
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            yield [encoding.eot_token, *encoding.encode_ordinary(file.read())]


def write_shard(split, number, ids):
    """Writes a shard, a file that contains only ids. 50,257 different ids fit into 16 bits."""
    path = f"{folder}/text_{split}_{number:06}.npy"
    np.save(path, np.array(ids, dtype=np.uint16))
    written.append(path)
    print(f"{path}: {len(ids):,} ids")


encoding = load_encoding()
os.makedirs(folder, exist_ok=True)
written = []  # the paths of the shards
number = 1
ids = []  # ids that are not in a shard yet
for new in ids_of_texts(sys.argv[1:] or ["input.txt"]):
    ids += new
    while len(ids) > 2 * shard_size:  # the last shard is for validation
        write_shard("train", number, ids[:shard_size])
        number += 1
        ids = ids[shard_size:]
if len(ids) <= shard_size:
    raise SystemExit(f"{len(ids):,} ids fill at most one shard; give more text")
write_shard("train", number, ids[:-shard_size])
write_shard("val", 0, ids[-shard_size:])
for path in set(glob(f"{folder}/*.npy")) - set(written):
    os.remove(path)  # an earlier call has written more shards
print(f"The last ten tokens: {[encoding.decode([id]) for id in ids[-10:]]}")
