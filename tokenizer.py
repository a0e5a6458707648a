"""Text to token ids and back. As a program, it trains a vocabulary on your text.

  python tokenizer.py --input 'corpus/*.txt' --vocab_size 32000 --output zh.json
  python fineweb.py --input 'corpus/*.txt' --tokenizer zh.json --output_dir zh

--input takes the same files as fineweb.py. The vocabulary is a byte-level BPE,
so it can encode any text. The output is a tokenizer.json of Hugging Face.
First: pip install tokenizers
"""

# There are three kinds of Tokenizer: GPT-2's BPE, plain bytes, and a tokenizer.json. GPT-2's merges
# are in plaingpt/gpt2.tiktoken (OpenAI, MIT license), so no network is needed.

import base64
import functools
import hashlib
import itertools
import json
import os
import random
import re
import sys
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from plaingpt import cli, tokenizer_json
from plaingpt.cli import UserError, first_line, require
from plaingpt.corpus import check_spaces, find_files, read_blocks, texts_of

END_OF_TEXT = "<|endoftext|>"
MERGES = Path(__file__).parent / "plaingpt" / "gpt2.tiktoken"
# tiktoken pins the same hash for r50k_base, its name for this encoding.
MERGES_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# GPT-2 splits text before it merges bytes: contractions, words, numbers, other symbols, spaces.
PATTERNS = dict(
    gpt2=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    gpt4=tokenizer_json.GPT4_PATTERN, bytes=r"[\s\S]")


@dataclass(eq=False, repr=False)  # has a hash for functools.cache
class Tokenizer:
    """Converts text to ids and ids to text. get_tokenizer and load_tokenizer create one."""

    name: str  # "gpt2", "bytes", or a description. Equal names mean: the ids have the same bytes
    source: str  # what get_tokenizer needs to create it again; checkpoints store it
    token_bytes: list[bytes]  # the bytes of each id
    special: dict[str, int]  # the ids that stand for no text
    end_of_text: int  # before every document; generation starts from it. bytes: the line break
    settings: dict | None = None  # the contents of a tokenizer.json

    def __post_init__(self):
        self.n_vocab = len(self.token_bytes)
        # How it splits text: a key of PATTERNS, or None for another way.
        self.pattern = tokenizer_json.find_pattern(self.settings) if self.settings else self.name
        self.mark = f"<|{uuid.uuid4()}|>"  # stands for end_of_text; random, so no text contains it

    @functools.cached_property
    def encoding(self):
        """The tiktoken.Encoding behind encode(). None if only `tokenizers` gives the right ids."""
        if not self.pattern or self.settings and not tokenizer_json.ids_are_ranks(
                self.settings, self.token_bytes, self.special):
            return None
        ordinary = self.token_bytes[: self.n_vocab - len(self.special)]
        ranks = {token: i for i, token in enumerate(ordinary)}
        return require("tiktoken").Encoding(
            self.name, pat_str=PATTERNS[self.pattern], mergeable_ranks=ranks,
            special_tokens={self.mark: self.end_of_text})

    @functools.cached_property
    def library(self):
        """This vocabulary as a tokenizers.Tokenizer. It encodes "<|endoftext|>" as plain text."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # fineweb.py has its own threads
        tokenizers = require("tokenizers")
        settings = self.settings or tokenizer_json.build(self.token_bytes, self.special)
        try:
            library = tokenizers.Tokenizer.from_str(json.dumps(settings))
        except Exception as error:  # the package has no exception class of its own
            raise UserError(f"the package tokenizers rejects the {self.name} "
                            f"({first_line(error)}); give another tokenizer") from error
        library.encode_special_tokens = True
        return library

    def encode(self, text):
        """Text -> list of ids. The text "<|endoftext|>" is encoded as ordinary text."""
        try:
            check_spaces(text)
        except ValueError as error:
            raise UserError(f"the text has {error}; shorten them") from error
        if self.encoding:
            return self.encoding.encode_ordinary(text)
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts):
        """Texts -> their ids, with end_of_text before each text: (n,) uint16. Releases the GIL."""
        if self.encoding:
            text = "".join(self.mark + text for text in texts)
            return self.encoding.encode_to_numpy(text, allowed_special="all").astype(np.uint16)
        found = self.library.encode_batch_fast(texts, add_special_tokens=False)
        ids = ([self.end_of_text, *encoded.ids] for encoded in found)
        return np.fromiter(itertools.chain.from_iterable(ids), np.uint16)

    def decode(self, ids):
        """Ids -> text. Invalid UTF-8, and ids without bytes (padding), become U+FFFD."""
        if self.settings and not tokenizer_json.is_byte_level(self.settings):
            return self.library.decode(ids, skip_special_tokens=False)
        unknown = "\ufffd".encode()
        parts = [self.token_bytes[i] if i < self.n_vocab else unknown for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")

    def text_bytes(self, vocab_size):
        """How many bytes of text each id stands for, 0 for special ids: (vocab_size,) int64."""
        lengths = np.zeros(max(vocab_size, self.n_vocab), np.int64)
        lengths[: self.n_vocab] = [len(data) for data in self.token_bytes]
        lengths[list(self.special.values())] = 0
        return lengths[:vocab_size]


@functools.cache
def get_tokenizer(source):
    """source: "gpt2", "bytes", or the text of a tokenizer.json -> Tokenizer. Raises UserError."""
    if source == "bytes":
        return Tokenizer(source, source, [bytes([i]) for i in range(256)], {}, ord("\n"))
    if source.startswith("{"):
        settings, token_bytes, special, end = tokenizer_json.parse(source)
        crc = f"{zlib.crc32(repr((token_bytes, end)).encode()):08x}"
        name = f"tokenizer.json ({len(token_bytes):,} ids, CRC-32 {crc})"
        tokenizer = Tokenizer(name, source, token_bytes, special, end, settings)
        known = tokenizer.pattern in ("gpt2", "bytes") and get_tokenizer(tokenizer.pattern)
        return known if known and known.token_bytes == token_bytes else tokenizer
    if source != "gpt2":
        raise UserError(f"unknown tokenizer {source[:50]!r}; add its tokenizer.json to the shards")
    data = MERGES.read_bytes()
    if hashlib.sha256(data).hexdigest() != MERGES_SHA256:
        raise UserError(f"{MERGES}: is damaged; restore it with git checkout {MERGES}")
    # Each line: the token in base64, a space, its id. The ids are the line numbers, from 0.
    token_bytes = [base64.b64decode(line.split()[0]) for line in data.splitlines()]
    end = len(token_bytes)
    return Tokenizer(source, source, [*token_bytes, END_OF_TEXT.encode()], {END_OF_TEXT: end}, end)


def load_tokenizer(place, end_of_text=None):
    """Loads "gpt2", "bytes", a tokenizer.json, or a directory or hub name with one -> Tokenizer.

    end_of_text: name of the token between documents, if it is not a usual one. Raises UserError.
    """
    if place in ("gpt2", "bytes"):
        return get_tokenizer(place)
    try:
        settings = dict(json.loads(tokenizer_json.read_source(str(place))))
        config = Path(place, "tokenizer_config.json")  # in an exported directory
        if end_of_text := end_of_text or cli.read_json(config).get("end_of_text"):
            settings["end_of_text"] = end_of_text
        return get_tokenizer(json.dumps(settings, ensure_ascii=False))
    except (ValueError, TypeError) as error:
        raise UserError(f"--tokenizer {place}: is not JSON ({error}); give a tokenizer.json"
                        ) from error
    except UserError as error:
        raise UserError(f"--tokenizer {place}: {error}") from error


PIECE = 10_000  # characters; large documents are sampled in pieces


@dataclass
class VocabularyConfig:
    input: Annotated[list[str] | None, "files or quoted globs, as in fineweb.py"] = None
    vocab_size: Annotated[int, "number of ids",
                          f"above 256 and at most {tokenizer_json.MAX_IDS}"] = 32000
    output: Annotated[str, "file to write"] = "tokenizer.json"
    pattern: Annotated[Literal["gpt2", "gpt4"], "how text is split before merging"] = "gpt2"
    text_key: Annotated[str, "field or column that holds the text"] = "text"
    sample_bytes: Annotated[int, "bytes of text to train on", "at least 1"] = 2 * 10**7


def read_sample(config):
    """The texts to train on, evenly spaced in the files. Raises UserError."""
    from tqdm import tqdm

    paths = find_files(config.input)
    n_bytes = sum(path.stat().st_size for path in paths)
    share = min(1, config.sample_bytes / max(1, n_bytes))
    texts, size, n_seen = [], 0, 0
    with tqdm(total=n_bytes, unit="B", unit_scale=True, desc="reading") as bar:
        for block in read_blocks(paths, config.text_key):
            found, skipped = texts_of(block, config.text_key)
            for line, reason in skipped:
                unit = "row" if block.kind == "table" else "line"
                tqdm.write(f"skipped {paths[block.file]}, {unit} {line}: {reason}", file=sys.stderr)
            pieces = [text[i : i + PIECE] for text in found for i in range(0, len(text), PIECE)]
            for piece in pieces:
                n_seen += 1
                if not texts or int(n_seen * share) > int((n_seen - 1) * share):
                    texts.append(piece)
                    size += len(piece.encode())
            bar.update(block.done - bar.n)
            if size >= config.sample_bytes:
                break
    if not texts:
        raise UserError(f"{paths[0]}: no text in it; choose another file or --text_key")
    return texts


def hold_out(texts):
    """Splits texts 19:1 -> (to train on, to measure on). Fewer than 20 texts are joined and cut."""
    if len(texts) >= 20:
        return [text for i, text in enumerate(texts) if i % 20 != 19], texts[19::20]
    text = "".join(texts)
    cut = len(text) * 19 // 20
    return [text[:cut]], [text[cut:]]


def train_vocabulary(texts, config):
    """Trains a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) -> text of its JSON."""
    hf = require("tokenizers")
    library = hf.Tokenizer(hf.models.BPE())
    library.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if config.pattern == "gpt4":
        library.pre_tokenizer = hf.pre_tokenizers.Sequence([
            hf.pre_tokenizers.Split(hf.Regex(PATTERNS["gpt4"]), "isolated"),
            hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=config.vocab_size - 1, show_progress=sys.stderr.isatty(),
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet())
    library.train_from_iterator(texts, trainer, length=len(texts))
    library.add_special_tokens([END_OF_TEXT])  # the last id
    return library.to_str(pretty=True)


def describe(name, tokenizer, texts):
    """Prints bytes per token of this tokenizer and GPT-2's, and ten words with their pieces."""
    n_bytes = sum(len(text.encode()) for text in texts)
    print(f"\nbytes per token, on {n_bytes:,} bytes of text that was not trained on:")
    for title, other in ((name, tokenizer), ("gpt2", get_tokenizer("gpt2"))):
        n_tokens = sum(len(other.encode(text)) for text in texts)
        print(f"  {title:20} {n_bytes / max(1, n_tokens):6.2f}")
    words = sorted(set(re.findall(r"\w{2,12}", "".join(texts))))
    print("\nten words:")
    for word in random.Random(0).sample(words, min(10, len(words))):
        pieces = [tokenizer.token_bytes[i].decode(errors="backslashreplace")
                  for i in tokenizer.encode(" " + word)]
        print(f"  {word:20} {' | '.join(pieces)}")


def main(argv=None):
    config = VocabularyConfig(**cli.parse_flags(__doc__, VocabularyConfig, argv=argv))
    if not config.input:
        raise UserError("--input: is missing; give text files")
    require("tokenizers")
    cli.check_output("--output", config.output)
    texts, held_out = hold_out(read_sample(config))
    text = train_vocabulary(texts, config)
    tokenizer = get_tokenizer(text)
    with cli.writing(config.output):
        Path(config.output).write_text(text, "utf-8")
    few = tokenizer.n_vocab < config.vocab_size
    reason = f"; the text is too short for {config.vocab_size:,} ids" if few else ""
    print(f"{config.output}: {tokenizer.n_vocab:,} ids{reason}")
    describe(config.output, tokenizer, held_out)
    print(f"\nto use it: python fineweb.py --input ... --tokenizer {config.output}")


if __name__ == "__main__":
    cli.run(main)
