"""Lesson 15: GPT-2's tokens. This program converts text files to shards for lessons 12 to 14.

  python lesson/15_tokens.py                writes shards of input.txt to log/tokens
  python lesson/15_tokens.py a.txt b.txt    writes shards of these two files to log/tokens

Then set data = "log/tokens" and vocab_size = 50257 in lesson 14, and change path, so that lesson 14
does not overwrite the old checkpoint. A token now contains three to four bytes, so block_size
tokens contain more text.

GPT-3's smallest model was trained on 300 billion tokens. fineweb.py in this repository writes 10
billion tokens of the data set FineWeb-Edu: 100 shards, 20 GB. train_gpt2.py loads only the tokens
of the current batch. Lessons 12 to 14 load all shards into the memory of each process, so use these
lessons only for small data sets.

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
shard_size = 20_000  # ids per shard; fineweb.py writes 100 million per shard


def load_encoding():
    """Loads GPT-2's tokenizer from a file. tiktoken.get_encoding("gpt2") would need the network.

    The 50,257 tokens are 256 bytes, 50,000 merges of two tokens, and <|endoftext|>. OpenAI learned
    the merges from a large amount of text: the most frequent pair of adjacent tokens repeatedly
    became a new token. To encode text, tiktoken first splits the text with the regular expression
    pat_str into words (with the space before the word), numbers, punctuation and whitespace. In
    each of these pieces, tiktoken then merges adjacent tokens, in the order in which OpenAI learned
    the merges. The ids of the merged tokens are in the same order.
    """
    ids = {}
    with open("plaingpt/gpt2.tiktoken", "rb") as file:
        for line in file:
            token, id = line.split()
            ids[base64.b64decode(token)] = int(id)
    # At each place in the text, the regular expression tries its alternatives from left to right:
    #   '(?:[sdmt]|ll|ve|re)   the 's of "it's", the 'll of "we'll"
    #    ?\p{L}+               letters, with an optional space before them: " boat"
    #    ?\p{N}+               digits, with an optional space before them: " 12"
    #    ?[^\s\p{L}\p{N}]+     other characters, with an optional space before them: " --"
    #   \s+(?!\S)             consecutive whitespace characters, without the last one if text
    #                         follows: if three spaces precede "boat", the first two spaces
    #   \s+                   all other whitespace, such as a line break before a word
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks=ids,
        special_tokens={"<|endoftext|>": 50256},
    )


def ids_of_texts(paths):
    """Yields the ids of each text file: first the id of <|endoftext|>, then the ids of the text.

    Training cuts sequences from one long array of ids, so a sequence may contain parts of two text
    files. <|endoftext|> tells the model that a new text begins. To let the model generate a text
    from its beginning, use <|endoftext|> as the prompt.
    """
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            yield [encoding.eot_token, *encoding.encode_ordinary(file.read())]


def write_shard(split, number, ids):
    """Writes a shard, a file of ids. All ids are less than 50,257, so each id fits into 16 bits."""
    path = f"{folder}/text_{split}_{number:06}.npy"
    np.save(path, np.array(ids, dtype=np.uint16))
    written.append(path)
    print(f"{path}: {len(ids):,} ids")


encoding = load_encoding()
os.makedirs(folder, exist_ok=True)
written = []  # the paths of the shards that this run has written
number = 1
ids = []  # ids that are not in a shard yet
for new in ids_of_texts(sys.argv[1:] or ["input.txt"]):
    ids += new
    while len(ids) > 2 * shard_size:  # the rest becomes a training shard and a validation shard
        write_shard("train", number, ids[:shard_size])
        number += 1
        ids = ids[shard_size:]
if len(ids) <= shard_size:
    raise SystemExit(f"{len(ids):,} ids fill at most one shard, but two are needed; pass more text")
write_shard("train", number, ids[:-shard_size])
write_shard("val", 0, ids[-shard_size:])
for path in set(glob(f"{folder}/*.npy")) - set(written):
    os.remove(path)  # an earlier run of this program wrote this shard
print(f"The last ten tokens: {[encoding.decode([id]) for id in ids[-10:]]}")
