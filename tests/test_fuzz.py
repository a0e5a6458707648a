"""Property tests: damaged shards, the order of the data, JSON lines, and the schedules."""

import ast
import contextlib
import copy
import dataclasses
import gzip
import json
import math
import re
import struct
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import write_bin
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

import train_gpt2
from model import GPT, GPTConfig
from plaingpt import corpus
from plaingpt.batches import check_batch_size, get_batch_tokens, micro_batch, micro_batches
from plaingpt.checkpoint import load_checkpoint, on_meta, restore, unpack
from plaingpt.cli import UserError
from plaingpt.device import data_parallel_rank
from plaingpt.shards import open_shard, open_tokens
from train_gpt2 import (
    DataLoaderLite,
    TrainConfig,
    get_lr,
)

# Keeps its Unicode tables out of the repository.
set_hypothesis_home_dir(Path(tempfile.gettempdir(), "hypothesis"))


def fuzz(examples, *inputs):
    slow = [HealthCheck.too_slow]  # a slow machine is not an error
    how = settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=slow)
    return lambda test: how(given(*inputs)(test))


@contextlib.contextmanager
def file_of(name, data):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, name)
        path.write_bytes(data)
        yield path


def assert_sentence(error, path):
    assert len(str(error).splitlines()) == 1 and str(path) in str(error)


# --- shards ---------------------------------------------------------------------------------------------------------------

def npy(header):
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + bytes(range(40))


BIN = struct.pack("<256i", 20240520, 1, 20, *[0] * 253) + bytes(range(40))
NPY = npy("{'descr': '<u2', 'fortran_order': False, 'shape': (20,), }")
PIECES = st.binary(max_size=4) | st.text("{}[]()'\"\\\n:,-#0123456789L<>uOTF ", max_size=4).map(str.encode)
NUMBERS = st.integers(-1, 21) | st.integers() | st.sampled_from([2**31, 2**62, 2**63, 2**64]) | st.booleans() | st.floats()
HEADER = {
    "descr": st.sampled_from(["<u2", "u2", ">u2", "<i4", "|O", "V0", ",<u2", (), ("<u2", (2,)), [("a", "<u2")], {}, 1, None]),
    "fortran_order": st.sampled_from([False, True, None]),
    "shape": st.tuples(st.integers(0, 21)) | st.lists(NUMBERS, max_size=2).map(tuple) | NUMBERS}
HEADERS = st.builds(repr, st.fixed_dictionaries(HEADER) | st.fixed_dictionaries(HEADER | {1: st.none()}))


def edits(end):
    """Changes to a file, mostly before `end`: (position, bytes removed there, bytes inserted)."""
    over = st.tuples(st.integers(0, end), PIECES).map(lambda change: (change[0], len(change[1]), change[1]))
    return st.lists(over | st.tuples(st.integers(0, end) | st.integers(0, 1100), st.integers(0, 9) | st.just(2000), PIECES),
                    min_size=1, max_size=3)


def edit(data, changes):
    for at, removed, inserted in changes:
        data = data[:at] + inserted + data[at + removed:]
    return data


def opened(name, data):
    """Whether open_shard accepts these bytes.

    If it does, the tokens must be in the file. If not, the error must be one line.
    """
    with file_of(name, data) as path:
        try:
            shard = open_shard(path)
        except UserError as error:
            assert_sentence(error, path)
            return False
        offset, n_tokens = shard.offset, shard.n_tokens
        assert offset >= 0 and n_tokens >= 0 and offset + 2 * n_tokens <= len(data)
        assert shard.read(0, n_tokens).tobytes() == data[offset:offset + 2 * n_tokens]
        return True


@example("x.npy", b"PK\3\4", b"")
@example("x.npy", b"PK\5\6", bytes(18))
@fuzz(200, st.sampled_from(["x.npy", "x.bin"]), st.sampled_from([b"", b"\x93NUMPY", b"PK\3\4"]), st.binary(max_size=200))
def test_any_bytes_for_a_shard(name, start, data):
    assert not opened(name, start + data)


@fuzz(200, edits(12))
def test_a_changed_bin(changes):
    data = edit(BIN, changes)
    good = len(data) >= 1024 and struct.unpack("<3i", data[:12]) == (20240520, 1, len(data) / 2 - 512)
    assert opened("x.bin", data) == good


@example([(60, 1, b"0")])
@example([(64, 2, b"")])
@pytest.mark.filterwarnings("ignore")
@fuzz(400, edits(70))
def test_a_changed_npy(changes):
    data = edit(NPY, changes)
    taken = opened("x.npy", data)
    if data.startswith(NPY[:-40]):
        assert taken == (len(data) >= len(NPY))


@example("{'descr': '<u2', 'fortran_order': False, 'shape': (4611686018427387904,)}")
@example("{'descr': '<u2', 'fortran_order': False, 'shape': (" + "-" * 5000 + "1,)}")
@pytest.mark.filterwarnings("ignore")
@fuzz(400, HEADERS)
def test_a_npy_header_of_any_values(header):
    if opened("x.npy", npy(header)):
        values = ast.literal_eval(header)
        tokens = np.empty(values["shape"], np.dtype(values["descr"]))
        assert tokens.dtype == np.uint16 and tokens.ndim == 1 and len(tokens) <= 20


# --- the order of the data ------------------------------------------------------------------------------------------------

LAYOUTS = [(dp, tp, pp) for dp in range(1, 5) for tp in range(1, 5) for pp in range(1, 5) if dp * tp * pp <= 4]
SHARDS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from([".npy", ".bin"])), min_size=1, max_size=6)


def write_shards(directory, shards):
    """Writes shards of these lengths and formats -> all their tokens, which are distinct."""
    lengths = [n for n, _ in shards]
    tokens = np.arange(60_000, 60_000 + sum(lengths), dtype=np.uint16)
    for i, (cut, (_, kind)) in enumerate(zip(np.split(tokens, np.cumsum(lengths)[:-1]), shards)):
        path = Path(directory, f"x_train_{i:06d}{kind}")
        np.save(path, cut) if kind == ".npy" else write_bin(path, cut)
    np.save(Path(directory, "x_val_000000.npy"), tokens[:0])
    return tokens.tolist()


@fuzz(150, SHARDS, st.integers(1, 20), st.sampled_from(LAYOUTS), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4),
      st.integers(0, 2**32 - 1), st.booleans())
def test_two_epochs_have_every_sequence_twice_in_any_layout(shards, T, layout, B, growth, rampup_steps, seed, shuffle):
    def numbers(x, y):
        """Checks every token -> the indices of the sequences."""
        found = [(row[0] - 60_000) // T for row in x.tolist()]
        assert x.tolist() == [tokens[i * T:(i + 1) * T] for i in found]
        assert y.tolist() == [tokens[i * T + 1:(i + 1) * T + 1] for i in found]
        return found

    dp, tp, pp = layout
    with tempfile.TemporaryDirectory() as directory:
        tokens = write_shards(directory, shards)
        n = (len(tokens) - 1) // T
        if n < 1:
            with pytest.raises(UserError, match=f"{len(tokens)} tokens .* too few") as error:
                DataLoaderLite(open_tokens(directory, "train", 65536, None), T, seed, shuffle)
            return assert_sentence(error.value, directory)
        loader = DataLoaderLite(open_tokens(directory, "train", 65536, None), T, seed, shuffle)
        order = [i for p in range(2 * n) for i in numbers(*loader.batch(p, 1))]
        for epoch in (order[:n], order[n:]):
            assert (sorted(epoch) if shuffle else epoch) == list(range(n))

        first = dp * pp * B  # sequences in the first step
        config = TrainConfig(batch_size=B, total_batch_size=growth * first * T, rampup_steps=rampup_steps, tp=tp, pp=pp,
                             rampup_batch_size=first * T, max_steps=-(-2 * n // first))
        shares = [(number, dp) for number in range(dp)]
        assert [data_parallel_rank(config, rank, dp * tp * pp) for rank in range(dp * tp * pp)] == \
            [share for _ in range(pp) for share in shares for _ in range(tp)]
        streams = [[i for batch in micro_batches(loader, config, 0, 0, *share, "cpu") for i in numbers(*batch)]
                   for share in shares]
    position = 0
    for step in range(config.max_steps):
        end = position + first * (1 + (growth - 1) * step // rampup_steps if step < rampup_steps else growth)
        seen = Counter(i for stream in streams for i in stream[position // dp:end // dp])
        assert seen.total() == end - position
        # the last steps continue into the third epoch
        assert not Counter(order[position:end]) - seen
        position = end
    assert [len(stream) for stream in streams] == [position // dp] * dp


# --- JSON lines -----------------------------------------------------------------------------------------------------------

BOM = b"\xef\xbb\xbf"
TEXTS = st.text(st.characters(), max_size=12)  # includes lone surrogates
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | TEXTS, max_leaves=4,
                      extend=lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3))
RECORDS = st.fixed_dictionaries({"text": TEXTS}) | st.dictionaries(st.just("text") | TEXTS, VALUES, max_size=3)
GOOD = st.builds(lambda record, escape: json.dumps(record, ensure_ascii=escape).encode(errors="surrogatepass"),
                 RECORDS, st.booleans())
ODD = [b"", b" \t", b"\x1c", "\u3000".encode(), b"1" * 5000, b"[" * 10**5,
       BOM + b"{}", rb'{"text": "\ufeff\ud83d\ude00\ud83d"}']
LINES = GOOD | VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=12) | st.sampled_from(ODD)
FILES = st.builds(lambda bom, end, lines: bom + end.join(lines), st.sampled_from([b"", BOM]),
                  st.sampled_from([b"\n", b"\r\n", b"\n\n"]), st.lists(GOOD, max_size=3) | st.lists(LINES, max_size=6))
# At least 4, because the byte order mark is removed from the first block.
BLOCKS = st.integers(4, 60) | st.just(2**20)
PACK = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": lambda data: pa.compress(data, "zstd", asbytes=True)}


def read(name, data, block):
    """Reads a file in blocks of this size, as the workers do.

    -> its texts, and the line numbers of the skipped records
    """
    with file_of(name, data) as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK", block)
        found = [corpus.texts_of(b, "text") for b in corpus.read_blocks([path], "text")]
    return [text for texts, _ in found for text in texts], [line for _, skipped in found for line, _ in skipped]


def text_of(data):
    """The text of a record, or None. A lone surrogate becomes U+FFFD."""
    try:
        text = json.loads(data.decode())["text"]
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@fuzz(400, st.sampled_from(list(PACK)), FILES, BLOCKS)
def test_texts_of_json_lines(name, data, block):
    lines = enumerate(data.removeprefix(BOM).split(b"\n"), start=1)
    expected = [(n, text_of(line)) for n, line in lines if line.strip()]
    texts, skipped = read("x" + name, PACK[name](data), block)
    assert texts == [text for _, text in expected if text is not None]
    assert skipped == [n for n, text in expected if text is None]


@example([12345678, {"text": "a"}], True, None, 4)
@example([1e16], True, None, 4)
@fuzz(200, st.lists(RECORDS | VALUES, max_size=5), st.booleans(), st.sampled_from([None, 0, 2]), BLOCKS)
def test_texts_of_a_json_array(records, escape, indent, block):
    data = json.dumps(records, ensure_ascii=escape, indent=indent).encode(errors="replace")
    expected = [text_of(json.dumps(record).encode()) for record in json.loads(data)]
    texts, skipped = read("x.json", data, block)
    assert texts == [text for text in expected if text is not None] and len(skipped) == expected.count(None)


@fuzz(300, FILES)
def test_records_of_json_lines(data):
    expected, bad, found = [], None, []
    for n, line in enumerate(data.split(b"\n"), start=1):
        try:
            if text := line.decode("utf-8-sig").strip():
                expected.append((f"line {n}", {**json.loads(text)}))
        except (ValueError, TypeError, RecursionError):
            bad = n
            break
    with file_of("x.jsonl", data) as path:
        try:
            for record in corpus.read_records(path):
                found.append(record)
            assert bad is None
        except UserError as error:
            assert_sentence(error, f"{path}, line {bad}: ")
    assert repr(found) == repr(expected)


# --- schedules ------------------------------------------------------------------------------------------------------------

@fuzz(300, st.integers(0, 60), st.integers(1, 120), st.floats(1e-9, 1e3), st.floats(0, 1))
def test_learning_rate(warmup_steps, max_steps, max_lr, fraction):
    config = TrainConfig(warmup_steps=warmup_steps, max_steps=max_steps, max_lr=max_lr, min_lr=fraction * max_lr)
    rates = [get_lr(step, config) / max_lr for step in range(max_steps + 3)]
    rise, fall, length = rates[:warmup_steps], rates[warmup_steps:], max_steps - warmup_steps
    rounding = 1e-15
    assert 0 <= min(rates) and max(rates) <= 1 + rounding
    assert all(a < b for a, b in zip(rise, rise[1:])) and all(a >= b - rounding for a, b in zip(fall, fall[1:]))
    assert rise == pytest.approx([(step + 1) / warmup_steps for step in range(len(rise))], rel=1e-12)
    if length > 0:
        cosine = [math.cos(math.pi / 2 * min(1, i / length))**2 for i in range(length + 3)]
        assert fall == pytest.approx([fraction + (1 - fraction) * c for c in cosine], rel=1e-9, abs=1e-15)


def batch_tokens(step, total, first, rampup_steps):
    return first * (1 + (total // first - 1) * step // rampup_steps) if step < rampup_steps else total


@fuzz(200, st.integers(0, 40), st.integers(1, 50), st.integers(1, 30))
def test_the_batch_grows(rampup_steps, first, times):
    config = TrainConfig(rampup_steps=rampup_steps, rampup_batch_size=first, total_batch_size=first * times)
    sizes = [get_batch_tokens(step, config) for step in range(rampup_steps + 3)]
    assert sizes == sorted(sizes) and sizes[-3:] == [first * times] * 3 and not any(size % first for size in sizes)
    assert sizes == [batch_tokens(step, first * times, first, rampup_steps) for step in range(rampup_steps + 3)]


@fuzz(600, st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(0, 6),
      st.sampled_from([(0, 0)] * 3 + [(0, 1), (1, 0)]), st.integers(1, 20), st.integers(1, 400))
def test_accepted_batches_can_be_divided(T, dp, pp, share, times, rampup_steps, odd, batch_size, n_sequences):
    first = share * T * dp + odd[0]
    total = first * times + odd[1]
    config = TrainConfig(batch_size=batch_size, total_batch_size=total, pp=pp, rampup_batch_size=first,
                         rampup_steps=rampup_steps)
    sizes = [batch_tokens(step, total, first, rampup_steps) for step in range(rampup_steps + 2)]
    shares = [size // (T * dp) for size in sizes]
    good = n_sequences * T >= max(sizes) and min(shares) >= pp and all(size % (T * dp) == 0 for size in sizes)
    good = good and all(share % min(batch_size, share // pp) == 0 for share in shares)
    try:
        check_batch_size(config, T, dp, n_sequences)
        assert good
    except UserError as error:
        assert_sentence(error, "--")
        assert not good
    if good:
        for step, size in enumerate(sizes):
            n, B = micro_batch(step, config, T, dp)
            assert n * T == size and n % (B * dp) == 0 and (B * dp == n if pp > 1 else 1 <= B <= batch_size)


# --- checkpoints ----------------------------------------------------------------------------------------------------------

def small_run():
    """(dict of a checkpoint, its trainer's configuration) of a model with one block."""
    g = GPTConfig(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=256)
    c = TrainConfig(total_batch_size=8, batch_size=2, compile=False, log_dir="run", max_steps=9)
    torch.manual_seed(0)
    trainer = train_gpt2.prepare(GPT(g), c, torch.device("cpu"), torch.float32)
    batch = torch.randint(256, (2, 4)), torch.randint(256, (2, 4))
    train_gpt2.train_step(trainer, [batch], 1, 1.0)
    model_state, (optimizer_state,) = trainer.full_state()
    return dict(model=dict(model_state), optimizer=dict(adamw=optimizer_state), scaler={}, step=1, position=2, tokenizer="bytes",
                model_config=dataclasses.asdict(g), train_config={}), c


def places(value, path=()):
    """Paths of all entries of nested dicts."""
    for key, inner in value.items():
        yield (*path, key)
        if isinstance(inner, dict):
            yield from places(inner, (*path, key))


SAVED, CONFIG = small_run()
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([10**9, 2**63, -1, "gpt2", {}, torch.zeros(()), torch.zeros(3), torch.zeros(256, 4, dtype=torch.int64),
                     torch.zeros(1).expand(256, 4), torch.full((256, 4), torch.nan), torch.zeros(2, 2).to_sparse()]))


@fuzz(400, st.sampled_from(list(places(SAVED))), VALUES)
def test_any_entry_of_a_checkpoint_replaced_by_any_value(place, value):
    """The checkpoint is refused with one sentence, or the next step works."""
    saved = copy.deepcopy(SAVED)
    inner = saved
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model_000001.pt")
        torch.save(saved, path)
        try:
            loaded = load_checkpoint(path)
            config, weights, _ = unpack(loaded)  # as init_model does
            model, weights = on_meta(config, weights)
            trainer = train_gpt2.prepare(model, CONFIG, torch.device("cpu"), torch.float32, weights)
            restore(loaded, trainer, CONFIG, {})
        except UserError as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) < 500
            return
    T = model.config.block_size
    train_gpt2.train_step(trainer, [(torch.zeros(1, T, dtype=torch.long),) * 2], 1, 1.0)
