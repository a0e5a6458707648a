"""Turns text into token ids and back. Run it to train a vocabulary on your text.

  python tokenizer.py --input 'corpus/*.txt' --vocab_size 32000 --output zh.json
  python fineweb.py --input 'corpus/*.txt' --tokenizer zh.json --output_dir zh

--input takes the same files as fineweb.py. The vocabulary is a byte-level BPE,
so it can encode any text. The output is a tokenizer.json of Hugging Face.
It needs tokenizers: pip install tokenizers
"""

# There are three kinds of Tokenizer: GPT-2's BPE, plain bytes, and a tokenizer.json. For the first
# two, tiktoken encodes the text; for the third, the package tokenizers. GPT-2's merges are in
# plaingpt/gpt2.tiktoken (OpenAI, MIT license), so no network is needed.

import base64
import functools
import json
import signal
import sys
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from plaingpt import cli
from plaingpt.cli import UserError, check_output, explaining, parse_flags, require, run_program
from plaingpt.text import clean_text, find_files, read_documents
from plaingpt.tokenizer_json import build, is_byte_level, is_gpt2, parse, read_settings

END_OF_TEXT = "<|endoftext|>"
MERGES = Path(__file__).parent / "plaingpt" / "gpt2.tiktoken"
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
        ranks = dict(zip(self.token_bytes, range(self.n_vocab - len(self.special))))
        return require("tiktoken").Encoding(
            self.name,
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens={self.mark: self.end_of_text},
        )

    @functools.cached_property
    def library(self):
        """This vocabulary as a tokenizers.Tokenizer. It encodes "<|endoftext|>" as plain text."""
        settings = self.settings or build(self.token_bytes, self.special)
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
            found = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return np.array([i for each in found for i in [self.end_of_text, *each.ids]], self.dtype)

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
        if self.settings and not is_byte_level(self.settings):
            cli.print0("note: bits per byte need a byte-level vocabulary; wikitext.py has them")
            return np.zeros(vocab_size, np.int64)
        special = {*self.special.values()}
        sizes = [0 if i in special else len(data) for i, data in enumerate(self.token_bytes)]
        return np.array(sizes + [0] * (vocab_size - self.n_vocab), np.int64)[:vocab_size]


@functools.cache
def get_tokenizer(source):
    """Makes the Tokenizer of a source. Raises UserError.

    source: "gpt2", "bytes", "lines", or the text of a tokenizer.json. "lines" are the bytes of a
    model that was trained on pairs: a line break ends a text.
    """
    if source in ("bytes", "lines"):
        return Tokenizer("bytes", source, [bytes([i]) for i in range(256)], {}, ord("\n"))
    if source == "gpt2":
        # A line has the token in base64, a space, and its id. The ids are the line numbers, from 0.
        lines = MERGES.read_bytes().splitlines()
        tokens = [*(base64.b64decode(line.split()[0]) for line in lines), END_OF_TEXT.encode()]
        return Tokenizer(source, source, tokens, {END_OF_TEXT: len(lines)}, len(lines))
    if not source.startswith("{"):
        raise UserError(f"unknown tokenizer {source[:50]!r}; add its tokenizer.json to the shards")
    settings, token_bytes, special, end, unknown = parse(source)
    for known in (get_tokenizer("gpt2"), get_tokenizer("bytes")):
        same_ids = known.token_bytes == token_bytes and known.end_of_text == end
        if same_ids and is_gpt2(settings):
            return known
    crc = f"{zlib.crc32(repr((token_bytes, end)).encode()):08x}"
    name = f"tokenizer.json ({len(token_bytes):,} ids, CRC-32 {crc})"
    return Tokenizer(name, source, token_bytes, special, end, settings, unknown)


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


PIECE = 10_000  # characters; large documents are sampled in pieces


@dataclass
class VocabularyConfig:
    input: Annotated[list[str] | None, "files or quoted globs, as in fineweb.py"] = None
    vocab_size: Annotated[int, "number of ids", "above 256"] = 32000
    output: Annotated[str, "file to write"] = "tokenizer.json"
    text_key: Annotated[str, "field or column that holds the text"] = "text"
    sample_bytes: Annotated[int, "bytes of text to train on", "at least 1"] = 2 * 10**7


def read_sample(config):
    """Returns the texts to train on, evenly spaced in the files. Raises UserError."""
    paths = find_files(config.input)
    n_bytes = sum(path.stat().st_size for path in paths)
    texts, damaged, size, n_before = [], [], 0, 0
    for document in read_documents(paths, config.text_key, cut=True):
        text = document.text or ""  # empty if the document is damaged
        if document.problem:
            damaged.append(f"{document.where}: {document.problem}")
        for start in range(0, len(text), PIECE):
            # These are bytes on disk up to the end of the piece. Compressed files hold more text.
            n_read = n_before + (document.done - n_before) * min(1, (start + PIECE) / len(text))
            if size * n_bytes <= config.sample_bytes * n_read:
                texts.append(text[start : start + PIECE])
                size += len(texts[-1].encode())
        n_before = document.done
    if damaged:
        cli.print0(f"skipped {len(damaged):,} damaged documents; the first one: {damaged[0]}")
    if not texts:
        raise UserError(f"{paths[0]}: no text in it; choose another file or --text_key")
    return texts


def main(argv=None):
    config = VocabularyConfig(**parse_flags(__doc__, VocabularyConfig, argv=argv))
    if not config.input:
        raise UserError("--input: is missing; give text files")
    check_output("--output", config.output, find_files(config.input))
    texts = read_sample(config)
    # BPE merges the most frequent pairs first (Sennrich et al. 2016, arXiv:1508.07909).
    library = require("tokenizers").ByteLevelBPETokenizer()
    library.train_from_iterator(
        texts,
        config.vocab_size - 1,
        min_frequency=0,
        length=len(texts),
        show_progress=sys.stderr.isatty(),
    )
    library.add_special_tokens([END_OF_TEXT])  # gets the last id
    cli.write_json(config.output, json.loads(library.to_str()))
    sample = "".join(texts[::20])
    for place in (config.output, "gpt2"):
        ratio = len(sample.encode()) / len(load_tokenizer(place).encode(sample))
        cli.print0(f"{place}: {ratio:.2f} bytes per token of the training text")


if __name__ == "__main__":
    # Ends at once. Otherwise, a library answers Ctrl-C only when it returns, perhaps after minutes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_program(main)
