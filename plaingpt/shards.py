"""The shards: files of token ids. Their names, headers and fingerprints, reading and writing.

A shard is {name}_{train|val}_{index:06d}.npy, one-dimensional uint16, as build-nanogpt writes it;
the end-of-text id begins each document. llm.c's .bin files, uint16 after 256 int32, are read too.
meta.json says how the shards were made. It is called progress.json until they are complete.
"""

import bisect
import functools
import io
import math
import os
import re
import weakref
import zlib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from plaingpt import cli
from plaingpt.cli import UserError, print0, read_json
from plaingpt.megatron import find_index, read_index
from tokenizer import get_tokenizer, load_tokenizer

ENDS = 2**16  # tokens at the start and at the end of each shard that the fingerprint covers
VAL_NAME = re.compile(r"(^|[_.-])val(id|idation)?([_.-]|$)")  # of Megatron's files for validation
MAX_OPEN = 64  # files of a split that stay open; a process may open only 256 on macOS


def crc32(arrays):
    """CRC-32 of arrays, one after the other."""
    return functools.reduce(lambda crc, array: zlib.crc32(array, crc), arrays, 0)


@dataclass
class Shard:
    """A file of tokens. ids: the tokens of a text, in memory; None for a shard."""

    path: Path
    n_tokens: int
    offset: int = 0  # bytes before the first token
    changed: int = 0  # time of the last change, in ns
    dtype: str = "<u2"
    ids: np.ndarray | None = None
    file: io.BufferedReader | None = None  # stays open, because opening is slow on a network disk

    def read(self, start, count, check=True):
        """Returns `count` tokens from `start`: (count,) uint16, uint32, or uint8 of a text.

        check: raise UserError if the file changed since open_shard(). The first read always checks.
        """
        if self.ids is not None:
            return self.ids[start : start + count]
        size = np.dtype(self.dtype).itemsize
        check, status, data = check or self.file is None, None, b""
        try:  # no memory map: its pages would count as memory of the process
            self.file = self.file or open(self.path, "rb")
            self.file.seek(self.offset + size * start)
            data = self.file.read(size * count)
            status = os.fstat(self.file.fileno()) if check else None
        except FileNotFoundError:
            pass  # status stays None
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror}); make it "
                            "readable, then use --resume") from error
        same = not check or status and status.st_nlink and status.st_mtime_ns == self.changed
        if not same or len(data) != size * count:
            raise UserError(f"{self.path}: changed during the run; restore it, then use --resume")
        return np.frombuffer(data, self.dtype)

    def close(self):
        if self.file:
            self.file.close()
            self.file = None

    def crc32(self):
        """CRC-32 of all tokens."""
        n = self.n_tokens
        return crc32(self.read(start, min(2**20, n - start)) for start in range(0, n, 2**20))


class Tokens:
    """The tokens of a split: those of its shards, one shard after the other, from start to stop."""

    def __init__(self, shards, vocab_size, name):
        self.name = name  # for messages
        self.shards = shards
        self.vocab_size = vocab_size
        self.starts = np.cumsum([0] + [shard.n_tokens for shard in shards]).tolist()
        self.start, self.stop = 0, self.starts[-1]
        self.opened = []  # shards with an open file, the oldest first

    def __len__(self):
        return self.stop - self.start

    def read(self, start, count, check=True):
        """Returns `count` tokens from `start`: (count,) uint16, uint32, or uint8 of a text.

        Raises UserError if a token is outside the vocabulary, or, with check, a file has changed.
        """
        parts = []
        start += self.start
        end = start + count
        i = bisect.bisect_right(self.starts, start) - 1
        j = bisect.bisect_left(self.starts, end)
        for shard, first in zip(self.shards[i:j], self.starts[i:j]):
            if shard.ids is None and shard.file is None:
                self.opened.append(shard)
            begin = max(start - first, 0)
            part = shard.read(begin, min(end - first, shard.n_tokens) - begin, check)
            if part.max(initial=0) >= self.vocab_size:
                raise UserError(f"{shard.path}: token id {part.max()} is outside the vocabulary "
                                f"of {self.vocab_size}; leave out --vocab_size, or give the right "
                                "--tokenizer")
            parts.append(part)
        while len(self.opened) > MAX_OPEN:
            self.opened.pop(0).close()
        return np.concatenate(parts)

    def fingerprint(self):
        """Number of tokens and CRC-32. It covers both ends of every shard, or all of a text."""
        parts = []  # (start, number of tokens)
        bounds = (np.clip(self.starts, self.start, self.stop) - self.start).tolist()
        for shard, start, stop in zip(self.shards, bounds, bounds[1:]):
            n = min(stop - start, ENDS) if shard.ids is None else stop - start
            parts += [(first, n) for first in sorted({start, stop - n}) if n]
        crc = crc32(self.read(*part).astype("<u2") for part in parts)
        return f"{len(self):,} tokens with CRC-32 {crc:08x}"


def open_tokens(data, split, vocab_size, tokenizer, val_fraction=None):
    """Opens the split "train" or "val" of a data set -> Tokens. Raises UserError.

    data: a text file, which `tokenizer` encodes, a directory of shards, or Megatron's X.bin and
    X.idx as X. Without val shards, the last documents are the split "val": val_fraction of the
    tokens, by default a tenth of a text, and a hundredth of shards.
    """
    path, name = Path(data), f"--data {data}, {split} split"
    if is_text(path):
        ids = read_text(path, tokenizer)
        whole = Tokens([Shard(path, len(ids), ids=ids)], vocab_size, name)
    else:
        own = {name: find_shards(path, name) for name in ("train", "val")}
        if split == "train" and (path / "progress.json").exists():
            print0(f"note: {data} is not complete; fineweb.py is still running, or was interrupted")
        paths = own[split if own["val"] else "train"]
        if not paths:
            raise UserError(f"--data {data}: no train shards in it; make them with fineweb.py")
        whole = Tokens([open_shard(path) for path in paths], vocab_size, name)
        if own["val"]:
            return whole
    fraction = Fraction(str(val_fraction or (0.1 if is_text(path) else 0.01)))
    cut = len(whole) - math.ceil(len(whole) * fraction)
    if not is_text(path) and len(whole):
        tokens = whole.read(cut, min(2**20, len(whole) - cut))
        cut += int(np.argmax(tokens == tokenizer.end_of_text))  # 0 if no document begins in them
        if split == "val":
            print0(f"note: {data} has no val shards; its last {len(whole) - cut:,} tokens "
                   "are the validation data")
    whole.start, whole.stop = (0, cut) if split == "train" else (cut, len(whole))
    return whole


def is_text(path):
    """Whether a value of --data is a text file."""
    return Path(path).is_file() and not find_index(path)


def count_tokens(data, tokenizer=None):
    """Number of training tokens of shards or of a text, roughly; 0 if missing.

    tokenizer: value of --tokenizer for a text; default: bytes.
    """
    path = Path(data)
    if not is_text(path):
        return sum(open_shard(shard).n_tokens for shard in find_shards(path, "train"))
    n = len(read_text(path, load_tokenizer(tokenizer))) if tokenizer else path.stat().st_size
    return n * 9 // 10


def find_shards(path, split):
    """Paths of the shards of a split, in the order of their names; .idx for Megatron's data."""
    if index := find_index(path):
        return [index] if split == "train" else []
    name = re.compile(rf"_{split}_\d+\.(npy|bin)$")
    return [file for file in sorted(Path(path).glob("*"))
            if name.search(file.name) and not find_index(file)
            or file.suffix == ".idx" and bool(VAL_NAME.search(file.stem)) == (split == "val")]


def open_shard(path):
    """Checks the header and the size of a shard -> Shard. Raises UserError."""
    try:
        if path.suffix == ".idx":
            dtype, starts = read_index(path)
            tokens = path.with_suffix(".bin")
            return Shard(tokens, int(starts[-1]), 0, tokens.stat().st_mtime_ns, dtype)
        changed = path.stat().st_mtime_ns
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.dtype != np.uint16 or tokens.ndim != 1:
                kind = f"{tokens.dtype} of shape {tokens.shape}"
                raise ValueError(f"{kind} is not one-dimensional uint16")
            return Shard(path, len(tokens), tokens.offset, changed)
        header = np.fromfile(path, "<i4", 256)
        n_bytes = path.stat().st_size
        if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
            raise ValueError("its header does not begin with 20240520 and 1")
        if n_bytes != header.nbytes + 2 * int(header[2]):
            raise ValueError(f"{n_bytes} bytes, but its header says {header[2]} tokens")
        return Shard(path, int(header[2]), header.nbytes, changed)
    except Exception as error:  # a damaged header makes np.load raise any kind of error
        reason = cli.first_line(error)
        raise UserError(f"{path}: not a readable shard ({reason}); make it again") from error


def read_text(path, tokenizer):
    """Tokens of a text file: (N,) uint16, or uint8 of bytes."""
    if path.suffix in (".jsonl", ".json", ".parquet", ".gz", ".zst"):
        raise UserError(f"--data {path}: is not a text; python fineweb.py --input {path} "
                        "--output_dir mine makes shards of it, for --data mine")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"--data {path}: cannot be read; give a readable file") from error
    if b"\0" in data:
        raise UserError(f"--data {path}: not a text; give one in UTF-8, or a directory of shards")
    if tokenizer.name == "bytes":
        return np.frombuffer(data, np.uint8)
    return np.array(tokenizer.encode(data.decode(errors="replace")), np.uint16)


def find_tokenizer(data, place=None):
    """Tokenizer of a data set: its own, else --tokenizer, else gpt2 for shards, bytes for a text.

    place: value of --tokenizer. Raises UserError without data, or if the data have another.
    """
    path, own = Path(data), None
    if not (path.is_dir() or is_text(path) or find_index(path)):
        raise UserError(f"--data {data}: not found; give a text file or a directory of shards")
    given = load_tokenizer(place) if place else None
    name = read_meta(path).get("tokenizer")
    if (path / "tokenizer.json").exists():
        own = load_tokenizer(path)
    elif name and not (given and given.name == name):
        own = get_tokenizer(name)
    if own and given and own.name != given.name:
        raise UserError(f"--tokenizer {place}: is {given.name}, but {data} has tokens of "
                        f"{own.name}; leave out --tokenizer")
    if not own and not given and any(file.suffix == ".idx" for file in find_shards(path, "train")):
        print0(f"note: {data} has no tokenizer; gpt2 is assumed, --tokenizer sets another one")
    return own or given or get_tokenizer("bytes" if is_text(path) else "gpt2")


def read_meta(directory):
    """Contents of meta.json or progress.json; {} without them. Raises UserError."""
    return read_json(directory / "meta.json") or read_json(directory / "progress.json")


def permute(i, n, seed, epoch):
    """Image of i under a random permutation of range(n). It needs no memory, whatever n is.

    A Feistel network with six rounds on the two digits of i in base ceil(sqrt(n)). A result
    outside range(n) passes through the network again: cycle walking (Black & Rogaway 2002,
    "Ciphers with Arbitrary Finite Domains").
    """
    base = math.isqrt(n - 1) + 1
    key = mix(mix(seed) + epoch)
    while True:
        left, right = divmod(i, base)
        for step in range(6):
            left, right = right, (left + mix(key + (step << 48) + right)) % base
        i = left * base + right
        if i < n:
            return i


def mix(x):
    """A 64-bit hash of a number: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


class ShardWriter:
    """Cuts tokens into shards. Continues after the shards that are in the directory.

    settings: what may not change between the runs. facts: the contents of meta.json;
    facts["next"] is where the next shard begins in the source: file, block, line, and how many
    tokens of the block are in earlier shards. It is None at the end of the source.
    """

    def __init__(self, directory, name, settings, tokenizer, max_shards=None):
        self.directory = Path(directory)
        self.tokenizer = tokenizer
        self.max_shards = max_shards or math.inf
        self.lock = None
        self.facts = dict(
            settings, name=name, shards=0, tokens=0, documents=0, skipped=0, next=[0, 0, 0, 0],
            crc32=[])
        if self.directory.is_dir():
            self.open_directory()
            if find_shards(self.directory, "(train|val)"):
                self.resume(settings)
        self.n_verified = self.facts["shards"]
        self.skip = self.facts["next"][3] if self.facts["next"] else 0
        self.parts = []  # the tokens of the next shard

    def resume(self, settings):
        """Continues with the facts of the shards in the directory. Raises UserError."""
        old = read_meta(self.directory)
        differ = [key for key in settings if old.get(key) != settings[key]]
        if differ:
            reason = f"another {', '.join(differ)}" if old else "without meta.json"
            raise UserError(f"--output_dir {self.directory}: holds other shards ({reason}); "
                            "choose another directory")
        self.facts.update(old)  # its name, too: the directory may have been renamed
        if "crc32" not in old:  # older versions did not write it
            self.facts["crc32"] = [open_shard(self.path(i)).crc32() for i in range(old["shards"])]
        self.verify()

    def open_directory(self):
        """Creates and locks the directory, and removes what a killed process left."""
        with cli.writing(f"--output_dir {self.directory}"):
            self.directory.mkdir(parents=True, exist_ok=True)
            self.lock = weakref.finalize(self, os.close, cli.lock(self.directory, "--output_dir"))
            for temporary in self.directory.glob("*.tmp"):
                temporary.unlink()

    def verify(self, first=0):
        """Raises UserError unless every shard has the tokens that were written."""
        for i in range(first, self.facts["shards"]):
            if open_shard(self.path(i)).crc32() != self.facts["crc32"][i]:
                raise UserError(f"{self.path(i)}: its checksum is not the recorded one; restore "
                                f"it, or start again with another --output_dir")

    def path(self, index):
        split = "val" if index < self.facts["val_shards"] else "train"
        return self.directory / f"{self.facts['name']}_{split}_{index:06d}.npy"

    @property
    def done(self):
        return self.facts["next"] is None or self.facts["shards"] >= self.max_shards

    @property
    def n_tokens(self):
        return self.facts["tokens"] + sum(map(len, self.parts))

    def add(self, block, tokens, n_skipped):
        """Adds the tokens of the next block, (n,) uint16. n_skipped: its damaged records."""
        used, self.skip = self.skip, 0
        while used < len(tokens) and not self.done:
            end = (self.facts["shards"] + 1) * self.facts["shard_size"]
            self.parts.append(tokens[used : used + end - self.n_tokens])
            used += len(self.parts[-1])
            if self.n_tokens == end:
                self.save([block.file, block.number, block.line, used])
        if not self.done:
            self.facts["skipped"] += n_skipped

    def save(self, next):
        """Writes the next shard. Writes progress.json before it, and again after it."""
        facts, progress = self.facts, self.directory / "progress.json"
        path = self.path(facts["shards"])
        n_tokens = self.n_tokens - facts["tokens"]
        header = dict(descr="<u2", fortran_order=False, shape=(n_tokens,))
        with cli.writing(path, "free some space; the same command continues"):
            if not self.lock:
                self.open_directory()
                if find_shards(self.directory, "(train|val)"):
                    raise UserError(f"--output_dir {self.directory}: another process has written "
                                    "there; start again to continue after its shards")
            if self.tokenizer.settings:
                (self.directory / "tokenizer.json").write_text(self.tokenizer.source, "utf-8")
            cli.write_json(progress, facts)
            (self.directory / "meta.json").unlink(missing_ok=True)
            with cli.replacing(path) as temporary, open(temporary, "wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                file.writelines(self.parts)
                file.flush()
                os.fsync(file.fileno())
        end = self.tokenizer.end_of_text
        facts["documents"] += sum(int((part == end).sum()) for part in self.parts)
        facts.update(shards=facts["shards"] + 1, tokens=self.n_tokens, next=next)
        facts["crc32"].append(crc32(self.parts))
        self.parts = []
        cli.write_json(progress, facts)

    def finish(self):
        """Writes the last shard, which may be short, and renames progress.json to meta.json."""
        if self.parts:
            self.save(None)
        self.verify(self.n_verified)
        if not self.done:
            self.facts["next"] = None
        cli.write_json(self.directory / "meta.json", self.facts)
        (self.directory / "progress.json").unlink(missing_ok=True)
