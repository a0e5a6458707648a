"""Reads and writes the tokenizer.json of Hugging Face: ids, bytes and special tokens."""

import functools
import json
import re
import uuid
from pathlib import Path

from plaingpt.base.errors import explaining, require
from plaingpt.base.files import read_json

# Common names of the end-of-text token. find_end_name uses the first name in the vocabulary.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")
# A byte-level vocabulary writes each byte as a character: visible bytes as themselves, and the
# other bytes as the characters from U+0100 on.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF = {chr(byte): byte for byte in VISIBLE}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(OTHERS)}
# These pre-tokenizers only split a text, and keep the whole text unless a setting removes a part.
SPLITTERS = ("ByteLevel", "Digits", "Punctuation", "Split", "UnicodeScripts")


class TokenizerJson:
    """A tokenizer.json: its vocabulary, read without a package, and its tokenizers.Tokenizer.

    source: the contents of the file. Only plainGPT uses the key "end_of_text": the name of the
    end-of-text token, if it is not in END_NAMES. Raises ValueError or KeyError if the JSON is not a
    usable tokenizer.
    """

    def __init__(self, source):
        settings = json.loads(source)
        end_name = settings.pop("end_of_text", None)
        settings.update(truncation=None, padding=None)
        empty = dict(normalizer=None, pre_tokenizer=None, decoder=None, added_tokens=[])
        settings = empty | settings
        model = settings["model"]
        if "dropout" in model:  # BPE would skip random merges, even outside of training
            model["dropout"] = None
        added = {token["content"]: token["id"] for token in settings["added_tokens"]}
        ids = ids_of_model(model) | added
        self.special = {}  # {text: id}
        for token in settings["added_tokens"]:
            if token["special"]:
                self.special[token["content"]] = token["id"]
        byte_level = is_byte_level(settings)
        end_name = find_end_name(ids, end_name)
        self.end_of_text = ids[end_name]
        self.end_name = None  # name of end_of_text; None if it also occurs as text
        # A single character, such as the line break, can be end_of_text and also occur in text.
        if len(end_name) > 1 or end_name in added:
            self.special[end_name] = self.end_of_text
        if end_name in self.special:
            self.end_name = end_name
        check_ids(ids)
        self.token_bytes = [b""] * (max(ids.values()) + 1)  # the bytes of each id
        for token, i in ids.items():
            self.token_bytes[i] = bytes_of(token, byte_level and token not in added)
        # The id of the unknown token, see Tokenizer.unknown.
        self.unknown = find_unknown(settings, ids)
        if self.unknown == self.end_of_text:
            raise ValueError(f"{end_name} is also the unknown token")
        self.settings = settings
        self.joins_bytes = joins_bytes(settings)
        self.keeps_text = keeps_text(settings)
        # In the library, end_of_text has this random name, which no text contains.
        self.mark = f"<|{uuid.uuid4()}|>"

    @functools.cached_property
    def library(self):
        """This vocabulary as a tokenizers.Tokenizer that encodes "<|endoftext|>" as plain text."""
        settings = self.settings
        if self.end_name:
            settings = rename_token(settings, self.end_name, self.mark)
        return make_library(settings)

    @functools.cached_property
    def counting_library(self):
        """Like library, but encodes text that the vocabulary lacks as the id `unknown`."""
        if self.unknown < len(self.token_bytes):
            return self.library
        settings = json.loads(self.library.to_str())
        return make_library(add_unknown_token(settings, str(uuid.uuid4()), self.unknown))

    def encode(self, texts):
        """Encodes strings -> a list of ids per string."""
        return [encoding.ids for encoding in encode_with(self.library, texts)]

    def count_unknown(self, texts):
        """Does what Tokenizer.count_unknown does."""
        if self.unknown is None:
            return 0, 0
        n_unknown = 0
        n_tokens = 0
        for encoding in encode_with(self.counting_library, texts):
            n_unknown += encoding.ids.count(self.unknown)
            n_tokens += len(encoding.ids)
        return n_unknown, n_tokens

    def decode(self, ids):
        """Decodes ids -> text."""
        text = self.library.decode(ids, skip_special_tokens=False)
        return text.replace(self.mark, self.end_name or "")


def make_library(settings):
    """Creates a tokenizers.Tokenizer. settings: contents of a tokenizer.json."""
    with explaining("tokenizer.json: not usable", "give another file"):
        library = require("tokenizers").Tokenizer.from_str(json.dumps(settings))
    library.encode_special_tokens = True
    return library


def encode_with(library, texts):
    """Encodes strings -> list of tokenizers.Encoding."""
    with explaining("tokenizer.json: not usable", "give another file"):
        # The library fails, for example, if the unknown token is missing.
        return library.encode_batch_fast(texts, add_special_tokens=False)


def ids_of_model(model):
    """Returns {token: id} of the vocabulary in a tokenizer.json, except its added tokens."""
    if isinstance(model["vocab"], list):  # [[token, score], ...]; the index is the id
        return {token: i for i, (token, _) in enumerate(model["vocab"])}
    return {**model["vocab"]}


def find_unknown(settings, ids):
    """Returns the id of the unknown token, or None if the tokenizer can encode any text.

    If BPE has no unknown token, it omits text that the vocabulary lacks. This function then returns
    the first free id, which encoded text never contains. ids: {token: id}.
    """
    model = settings["model"]
    if has_all_bytes(settings):
        return None
    unknown = model.get("unk_id", ids.get(model.get("unk_token")))  # only Unigram has "unk_id"
    if unknown is None and "merges" in model:
        return max(ids.values()) + 1
    return unknown


def has_all_bytes(settings):
    """Returns whether each byte has a token, and the tokenizer splits unknown text into bytes."""
    model = settings["model"]
    if model.get("byte_fallback"):
        names = {f"<0x{byte:02X}>" for byte in range(256)}
    elif any(step["type"] == "ByteLevel" for step in steps_of(settings["pre_tokenizer"])):
        names = BYTE_OF.keys()
    else:
        return False
    # WordLevel and WordPiece do not split unknown words. With an affix, the first or the last byte
    # of a word would need a different token.
    is_split = model.get("type", "BPE") in ("BPE", "Unigram")
    has_affix = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    return is_split and not has_affix and ids_of_model(model).keys() >= names


def steps_of(part):
    """Returns the steps of a normalizer, pre-tokenizer or decoder. Only a Sequence has several."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    steps = []
    for name in ("normalizers", "pretokenizers", "decoders"):
        for step in part.get(name, []):
            steps += steps_of(step)
    return steps


def check_ids(ids):
    """Raises ValueError if two tokens have the same id.

    Such an id could decode to only one of the two tokens. ids: {token: id}.
    """
    token_of = {}
    for token, i in ids.items():
        other = token_of.setdefault(i, token)
        if other != token:
            raise ValueError(f"{other!r} and {token!r} have the same id {i}")


def find_end_name(ids, end_name=None):
    """Returns the name of the end-of-text token. Raises ValueError if `ids` does not contain it.

    ids: {token: id}. end_name: the name, if it is not in END_NAMES.
    """
    names = [end_name] if end_name else END_NAMES
    for name in names:
        if name in ids:
            return name
    raise ValueError(f"no end-of-text token {end_name or ' or '.join(END_NAMES)}")


def is_byte_level(settings):
    """Returns whether the vocabulary is byte-level: each byte is written as a character."""
    return any(step["type"] == "ByteLevel" for step in steps_of(settings["decoder"]))


def joins_bytes(settings):
    """Returns whether decoding only concatenates the bytes of the tokens."""
    kinds = {step["type"] for step in steps_of(settings["decoder"])}
    return kinds == {"ByteLevel"}


def keeps_text(settings):
    """Returns whether the bytes of the tokens are always exactly the bytes of the encoded text.

    The result is False if a normalizer changes the text, if a pre-tokenizer or an added token may
    add or omit spaces, or if the vocabulary lacks some text.
    """
    if settings["normalizer"] is not None or not is_byte_level(settings):
        return False
    for step in steps_of(settings["pre_tokenizer"]):
        if step["type"] not in SPLITTERS or step.get("behavior") == "Removed":
            return False
        if step["type"] == "ByteLevel" and step.get("add_prefix_space") is not False:
            return False
    for token in settings["added_tokens"]:
        if not token["special"] and (token.get("lstrip") or token.get("rstrip")):
            return False
    return has_all_bytes(settings)


def rename_token(settings, old, new):
    """Returns the contents of a tokenizer.json in which a token has a new name and the same id.

    The old name is then encoded as ordinary text. The token may be a piece of Unigram or BPE, a
    word of WordLevel, or an added token.
    """
    model = {**settings["model"]}
    if isinstance(model["vocab"], list):
        model["vocab"] = [[new if name == old else name, x] for name, x in model["vocab"]]
    else:
        model["vocab"] = {new if name == old else name: i for name, i in model["vocab"].items()}
    if "merges" in model:
        merges = []
        for merge in model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            if old not in (left, right, left + right):
                merges.append(merge)
        model["merges"] = merges
    added = []
    for token in settings["added_tokens"]:
        if token["content"] == old:
            token = token | dict(content=new, special=True)
        added.append(token)
    return settings | dict(model=model, added_tokens=added)


def add_unknown_token(settings, name, i):
    """Returns the contents of a tokenizer.json in which BPE encodes unknown text as the id i."""
    model = settings["model"]
    vocab = model["vocab"] | {name: i}
    return settings | dict(model=model | dict(vocab=vocab, unk_token=name, fuse_unk=False))


def bytes_of(token, byte_level):
    """Returns the bytes of a token of a byte-level vocabulary, or of SentencePiece or WordPiece."""
    if byte_level:
        if BYTE_OF.keys() >= set(token):
            return bytes(map(BYTE_OF.get, token))
        return token.encode()
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").removeprefix("##").encode()  # U+2581 means a space


def is_gpt2(settings):
    """Returns whether the settings only split a text into words, as GPT-2 does."""
    split = settings["pre_tokenizer"] or {}
    if settings["normalizer"] is not None:
        return False
    if split.get("type") != "ByteLevel" or split.get("add_prefix_space") is not False:
        return False
    # use_regex means that GPT-2's regular expression splits the text. The tokenizer.json of "bytes"
    # contains no merges, so it needs no split.
    return split.get("use_regex", True) or not settings["model"].get("merges")


def build_tokenizer_json(token_bytes, special):
    """Returns the tokenizer.json of "gpt2" or "bytes".

    token_bytes: the bytes of each id. special: {name: id} of special tokens.
    """
    bpe_encode = require("tiktoken._educational").bpe_encode
    letters = {byte: letter for letter, byte in BYTE_OF.items()}
    names = []  # the tokens as strings, with a character of BYTE_OF per byte
    ranks = {}  # {bytes of a token: id}
    merges = []
    for token in token_bytes[: len(token_bytes) - len(special)]:  # special tokens come last
        names.append("".join(map(letters.get, token)))
        if len(token) > 1:
            # With only the earlier tokens, BPE splits this token into the two tokens of its merge.
            left, right = bpe_encode(ranks, token, visualise=None)
            merges.append((names[left], names[right]))
        ranks[token] = len(ranks)
    vocab = {name: i for i, name in enumerate(names)}
    return build_byte_level(vocab, merges, list(special))


def build_byte_level(vocab, merges, special):
    """Returns the tokenizer.json of a byte-level BPE that splits text as GPT-2 does.

    vocab: {token: id}. merges: pairs of tokens. Both may also be paths of files. special: names of
    special tokens.
    """
    library = require("tokenizers").ByteLevelBPETokenizer(vocab, merges)
    library.add_special_tokens(special)
    return json.loads(library.to_str())


def read_settings(place, end_of_text=None):
    """Returns the contents of a tokenizer.json. Raises errors of many kinds.

    place: the path of the file, a directory with this file, or a name on the Hugging Face Hub.
    Converts the older format, vocab.json and merges.txt. end_of_text: name of the end-of-text
    token; by default the name that an export stores in tokenizer_config.json.
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
    """Returns the path of a tokenizer.json, or of a vocab.json if tokenizer.json is missing.

    place: as in read_settings. Downloads a tokenizer from the Hugging Face Hub.
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
    return path / "tokenizer.json"  # the error message will name this path
