"""Reads the tokenizer.json of Hugging Face without its packages: ids, bytes, special tokens."""

import itertools
import json
import re
from pathlib import Path

from plaingpt.cli import UserError, first_line, require
from plaingpt.corpus import retry

MAX_IDS = 2**16  # shards store an id in two bytes
# Names of the token between documents, in the order in which they are looked for.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")
# The regular expression of vocabularies that split text like GPT-4: groups of up to three digits;
# line breaks belong to the symbol before them. Hugging Face and tokenizer.py write the same text.
GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+")
# A byte-level vocabulary writes each byte as a character: a visible one as itself.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(byte): byte for byte in VISIBLE}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*VISIBLE}))}


def parse(source):
    """Text of a tokenizer.json -> (settings, bytes of each id, special ids, end-of-text id).

    settings: its contents. special ids: {text: id}. The key "end_of_text" is ours: the name of the
    token between documents, if it is not in END_NAMES. Raises UserError.
    """
    try:
        settings = json.loads(source)
        end = settings.pop("end_of_text", None)
        settings.update(truncation=None, padding=None)
        vocab = settings["model"]["vocab"]  # {token: id}, or [[token, score], ...]
        if isinstance(vocab, list):
            vocab = {token: i for i, (token, _) in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in settings["added_tokens"]}
        special = {t["content"]: t["id"] for t in settings["added_tokens"] if t["special"]}
        byte_level, ids = is_byte_level(settings), {**vocab, **added}
        n_vocab = max(ids.values()) + 1
        settings["normalizer"], settings["pre_tokenizer"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"not a tokenizer.json of Hugging Face ({first_line(error)}); give one "
                        "that python tokenizer.py or transformers wrote") from error
    if n_vocab > MAX_IDS:
        raise UserError(f"has {n_vocab:,} ids, but shards store at most {MAX_IDS:,}; give a "
                        "smaller vocabulary")
    name = next((name for name in ([end] if end else END_NAMES) if name in ids), None)
    if not name:
        raise UserError(f"has no token {end or ' or '.join(END_NAMES)}; name the token between "
                        "documents with --end_of_text of fineweb.py")
    token_bytes = [b""] * n_vocab
    for text, i in ids.items():
        exact = text in added or not byte_level
        token_bytes[i] = plain_bytes(text) if exact else map_bytes(text)
    return settings, token_bytes, {**special, name: ids[name]}, ids[name]


def is_byte_level(settings):
    """Whether every text can be encoded, and ids can be decoded one by one."""
    return '"ByteLevel"' in json.dumps(settings["decoder"])


def map_bytes(text):
    """The bytes of a token of a byte-level vocabulary."""
    return bytes(BYTE_OF[c] for c in text) if BYTE_OF.keys() >= {*text} else text.encode()


def plain_bytes(text):
    """The bytes of a token of another vocabulary: of SentencePiece or WordPiece."""
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", text):
        return bytes.fromhex(byte[1])
    return text.replace("\u2581", " ").removeprefix("##").encode()  # U+2581 stands for a space


def find_pattern(settings):
    """How the vocabulary splits text before it merges: "gpt2", "gpt4", "bytes", or None."""
    before = settings["pre_tokenizer"] or {}
    *splits, last = before.get("pretokenizers", [before])
    byte_level = last.get("type") == "ByteLevel" and not last["add_prefix_space"]
    if settings["normalizer"] or not byte_level:
        return None
    if last["use_regex"]:
        return None if splits else "gpt2"
    if not splits and settings["model"].get("merges") == []:
        return "bytes"
    patterns = [split.get("pattern") for split in splits]
    return "gpt4" if patterns == [{"Regex": GPT4_PATTERN}] else None


def ids_are_ranks(settings, token_bytes, special):
    """Whether tiktoken gives the ids of this vocabulary.

    `tokenizers` merges only listed pairs, in their order. tiktoken merges any pair whose bytes are
    a token, the lowest id first. Both give the same ids if this holds for each token: its bytes,
    merged with lower ids only, become its listed pair. It holds for a trained BPE.
    """
    model, tokens = settings["model"], token_bytes[: len(token_bytes) - len(special)]
    ranks = {token: i for i, token in enumerate(tokens)}
    merges = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges", [])]
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ordered = len(ranks) == len(tokens) == len(merges) + 256 == min(special.values())
    if not ordered or len(settings["added_tokens"]) != len(special) or any(map(model.get, names)):
        return False
    return {*tokens[:256]} == {bytes([i]) for i in range(256)} and all(
        merge_bytes(tokens[i], ranks, i) == [*map(map_bytes, pair)]
        for i, pair in enumerate(merges, start=256))


def merge_bytes(data, ranks, limit):
    """Merges the bytes of a token, lowest rank first, only ranks below limit -> the parts left."""
    parts = [data[i : i + 1] for i in range(len(data))]
    while len(parts) > 1:
        pairs = [ranks.get(left + right, limit) for left, right in itertools.pairwise(parts)]
        rank = min(pairs)
        if rank >= limit:
            break
        i = pairs.index(rank)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def build(token_bytes, special):
    """Bytes of each id, special ids {text: id} -> contents of the tokenizer.json.

    For a vocabulary whose ids are ranks: "gpt2", and "bytes", which has no merges.
    """
    hf = require("tokenizers")
    letters = {byte: c for c, byte in BYTE_OF.items()}

    def name(data):
        return "".join(letters[byte] for byte in data)

    ranks = {token: i for i, token in enumerate(token_bytes[: len(token_bytes) - len(special)])}
    merges = [tuple(map(name, merge_bytes(token, ranks, i)))
              for token, i in ranks.items() if len(token) > 1]
    library = hf.Tokenizer(hf.models.BPE({name(token): i for token, i in ranks.items()}, merges))
    library.pre_tokenizer = hf.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=bool(merges))  # the expression of GPT-2
    library.decoder = hf.decoders.ByteLevel()
    library.add_special_tokens(list(special))
    return json.loads(library.to_str())


def read_source(place):
    """Text of the tokenizer.json at a path, in a directory or on the hub. Raises UserError.

    The older pair vocab.json and merges.txt is converted.
    """
    path = Path(place)
    if not path.exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place) and path.suffix != ".json":
        hub, names = require("huggingface_hub"), ["tokenizer.json", "vocab.json", "merges.txt"]
        path = Path(retry("the hub", hub.snapshot_download, place, allow_patterns=names))
    files = [path] if path.is_file() else [path / "tokenizer.json", path / "vocab.json"]
    found = next((file for file in files if file.is_file()), None)
    if not found:
        raise UserError("no tokenizer.json there; give a file or a directory with one, or a name "
                        "of the Hugging Face hub")
    try:
        if found.name != "vocab.json":
            return found.read_text("utf-8")
        files = str(found), str(found.with_name("merges.txt"))
        library = require("tokenizers").ByteLevelBPETokenizer(*files)
    except UserError:
        raise
    except Exception as error:  # `tokenizers` has no exception class of its own
        raise UserError(f"{found} cannot be read ({first_line(error)}); give a tokenizer.json"
                        ) from error
    known = [name for name in END_NAMES if library.token_to_id(name) is not None]
    library.add_special_tokens(known[:1])
    return library.to_str()
