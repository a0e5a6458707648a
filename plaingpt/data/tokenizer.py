"""The tokenizer, which turns text into token ids and back.

There are three kinds of tokenizers: GPT-2's BPE, plain bytes, and a tokenizer.json of Hugging Face.
The package tiktoken encodes text for the first two kinds, and the package tokenizers for the third
kind. GPT-2's merges are in gpt2.tiktoken (OpenAI, MIT license), so loading them needs no network.
"""

import base64
import functools
import json
import re
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path

from plaingpt.base.errors import UserError, explaining, require
from plaingpt.base.terminal import print0
from plaingpt.data.tokenizer_json import TokenizerJson, is_gpt2, read_settings

import numpy as np

END_OF_TEXT = "<|endoftext|>"
MERGES = Path(__file__).with_name("gpt2.tiktoken")
# Before merging bytes, GPT-2 splits text into contractions, words, numbers, symbols and spaces.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
LONG_SPACE = 500_000


@dataclass(eq=False, repr=False)  # eq=False keeps it hashable, for functools.cache
class Tokenizer:
    """Converts text to ids and ids to text. get_tokenizer and load_tokenizer create one."""

    name: str  # "gpt2", "bytes", or a description; the same name means the same tokens
    source: str  # the argument of get_tokenizer; checkpoints store this string
    token_bytes: list[bytes]  # the bytes of each id
    special: dict[str, int]  # {name: id} of tokens that represent no text
    # This id precedes every document, and generation starts from this id. For "bytes" and "lines",
    # this id is the line break, which also occurs within text.
    end_of_text: int
    json: TokenizerJson | None = None  # None for "gpt2" and "bytes"

    def __post_init__(self):
        self.n_vocab = len(self.token_bytes)
        self.dtype = np.dtype("<u2" if self.n_vocab <= 2**16 else "<u4")  # dtype of ids in shards
        # tiktoken encodes this mark as end_of_text. The mark is random, so no text contains it.
        self.mark = f"<|{uuid.uuid4()}|>"

    @functools.cached_property
    def encoding(self):
        """The tiktoken.Encoding of "gpt2" or "bytes". Bytes have no merges, so any pattern fits."""
        n = self.n_vocab - len(self.special)  # special tokens come last
        ranks = dict(zip(self.token_bytes, range(n)))
        return require("tiktoken").Encoding(
            self.name,
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens={self.mark: self.end_of_text},
        )

    def encode(self, text):
        """Encodes a string -> list of ids. "<|endoftext|>" is encoded as ordinary text.

        Raises UserError if there are so many consecutive spaces that tiktoken would crash.
        """
        # A prompt that is not UTF-8 contains lone surrogates.
        return self.encode_documents([clean_text(text)])[1:].tolist()

    def encode_documents(self, texts):
        """Encodes strings -> ids, (n,), with end_of_text before each string. Releases the GIL."""
        if self.json:
            ids = []
            for own in self.json.encode(texts):
                ids += [self.end_of_text, *own]
            return np.array(ids, self.dtype)
        text = "".join(self.mark + text for text in texts)
        return self.encoding.encode_to_numpy(text, allowed_special="all").astype(self.dtype)

    def count_unknown(self, texts):
        """Returns (number of unknown tokens, number of all tokens) in a list of strings.

        An unknown token represents text that the vocabulary lacks. If the tokenizer omits such
        text, each omitted character (or byte) counts as an unknown token.
        """
        return self.json.count_unknown(texts) if self.json else (0, 0)

    @property
    def unknown(self):
        """The id of the unknown token, or None if the tokenizer can encode any text.

        The id is n_vocab if the tokenizer omits text that the vocabulary lacks.
        """
        return self.json.unknown if self.json else None

    def count_lost(self, texts):
        """Returns how many characters (or bytes) the tokenizer omits when it encodes strings."""
        leaves_out = self.unknown == self.n_vocab
        return self.count_unknown(texts)[0] if leaves_out else 0

    def decode(self, ids):
        """Decodes ids -> text. Invalid UTF-8 and padding ids become U+FFFD."""
        if self.json and not self.json.joins_bytes:
            return self.json.decode(ids)
        data = b"".join(self.token_bytes[i] if i < self.n_vocab else b"\xff" for i in ids)
        return data.decode("utf-8", errors="replace")

    def text_bytes(self, vocab_size):
        """Returns the number of bytes of text per id, (vocab_size,) int64; 0 for special ids.

        All numbers are 0 if the bytes of a text may differ from the bytes of its tokens. For
        example, WordPiece omits spaces, SentencePiece adds a space, and a normalizer replaces
        characters.
        """
        sizes = np.zeros(vocab_size, np.int64)
        if self.json and not self.json.keeps_text:
            print0(
                "note: bits per byte need a byte-level tokenizer that does not change its input; "
                "wikitext.py computes bits per byte with any tokenizer"
            )
            return sizes
        special = set(self.special.values())
        for i, data in enumerate(self.token_bytes[:vocab_size]):
            if i not in special:
                sizes[i] = len(data)
        return sizes


def note_unknown(tokenizer, texts, what):
    """Prints the share of unknown tokens, if there are any. what: name of the texts."""
    if tokenizer.unknown is None:  # the tokenizer can encode any text
        return
    n_unknown, n_tokens = tokenizer.count_unknown([clean_text(text) for text in texts])
    if n_unknown:
        print0(f"note: the tokenizer does not know {n_unknown / n_tokens:.1%} of {what}")


@functools.cache
def get_tokenizer(source):
    """Returns the Tokenizer of a source.

    source: "gpt2", "bytes", "lines", or the contents of a tokenizer.json. "lines" is the tokenizer
    "bytes" for a model that was trained on pairs, in which a line break ends a text.
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
        raise UserError(
            f"unknown tokenizer {source[:50]!r}; copy its tokenizer.json next to the shards"
        )
    found = TokenizerJson(source)
    token_bytes, end = found.token_bytes, found.end_of_text
    for known in (get_tokenizer("gpt2"), get_tokenizer("bytes")):
        same_ids = known.token_bytes == token_bytes and known.end_of_text == end
        if same_ids and is_gpt2(found.settings):
            return known
    crc = zlib.crc32(repr((token_bytes, end)).encode())
    name = f"tokenizer.json ({len(token_bytes):,} ids, CRC-32 {crc:08x})"
    return Tokenizer(name, source, token_bytes, found.special, end, found)


def read_gpt2_tokens():
    """Returns the bytes of each GPT-2 token, except the last token, end_of_text."""
    token_bytes = []
    # A line contains a token in Base64, a space, and its id. The ids are the line numbers, from 0.
    for line in MERGES.read_bytes().splitlines():
        base64_token, _ = line.split()
        token_bytes.append(base64.b64decode(base64_token))
    return token_bytes


def load_tokenizer(place, end_of_text=None):
    """Loads a Tokenizer.

    place: "gpt2", "bytes", a tokenizer.json, a directory with this file, or a name on the Hugging
    Face Hub. end_of_text: name of the end-of-text token, if it is not in END_NAMES.
    """
    if place in ("gpt2", "bytes"):
        known = get_tokenizer(place)
        if end_of_text and end_of_text not in known.special:
            raise UserError(
                f"--end_of_text: {place} has its own end-of-text token; remove this flag"
            )
        return known
    # Errors of the network and of `tokenizers` have no common class.
    with explaining(f"--tokenizer {place}: not usable", "give another tokenizer, or --end_of_text"):
        settings = read_settings(str(place), end_of_text)
        return get_tokenizer(json.dumps(settings, ensure_ascii=False))


def clean_text(text):
    """Replaces each lone surrogate with U+FFFD, as tiktoken does -> text.

    Raises UserError if many consecutive spaces would overflow the stack of tiktoken's regex.
    """
    # With (?<!\s), a match can begin only at the first of several spaces. Otherwise, the search
    # could need quadratic time.
    if len(text) >= LONG_SPACE and re.search(rf"(?<!\s)\s{{{LONG_SPACE}}}", text):
        raise UserError(f"{LONG_SPACE:,} or more white spaces in a row; remove some of them")
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
