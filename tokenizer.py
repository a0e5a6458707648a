"""Text to token ids and back: GPT-2's byte-pair encoding, and plain bytes for the baby run.

An encoding is a name, "gpt2" or "bytes", which checkpoints carry. The ranks of GPT-2's merges lie beside this file in
gpt2.tiktoken (OpenAI, MIT licence; tiktoken itself downloads the same data as `r50k_base`), so no network is ever needed.
Encoding is tiktoken's work; decoding is looking up, so that training from shards can print samples without tiktoken.
"""

# Read next: train_gpt2.py.

import base64
import functools
import hashlib
from pathlib import Path

RANKS = Path(__file__).parent / "plaingpt" / "gpt2.tiktoken"
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # the hash tiktoken pins

# GPT-2's pre-tokenisation, as tiktoken writes it: contractions, words, numbers, other symbols, white space.
PATTERNS = {"gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""", "bytes": r"[\s\S]"}
SPECIAL_TOKENS = {"gpt2": {"<|endoftext|>": 50256}, "bytes": {}}
START = {"gpt2": 50256, "bytes": ord("\n")}  # the id that stands before a text


def name_for(vocab_size):
    """The encoding that ids below `vocab_size` belong to when nothing else says it."""
    return "bytes" if vocab_size <= 256 else "gpt2"


def start_id(name, vocab_size):
    """The id to begin a text with; the last one, if the vocabulary was cut short of the usual one."""
    return min(START[name], vocab_size - 1)


@functools.cache
def token_bytes(name):
    """The bytes of each id that stands for bytes, in order of ids: 50,256 of "gpt2", 256 of "bytes".

    Raises ValueError for another name, or if gpt2.tiktoken is not OpenAI's file.
    """
    if name == "bytes":
        return [bytes([i]) for i in range(256)]
    if name != "gpt2":
        raise ValueError(f"unknown tokenizer {name!r}: it is 'gpt2' or 'bytes'")
    data = RANKS.read_bytes()
    if hashlib.sha256(data).hexdigest() != RANKS_SHA256:
        raise ValueError(f"{RANKS.name} is damaged, its SHA-256 is not OpenAI's; to mend it: git checkout {RANKS.name}")
    return [base64.b64decode(line.split()[0]) for line in data.splitlines()]  # a line: token in base64, rank from 0 up


def get_encoding(name):
    """The encoding of that name as a `tiktoken.Encoding`: encode_ordinary(text) -> ids, n_vocab, decode(ids) -> text."""
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(token_bytes(name))}
    return tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens=SPECIAL_TOKENS[name])


def decode(name, ids):
    """Ids -> text. Bytes that are no UTF-8, such as a character cut in half, become U+FFFD."""
    special = {i: text.encode() for text, i in SPECIAL_TOKENS[name].items()}
    tokens = token_bytes(name)
    return b"".join(special.get(i) or tokens[i] for i in ids).decode("utf-8", errors="replace")
