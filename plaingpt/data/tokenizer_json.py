"""Reads and writes the tokenizer.json of Hugging Face: ids, bytes, special tokens."""

import json
import re
from pathlib import Path

from plaingpt.base.errors import require
from plaingpt.base.files import read_json

# Usual names of the token between documents. The first one that a vocabulary has is taken.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")
# A byte-level vocabulary writes each byte as a character. It writes a visible byte as itself, and
# the others as the characters from U+0100 on.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF = {chr(byte): byte for byte in VISIBLE}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def parse_tokenizer_json(source):
    """Text of a tokenizer.json -> (settings, bytes of each id, special ids, end-of-text id, id of
    unknown text or None).

    Needs no package, so that training from shards needs none. settings: the contents of the file.
    special ids: {text: id}. The key "end_of_text" is ours. It is the name of the token between
    documents, if it is not in END_NAMES. Raises ValueError, or KeyError if the text is other JSON.
    """
    settings = json.loads(source)
    end_name = settings.pop("end_of_text", None)
    settings.update(truncation=None, padding=None)
    model = settings["model"]
    if isinstance(model["vocab"], list):  # [[token, score], ...]; the place is the id
        ids = {token: i for i, (token, _) in enumerate(model["vocab"])}
    else:  # {token: id}
        ids = {**model["vocab"]}
    added = {token["content"]: token["id"] for token in settings["added_tokens"]}
    ids.update(added)
    special = {}
    for token in settings["added_tokens"]:
        if token["special"]:
            special[token["content"]] = token["id"]
    byte_level = is_byte_level(settings)
    end_name = find_end_name(ids, end_name)
    end = ids[end_name]
    special[end_name] = end
    token_bytes = [b""] * (max(ids.values()) + 1)
    for token, i in ids.items():
        token_bytes[i] = bytes_of(token, byte_level and token not in added)
    unknown = None  # a byte-level vocabulary has all bytes, so no text is unknown
    if not byte_level:
        # Only Unigram has "unk_id".
        unknown = model.get("unk_id", ids.get(model.get("unk_token")))
    return settings, token_bytes, special, end, unknown


def find_end_name(ids, end_name=None):
    """Returns the name of the token between documents. Raises ValueError if `ids` lacks it.

    ids: {token: id}. end_name: the name, if it is not in END_NAMES.
    """
    names = [end_name] if end_name else END_NAMES
    for name in names:
        if name in ids:
            return name
    raise ValueError(f"no end-of-text token {end_name or ' or '.join(END_NAMES)}")


def is_byte_level(settings):
    """Returns whether the decoder is ByteLevel.

    Then every text can be encoded, and ids can be decoded one by one.
    """
    return '"ByteLevel"' in json.dumps(settings["decoder"])


def bytes_of(token, byte_level):
    """Returns the bytes of a token of a byte-level vocabulary, or of SentencePiece or WordPiece."""
    if byte_level:
        if BYTE_OF.keys() >= set(token):
            return bytes(map(BYTE_OF.get, token))
        return token.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").removeprefix("##").encode()  # U+2581 stands for a space


def is_gpt2(settings):
    """Returns whether a text is split into words as in GPT-2, and changed in no other way."""
    split = settings["pre_tokenizer"] or {}
    if settings["normalizer"] is not None:
        return False
    if split.get("type") != "ByteLevel" or split.get("add_prefix_space") is not False:
        return False
    # use_regex means that GPT-2's expression splits the text. Without merges, as in exported bytes,
    # no split is needed.
    return split.get("use_regex", True) or not settings["model"].get("merges")


def build_tokenizer_json(token_bytes, special):
    """Bytes of each id, {text: id} of special tokens -> the tokenizer.json of "gpt2" or "bytes"."""
    bpe_encode = require("tiktoken._educational").bpe_encode
    letters = {byte: letter for letter, byte in BYTE_OF.items()}
    names = []  # the tokens in letters
    ranks = {}  # {bytes of a token: id}
    merges = []
    for token in token_bytes[: len(token_bytes) - len(special)]:  # special tokens come last
        names.append("".join(map(letters.get, token)))
        if len(token) > 1:  # it merges the two tokens into which the earlier ones split it
            left, right = bpe_encode(ranks, token, visualise=None)
            merges.append((names[left], names[right]))
        ranks[token] = len(ranks)
    vocab = {name: i for i, name in enumerate(names)}
    return build_byte_level(vocab, merges, list(special))


def build_byte_level(vocab, merges, special):
    """Makes the tokenizer.json of a byte-level BPE that splits text as GPT-2.

    vocab: {token: id}. merges: pairs of tokens. Or both are the paths of their files. special:
    names of special tokens.
    """
    library = require("tokenizers").ByteLevelBPETokenizer(vocab, merges)
    library.add_special_tokens(special)
    return json.loads(library.to_str())


def read_settings(place, end_of_text=None):
    """Returns the contents of the tokenizer.json at a path, in a directory or on the hub.

    The older pair of vocab.json and merges.txt becomes one. end_of_text: name of the token between
    documents. An exported directory has it in tokenizer_config.json. Raises errors of many kinds.
    """
    path = find_tokenizer_file(place)
    settings = json.loads(path.read_text("utf-8"))
    if path.name == "vocab.json":  # the settings are {token: id}
        ends = [name for name in END_NAMES if name in settings]
        settings = build_byte_level(str(path), str(path.with_name("merges.txt")), ends[:1])
    config = read_json(path.with_name("tokenizer_config.json"))
    end_of_text = end_of_text or config.get("end_of_text")
    if end_of_text:
        settings["end_of_text"] = end_of_text
    return settings


def find_tokenizer_file(place):
    """Returns the path of a tokenizer.json, or of a vocab.json if there is only that.

    place: as in read_settings. Downloads a tokenizer of the hub.
    """
    path = Path(place)
    if not path.exists() and path.suffix != ".json" and place.count("/") < 2:
        names = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
        path = Path(require("huggingface_hub").snapshot_download(place, allow_patterns=names))
    if not path.is_dir():
        return path
    for name in ("tokenizer.json", "vocab.json"):
        if (path / name).exists():
            return path / name
    return path / "tokenizer.json"  # the error message will name it
