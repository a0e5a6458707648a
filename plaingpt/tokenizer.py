"""The tokenizer, which turns text into token ids, and token ids into text.

There are three kinds of tokenizers: GPT-2's BPE, plain bytes, and a tokenizer.json in Hugging Face
format. The package tiktoken encodes text for the first two kinds, and the package tokenizers for
the third kind. GPT-2's tokens are in gpt2.tiktoken (OpenAI, MIT license), so loading them needs no
network.
"""

import base64
import functools
import json
import re
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaingpt.errors import UserError, explaining, require
from plaingpt.files import read_json
from plaingpt.terminal import print0

import numpy as np

END_OF_TEXT = "<|endoftext|>"
# Common strings of end-of-text tokens. The first of these strings that the vocabulary of a
# tokenizer.json contains is the end-of-text token.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")
MERGES = Path(__file__).with_name("gpt2.tiktoken")
# Before merging bytes, GPT-2 splits text into contractions, words, numbers, symbols and spaces.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
LONG_SPACE = 500_000  # consecutive whitespace characters, see clean_text
# A byte-level vocabulary writes each byte as a character: visible bytes as themselves, and the
# other bytes as the characters from U+0100 on.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF = {chr(byte): byte for byte in VISIBLE}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


@dataclass(eq=False, repr=False)  # eq=False keeps a Tokenizer hashable, for functools.cache
class Tokenizer:
    """Converts text to ids and ids to text. get_tokenizer and load_tokenizer return a Tokenizer."""

    name: str  # "gpt2", "bytes", or a description; tokenizers with equal names have equal tokens
    source: str  # the argument of get_tokenizer; checkpoints store this string
    token_bytes: list[bytes]  # the bytes of each id
    special: dict[str, int]  # {string: id} of the special tokens, which represent no text
    # This id precedes every document, and generation starts from this id. For "bytes" and "lines",
    # end_of_text is the id of the line break, which also occurs within text.
    end_of_text: int
    json: Any = None  # the tokenizers.Tokenizer of a tokenizer.json
    unknown: int | None = None  # the id of the unknown token, for text that the vocabulary lacks
    joins_bytes: bool = True  # whether decoding only concatenates the bytes of the tokens

    def __post_init__(self):
        self.n_vocab = len(self.token_bytes)
        self.dtype = np.dtype("<u2" if self.n_vocab <= 2**16 else "<u4")  # dtype of ids in shards
        # `encode_documents` writes this mark for end_of_text. The mark is random, so no text
        # contains the mark.
        self.mark = f"<|{uuid.uuid4()}|>"
        ends = [name for name, i in self.special.items() if i == self.end_of_text]
        self.new_names = dict.fromkeys(ends, self.mark)  # {} if end_of_text also occurs in text

    @functools.cached_property
    def encoding(self):
        """The tiktoken.Encoding of "gpt2" or "bytes".

        "bytes" has no merges, so PATTERN does not change the tokens of a text.
        """
        n = self.n_vocab - len(self.special)  # special tokens come last
        ranks = dict(zip(self.token_bytes, range(n)))
        return require("tiktoken").Encoding(
            self.name,
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens={self.mark: self.end_of_text},
        )

    @functools.cached_property
    def encoder(self):
        """A copy of `json` that encodes the string of the end-of-text token as ordinary text."""
        return make_encoder(self.json, self.new_names)

    def encode(self, text):
        """Returns the ids of a string, as a list. Encodes "<|endoftext|>" as ordinary text.

        Raises UserError for the same texts as clean_text.
        """
        # A prompt that is not UTF-8 contains lone surrogates, which clean_text replaces.
        return self.encode_documents([clean_text(text)])[1:].tolist()

    def encode_documents(self, texts):
        """Returns the ids of all strings in one array, (n,), with end_of_text before each string.

        Releases the GIL, so several threads can encode at the same time.
        """
        if self.json:
            with explaining("tokenizer.json: not usable", "give another file"):
                # The library raises an error, for example, if the unknown token is missing.
                encodings = self.encoder.encode_batch_fast(texts, add_special_tokens=False)
            ids = []
            for encoding in encodings:
                ids += [self.end_of_text, *encoding.ids]
            return np.array(ids, self.dtype)
        text = "".join(self.mark + text for text in texts)
        return self.encoding.encode_to_numpy(text, allowed_special="all").astype(self.dtype)

    def decode(self, ids):
        """Returns the text of some ids. Invalid UTF-8 and ids outside the vocabulary become U+FFFD.

        A model may generate ids outside the vocabulary if its vocab_size is larger than n_vocab.
        """
        if not self.joins_bytes:
            return self.json.decode(ids, skip_special_tokens=False)
        data = b"".join(self.token_bytes[i] if i < self.n_vocab else b"\xff" for i in ids)
        return data.decode("utf-8", errors="replace")

    def text_bytes(self, vocab_size):
        """Returns the number of bytes of text per id, (vocab_size,) int64.

        The number is 0 for special tokens. All numbers are 0 if the bytes of a text may differ from
        the bytes of its tokens. For example, WordPiece omits spaces, SentencePiece adds a space,
        and a normalizer replaces characters.
        """
        sizes = np.zeros(vocab_size, np.int64)
        if self.json and not self.keeps_text():
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

    def keeps_text(self):
        """Returns whether the tokens of a text contain exactly the bytes of the text.

        Encodes and decodes a text that contains the added tokens, and each possible byte of UTF-8.
        """
        if not self.joins_bytes or self.json.normalizer:
            return False
        added = [token.content for token in self.json.get_added_tokens_decoder().values()]
        characters = [chr(c) for c in range(0x110000) if c < 0x3000 or c % 0x1000 == 0]
        text = "  ".join(["a", *added, *characters])
        return self.decode(self.encode(text)) == text


def note_unknown(tokenizer, parts, what):
    """If ids contain the unknown token, prints the share of the ids that are the unknown token.

    parts: lists or arrays of ids. what: the name of the encoded text, for the message.
    """
    if tokenizer.unknown is None:
        return
    n_unknown = sum(np.count_nonzero(np.equal(part, tokenizer.unknown)) for part in parts)
    if n_unknown:
        share = n_unknown / sum(map(len, parts))
        print0(f"note: {share:.1%} of the tokens of {what} are the unknown token")


@functools.cache
def get_tokenizer(source):
    """Returns the Tokenizer of a source.

    source: "gpt2", "bytes", "lines", or the contents of a tokenizer.json. "lines" means the same
    tokens as "bytes", for a model that was trained on pairs: there, a line break ends a text.
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
    return read_tokenizer_json(source)


def read_gpt2_tokens():
    """Returns the bytes of each GPT-2 token, except the last token, end_of_text."""
    token_bytes = []
    # A line contains a token in Base64, a space, and the id of the token. The ids are the line
    # numbers, counted from 0.
    for line in MERGES.read_bytes().splitlines():
        base64_token, _ = line.split()
        token_bytes.append(base64.b64decode(base64_token))
    return token_bytes


def read_tokenizer_json(source):
    """Returns the Tokenizer of a tokenizer.json. Raises exceptions of many kinds.

    source: the contents of the file. Only plainGPT uses the key "end_of_text", which contains the
    string of the end-of-text token if END_NAMES does not contain this string. If the file has the
    same tokens and ids as the tokenizer "gpt2" or "bytes", returns the Tokenizer of that name.
    """
    settings = json.loads(source)
    end_name = settings.pop("end_of_text", None)
    settings.update(truncation=None, padding=None)
    if "dropout" in settings["model"]:  # with dropout, BPE skips random merges in every call
        settings["model"]["dropout"] = None
    library = require("tokenizers").Tokenizer.from_str(json.dumps(settings))
    settings = json.loads(library.to_str())  # now contains every setting
    vocab = library.get_vocab()  # {token: id}
    if len(set(vocab.values())) < len(vocab):  # an id of two tokens decodes to only one
        raise ValueError("two tokens have the same id")
    names = [name for name in ([end_name] if end_name else END_NAMES) if name in vocab]
    if not names:
        raise ValueError(f"no end-of-text token {end_name or ' or '.join(END_NAMES)}")
    end = vocab[names[0]]
    added = {token["content"]: token["special"] for token in settings["added_tokens"]}
    special = {name: vocab[name] for name in added if added[name]}
    # A single character, such as the line break, can be end_of_text and also occur in text.
    if len(names[0]) > 1 or names[0] in added:
        special[names[0]] = end
    is_byte_level = "ByteLevel" in str(settings["decoder"])
    token_bytes = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        token_bytes[i] = bytes_of(token, is_byte_level and token not in added)
    for known in (get_tokenizer("gpt2"), get_tokenizer("bytes")):
        same_ids = known.token_bytes == token_bytes and known.end_of_text == end
        if same_ids and splits_like_gpt2(settings):
            return known
    model = settings["model"]
    unknown = model.get("unk_id", vocab.get(model.get("unk_token")))  # only Unigram has "unk_id"
    if unknown == end:
        if model["type"] != "BPE":
            raise ValueError(f"{names[0]} is also the unknown token")
        unknown = None  # `encoder` renames end_of_text, so BPE raises an error for unknown text
    if omits_text(settings, vocab):
        print0("note: the tokenizer omits text that its vocabulary lacks")
    crc = zlib.crc32(repr((token_bytes, end)).encode())
    name = f"tokenizer.json ({len(token_bytes):,} ids, CRC-32 {crc:08x})"
    joins_bytes = type(library.decoder).__name__ == "ByteLevel"
    return Tokenizer(name, source, token_bytes, special, end, library, unknown, joins_bytes)


def bytes_of(token, is_byte_level):
    """Returns the bytes of a token in the vocabulary of a tokenizer.json.

    is_byte_level: whether the token writes each byte as a character (BYTE_OF). Otherwise, the token
    follows the rules of SentencePiece or WordPiece.
    """
    if is_byte_level:
        if BYTE_OF.keys() >= set(token):
            return bytes(map(BYTE_OF.get, token))
        return token.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").removeprefix("##").encode()  # U+2581 means a space


def splits_like_gpt2(settings):
    """Returns whether a tokenizer splits a text as GPT-2 does, without changing the text.

    settings: the contents of the tokenizer.json.
    """
    split = settings["pre_tokenizer"] or {}
    if settings["normalizer"] or split.get("type") != "ByteLevel" or split["add_prefix_space"]:
        return False
    # With use_regex, the tokenizer splits text with GPT-2's regular expression. A tokenizer without
    # merges, such as "bytes", needs no split.
    return split["use_regex"] or not settings["model"].get("merges")


def omits_text(settings, vocab):
    """Returns whether a tokenizer omits text that its vocabulary lacks.

    Only a BPE without an unknown token omits text, unless the vocabulary contains every byte.
    settings: the contents of the tokenizer.json. vocab: {token: id}.
    """
    model = settings["model"]
    if model["type"] != "BPE" or model["unk_token"] is not None:
        return False
    byte_names = {f"<0x{byte:02X}>" for byte in range(256)}
    if not model["byte_fallback"] and "ByteLevel" in str(settings["pre_tokenizer"]):
        byte_names = BYTE_OF.keys()
    return not vocab.keys() >= byte_names


def make_encoder(library, new_names):
    """Returns a copy of a tokenizers.Tokenizer in which some tokens have new strings.

    The ids stay the same. If an old string occurs in a text, the copy encodes the old string as
    ordinary text. Without the new strings, Unigram would find the old string in its vocabulary.
    library: the tokenizers.Tokenizer. new_names: {old string: new string}.
    """
    settings = json.loads(library.to_str())
    model = settings["model"]
    if isinstance(model["vocab"], list):  # Unigram: [[token, score], ...]
        model["vocab"] = [[new_names.get(token, token), score] for token, score in model["vocab"]]
    else:
        model["vocab"] = {new_names.get(token, token): i for token, i in model["vocab"].items()}
    if "merges" in model:
        merges = model["merges"]
        model["merges"] = [[a, b] for a, b in merges if not new_names.keys() & {a, b, a + b}]
    for token in settings["added_tokens"]:
        if token["content"] in new_names:
            token.update(content=new_names[token["content"]], special=True)
    encoder = require("tokenizers").Tokenizer.from_str(json.dumps(settings))
    encoder.encode_special_tokens = True  # encodes special tokens in a text as ordinary text
    return encoder


def load_tokenizer(place, end_of_text=None):
    """Loads a Tokenizer.

    place: "gpt2", "bytes", a tokenizer.json, a directory with a tokenizer.json, or a name on the
    Hugging Face Hub. end_of_text: the string of the end-of-text token, if END_NAMES does not
    contain this string.
    """
    if place in ("gpt2", "bytes"):
        known = get_tokenizer(place)
        if end_of_text and end_of_text not in known.special:
            raise UserError(
                f"--end_of_text: {place} has its own end-of-text token; remove this flag"
            )
        return known
    # Errors of the network and of the package tokenizers have no common class, so this block
    # catches exceptions of all kinds.
    with explaining(f"--tokenizer {place}: not usable", "give another tokenizer, or --end_of_text"):
        settings = read_settings(str(place), end_of_text)
        return get_tokenizer(json.dumps(settings, ensure_ascii=False))


def read_settings(place, end_of_text=None):
    """Returns the contents of a tokenizer.json, as a dict. Raises exceptions of many kinds.

    The key "end_of_text" contains the argument end_of_text. If the argument is None, the key
    contains the string that export.py has stored in tokenizer_config.json. The arguments are as in
    load_tokenizer.
    """
    path = Path(place)
    if not path.exists() and path.suffix != ".json" and place.count("/") < 2:
        names = ["tokenizer*.json", "vocab.json", "merges.txt", "added_tokens.json"]
        path = Path(require("huggingface_hub").snapshot_download(place, allow_patterns=names))
    if path.is_dir():
        is_old = (path / "vocab.json").exists() and not (path / "tokenizer.json").exists()
        path = path / ("vocab.json" if is_old else "tokenizer.json")
    if path.name == "vocab.json":
        settings = convert_older_files(path)
    else:
        settings = json.loads(path.read_text("utf-8"))
    config = read_json(path.with_name("tokenizer_config.json"))
    end_of_text = end_of_text or config.get("end_of_text")
    if end_of_text:
        settings["end_of_text"] = end_of_text
    return settings


def convert_older_files(path):
    """Converts vocab.json, merges.txt and added_tokens.json to a tokenizer.json. Returns a dict.

    path: the path of vocab.json. The other two files are in the same directory.
    """
    vocab = json.loads(path.read_text("utf-8"))
    ends = [name for name in END_NAMES if name in vocab]
    library = build_byte_level(str(path), str(path.with_name("merges.txt")), ends[:1])
    added = read_json(path.with_name("added_tokens.json"))  # {token: id}
    library.add_tokens(sorted(added, key=added.get))
    for token, i in added.items():
        found = library.token_to_id(token)
        if found != i:
            raise ValueError(f"added_tokens.json: the id of {token!r} must be {found}, not {i}")
    return json.loads(library.to_str())


def build_byte_level(vocab, merges, special):
    """Returns a byte-level BPE of the package tokenizers that splits text as GPT-2 does.

    vocab: {token: id}, or the path of a vocab.json. merges: pairs of tokens, or the path of a
    merges.txt. special: the strings of special tokens.
    """
    library = require("tokenizers").ByteLevelBPETokenizer(vocab, merges)
    library.add_special_tokens(special)
    return library


def clean_text(text):
    """Returns the text, with U+FFFD in place of each lone surrogate, as in tiktoken.

    Raises UserError if the text contains LONG_SPACE consecutive whitespace characters, because so
    much whitespace could overflow the stack of tiktoken's regular expression.
    """
    # With (?<!\s), a match can begin only at the first of several whitespace characters. Otherwise,
    # the search could need quadratic time.
    if len(text) >= LONG_SPACE and re.search(rf"(?<!\s)\s{{{LONG_SPACE}}}", text):
        raise UserError(f"{LONG_SPACE:,} or more consecutive whitespace characters; remove some")
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
