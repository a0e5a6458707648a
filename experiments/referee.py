"""The referee of experiment.py: splits the data before the first run, and measures trained models.

experiment.py copies this program into the copy of the base and starts it there. So the split, the
order of the data and the cross-entropy are those of the base, whatever the change does.
give_logits.py, in the copy with the change, has the models: it gets ids, and gives logits.

The argument is the name of a task, `split` or `measure`. The functions of this name say what the
input is, and what the last line of the output is. Both are JSON.
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

from plaingpt.base.errors import UserError, run_program
from plaingpt.base.files import checksum_of_places, write_json
from plaingpt.base.flags import parse_flags, pick
from plaingpt.data.data_sets import (
    Sources,
    encode_text,
    is_pairs_file,
    is_text_file,
    open_splits,
    read_shares,
    read_weight,
)
from plaingpt.data.documents import read_records
from plaingpt.data.pairs import encode_pair, join_pairs
from plaingpt.data.shards import find_shards, open_shard
from plaingpt.data.tokens import Tokens, find_cut
from plaingpt.run.config import choose_data

import numpy as np
import torch
import torch.nn.functional as F

from model import GPT
from train_gpt2 import GPTConfig, TrainConfig, make_val_loader

SNIPPET = 48  # tokens of a snippet of a sealed text
N_SNIPPETS = 100  # of each sealed text
OVERLAP = 0.05  # of the snippets; a text may quote another one


def main():
    given = json.load(sys.stdin)
    result = split(given) if sys.argv[1] == "split" else measure(given)
    print(json.dumps(result))


def split(given):
    """Splits all data sets once: into data to train on, and a sealed part that no run is given.

    given: `flags` of the base, `more` flags of the change, and `place`, the directory that gets the
    parts. Returns {"data": {"base": values of --data, "change": the same}, "sealed": the sealed
    sets of the base, see split_set}. Raises UserError.
    """
    flags = parse_flags("", GPTConfig, TrainConfig, argv=given["flags"])
    own = [str(item) for item in choose_data(flags)]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data", nargs="+", default=own)
    items = dict(base=own, change=parser.parse_known_args(given["more"])[0].data)
    fraction = flags.get("val_fraction")
    sources = Sources([*own, *items["change"]], flags.get("tokenizer"), fraction)
    parts = {}
    for path in sources.shares:
        parts[path] = split_set(Path(path), sources.tokenizer, fraction, Path(given["place"]))
    data = {}
    for name, values in items.items():
        data[name] = []
        for item in values:
            path, weight = read_weight(item)
            new = parts[path]["train"]
            data[name].append(f"{new}={weight}" if len(values) > 1 else new)
    sealed = []
    for path, share in read_shares(own).items():
        sealed.append(dict(parts[path], share=str(share)))
    added = [path for path in read_shares(items["change"]) if path not in read_shares(own)]
    if added:
        check_overlap(added, read_shares(own), parts, sources.tokenizer, flags)
    return dict(data=data, sealed=sealed)


def split_set(path, tokenizer, fraction, place):
    """Splits a data set -> {"train": path, "sealed": path, "is_held_out": bool}.

    Both parts are data of the same kind, and they are made only once. fraction: that of
    --val_fraction, or None. is_held_out: False if the sealed part are val shards.
    """
    if is_text_file(path):
        contents = hashlib.sha256(path.read_bytes()).hexdigest()
        is_held_out = True
    else:
        val_files = find_shards(path, "val")
        contents = checksum_of_places([*find_shards(path, "train"), *val_files])
        is_held_out = not val_files
    settings = repr((contents, path.name, fraction, tokenizer.name))
    number = hashlib.sha256(settings.encode("utf-8", "backslashreplace")).hexdigest()[:12]
    finished = [place / kind / number for kind in ("sealed", "data")]
    if not finished[1].exists():
        unfinished = [part.with_suffix(".tmp") for part in finished]
        for part in unfinished:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        sealed, train = [part / path.name for part in unfinished]
        if is_pairs_file(path):
            split_pairs(path, train, sealed, tokenizer, fraction)
        elif is_text_file(path):
            split_text(path, train, sealed, fraction)
        else:
            split_shards(path, train, sealed, tokenizer, fraction)
        for new, part in zip(unfinished, finished):  # `data` is last, and says that both are there
            shutil.rmtree(part, ignore_errors=True)
            os.replace(new, part)
    sealed, train = [name_of_part(part, path) for part in finished]
    return dict(train=str(train), sealed=str(sealed), is_held_out=is_held_out)


def name_of_part(directory, path):
    """Returns the path of a part of a data set in its directory. Pairs become JSON lines."""
    if is_pairs_file(path):
        return directory / f"{path.name}.jsonl"
    return directory / path.name


def split_text(path, train, sealed, fraction):
    """Splits a text file. Its last part is sealed, by default a tenth of its bytes."""
    data = path.read_bytes()
    cut = find_cut(data, fraction or 0.1)
    while cut < len(data) and data[cut] & 0xC0 == 0x80:  # within a character of UTF-8
        cut += 1
    train.write_bytes(data[:cut])
    sealed.write_bytes(data[cut:])


def split_pairs(path, train, sealed, tokenizer, fraction):
    """Splits a file of pairs as read_pairs does, after the same shuffle. Raises UserError."""
    records = list(read_records([path], columns=("prompt", "response")))
    for record in records:
        encode_pair(record, tokenizer)  # so that an error names the file of the user
    random.Random(0).shuffle(records)
    cut = find_cut(records, fraction or 0.1)
    for part, chosen in ((train, records[:cut]), (sealed, records[cut:])):
        with open(f"{part}.jsonl", "w", encoding="utf-8") as file:
            for record in chosen:
                pair = {name: record[name] for name in ("prompt", "response")}
                file.write(json.dumps(pair) + "\n")


def split_shards(path, train, sealed, tokenizer, fraction):
    """Splits token files. The val shards are the sealed part, or by default a hundredth."""
    parts = open_splits(path, tokenizer, fraction)
    for kind, tokens, directory in zip(("train", "val"), parts, (train, sealed)):
        directory.mkdir()
        # The meta.json of the whole data set has the number of its shards, and a part has fewer.
        write_json(directory / "meta.json", dict(tokenizer=tokenizer.name))
        if (path / "tokenizer.json").exists():
            shutil.copy(path / "tokenizer.json", directory)
        for i, file in enumerate(tokens.files):
            write_shard(directory / f"part_{kind}_{i:06d}", tokens, file, tokens.starts[i])


def write_shard(target, tokens, file, begin):
    """Writes what `tokens` has of one of its files, which begins at `begin`. Links a whole file."""
    ids = open_shard(file)
    first = max(tokens.start - begin, 0)
    last = min(tokens.stop - begin, len(ids))
    if first >= last:
        return
    has_header = file.suffix == ".npy" or re.search(r"_\d+\.bin$", file.name)  # that of llm.c
    if has_header and last - first == len(ids):
        Path(f"{target}{file.suffix}").symlink_to(file.resolve())
    else:
        dtype = np.uint16 if ids.dtype.itemsize == 2 else np.uint32
        np.save(f"{target}.npy", np.asarray(ids[first:last], dtype))


def open_whole(path, tokenizer, T, vocab_size, is_held_out=False):
    """Opens all of a part, as Tokens. The arguments are as in open_splits."""
    path = Path(path)
    if is_pairs_file(path):
        records = read_records([path], columns=("prompt", "response"))
        pairs = [encode_pair(record, tokenizer) for record in records]
        ids, counted = join_pairs(pairs, tokenizer, T)
        return Tokens(str(path), [ids], vocab_size, counted, is_held_out)
    if is_text_file(path):
        files = [encode_text(path, tokenizer)]
    else:
        files = find_shards(path, "train") or find_shards(path, "val")
    return Tokens(str(path), files, vocab_size, is_held_out=is_held_out)


def check_overlap(added, own, parts, tokenizer, flags):
    """Raises UserError if a data set that the change adds has a sealed text in its training part.

    added, own: paths of the data sets that only the change has, and of those of the base. parts:
    {path: from split_set}.
    """
    T = flags.get("block_size", 1024)

    def open_part(path, kind):
        return open_whole(parts[path][kind], tokenizer, T, tokenizer.n_vocab)

    snippets = set()
    for path in own:
        tokens = open_part(path, "sealed")
        n_places = max(0, len(tokens) - SNIPPET)
        for start in np.linspace(0, n_places, N_SNIPPETS).astype(int).tolist():
            ids = tokens.read(start, min(SNIPPET, len(tokens)))
            snippets.add(ids.astype(np.uint32).tobytes())
    known = set()
    for path in own:
        known |= find_snippets(open_part(path, "train"), snippets)
    for path in added:
        found = find_snippets(open_part(path, "train"), snippets) - known
        if len(found) > OVERLAP * len(snippets):
            raise UserError(
                f"--data {path}: has {len(found) / len(snippets):.0%} of the text that is sealed "
                "for the validation; leave it out"
            )


def find_snippets(tokens, snippets):
    """Returns which of the snippets are in the tokens. Each is the bytes of uint32 ids."""
    found = set()
    size = 2**22
    for start in range(0, len(tokens), size):
        ids = tokens.read(start, min(size + SNIPPET, len(tokens) - start))
        data = ids.astype(np.uint32).tobytes()
        found |= {snippet for snippet in snippets - found if snippet in data}
    return found


def measure(given):
    """Computes the losses of trained models on the sealed data, from their logits.

    given: `base_run`, a run directory that has the tokenizer of the base; `facts` of the base;
    `sealed` from split; `program`, the path of give_logits.py; and `runs`, the run directories.
    Returns for each run {"loss": nats per token, "later": the effect of later tokens}. Raises
    UserError.
    """
    facts = given["facts"]
    _, tokenizer = GPT.load(given["base_run"])
    loaders = []
    for part in given["sealed"]:
        tokens = open_whole(
            part["sealed"],
            tokenizer,
            facts["block_size"],
            facts["vocab_size"],
            part["is_held_out"],
        )
        loaders.append(make_val_loader(tokens, facts["block_size"], pick(TrainConfig, facts)))
    shares = [Fraction(part["share"]) for part in given["sealed"]]
    command = [sys.executable, given["program"], *given["runs"]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as models:
        if read_line(models) != tokenizer.source:
            raise UserError("the change gives another tokenizer, so its losses do not compare")
        results = []
        for run in range(len(given["runs"])):
            results.append(measure_run(models, run, loaders, shares, facts, tokenizer.n_vocab))
    return results


def measure_run(models, run, loaders, shares, facts, n_vocab):
    """Measures one model. models: the process of give_logits.py. run: the index of the run there.

    loaders: of the sealed sets. shares: theirs. facts: of the base. See measure.
    """
    T = facts["block_size"]
    loss = 0.0
    changes = [torch.zeros(())]
    largest = torch.zeros(())
    for loader, share in zip(loaders, shares):
        n = max(1, min(facts["val_tokens"] // T, loader.lengths[0]))
        B = max(1, 2**22 // (T * facts["vocab_size"]))  # so that the logits need 16 MB
        for first in range(0, n, B):
            x, y = loader.batch(first, min(B, n - first), torch.device("cpu"))  # (B, T) each
            # The model gets these first, so that it cannot remember the tokens that are replaced.
            rows, lengths, replaced = logits_before(models, run, x, first, n, n_vocab)
            logits = ask_for_logits(models, run, x)  # (B, T, vocab_size)
            if len(rows):
                true = logits[rows, lengths - 1]  # (R, vocab_size)
                changes.append((replaced - true).abs().max())
            largest = torch.maximum(largest, logits.abs().max())
            nats = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
            loss += float(share) * nats / loader.count_targets(0, n)
    later = torch.stack(changes).max() / largest
    return dict(loss=loss, later=later.item())


def logits_before(models, run, x, first, n, n_vocab):
    """Asks for the last logits before tokens that are replaced by others.

    Each length below T has its turn in two of the n sequences, so each position is compared twice.
    x: sequences from index `first` on, (B, T). n_vocab: the number of ids. Returns the rows of x
    (R), how many tokens of each stay (R), and the logits (R, vocab_size).
    """
    B, T = x.shape
    pairs = []
    for t in range(1, T):
        for i in {t % n, (t + n // 2) % n}:
            if first <= i < first + B:
                pairs.append((i - first, t))
    rows = torch.tensor([row for row, _ in pairs], dtype=torch.int64)  # (R)
    lengths = torch.tensor([t for _, t in pairs], dtype=torch.int64)  # (R)
    found = []
    size = max(1, 2**15 // T)  # rows in a forward pass
    for start in range(0, len(pairs), size):
        part = lengths[start : start + size]  # (r)
        ids = x[rows[start : start + size]]  # (r, T)
        other = (ids + torch.randint(1, n_vocab, ids.shape)) % n_vocab  # (r, T), none is equal
        ids = torch.where(torch.arange(T) < part[:, None], ids, other)  # (r, T)
        found.append(ask_for_logits(models, run, ids, part - 1))  # (r, vocab_size)
    return rows, lengths, torch.cat(found) if found else None


def ask_for_logits(models, run, rows, positions=None):
    """Returns the logits that the model of a run gives, float32.

    rows: ids (R, T). positions: (R), one of each row; the logits are (R, vocab_size). None: all
    positions; (R, T, vocab_size).
    """
    asked = None if positions is None else positions.tolist()
    models.stdin.write(json.dumps([run, rows.tolist(), asked]).encode() + b"\n")
    models.stdin.flush()
    shape = read_line(models)
    data = bytearray(models.stdout.read(4 * math.prod(shape)))  # torch wants to write into it
    return torch.from_numpy(np.frombuffer(data, np.float32).reshape(shape))


def read_line(models):
    """Reads a line of JSON. If there is none, ends this program: the other one has said why."""
    line = models.stdout.readline()
    if not line:
        sys.exit(1)
    return json.loads(line)


if __name__ == "__main__":
    run_program(main)
