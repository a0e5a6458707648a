"""The data sets that --data names: their shares, their tokenizer and their tokens.

A mixture consists of several data sets. This mixture takes 70% of its sequences from fineweb:

  --data fineweb=0.7 code=0.2 zh=0.1
"""

import codecs
import contextlib
import io
import math
import re
from fractions import Fraction
from pathlib import Path

from plaingpt.documents import RECORDS, SEPARATOR, check_encoding, kind_of, split_text
from plaingpt.errors import UserError, explaining
from plaingpt.files import check_pointer, reading
from plaingpt.pairs import read_pairs
from plaingpt.shards import (
    Tokens,
    check_complete,
    find_cut,
    find_index,
    find_meta,
    find_shards,
    note_missing,
    open_shard,
    read_meta,
)
from plaingpt.terminal import print0
from plaingpt.tokenizer import clean_text, get_tokenizer, load_tokenizer, note_unknown

import numpy as np

MAX_PERIOD = 100_000  # the order of the data sets repeats after at most this many sequences


def read_shares(items):
    """Returns {path: share of the sequences} for the values of --data. The shares add up to 1.

    items: the values, each PATH or PATH=WEIGHT. A data set without a weight has weight 1.
    """
    weights = {}
    for item in items:
        path, weight = read_weight(item)
        weights[path] = weights.get(path, 0) + weight
    total = sum(weights.values())
    shares = {path: weight / total for path, weight in weights.items()}
    if math.lcm(*(share.denominator for share in shares.values())) <= MAX_PERIOD:
        return shares
    # Rounds the shares to multiples of 1 / MAX_PERIOD that are above 0.
    for path, share in shares.items():
        shares[path] = Fraction(max(1, round(share * MAX_PERIOD)), MAX_PERIOD)
    largest = max(shares, key=shares.get)
    shares[largest] += 1 - sum(shares.values())
    return shares


def read_weight(item):
    """Returns (path, weight) for a value of --data, PATH or PATH=WEIGHT."""
    if "=" not in item[1:] or Path(item).exists():
        return item, Fraction(1)
    path, _, text = item.rpartition("=")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if (weight := Fraction(text)) > 0:
            return path, weight
    raise UserError(f"--data {item}: give a weight above 0, such as 0.5")


def is_text_file(path):
    """Returns whether a value of --data is a text file."""
    return Path(path).is_file() and not find_index(path)


def is_pairs_file(path):
    """Returns whether a value of --data is a file with pairs of prompt and response."""
    return is_text_file(path) and kind_of(Path(path)) in RECORDS


def encode_text(path, tokenizer):
    """Returns the token ids of a text file: (n,) uint16 or uint32, or uint8 for byte tokens.

    If the file contains <|endoftext|>, the ids are the same as in shards of fineweb.py, with
    end_of_text before each document. Otherwise, the ids contain no end_of_text. With byte tokens,
    the ids are always the bytes of the file, without a BOM.
    """
    if path.suffix in (".bin", ".npy"):
        raise UserError(
            f"--data {path}: is a shard; give the directory of the shard, {path.parent}"
        )
    check_pointer(path)
    data = path.read_bytes()
    check_encoding(f"--data {path}", data)
    if path.suffix.lower() in (".gz", ".zst") or b"\0" in data:
        raise UserError(
            f"--data {path}: is not a text file; make shards from it: fineweb.py --input {path}"
        )
    if tokenizer.name == "bytes":
        data = data.removeprefix(codecs.BOM_UTF8)
        n_bad = len(data) - len(data.decode("utf-8", "ignore").encode())
        if n_bad:
            print0(
                f"note: {path}: {n_bad / len(data):.1%} of its bytes are not UTF-8; convert the "
                "file to UTF-8"
            )
        return np.frombuffer(data, np.uint8)
    with explaining(f"--data {path}: is not UTF-8", "convert it to UTF-8", UnicodeDecodeError):
        documents = [document.decode() for _, document, _ in split_text(io.BytesIO(data))]
    ids = tokenizer.encode_documents([clean_text(document) for document in documents])
    note_unknown(tokenizer, [ids], path)
    return ids if SEPARATOR in data else ids[1:]


def open_pairs(path, tokenizer, T, val_fraction=None, vocab_size=None):
    """Opens a file of pairs. Returns (training Tokens, validation Tokens).

    The validation split contains val_fraction of the pairs, by default a tenth. T: tokens per
    sequence. vocab_size: as in open_splits.
    """
    vocab_size = vocab_size or tokenizer.n_vocab
    train, val = read_pairs(Path(path), tokenizer, T, val_fraction or 0.1)  # (ids, counted) each
    train_name, val_name = name_splits(path)
    return (
        Tokens(train_name, [train[0]], vocab_size, train[1]),
        Tokens(val_name, [val[0]], vocab_size, val[1], is_held_out=True),
    )


def open_splits(path, tokenizer, val_fraction=None, vocab_size=None):
    """Opens a text file or token files. Returns (training Tokens, validation Tokens).

    path: a text file, which is encoded with `tokenizer`; a directory with shards; or X for
    Megatron's files X.bin and X.idx. The validation data are the val shards. If there are no val
    shards, the last part of the data is held out: val_fraction of the tokens, by default a tenth of
    a text file and a hundredth of other data. vocab_size: vocabulary size of the model; by default
    the vocabulary size of the tokenizer.
    """
    path = Path(path)
    vocab_size = vocab_size or tokenizer.n_vocab
    train_name, val_name = name_splits(path)
    if is_text_file(path):
        whole = Tokens(train_name, [encode_text(path, tokenizer)], vocab_size)
        return whole.hold_out(find_cut(whole, val_fraction or 0.1), val_name)
    files = find_shards(path, "train")
    if not files:
        raise UserError(f"--data {path}: contains no train shards; make them with fineweb.py")
    whole = Tokens(train_name, files, vocab_size)
    val = Tokens(val_name, find_shards(path, "val"), vocab_size)
    check_complete(path, len(whole) + len(val))
    if val.files:
        return whole, val
    return whole.hold_out(find_cut(whole, val_fraction or 0.01, tokenizer.end_of_text), val_name)


def name_splits(path):
    """Returns the names of the training and the validation split of a data set, for messages."""
    return f"--data {path}, train split", f"--data {path}, val split"


class Sources:
    """The data sets that --data names, before they are opened.

    items: values of --data, each PATH or PATH=WEIGHT. tokenizer, val_fraction: values of the flags
    with these names. The attribute `tokenizer` is the Tokenizer of all data sets. The attribute
    `shares` is {path: share of the sequences}, with Fractions that add up to 1.
    """

    def __init__(self, items, tokenizer=None, val_fraction=None):
        # A notebook may start several runs, and shards may change between these runs. Therefore,
        # each run opens its shards again.
        open_shard.cache_clear()
        self.items = items
        self.val_fraction = val_fraction
        self.shares = read_shares(items)
        self.is_text = all(map(is_text_file, self.shares))
        # If a mixture contains shards, text files are encoded with the tokenizer of the shards.
        paths = [path for path in self.shares if not is_text_file(path)] or self.shares
        found = {path: find_tokenizer(path, tokenizer) for path in paths}
        if len({each.name for each in found.values()}) > 1:
            names = ", ".join(f"{path} uses {each.name}" for path, each in found.items())
            raise UserError(f"--data: {names}; use one tokenizer for all data sets")
        self.tokenizer = next(iter(found.values()))
        if val_fraction and all(find_shards(path, "val") for path in self.shares):
            raise UserError("--val_fraction: the data have val shards; remove this flag")

    def open(self, tokenizer, T, vocab_size=None):
        """Opens the data sets. Returns [(training Tokens, validation Tokens) of each data set].

        tokenizer: the Tokenizer of the run, which may come from loaded weights. T: tokens per
        sequence, used only for pairs. vocab_size: as in open_splits.
        """
        splits = []
        for path in self.shares:
            if is_pairs_file(path):
                splits.append(open_pairs(path, tokenizer, T, self.val_fraction, vocab_size))
            else:
                splits.append(open_splits(path, tokenizer, self.val_fraction, vocab_size))
        return splits

    def count_train_tokens(self):
        """Returns the number of training tokens in all shards.

        The number excludes text files, because encoding a text file takes long, and text files are
        small compared with shards.
        """
        shards = [path for path in self.shares if not is_text_file(path)]
        return sum(len(open_splits(path, self.tokenizer, self.val_fraction)[0]) for path in shards)


def find_tokenizer(data, place=None):
    """Returns the Tokenizer of a data set.

    If the data set names no tokenizer, returns the tokenizer of the flag --tokenizer. If the flag
    is missing, too, returns gpt2 for shards, and bytes for a text file. place: value of the flag.
    Raises UserError if the data do not exist, or if the data set and the flag name different
    tokenizers.
    """
    path = Path(data)
    if not (path.is_dir() or is_text_file(path) or find_index(path)):
        raise UserError(f"--data {data}: not found; give a text file, or run fineweb.py")
    note_missing(path)
    given = load_tokenizer(place) if place else None
    name = read_meta(path).get("tokenizer")
    own = None
    if (path / "tokenizer.json").exists():
        own = load_tokenizer(path)
        if name and own.name != name:
            raise UserError(
                f"{data}: tokenizer.json is not {name}, the tokenizer of the shards; move "
                "tokenizer.json to a different directory"
            )
    elif name and not (given and given.name == name):
        with reading(find_meta(path), "restore it"):
            own = get_tokenizer(str(name))
    if own and given and own.name != given.name:
        raise UserError(f"{data}: contains tokens of {own.name}; remove --tokenizer {place}")
    if own or given:
        return own or given
    if is_text_file(path):
        return get_tokenizer("bytes")
    check_gpt2_ids(path)
    return get_tokenizer("gpt2")


def check_gpt2_ids(path):
    """Raises UserError if the ids of a data set seem to be ids of bytes or characters.

    In GPT-2's vocabulary, words have ids of 256 or more, and the ids below 256 are single bytes.
    """
    for file in find_shards(path, "train")[:1]:
        ids = open_shard(file)[: 2**16]
        if len(ids) and ids.max() < 256:
            raise UserError(
                f"--data {path}: all ids are below 256, like ids of bytes or characters; give "
                "--tokenizer bytes, or --tokenizer gpt2 if the ids are GPT-2's"
            )


class Data:
    """The opened data sets of a run.

    tokenizer: the Tokenizer of the run. gpt_config: the GPTConfig of the model that reads the data.
    The lists train, val, shares and names contain one element per data set: the training Tokens,
    the validation Tokens, the share as a Fraction, and the name in the log. fingerprints: {name of
    a split: string}. n_bytes_of_id: number of bytes of text per token id, (vocab_size,) int64.
    """

    def __init__(self, sources, tokenizer, gpt_config):
        self.T = gpt_config.block_size
        self.shares = list(sources.shares.values())
        splits = sources.open(tokenizer, self.T, gpt_config.vocab_size)
        self.train = [train for train, _ in splits]
        self.val = [val for _, val in splits]
        self.n_bytes_of_id = tokenizer.text_bytes(gpt_config.vocab_size)
        self.tokenizer = tokenizer
        if tokenizer.name == "bytes":
            # If the data contain pairs, a line break ends a text. Otherwise, a line break is
            # ordinary text, even if the weights of --init_from were trained on pairs.
            has_pairs = any(tokens.has_pairs for tokens in self.val)
            self.tokenizer = get_tokenizer("lines" if has_pairs else "bytes")
        self.names = log_names(sources.shares)
        self.fingerprints = {
            "training split": fingerprint(self.train, self.shares),
            "validation split": fingerprint(self.val, self.shares),
        }

    def find_prompts(self, n):
        """Returns at most n validation pairs: [(ids of the prompt, ids of the response)].

        Reads only the first pair of each sequence. If the data contain no pairs, returns [].
        """
        found = []
        for tokens in self.val:
            if not tokens.has_pairs:
                continue
            starts = range(0, len(tokens) - 1, self.T)
            for start in starts[: n - len(found)]:
                found.append(self.first_prompt(*tokens.read_sequence(start, self.T)))
        return found

    def first_prompt(self, x, y):
        """Returns the first pair of a sequence: (ids of the prompt, ids of the response).

        x, y: the inputs and targets of the sequence, (T,) each.
        """
        first = int((y != -100).argmax())  # this position predicts the first token of the response
        response = y[first:].tolist()
        # A response ends with end_of_text.
        return x[: first + 1].tolist(), response[: response.index(self.tokenizer.end_of_text) + 1]


def log_names(paths):
    """Returns a name without whitespace for each data set.

    The name is the last part of the path. If two data sets would have the same name, the names are
    the whole paths. Bytes of a path that are not UTF-8 become escapes such as \\udce9.
    """
    paths = [str(path).encode("utf-8", "backslashreplace").decode() for path in paths]
    names = [re.sub(r"\s", "_", Path(path).name) for path in paths]
    if len(set(names)) == len(names):
        return names
    return [re.sub(r"\s", "%20", path) for path in paths]


def fingerprint(sets, shares):
    """Returns a description of a split: number of tokens, CRC-32 and share of each data set."""
    texts = [tokens.fingerprint() for tokens in sets]
    if len(sets) > 1:
        texts = [f"{share} of {text}" for text, share in zip(texts, shares)]
    return " + ".join(texts)
