"""Tokenizes text and writes the token shards that train_gpt2.py reads.

  python fineweb.py                                    tokenizes FineWeb-Edu
  python fineweb.py --input a.jsonl --output_dir mine  tokenizes your own text
  python fineweb.py --input 'wiki/*.parquet' b.txt.gz --output_dir mine
  python fineweb.py --ready 10                         downloads ten tokenized
                                                       shards of FineWeb-Edu

--input accepts .jsonl (or .ndjson, .jsonlines), .json, .csv, .tsv and .txt
files (also compressed: .gz or .zst), .parquet files, directories of such files,
and directories written by save_to_disk of Hugging Face datasets. In a .txt
file, <|endoftext|> separates documents. --tokenizer selects your own tokenizer,
which tokenizer.py can train. To continue after an interruption, run the same
command again. fineweb.py skips and counts damaged records, and shows the first
5 of them. With --strict, fineweb.py stops at the first damaged record.
"""

# plaingpt/documents.py reads a stream of documents. Several threads tokenize batches of documents.
# The main thread writes the shards. The shards of FineWeb-Edu are byte-identical to the shards that
# build-nanogpt writes.

import contextlib
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from plaingpt.documents import count_bytes, find_files, find_hub_files, read_documents
from plaingpt.errors import UserError, run_program
from plaingpt.files import (
    checksum_of_places,
    delete_temporary_files,
    lock,
    replacing,
    write_json,
    writing,
)
from plaingpt.flags import flag, parse_flags
from plaingpt.machine import count_cores
from plaingpt.ready_shards import download_ready
from plaingpt.shards import find_shards, read_meta
from plaingpt.signals import end_at_once_on_ctrl_c
from plaingpt.terminal import print0, print_result, visible
from plaingpt.tokenizer import load_tokenizer, note_unknown

import numpy as np
from tqdm import tqdm

FINEWEB = "HuggingFaceFW/fineweb-edu"
SHARD_SIZE = 10**8  # tokens, as in build-nanogpt
BATCH = 2**20  # characters that a thread tokenizes at a time
DOCUMENTS = 1000  # number of documents that a thread tokenizes at a time, even if they are short
SHOWN = 5  # number of damaged records that are shown


@dataclass
class ShardConfig:
    input: list[str] | None = flag(
        None, "your own text: files, directories, or quoted glob patterns"
    )
    dataset: str = flag(FINEWEB, "data set on the hub: Hugging Face or HF_ENDPOINT", either=True)
    name: str | None = flag(None, "configuration of --dataset [FineWeb-Edu: sample-10BT]")
    text_key: str = flag("text", "field or column that contains the text")
    tokenizer: str = flag("gpt2", "a tokenizer.json, its directory, or a name on the hub")
    end_of_text: str | None = flag(
        None, "string of the token that separates documents, such as </s>"
    )
    output_dir: str = flag("edu_fineweb10B", "directory for the shards")
    shard_size: int | None = flag(None, "tokens per shard [10^8; small data: fewer]", at_least=1)
    val_shards: int = flag(
        1, "number of shards for validation; the first shards are used", at_least=0
    )
    max_shards: int = flag(10**6, "stop after this many shards", at_least=1)
    num_proc: int | None = flag(None, "number of tokenizer threads [one per core]", at_least=1)
    strict: bool = flag(False, "stop at the first damaged record")
    ready: int | None = flag(None, "instead of tokenizing, download this many shards", at_least=1)


def read_progress(directory, name, settings):
    """Returns a dict of facts that describes the shards in a directory: the contents of meta.json.

    If the directory contains neither shards nor a file that fineweb.py would replace, returns the
    facts of an empty directory. Raises UserError if a shard is missing, or if the shards were made
    with different settings.

    name: the name of new shards. settings: the settings that must not change when fineweb.py
    continues after an interruption. facts["next"] says where the next shard begins: [n, m] means
    that the earlier shards contain the first n documents, and then m tokens of the documents that
    follow. None means that no documents are left.
    """
    facts = dict(settings, name=name, shards=0, tokens=0, documents=0, skipped=0, next=[0, 0])
    replaced = {"meta.json", "progress.json", "tokenizer.json"} & set(os.listdir(directory))
    shards = [*find_shards(directory, "train"), *find_shards(directory, "val")]
    if not replaced and not shards:
        return facts
    old = read_meta(directory)
    if isinstance(old.get("source"), dict):
        old["source"].pop("rows", None)  # only version 2.1 counted the rows of a data set
    differ = [key for key in settings if old.get(key) != settings[key]]
    if differ:
        raise UserError(
            f"{directory}: its files were written with a different {', '.join(differ)}; "
            "use a new directory"
        )
    facts.update(old)  # the shards keep their name even if the directory was renamed
    if len(shards) < facts["shards"]:
        raise UserError(
            f"{directory}: a shard is missing; restore the shard, or use a new directory"
        )
    return facts


def save_shard(directory, facts, parts, following, tokenizer):
    """Writes the next shard. Writes progress.json before the shard, and again after the shard.

    facts: the result of read_progress, which save_shard updates. parts: arrays that contain the
    tokens of the shard. following: the value of facts["next"] after this shard.
    """
    index = facts["shards"]
    split = "val" if index < facts["val_shards"] else "train"
    path = directory / f"{facts['name']}_{split}_{index:06d}.npy"
    n_tokens = sum(map(len, parts))
    note_unknown(tokenizer, parts, path)
    header = dict(descr=tokenizer.dtype.str, fortran_order=False, shape=(n_tokens,))
    with writing(path, "free some space, then run the same command again"):
        write_json(directory / "progress.json", facts)
        # tokenizer.json is written once, before the first shard, because a training run may start,
        # and read tokenizer.json, before all shards are written.
        if tokenizer.json and not (directory / "tokenizer.json").exists():
            with replacing(directory / "tokenizer.json") as file:
                file.write(tokenizer.source.encode())
        (directory / "meta.json").unlink(missing_ok=True)
        with replacing(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.writelines(parts)
    # If the tokenizer has no special ids, end_of_text is a line break. Documents may contain line
    # breaks, so the number of line breaks is not the number of documents.
    if tokenizer.special:
        facts["documents"] += sum(int((part == tokenizer.end_of_text).sum()) for part in parts)
    facts.update(shards=index + 1, tokens=facts["tokens"] + n_tokens, next=following)
    write_json(directory / "progress.json", facts)


def make_batches(documents):
    """Yields lists of Documents. A list ends when it contains BATCH characters or DOCUMENTS items.

    Only the first Document of a list may be the continuation of an earlier Document.
    """
    batch = []
    size = 0  # characters
    for document in documents:
        is_full = size >= BATCH or len(batch) >= DOCUMENTS
        if batch and (is_full or not document.begins):
            yield batch
            batch = []
            size = 0
        batch.append(document)
        size += len(document.text or "")
    if batch:
        yield batch


def encode_batch(batch, tokenizer):
    """Encodes the Documents of a batch. Returns (batch, tokens).

    tokens: end_of_text and the token ids of each Document, (n,). If a Document continues an earlier
    Document, there is no end_of_text before its token ids.
    """
    good = [document for document in batch if document.text is not None]
    tokens = tokenizer.encode_documents([document.text for document in good])
    if good and not good[0].begins:
        tokens = tokens[1:]
    return batch, tokens


def encode_all(documents, tokenizer, n_threads):
    """Yields the result of encode_batch for each batch. Threads encode a few batches ahead."""
    with ThreadPoolExecutor(n_threads) as pool:
        futures = (pool.submit(encode_batch, batch, tokenizer) for batch in make_batches(documents))
        running = [*itertools.islice(futures, 2 * n_threads)]
        while running:
            running += itertools.islice(futures, 1)
            yield running.pop(0).result()


def skip_damaged(batch, n_before, strict):
    """Counts the damaged Documents of a batch. Returns their number.

    Prints a line for each of the first SHOWN damaged Documents of all batches together. n_before:
    the number of damaged Documents in earlier batches. strict: whether to raise UserError if a
    Document is damaged.
    """
    damaged = [f"{each.where}: {each.problem}" for each in batch if each.problem]
    if damaged and strict:
        raise UserError(f"{damaged[0]}; correct this record, or remove --strict")
    for text in damaged[: max(0, SHOWN - n_before)]:
        tqdm.write(visible(f"skipped {text}", sys.stderr), file=sys.stderr)
    return len(damaged)


def write_shards(directory, facts, config, paths, n_bytes, tokenizer):
    """Writes the shards that are not in the directory yet. Updates `facts`, from read_progress.

    paths, n_bytes: the files to read, and their total size in bytes.
    """
    if facts["shards"]:
        print0(f"{directory} contains {facts['shards']} complete shards: continuing after them")
    # n_used: how many tokens of the next batches are already in earlier shards. If version 2.1,
    # whose batches contain more documents, wrote these shards, n_used may exceed the number of
    # tokens in the next batch.
    n_done, n_used = facts["next"]
    is_gpt2 = tokenizer.name == "gpt2"
    documents = read_documents(paths, config.text_key, cut=is_gpt2, skip=n_done)
    n_threads = config.num_proc or count_cores()
    parts = []  # tokens of the next shard
    with tqdm(total=n_bytes, unit="B", unit_scale=True, mininterval=1) as bar:
        for batch, tokens in encode_all(documents, tokenizer, n_threads):
            if n_used == 0:  # otherwise, these damaged records are already counted
                facts["skipped"] += skip_damaged(batch, facts["skipped"], config.strict)
            while n_used < len(tokens) and facts["shards"] < config.max_shards:
                room = facts["shard_size"] - sum(map(len, parts))
                part = tokens[n_used : n_used + room]
                parts.append(part)
                n_used += len(part)
                if len(part) == room:
                    save_shard(directory, facts, parts, [n_done, n_used], tokenizer)
                    parts = []
            if facts["shards"] == config.max_shards:
                return
            n_done += len(batch)
            n_used -= len(tokens)
            bar.update(batch[-1].done - bar.n)
    if parts:
        save_shard(directory, facts, parts, None, tokenizer)
    if not facts["tokens"]:
        raise UserError(f"{paths[0]}: contains no text; choose a different file or --text_key")
    facts["next"] = None


def load_source(config):
    """Finds the files of --input or --dataset. Returns (paths or URLs of the files, facts).

    facts: the entries of meta.json that identify these files.
    """
    if config.input:
        if config.name:
            raise UserError("--name: belongs to --dataset; remove --name or --input")
        paths = find_files(config.input)
        source = dict(input=[[path.name, path.stat().st_size] for path in paths])
        return paths, dict(source=source, input_checksum=checksum_of_places(paths))
    name = config.name
    if config.dataset == FINEWEB and not name:
        name = "sample-10BT"
    paths, revision = find_hub_files(config.dataset, name)
    source = dict(dataset=config.dataset, name=name, revision=revision)
    return paths, dict(source=source, input_checksum=None)  # the revision identifies the files


def show_result(directory, facts, tokenizer):
    """Prints what the directory now contains, and what to do next."""
    extent = "" if facts["next"] is None else f" up to --max_shards {facts['shards']}"
    n_val = min(facts["val_shards"], facts["shards"])
    n_documents = f"{facts['documents']:,} documents, " if tokenizer.special else ""
    print_result(
        f"{directory} is complete{extent}: {facts['shards']} shards (for validation: {n_val}), "
        f"{facts['tokens']:,} tokens, {n_documents}{facts['skipped']:,} damaged records skipped"
    )
    if n_val < facts["shards"]:
        print0(f"to train on it: python train_gpt2.py --data {directory}")
    else:
        print0("all shards are validation shards; give more text, or a smaller --shard_size")


def main(argv=None):
    flags = parse_flags(__doc__, ShardConfig, argv=argv)
    config = ShardConfig(**flags)
    if config.ready:
        return download_ready(config.ready, config.output_dir, flags)
    tokenizer = load_tokenizer(config.tokenizer, config.end_of_text)
    directory = Path(config.output_dir)
    paths, facts_of_source = load_source(config)
    name = directory.resolve().name
    if facts_of_source["source"].get("dataset") == FINEWEB:
        name = "edufineweb"
    # `usual_size` yields 20 shards at 4 bytes per token and 40 shards at 2 bytes per token, so even
    # a small text yields shards for both validation and training. Compressed files yield more
    # shards, because their uncompressed size is unknown.
    n_bytes = sum(map(count_bytes, paths))
    usual_size = min(SHARD_SIZE, max(1000, n_bytes // 80))
    # Existing shards of a data set on the hub keep their size, because version 2.1 derived a
    # different size from its cache.
    usual_size = read_meta(directory).get("shard_size", usual_size)
    settings = dict(
        **facts_of_source,
        text_key=config.text_key,
        tokenizer=tokenizer.name,
        shard_size=config.shard_size or usual_size,
        val_shards=config.val_shards,
    )
    with writing(f"--output_dir {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock(directory, "--output_dir"))
        delete_temporary_files(directory)
        facts = read_progress(directory, name, settings)
        if facts["next"] is not None and facts["shards"] < config.max_shards:
            write_shards(directory, facts, config, paths, n_bytes, tokenizer)
        write_json(directory / "meta.json", facts)
        (directory / "progress.json").unlink(missing_ok=True)
        show_result(directory, facts, tokenizer)


if __name__ == "__main__":
    end_at_once_on_ctrl_c()
    run_program(main)
