"""Text to token ids and back: GPT-2's byte-pair encoding, and plain bytes.

A Tokenizer converts text to ids and ids to text. Shards and checkpoints store its name,
"gpt2" or "bytes". GPT-2's merges are in plaingpt/gpt2.tiktoken (OpenAI, MIT license), so no
network is needed. Encoding uses tiktoken. Decoding is a table lookup and needs no package.
"""

import base64
import functools
import hashlib
import re
import uuid
from pathlib import Path

import numpy as np

from plaingpt.cli import UserError, require

MERGES = Path(__file__).parent / "plaingpt" / "gpt2.tiktoken"
# tiktoken pins the same hash for r50k_base, its name for this encoding.
MERGES_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
END_OF_TEXT = "<|endoftext|>"
LONG_SPACE = 500_000
# GPT-2 splits text before it merges bytes: contractions, words, numbers, other symbols, spaces.
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""")


class Tokenizer:
    """Converts text to ids and ids to text. get_tokenizer(name) creates one.

    name: "gpt2" or "bytes". n_vocab: the number of ids. token_bytes: the bytes of each id.
    end_of_text: the id before every document; generation also starts from it. For "bytes" it is
    the id of the line break.
    """

    def __init__(self, name, token_bytes, special):
        self.name = name
        self.special = special  # {text: id}
        self.token_bytes = token_bytes + [text.encode() for text in special]
        self.n_vocab = len(self.token_bytes)
        self.end_of_text = special.get(END_OF_TEXT, ord("\n"))
        self.mark = f"<|{uuid.uuid4()}|>"  # stands for end_of_text; random, so in no text

    @functools.cached_property
    def encoding(self):
        """The tiktoken.Encoding behind encode()."""
        ordinary = self.token_bytes[: self.n_vocab - len(self.special)]
        ranks = {token: i for i, token in enumerate(ordinary)}
        pattern = GPT2_PATTERN if self.name == "gpt2" else r"[\s\S]"
        return require("tiktoken").Encoding(
            self.name, pat_str=pattern, mergeable_ranks=ranks,
            special_tokens={self.mark: self.end_of_text})

    def encode(self, text):
        """Text -> list of ids. The text "<|endoftext|>" is encoded as ordinary text."""
        try:
            check_spaces(text)
        except ValueError as error:
            raise UserError(f"the text has {error}; shorten them") from error
        return self.encoding.encode_ordinary(text)

    def encode_documents(self, texts):
        """Texts -> their ids, with end_of_text before each text: (n,) uint16.

        One call for all texts: tiktoken releases the GIL during a call, so other threads can run.
        """
        text = "".join(self.mark + text for text in texts)
        return self.encoding.encode_to_numpy(text, allowed_special="all").astype(np.uint16)

    def decode(self, ids):
        """Ids -> text. Invalid UTF-8, and ids without bytes (padding), become U+FFFD."""
        unknown = "\ufffd".encode()
        parts = [self.token_bytes[i] if i < self.n_vocab else unknown for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")


def check_spaces(text):
    """Raises ValueError for so many spaces that tiktoken's regex would overflow its stack."""
    if len(text) >= LONG_SPACE and re.search(rf"\s{{{LONG_SPACE}}}", text):
        raise ValueError(f"{LONG_SPACE:,} or more white spaces in a row")


@functools.cache
def get_tokenizer(name):
    """Returns the Tokenizer of that name. Raises UserError if it is unknown or damaged."""
    if name == "bytes":
        return Tokenizer(name, [bytes([i]) for i in range(256)], special={})
    if name != "gpt2":
        raise UserError(f"unknown tokenizer {name!r}; it must be gpt2 or bytes")
    data = MERGES.read_bytes()
    if hashlib.sha256(data).hexdigest() != MERGES_SHA256:
        raise UserError(f"{MERGES}: is damaged; restore it with git checkout {MERGES}")
    # Each line: the token in base64, a space, its id. The ids are the line numbers, from 0.
    token_bytes = [base64.b64decode(line.split()[0]) for line in data.splitlines()]
    return Tokenizer(name, token_bytes, special={END_OF_TEXT: len(token_bytes)})
