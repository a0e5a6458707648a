"""Reads and writes the tokenizer.json of Hugging Face: ids, bytes, special tokens."""

import json
import re
from pathlib import Path

from plaingpt.cli import read_json, require

# Usual names of the token between documents. The first one that a vocabulary has is taken.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")
# A byte-level vocabulary writes each byte as a character. It writes a visible byte as itself.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(byte): byte for byte in VISIBLE}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*VISIBLE}))}


def parse(source):
    """Text of a tokenizer.json -> (settings, bytes of each id, special ids, end-of-text id, id of
    unknown text or None).

    Needs no package, so that training from shards needs none. settings: the contents of the file.
    special ids: {text: id}. The key "end_of_text" is ours. It is the name of the token between
    documents, if it is not in END_NAMES. Raises ValueError, or KeyError if the text is other JSON.
    """
    settings = json.loads(source)
    end = settings.pop("end_of_text", None)
    settings.update(truncation=None, padding=None)
    model = settings["model"]
    vocab = model["vocab"]  # {token: id}, or [[token, score], ...]
    if isinstance(vocab, list):
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    added = {token["content"]: token["id"] for token in settings["added_tokens"]}
    special = {t["content"]: t["id"] for t in settings["added_tokens"] if t["special"]}
    ids, byte_level = {**vocab, **added}, is_byte_level(settings)
    name = next((name for name in ([end] if end else END_NAMES) if name in ids), None)
    if not name:
        raise ValueError(f"no end-of-text token {end or ' or '.join(END_NAMES)}")
    token_bytes = [b""] * (max(ids.values()) + 1)
    for token, i in ids.items():
        token_bytes[i] = bytes_of(token, byte_level and token not in added)
    # A byte-level vocabulary has all bytes, so no text is unknown. Only Unigram has "unk_id".
    unknown = None if byte_level else model.get("unk_id", ids.get(model.get("unk_token")))
    return settings, token_bytes, {**special, name: ids[name]}, ids[name], unknown


def is_byte_level(settings):
    """Returns whether every text can be encoded, and ids can be decoded one by one."""
    return '"ByteLevel"' in json.dumps(settings["decoder"])


def bytes_of(token, byte_level):
    """Returns the bytes of a token of a byte-level vocabulary, or of SentencePiece or WordPiece."""
    if byte_level:
        return bytes(map(BYTE_OF.get, token)) if BYTE_OF.keys() >= {*token} else token.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").removeprefix("##").encode()  # U+2581 stands for a space


def is_gpt2(settings):
    """Returns whether a text is split into words as in GPT-2, and changed in no other way."""
    # use_regex means that GPT-2's expression splits the text. Without merges, as in exported bytes,
    # no split is needed.
    split = settings["pre_tokenizer"] or {}
    regex = split.get("use_regex", True) or not settings["model"].get("merges")
    kind = split.get("type"), split.get("add_prefix_space"), settings["normalizer"]
    return regex and kind == ("ByteLevel", False, None)


def build(token_bytes, special):
    """Bytes of each id, {text: id} of special tokens -> the tokenizer.json of "gpt2" or "bytes"."""
    bpe_encode = require("tiktoken._educational").bpe_encode
    letters = {byte: c for c, byte in BYTE_OF.items()}
    names = ["".join(map(letters.get, token)) for token in token_bytes]
    ranks, merges = {}, []
    for token in token_bytes[: len(names) - len(special)]:
        if len(token) > 1:  # it merges the two tokens into which the earlier ones split it
            merges.append(tuple(names[i] for i in bpe_encode(ranks, token, visualise=None)))
        ranks[token] = len(ranks)
    library = require("tokenizers").ByteLevelBPETokenizer(dict(zip(names, ranks.values())), merges)
    library.add_special_tokens([*special])
    return json.loads(library.to_str())


def read_settings(place, end_of_text=None):
    """Returns the contents of the tokenizer.json at a path, in a directory or on the hub.

    end_of_text: name of the token between documents. An exported directory has it in
    tokenizer_config.json. Raises errors of many kinds.
    """
    path = Path(place)
    if not path.exists() and path.suffix != ".json" and place.count("/") < 2:
        path = Path(require("huggingface_hub").hf_hub_download(place, "tokenizer.json"))
    if path.is_dir():
        path /= "tokenizer.json"
    settings = json.loads(path.read_text("utf-8"))
    config = read_json(path.with_name("tokenizer_config.json"))
    if end_of_text := end_of_text or config.get("end_of_text"):
        settings["end_of_text"] = end_of_text
    return settings
