"""Turns text into the token shards that train_gpt2.py reads.

  python fineweb.py                                       FineWeb-Edu, 10 billion tokens, into edu_fineweb10B/
  python fineweb.py --input my.jsonl --output_dir mine    your own text; then: python train_gpt2.py --data mine
  python fineweb.py --input 'wiki/*.parquet' notes.txt.gz --output_dir mine --shard_size 10000000

--input takes .jsonl, .json, .txt (each also .gz or .zst) and .parquet files. In a .txt file <|endoftext|> separates documents.
Interrupted or killed, the same command goes on where it was. A damaged record is counted, shown and skipped.
"""

# corpus.py reads the text in blocks; workers make each block one array of tokens; the main process only fills shards, which
# are byte for byte those of build-nanogpt's fineweb.py.
# Read next: corpus.py, where text comes from.

import functools
import importlib.metadata
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plaingpt.cli import UserError, catch_stop_signals, duration, first_line, parse_flags, run, write_json
from plaingpt.corpus import find_files, load_hub, parse_table, parse_text, read_blocks, texts_of
from tokenizer import RANKS, RANKS_SHA256, START, get_encoding

FINEWEB, FINEWEB_NAME = "HuggingFaceFW/fineweb-edu", "sample-10BT"
END_OF_TEXT = START["gpt2"]
SHOWN = 5  # damaged records that are shown; all are counted
SAMPLE_TEXTS, SAMPLE_BYTES = 1000, 2**24  # on which the back ends are compared: so many texts, or so much text


@dataclass
class ShardConfig:
    input: list = None  # files or quoted globs of your own text, in this order; without it, --dataset
    dataset: str = FINEWEB  # of the Hugging Face hub, or of the mirror in HF_ENDPOINT
    name: str = None  # the data set's configuration [sample-10BT of FineWeb-Edu]
    text_key: str = "text"  # the field or column that holds the text
    output_dir: str = "edu_fineweb10B"  # where the shards go
    shard_size: int = 100000000  # tokens in a shard; the last may be shorter
    val_shards: int = 1  # so many shards, the first, are for validation
    max_shards: int = None  # stop after so many; the same command with more goes on from there [all]
    num_proc: int = None  # workers [one a core]
    backend: str = "auto"  # tiktoken, or gigatoken, which is several times faster; auto: gigatoken if it is installed
    strict: bool = False  # stop at the first damaged record rather than skip it


# --- block -> tokens ------------------------------------------------------------------------------------------------------

@functools.cache
def get_encoder(backend, thread):
    """The function that encode calls; each thread has its own, since gigatoken lets the threads that share one wait."""
    if backend == "gigatoken":
        import gigatoken
        from awkward import flatten, num, to_numpy

        tokenizer = gigatoken.Tokenizer.from_tiktoken(RANKS, "gpt2", {})  # no special tokens: their text is ordinary

        def encode_all(texts):
            ragged = tokenizer.encode_batch(texts, parallel=False)  # (texts, tokens of each)
            tokens, ends = to_numpy(flatten(ragged)), np.cumsum(to_numpy(num(ragged)))
            return np.insert(tokens.astype(np.uint16), [0, *ends[:-1]], END_OF_TEXT)
    else:
        encoding, lead = get_encoding("gpt2"), np.array([END_OF_TEXT], np.uint32)

        def encode_all(texts):
            parts = [part for text in texts for part in (lead, encoding.encode_to_numpy(text, disallowed_special=()))]
            return np.concatenate(parts).astype(np.uint16)
    return encode_all


def encode(texts, backend):
    """Texts -> the tokens of all of them, each led by <|endoftext|>: (n,) uint16."""
    return get_encoder(backend, threading.get_ident())(texts) if texts else np.empty(0, np.uint16)


def tokenize(block, text_key, backend):
    """A block -> its tokens, (n,) uint16; the first records that were skipped, as texts_of gives them; how many there are."""
    texts, skipped = texts_of(block, text_key)
    tokens = encode(texts, backend)
    if block.parse is parse_text:
        tokens = tokens[1:]  # its first text does not begin a document
    return tokens, skipped[:SHOWN], len(skipped)


def start_worker():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the main one decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # do not outlive it


def tokenize_all(blocks, config, backend):
    """Blocks -> (block, what `tokenize` makes of it) in the same order, a few at a time.

    tiktoken is best served by processes. gigatoken is so fast that handing over the text would take longer: threads, which
    it does not block.
    """
    pool = ThreadPoolExecutor(config.num_proc) if backend == "gigatoken" else \
        ProcessPoolExecutor(config.num_proc, initializer=start_worker)
    running = deque()
    try:
        with pool:
            for block in blocks:
                running.append((block, pool.submit(tokenize, block, config.text_key, backend)))
                if len(running) > 2 * config.num_proc:
                    block, result = running.popleft()
                    yield block, *result.result()
            while running:
                block, result = running.popleft()
                yield block, *result.result()
    except BrokenProcessPool as error:
        raise UserError("a worker died, most likely for want of memory; the same command, perhaps with fewer --num_proc, "
                        "goes on from the last whole shard") from error


def choose_backend(config, blocks):
    """Takes a few blocks -> (back end, the blocks taken, about how many tokens are in them).

    gigatoken if it is installed and gives tiktoken's tokens for a thousand texts, otherwise tiktoken.
    """
    taken, texts = [], []
    while len(texts) < SAMPLE_TEXTS and sum(len(b.data) for b in taken) < SAMPLE_BYTES and (block := next(blocks, None)):
        taken.append(block)
        texts += texts_of(block, config.text_key)[0]
    backends = ["tiktoken"] if config.backend == "tiktoken" else ["tiktoken", "gigatoken"]
    sample = texts[:SAMPLE_TEXTS if len(backends) > 1 else SAMPLE_TEXTS // 10]
    with ThreadPoolExecutor(2) as pool:  # while one encodes the other loads
        tokens, *others = [pool.submit(encode, sample, backend) for backend in backends]
    n_tokens = len(tokens.result()) * len(texts) // max(1, len(sample))
    try:
        if others and np.array_equal(others[0].result(), tokens.result()):
            return "gigatoken", taken, n_tokens
        if others:
            print("gigatoken and tiktoken do not agree on this text: going on with tiktoken", file=sys.stderr)
    except ImportError as error:
        if config.backend == "gigatoken":
            raise UserError(f"--backend gigatoken: {first_line(error)}; pip install gigatoken") from error
    return "tiktoken", taken, n_tokens


# --- tokens -> shards -----------------------------------------------------------------------------------------------------

class ShardWriter:
    """Cuts tokens into shards, and keeps the facts of their making beside them: progress.json, which becomes meta.json.

    A file gets its name when it is whole. facts["next"] is where the next shard begins: file, block and line in the source,
    and how many of that block's tokens are in the shards before; None at the end. Raises UserError if the directory holds
    other shards, and OSError if it cannot be written.
    """

    def __init__(self, config, settings, name):
        self.directory = Path(config.output_dir)
        self.shard_size, self.max_shards = config.shard_size, config.max_shards or math.inf
        self.meta, self.progress = self.directory / "meta.json", self.directory / "progress.json"
        versions = {package: importlib.metadata.version(package) for package in ("numpy", "tiktoken", "pyarrow")}
        self.facts = dict(settings, name=name, shards=0, tokens=0, documents=0, skipped=0, next=[0, 0, 0, 0],
                          versions=dict(python=platform.python_version(), **versions))
        if any(re.search(r"_(train|val)_\d+\.(npy|bin)$", p.name) for p in self.directory.glob("*")):
            self.go_on(settings, config.strict)
        self.skip = self.facts["next"][3] if self.facts["next"] else 0
        self.file, self.filled = None, 0
        self.disk, self.committing = ThreadPoolExecutor(1), None  # flushing a shard to the disk takes as long as many blocks

    def go_on(self, settings, strict):
        """Takes up the facts of the shards that are there."""
        try:
            old = next((json.loads(p.read_text()) for p in (self.meta, self.progress) if p.exists()), {})
        except ValueError as error:
            raise UserError(f"{self.directory}: meta.json or progress.json is damaged ({first_line(error)})") from error
        if not old:
            raise UserError(f"--output_dir {self.directory}: holds shards, but no meta.json that says what of; choose "
                            "another directory")
        if differ := [key for key in settings if old.get(key) != settings[key]]:
            raise UserError(f"--output_dir {self.directory}: holds shards made with another {', '.join(differ)}; choose "
                            "another directory or delete this one")
        self.facts["name"] = old["name"]  # which stays, should the directory be renamed
        if not all(self.is_whole(old, i) for i in range(old["shards"])):
            print(f"shards in {self.directory} are missing or damaged: making all of them again", file=sys.stderr)
            self.meta.unlink(missing_ok=True)
            return
        if strict and old["skipped"]:
            raise UserError(f"--output_dir {self.directory}: was made without --strict, {old['skipped']:,} records were "
                            "skipped; choose another directory or delete this one")
        self.facts.update(old, versions=self.facts["versions"])
        if self.meta.exists() and not self.done:  # complete was less than is wanted now
            os.replace(self.meta, self.progress)

    def path(self, facts, index):
        return self.directory / f"{facts['name']}_{'val' if index < facts['val_shards'] else 'train'}_{index:06d}.npy"

    def is_whole(self, facts, index):
        try:
            tokens = np.load(self.path(facts, index), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            return False
        return len(tokens) == min(facts["shard_size"], facts["tokens"] - index * facts["shard_size"])

    @property
    def done(self):
        return self.facts["next"] is None or self.facts["shards"] >= self.max_shards

    @property
    def tokens(self):
        return self.facts["tokens"] + self.filled

    def add(self, block, tokens, n_skipped):
        """Takes the tokens of the next block, in which so many records were skipped."""
        used, self.skip = self.skip, 0
        while used < len(tokens) and not self.done:
            if self.file is None:
                self.open_shard()
            part = tokens[used:used + self.shard_size - self.filled]
            self.write(part)
            self.documents += int(np.count_nonzero(part == END_OF_TEXT))  # begins a document, and is nowhere else
            used, self.filled = used + len(part), self.filled + len(part)
            if self.filled == self.shard_size:
                self.close_shard([block.file, block.number, block.line, used])
        self.facts["skipped"] += 0 if self.done else n_skipped

    def open_shard(self):
        if self.facts["shards"] == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(self.progress, self.facts)  # so that the first shard, too, is known for this command's
        path = self.path(self.facts, self.facts["shards"]).with_suffix(".tmp")
        self.file, self.documents = open(path, "wb", buffering=0), 0
        self.write_header(self.shard_size)

    def write(self, data):
        data = memoryview(data).cast("B")
        while data:
            data = data[self.file.write(data):]  # a nearly full disk may take less than all

    def write_header(self, n_tokens):
        header = io.BytesIO()  # as np.save writes it; its length does not depend on the number
        np.lib.format.write_array_header_1_0(header, dict(descr="<u2", fortran_order=False, shape=(n_tokens,)))
        self.write(header.getvalue())

    def close_shard(self, next):
        facts, path = self.facts, self.path(self.facts, self.facts["shards"])
        if self.filled < self.shard_size:
            self.file.seek(0)
            self.write_header(self.filled)
        facts.update(shards=facts["shards"] + 1, tokens=self.tokens, documents=facts["documents"] + self.documents, next=next)
        self.wait()
        self.committing = self.disk.submit(commit, self.file, path, self.progress, dict(facts))
        self.file, self.filled = None, 0

    def wait(self):
        """Until the last shard that was closed lies on the disk; raises what went wrong with it."""
        if self.committing:
            self.committing.result()

    def finish(self):
        """Closes the last, short shard, and says by meta.json that this is all."""
        if not self.done:
            if self.file:
                self.close_shard(None)
            self.facts["next"] = None
        self.wait()
        if not self.meta.exists():
            write_json(self.progress, self.facts)
            os.replace(self.progress, self.meta)

    def stop(self):
        """Leaves no thread and no unfinished file behind."""
        self.disk.shutdown()
        if self.file:
            self.file.close()
            os.unlink(self.file.name)


def commit(file, path, progress, facts):
    """A shard gets its name, and then progress.json its new facts: killed in between, that one shard is made again."""
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
    write_json(progress, facts)


# --- the whole ------------------------------------------------------------------------------------------------------------

def check_config(config, given):
    for name, least in (("shard_size", 1), ("val_shards", 0), ("max_shards", 1), ("num_proc", 1)):
        if getattr(config, name) is not None and getattr(config, name) < least:
            raise UserError(f"--{name} {getattr(config, name)}: must be at least {least}")
    if config.backend not in ("auto", "tiktoken", "gigatoken"):
        raise UserError(f"--backend {config.backend} is none of auto, tiktoken, gigatoken")
    if config.input and ("dataset" in given or "name" in given):
        raise UserError("--input is your own text, --dataset and --name are the hub's: give one or the other")


def check_disk(directory, size):
    """Raises UserError if `directory`, which need not exist, cannot be written or has no room for `size` bytes more."""
    place = next(p for p in (directory.resolve(), *directory.resolve().parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UserError(f"--output_dir {directory}: {place} is not a directory that can be written to")
    if size > (free := shutil.disk_usage(place).free):
        raise UserError(f"--output_dir {directory}: the shards will take about {size / 1e9:.1f} GB, but {free / 1e9:.1f} GB "
                        "are free; make room, or take less with --max_shards")


def checksum(path):
    """CRC-32 of a file's first and last megabyte: enough to tell that it is another file, for the little it costs."""
    with open(path, "rb") as file:
        first = file.read(2**20)
        file.seek(max(0, path.stat().st_size - 2**20))
        return zlib.crc32(file.read(2**20), zlib.crc32(first))


def fill(writer, config, paths):
    """Makes the shards that the directory still lacks."""
    from tqdm import tqdm

    file, number, line, _ = writer.facts["next"]
    blocks = read_blocks(paths, config.text_key, file, number)
    backend, taken, n_tokens = choose_backend(config, blocks)
    if taken and taken[0].line != line:
        raise UserError(f"{paths[file]} falls into other blocks than before, perhaps by another version of pyarrow: delete "
                        f"{writer.directory} and start again")
    starts = np.cumsum([0] + [p.stat().st_size for p in paths]).tolist()  # of the files, as if they were one
    first, first_shards, most = writer.tokens, writer.facts["shards"], writer.max_shards * config.shard_size

    def expected(tokens, block):
        return min(most, tokens * starts[-1] / max(1, starts[block.file] + block.done))

    check_disk(writer.directory, 2 * (expected(first + n_tokens, taken[-1]) - first) if taken else 0)
    if first_shards:
        print(f"{writer.directory} holds {first_shards} whole shards: going on from there")
    start, shown, stop_signals = time.monotonic(), [], catch_stop_signals()
    with tqdm(unit="tok", unit_scale=True, initial=first, mininterval=0.5 if sys.stderr.isatty() else 10) as bar:
        for block, tokens, skipped, n_skipped in tokenize_all(itertools.chain(taken, blocks), config, backend):
            for line, reason in skipped[:SHOWN - len(shown)]:
                shown.append(f"{paths[block.file]}, {'row' if block.parse is parse_table else 'line'} {line}: {reason}")
                if config.strict:
                    raise UserError(f"{shown[0]}; mend it, or leave --strict out to skip it")
                tqdm.write(f"skipped {shown[-1]}", file=sys.stderr)
            writer.add(block, tokens, n_skipped)
            bar.total = round(expected(writer.tokens, block))
            bar.update(writer.tokens - bar.n)
            if writer.done:
                break
            if stop_signals:
                tqdm.write("stopped; the same command goes on from the last whole shard", file=sys.stderr)
                sys.exit(128 + stop_signals[0])  # as the shell counts it
    if not writer.tokens:
        raise UserError(f"no text in {paths[0]}" + f" and {len(paths) - 1} more files" * (len(paths) > 1) + (
            f": {writer.facts['skipped']:,} records skipped, the first {shown[0]}" if shown else ", which is empty; give more"))
    seconds = time.monotonic() - start
    print(f"{backend}: {duration(seconds)}, {(writer.tokens - first) / seconds / 1e6:.1f} million tokens a second")


def main(argv=None):
    given = parse_flags(__doc__, ShardConfig, argv=argv)
    config = ShardConfig(**given)
    check_config(config, given)
    config.num_proc = config.num_proc or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    name = Path(config.output_dir).resolve().name
    if config.input:
        paths = find_files(config.input)
        source = dict(input=[[p.name, p.stat().st_size, checksum(p)] for p in paths])
    else:
        if config.dataset == FINEWEB:
            name, config.name = "edufineweb", config.name or FINEWEB_NAME
        paths, rows, revision = load_hub(config.dataset, config.name)
        source = dict(dataset=config.dataset, name=config.name, rows=rows, revision=revision)
    settings = dict(source=source, text_key=config.text_key, tokenizer="gpt2", tokenizer_sha256=RANKS_SHA256,
                    shard_size=config.shard_size, val_shards=config.val_shards)
    try:
        writer = ShardWriter(config, settings, name)
        try:
            if not writer.done:
                fill(writer, config, paths)
            writer.finish()
        finally:
            writer.stop()
    except OSError as error:
        raise UserError(f"--output_dir {config.output_dir}: {first_line(error)}; what shards there are are whole, and the same "
                        "command goes on from them") from error
    facts, n_val = writer.facts, min(writer.facts["shards"], config.val_shards)
    extent = "" if facts["next"] is None else f" as far as --max_shards {facts['shards']}"
    print(f"{config.output_dir} is complete{extent}: validation shards {n_val}, training shards {facts['shards'] - n_val}, "
          f"tokens {facts['tokens']:,}, documents {facts['documents']:,}, "
          f"skipped {facts['skipped']:,} of {facts['documents'] + facts['skipped']:,} records")
    if 0 < n_val < facts["shards"]:
        print(f"to train on it: python train_gpt2.py --data {config.output_dir}")
    elif facts["next"] is None:
        print(f"there are no {'training' if n_val else 'validation'} shards: to train, delete {config.output_dir} and give "
              f"--val_shards 1 --shard_size {max(1, min(config.shard_size, facts['tokens'] // 10))}")


if __name__ == "__main__":
    run(main)
