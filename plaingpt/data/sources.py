"""What --data names, before it is opened: data sets, their shares and their tokenizer."""

from pathlib import Path

from plaingpt.base.errors import UserError
from plaingpt.base.files import reading
from plaingpt.base.terminal import print0
from plaingpt.data.foreign import find_index
from plaingpt.data.mixture import read_shares
from plaingpt.data.shards import find_meta, find_shards, open_shard, read_meta
from plaingpt.data.splits import (
    encode_pairs,
    encode_text,
    is_pairs_file,
    is_text_file,
    open_pairs,
    open_splits,
)
from plaingpt.data.tokenizer import get_tokenizer, load_tokenizer


class Sources:
    """The data sets that --data names, before they are opened. Raises UserError.

    items: values of --data, each PATH or PATH=WEIGHT. tokenizer: value of --tokenizer. The
    attribute `tokenizer` is what find_tokenizer returns. The attribute `shares` is {path: its share
    of the sequences}, with Fractions that add up to 1.
    """

    def __init__(self, items, tokenizer=None, val_fraction=None):
        # A notebook may start several runs, and files may have changed since the run before.
        encode_text.cache_clear()
        encode_pairs.cache_clear()
        open_shard.cache_clear()
        self.items = items
        self.val_fraction = val_fraction
        self.shares = read_shares(items)
        self.is_text = all(map(is_text_file, self.shares))
        self.tokenizer = find_common_tokenizer(self.shares, tokenizer)
        if val_fraction and all(find_shards(path, "val") for path in self.shares):
            raise UserError("--val_fraction: the data have val shards; leave this flag out")

    def open(self, tokenizer, T, vocab_size=None):
        """Opens the data sets -> [(training Tokens, validation Tokens)]. Raises UserError.

        tokenizer: the Tokenizer of the run, which may be that of its weights. T: tokens in a
        sequence, which pairs depend on. vocab_size: as in open_splits.
        """
        opened = []
        for path in self.shares:
            if is_pairs_file(path):
                opened.append(open_pairs(path, tokenizer, T, self.val_fraction, vocab_size))
            else:
                opened.append(open_splits(path, tokenizer, self.val_fraction, vocab_size))
        return opened

    def count_train_tokens(self, tokenizer, T):
        """Returns the number of training tokens of all data sets. The arguments are as in open."""
        return sum(len(train) for train, _ in self.open(tokenizer, T))


def find_common_tokenizer(paths, place):
    """The Tokenizer of all data sets. place: value of --tokenizer. Raises UserError."""
    # A text takes the tokenizer of the shards beside it.
    paths = [path for path in paths if not is_text_file(path)] or paths
    found = [find_tokenizer(path, place) for path in paths]
    if len({tokenizer.name for tokenizer in found}) > 1:
        names = ", ".join(f"{path} has {tokenizer.name}" for path, tokenizer in zip(paths, found))
        raise UserError(f"--data: {names}; use one tokenizer for all")
    return found[0]


def find_tokenizer(data, place=None):
    """Returns the Tokenizer of a data set.

    If the data set has none of its own, it is that of --tokenizer. Without this flag, it is gpt2
    for shards and bytes for a text. place: value of --tokenizer. Raises UserError if there are no
    data, or if they have another tokenizer than the flag.
    """
    path = Path(data)
    if not (path.is_dir() or is_text_file(path) or find_index(path)):
        raise UserError(f"--data {data}: not found; give a text file, or run fineweb.py")
    if (path / "progress.json").exists():
        print0(f"note: {path} is not complete; fineweb.py is still running, or was interrupted")
    given = load_tokenizer(place) if place else None
    name = read_meta(path).get("tokenizer")
    own = None
    if (path / "tokenizer.json").exists():
        own = load_tokenizer(path)
    elif name and not (given and given.name == name):
        with reading(find_meta(path), "restore it"):
            own = get_tokenizer(str(name))
    if own and name and own.name != name:
        raise UserError(f"{data}: tokenizer.json is not that of the shards, {name}; move it away")
    if own and given and own.name != given.name:
        raise UserError(f"{data}: has tokens of {own.name}; leave out --tokenizer {place}")
    if own or given:
        return own or given
    return get_tokenizer("bytes" if is_text_file(path) else "gpt2")
