"""The tokenizer, which turns text into token ids and back.

There are three kinds: GPT-2's BPE, plain bytes, and a tokenizer.json of Hugging Face. For the first
two, tiktoken encodes the text; for the third, the package tokenizers. GPT-2's merges are in
gpt2.tiktoken (OpenAI, MIT license), so no network is needed.
"""

import base64
import functools
import json
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path

from plaingpt.base.errors import UserError, explaining, require
from plaingpt.base.terminal import print0
from plaingpt.data.text import clean_text
from plaingpt.data.tokenizer_json import (
    build_tokenizer_json,
    is_byte_level,
    is_gpt2,
    parse_tokenizer_json,
    read_settings,
)

import numpy as np

END_OF_TEXT = "<|endoftext|>"
MERGES = Path(__file__).with_name("gpt2.tiktoken")
# Before it merges bytes, GPT-2 splits text into contractions, words, numbers, symbols and spaces.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


@dataclass(eq=False, repr=False)  # has a hash for functools.cache
class Tokenizer:
    """Converts text to ids and ids to text. get_tokenizer and load_tokenizer create one."""

    name: str  # "gpt2", "bytes", or a description. If names are equal, the ids have equal bytes
    source: str  # what get_tokenizer needs to create it again; checkpoints store it
    token_bytes: list[bytes]  # the bytes of each id
    special: dict[str, int]  # the ids that stand for no text
    # This id stands before every document, and generation starts from it. For "bytes" and "lines",
    # it is the line break.
    end_of_text: int
    settings: dict | None = None  # the contents of a tokenizer.json; None for "gpt2" and "bytes"
    unknown: int | None = None  # the id for text that the vocabulary does not have

    def __post_init__(self):
        self.n_vocab = len(self.token_bytes)
        self.dtype = np.dtype("<u2" if self.n_vocab <= 2**16 else "<u4")  # of ids in shards
        # It stands for end_of_text. It is random, so that no text contains it.
        self.mark = f"<|{uuid.uuid4()}|>"

    @functools.cached_property
    def encoding(self):
        """The tiktoken.Encoding of "gpt2" or "bytes"; bytes have no merges, so any pattern fits."""
        n = self.n_vocab - len(self.special)  # special tokens come last
        ranks = dict(zip(self.token_bytes, range(n)))
        return require("tiktoken").Encoding(
            self.name,
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens={self.mark: self.end_of_text},
        )

    @functools.cached_property
    def library(self):
        """This vocabulary as a tokenizers.Tokenizer. It encodes "<|endoftext|>" as plain text."""
        settings = self.settings or build_tokenizer_json(self.token_bytes, self.special)
        with explaining("tokenizer.json: not usable", "give another one"):
            library = require("tokenizers").Tokenizer.from_str(json.dumps(settings))
        library.encode_special_tokens = True
        return library

    def encode(self, text):
        """Text -> list of ids. The text "<|endoftext|>" is encoded as ordinary text.

        Raises UserError for so many spaces in a row that tiktoken would end the program.
        """
        # A prompt that is not UTF-8 has halves of surrogate pairs.
        return self.encode_documents([clean_text(text)])[1:].tolist()

    def encode_documents(self, texts):
        """Texts -> their ids, (n,), with end_of_text before each text. Releases the GIL."""
        if not self.settings:
            text = "".join(self.mark + text for text in texts)
            return self.encoding.encode_to_numpy(text, allowed_special="all").astype(self.dtype)
        with explaining("tokenizer.json: not usable", "give another one"):
            # This fails, for example, if the unknown token is missing.
            encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
        ids = []
        for encoding in encodings:
            ids.append(self.end_of_text)
            ids.extend(encoding.ids)
        return np.array(ids, self.dtype)

    def decode(self, ids):
        """Ids -> text. Invalid UTF-8, and ids without bytes (padding), become U+FFFD."""
        if self.settings and not is_byte_level(self.settings):
            return self.library.decode(ids, skip_special_tokens=False)
        data = b"".join(self.token_bytes[i] if i < self.n_vocab else b"\xff" for i in ids)
        return data.decode("utf-8", errors="replace")

    def text_bytes(self, vocab_size):
        """How many bytes of text each id stands for, (vocab_size,) int64. Special ids have 0.

        In a vocabulary that is not byte-level, all ids have 0, because a text may have other bytes
        than its tokens. WordPiece drops spaces, for example. SentencePiece puts one before a text.
        """
        sizes = np.zeros(vocab_size, np.int64)
        if self.settings and not is_byte_level(self.settings):
            print0("note: bits per byte need a byte-level vocabulary; wikitext.py has them")
            return sizes
        special = set(self.special.values())
        for i, data in enumerate(self.token_bytes[:vocab_size]):
            if i not in special:
                sizes[i] = len(data)
        return sizes


@functools.cache
def get_tokenizer(source):
    """Makes the Tokenizer of a source. Raises UserError.

    source: "gpt2", "bytes", "lines", or the text of a tokenizer.json. "lines" are the bytes of a
    model that was trained on pairs: a line break ends a text.
    """
    if source in ("bytes", "lines"):
        token_bytes = [bytes([i]) for i in range(256)]
        return Tokenizer("bytes", source, token_bytes, special={}, end_of_text=ord("\n"))
    if source == "gpt2":
        token_bytes = read_gpt2_tokens()
        end = len(token_bytes)
        token_bytes.append(END_OF_TEXT.encode())
        return Tokenizer("gpt2", source, token_bytes, {END_OF_TEXT: end}, end)
    if not source.startswith("{"):
        raise UserError(f"unknown tokenizer {source[:50]!r}; add its tokenizer.json to the shards")
    settings, token_bytes, special, end, unknown = parse_tokenizer_json(source)
    for known in (get_tokenizer("gpt2"), get_tokenizer("bytes")):
        same_ids = known.token_bytes == token_bytes and known.end_of_text == end
        if same_ids and is_gpt2(settings):
            return known
    crc = zlib.crc32(repr((token_bytes, end)).encode())
    name = f"tokenizer.json ({len(token_bytes):,} ids, CRC-32 {crc:08x})"
    return Tokenizer(name, source, token_bytes, special, end, settings, unknown)


def read_gpt2_tokens():
    """Returns the bytes of GPT-2's tokens, without the last one, which is end_of_text."""
    token_bytes = []
    # A line has the token in base64, a space, and its id. The ids are the line numbers, from 0.
    for line in MERGES.read_bytes().splitlines():
        base64_token, _ = line.split()
        token_bytes.append(base64.b64decode(base64_token))
    return token_bytes


def load_tokenizer(place, end_of_text=None):
    """Loads "gpt2", "bytes", a tokenizer.json, or a directory or hub name with one -> Tokenizer.

    end_of_text: name of the token between documents, if it is not a usual one. Raises UserError.
    """
    if place in ("gpt2", "bytes"):
        return get_tokenizer(place)
    # Errors of the network and of `tokenizers` share no class.
    with explaining(f"--tokenizer {place}: not usable", "give another, or --end_of_text"):
        settings = read_settings(str(place), end_of_text)
        return get_tokenizer(json.dumps(settings, ensure_ascii=False))
