"""Turns text into the token shards that train_gpt2.py reads.

  python fineweb.py                                    FineWeb-Edu
  python fineweb.py --input a.jsonl --output_dir mine  your own text
  python fineweb.py --input 'wiki/*.parquet' b.txt.gz --output_dir mine
  python fineweb.py --prebuilt kjj0/finewebedu10B-gpt2 --max_shards 10

--input takes .jsonl, .json, .txt (also with .gz or .zst) and .parquet files,
and Megatron's .idx, whose tokens are copied. --prebuilt downloads shards that
others have made, instead of text.
In a .txt file <|endoftext|> separates documents. --tokenizer takes a
vocabulary of your own, see tokenizer.py. After an interruption the same
command continues. Damaged records are counted and skipped; the first 5 are
shown.
"""

# plaingpt/corpus.py reads the text in blocks. Threads encode the blocks. The main thread writes the
# shards. They equal the shards of build-nanogpt's fineweb.py byte for byte.

import functools
import hashlib
import itertools
import json
import os
import re
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from tqdm import tqdm

from plaingpt import cli, corpus
from plaingpt.cli import UserError
from plaingpt.shards import ShardWriter, open_shard
from tokenizer import MERGES, MERGES_SHA256, load_tokenizer

FINEWEB = "HuggingFaceFW/fineweb-edu"
SHARD_SIZE = 10**8  # tokens, as in build-nanogpt
SHOWN = 5  # damaged records that are shown


@dataclass
class ShardConfig:
    input: Annotated[list[str] | None, "files or quoted globs of your own text"] = None
    prebuilt: Annotated[str | None, "or download shards from this data set of the hub"] = None
    dataset: Annotated[str, "of the Hugging Face hub, or of the mirror in HF_ENDPOINT"] = FINEWEB
    name: Annotated[str | None, "configuration of --dataset [sample-10BT of FineWeb-Edu]"] = None
    text_key: Annotated[str, "field or column that holds the text"] = "text"
    tokenizer: Annotated[str, "tokenizer.json, its directory, or a name of the hub"] = "gpt2"
    end_of_text: Annotated[str | None, "name of the token between documents"] = None
    output_dir: Annotated[str, "directory for the shards"] = "edu_fineweb10B"
    shard_size: Annotated[int | None, "tokens [10^8; --input: by size]", "at least 1"] = None
    val_shards: Annotated[int, "shards for validation, the first ones", "at least 0"] = 1
    max_shards: Annotated[int | None, "stop after so many shards", "at least 1"] = None
    num_proc: Annotated[int | None, "threads that encode [one per core]", "at least 1"] = None
    backend: Annotated[Literal["auto", "tiktoken", "gigatoken"], "auto tries gigatoken"] = "auto"
    strict: Annotated[bool, "stop at the first damaged record"] = False


@functools.cache
def get_gigatoken(tokenizer, thread):
    """One encoder per thread. Threads with a common encoder would wait for each other."""
    gigatoken = cli.require("gigatoken").Tokenizer
    if tokenizer.settings:  # without added tokens, <|endoftext|> in a text is plain text
        return gigatoken.from_json(json.dumps({**tokenizer.settings, "added_tokens": []}))
    return gigatoken.from_tiktoken(MERGES, "gpt2", {})


def encode(texts, tokenizer, backend):
    """Texts -> their tokens, with end_of_text before each text: (n,) uint16."""
    if backend != "gigatoken" or not texts:
        return tokenizer.encode_documents(texts)
    import awkward as ak  # gigatoken depends on it

    encoder = get_gigatoken(tokenizer, threading.get_ident())
    ragged = encoder.encode_batch(texts, parallel=False)
    tokens, lengths = ak.to_numpy(ak.flatten(ragged)), ak.to_numpy(ak.num(ragged))
    return np.insert(tokens.astype(np.uint16), np.cumsum(lengths) - lengths, tokenizer.end_of_text)


def tokenize(block, text_key, tokenizer, backend):
    """A block -> its tokens, (n,) uint16, and its skipped records."""
    if block.kind == "ids":
        return copy_documents(block.records, tokenizer), []
    texts, skipped = corpus.texts_of(block, text_key)
    tokens = encode(texts, tokenizer, backend)
    if block.kind == "text":
        tokens = tokens[1:]  # no end-of-text: continues the previous block's document
    return tokens, skipped


def copy_documents(documents, tokenizer):
    """Joins arrays of ids -> (n,) uint16, each with one end_of_text before it and none after it."""
    end, parts = tokenizer.end_of_text, []
    for ids in documents:
        if ids.max(initial=0) >= tokenizer.n_vocab:
            raise UserError(f"--input: has token id {ids.max()}, but {tokenizer.name} has "
                            f"{tokenizer.n_vocab:,} ids; give the data's --tokenizer")
        inner = np.flatnonzero(ids != end)
        parts += [[end], ids[inner[0] : inner[-1] + 1] if len(inner) else []]
    return np.concatenate(parts).astype(np.uint16)


def download_shards(config):
    """Downloads shards that others have made, validation first. Raises UserError.

    A file that is there already is kept. A download that was cut off continues.
    """
    hub, name = cli.require("huggingface_hub"), config.prebuilt
    if not corpus.hub_answers():
        raise UserError(f"--prebuilt {name}: the hub does not answer; check the network, or set "
                        "HF_ENDPOINT to a mirror")
    files = corpus.retry(name, hub.list_repo_files, name, repo_type="dataset")
    found = [re.search(r"^[^/]+_(train|val)_\d+\.(npy|bin)$", file) for file in sorted(files)]
    val, train = ([m[0] for m in found if m and m[1] == split] for split in ("val", "train"))
    shards = (val + train)[: config.max_shards]
    if not shards:
        raise UserError(f"--prebuilt {name}: no shards X_train_000001.bin; give another data set")
    for file in [f for f in files if f == "tokenizer.json"] + shards:
        with cli.writing(config.output_dir):
            path = Path(corpus.retry(name, hub.hf_hub_download, name, file, repo_type="dataset",
                                     local_dir=config.output_dir))
        if file in shards:
            try:
                open_shard(path)
            except UserError:
                path.unlink()  # or it would count as downloaded
                raise
    print(f"{config.output_dir} has {len(shards)} of {len(val + train)} shards of {name}\n"
          f"to train on it: python train_gpt2.py --data {config.output_dir}")


def tokenize_all(blocks, config, *encoder):
    """Yields (block, its tokens, its skipped records) in order. Threads are a few blocks ahead."""
    running = deque()
    with ThreadPoolExecutor(config.num_proc) as pool:
        for block in itertools.chain(blocks, [None]):
            if block:
                running.append((block, pool.submit(tokenize, block, config.text_key, *encoder)))
            while running and (not block or len(running) > 2 * config.num_proc):
                oldest, future = running.popleft()
                yield oldest, *future.result()


def choose_backend(config, blocks, tokenizer):
    """gigatoken if it is installed and encodes the first texts as the tokenizer does."""
    if blocks and all(block.kind == "ids" for block in blocks):
        return "copied"
    if not tokenizer.encoding:
        return "tokenizers"
    if config.backend == "tiktoken" or (config.backend == "auto" and not find_spec("gigatoken")):
        return "tiktoken"
    texts = [text for block in blocks for text in corpus.texts_of(block, config.text_key)[0]][:1000]
    if np.array_equal(*(encode(texts, tokenizer, name) for name in ("gigatoken", "tiktoken"))):
        return "gigatoken"
    print("gigatoken and tiktoken encode this text differently; tiktoken is used", file=sys.stderr)
    return "tiktoken"


def fill(writer, config, paths, n_bytes, tokenizer):
    """Writes the shards that are not in the directory yet. n_bytes: size of all files."""
    facts = writer.facts
    stop_signals = cli.catch_stop_signals("finishing this block")
    if facts["shards"]:
        print(f"{config.output_dir} has {facts['shards']} whole shards: continuing after them")
    blocks = corpus.read_blocks(paths, config.text_key, *facts["next"][:2], tokenizer.pattern)
    first = list(itertools.islice(blocks, 8))
    if first and first[0].line != facts["next"][2]:
        raise UserError(f"{paths[first[0].file]}: this pyarrow version cuts the file differently; "
                        "start again with another --output_dir")
    backend = choose_backend(config, first, tokenizer)
    n_before, n_shown, start = writer.n_tokens, 0, time.monotonic()
    interval = 0.5 if sys.stderr.isatty() else 10  # seconds between updates of the progress bar
    with tqdm(total=n_bytes, unit="B", unit_scale=True, mininterval=interval) as bar:
        for block, tokens, skipped in tokenize_all(
                itertools.chain(first, blocks), config, tokenizer, backend):
            for line, reason in skipped[: SHOWN - n_shown]:
                where = f"{paths[block.file]}, {'row' if block.kind == 'table' else 'line'} {line}"
                if config.strict:
                    raise UserError(f"{where}: {reason}; correct it, or leave out --strict")
                tqdm.write(f"skipped {where}: {reason}", file=sys.stderr)
                n_shown += 1
            writer.add(block, tokens, len(skipped))
            bar.update(block.done - bar.n)
            if writer.done:
                break
            if stop_signals:
                tqdm.write("stopped; the same command continues", file=sys.stderr)
                sys.exit(128 + stop_signals[0])
    if not writer.n_tokens:
        raise UserError(f"{paths[0]}: no text in it, {facts['skipped']} records were skipped; "
                        "choose another file or --text_key")
    seconds = time.monotonic() - start
    speed = (writer.n_tokens - n_before) / seconds / 1e6
    duration = timedelta(seconds=round(seconds))
    print(f"{backend}: {duration}, {speed:.1f} million tokens per second")


@cli.restoring_signals()
def main(argv=None):
    given = cli.parse_flags(__doc__, ShardConfig, argv=argv)
    config = ShardConfig(**given)
    if config.prebuilt:
        others = given.keys() - {"prebuilt", "output_dir", "max_shards"}
        if others:
            raise UserError(f"--prebuilt: leave out --{min(others)}; the shards are made already")
        return download_shards(config)
    tokenizer = load_tokenizer(config.tokenizer, config.end_of_text)
    if tokenizer.name == "bytes":
        raise UserError("--tokenizer bytes: needs no shards; train_gpt2.py --data reads the text")
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    config.num_proc = config.num_proc or len(cores)
    name = Path(config.output_dir).resolve().name
    if config.input:
        if "dataset" in given or "name" in given:
            raise UserError("--input: leave out --dataset and --name; they choose data of the hub")
        own = {Path(config.output_dir, f).resolve() for f in ("meta.json", "progress.json")}
        paths = [path for path in corpus.find_files(config.input) if path.resolve() not in own]
        source = dict(input=[[p.name, p.stat().st_size, corpus.checksum(p)] for p in paths])
    else:
        if config.dataset == FINEWEB:
            name, config.name = "edufineweb", config.name or "sample-10BT"
        paths, rows, revision = corpus.load_hub(config.dataset, config.name)
        source = dict(dataset=config.dataset, name=config.name, rows=rows, revision=revision)
    n_bytes = sum(path.stat().st_size for path in paths)
    # Own text: 20 to 40 shards, so that a small text also gives validation and training shards.
    default = min(SHARD_SIZE, max(1000, n_bytes // 80)) if config.input else SHARD_SIZE
    sha256 = hashlib.sha256(tokenizer.source.encode()).hexdigest()
    if tokenizer.name == "gpt2":
        sha256 = MERGES_SHA256
    settings = dict(source=source, text_key=config.text_key, tokenizer=tokenizer.name,
                    tokenizer_sha256=sha256, shard_size=config.shard_size or default,
                    val_shards=config.val_shards)
    writer = ShardWriter(config.output_dir, name, settings, tokenizer, config.max_shards)
    facts = writer.facts
    if config.strict and facts["skipped"]:
        raise UserError(f"--output_dir {config.output_dir}: was made without --strict, "
                        f"{facts['skipped']} records were skipped; choose another directory")
    if not writer.done:
        fill(writer, config, paths, n_bytes, tokenizer)
    writer.finish()
    n_val = min(facts["shards"], config.val_shards)
    extent = "" if facts["next"] is None else f" up to --max_shards {facts['shards']}"
    print(f"{config.output_dir} is complete{extent}: validation shards: {n_val}, "
          f"training shards: {facts['shards'] - n_val}, {facts['tokens']:,} tokens, "
          f"{facts['documents']:,} documents, {facts['skipped']:,} damaged records skipped")
    if 0 < n_val < facts["shards"]:
        print(f"to train on it: python train_gpt2.py --data {config.output_dir}")
    elif facts["next"] is None:
        kind = "training" if n_val else "validation"
        print(f"there are no {kind} shards: to train, start again with another --output_dir, "
              f"--val_shards 1 --shard_size {max(1, facts['tokens'] // 10)}")


if __name__ == "__main__":
    cli.run(main)
