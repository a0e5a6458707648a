"""Text to shards: compares every format with tiktoken, and tests damaged input and other faults."""

import functools
import gzip
import io
import json
import os
import random
import re
import resource
import signal
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, read_log, spawn, train
from stand_in_hub import COMMIT, stand_in_hub

import fineweb
from plaingpt import corpus
from plaingpt.cli import UserError
from tokenizer import VocabularyConfig, get_tokenizer, train_vocabulary

SHARD = 50_000
HARD = ["", "<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "日本語の文章。　全角の空白\u3000", "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 ﷽", "\x00\x01\x1b[0m\x7f\ufeff", " \t\n\r\n\x0b\x85\xa0\u2028 ",
        "  leading", "trailing \n\n", "I'll we've 'S 'd '' 1234567890 ½ ①", "\ufffd", "مرحبا שלום हिन्दी ไทย", "x" * 3000, " " * 3000, "\n" * 3000 + "x", '{"text": "json"}\\u0041\\',
        "<|endoftext", "|>", "\U0010ffff"]


@pytest.fixture(scope="session")
def documents():
    """Some 1,500 documents: English, and between them texts that are hard for tokenizers."""
    rng, english = random.Random(0), (ROOT / "input.txt").read_text()
    documents = []
    for _ in range(1500):
        start, length = rng.randrange(len(english)), rng.randrange(10, 600)
        documents.append(english[start:start + length] if rng.random() < 0.7 else "".join(rng.choices(HARD, k=rng.randrange(1, 4))))
    return documents + HARD + [english]


@pytest.fixture(autouse=True)
def own_signal_handlers():
    """Restores pytest's signal handlers after the program has replaced them."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def short(documents):
    """Training is slow on words of thousands of characters."""
    return [text for text in documents if len(text) < 700]


@pytest.fixture(scope="session", params=["gpt2", "gpt4"])
def vocabulary(documents, tmp_path_factory, request):
    """A vocabulary of 2,000 ids: (its file, its tokenizers.Tokenizer)."""
    path = tmp_path_factory.mktemp("vocabulary") / "v.json"
    path.write_text(train_vocabulary(short(documents), VocabularyConfig(vocab_size=2000, pattern=request.param)), "utf-8")
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    return path, library


@functools.cache  # many tests have the same documents
def encoded(documents, library):
    encoding, tokens = get_tokenizer("gpt2").encoding, []
    for text in documents:
        tokens += [1999, *library.encode(text).ids] if library else [50256, *encoding.encode_ordinary(text)]
    return tokens


def reference(documents, shard_size=SHARD, val_shards=1, library=None):
    """The shards that build-nanogpt writes: {end of the file name: content}. library: encodes instead of GPT-2's tokenizer."""
    tokens, files = encoded(tuple(documents), library), {}
    for i in range(0, len(tokens), shard_size):
        file, index = io.BytesIO(), i // shard_size
        np.save(file, np.array(tokens[i:i + shard_size], np.uint16))
        files[f"_{'val' if index < val_shards else 'train'}_{index:06d}.npy"] = file.getvalue()
    return files


def shards_in(directory):
    return {re.sub(".*(?=_(val|train)_)", "", p.name): p.read_bytes() for p in directory.glob("*.npy")}


def everything_in(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def jsonl(documents, **options):
    return "".join(json.dumps({"id": i, "text": text}, **options) + "\n" for i, text in enumerate(documents)).encode()


def write(path, documents):
    """Writes the documents in the format that the file name selects."""
    if path.name.endswith(".parquet"):
        kind = {"large": pa.large_string(), "view": pa.string_view(), "binary": pa.binary()}.get(path.stem, pa.string())
        column = pa.array(documents, kind) if kind != pa.binary() else pa.array([d.encode() for d in documents], kind)
        column = column.dictionary_encode() if path.stem == "dictionary" else column
        pq.write_table(pa.table({"id": range(len(documents)), "text": column}), path,
                       row_group_size=100 if path.stem == "groups" else None)
        return path
    data = {"jsonl": lambda: jsonl(documents, ensure_ascii=False), "ascii": lambda: jsonl(documents),
            "array": lambda: json.dumps([{"text": d} for d in documents], ensure_ascii=False, indent=1).encode(),
            "windows": lambda: b"\xef\xbb\xbf" + jsonl(documents).replace(b"\n", b"\r\n\r\n"),
            "text": lambda: "<|endoftext|>".join(documents).encode()}[path.name.split(".")[0]]()
    if path.suffix == ".gz":  # two gzip members, as from `cat a.gz b.gz`
        data = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
    if path.suffix == ".zst":
        with pa.output_stream(path, compression="zstd") as file:
            file.write(data)
        return path
    path.write_bytes(data)
    return path


def fine(*flags, directory, backend="gigatoken", shard_size=SHARD, num_proc=2):
    fineweb.main([*map(str, flags), "--output_dir", str(directory), "--backend", backend, "--shard_size", str(shard_size),
                  "--num_proc", str(num_proc)])


def start(*flags, directory, cwd, shard_size=SHARD, backend="tiktoken", num_proc=2, **options):
    """Starts the real program in a new process."""
    return spawn(*flags, "--output_dir", directory, "--shard_size", shard_size, "--backend", backend, "--num_proc", num_proc,
                 cwd=cwd, program="fineweb.py", **options)[0]


def finish(process, status=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, f"exit status {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    assert "Traceback" not in err
    return out, err


NAMES = ["jsonl.jsonl", "ascii.jsonl", "jsonl.json", "array.json", "windows.jsonl", "jsonl.jsonl.gz", "jsonl.JSONL.zst", "array.json.gz",
         "table.parquet", "groups.parquet", "large.parquet", "view.parquet", "binary.parquet", "dictionary.parquet", "text.txt", "text.txt.gz", "text.txt.zst"]


@pytest.mark.parametrize("name", NAMES)
# block size in bytes: one block, or hundreds
@pytest.mark.parametrize("block", [corpus.BLOCK, 5000])
def test_every_format_gives_the_reference_shards(documents, tmp_path, monkeypatch, name, block):
    monkeypatch.setattr(corpus, "BLOCK", block)
    if name.startswith("text"):
        documents = [d for d in documents if "<|" not in d]
    fine("--input", write(tmp_path / name, documents), directory=tmp_path / "out")
    assert shards_in(tmp_path / "out") == reference(documents)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["documents"] == len(documents) and meta["skipped"] == 0 and meta["next"] is None
    assert meta["tokens"] == sum(len(np.load(p)) for p in (tmp_path / "out").glob("*.npy"))
    assert sorted(p.suffix for p in (tmp_path / "out").iterdir() if p.suffix != ".npy") == [".json"]


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("backend", ["tiktoken", "gigatoken"])
def test_threads_and_backends(documents, tmp_path, num_proc, backend):
    # Several formats and a glob. The order of the flags is the order of the documents.
    third = len(documents) // 3
    write(tmp_path / "table.parquet", documents[:third])
    (tmp_path / "b1.jsonl").write_bytes(jsonl(documents[third:2 * third]))
    (tmp_path / "b2.jsonl.gz").write_bytes(gzip.compress(jsonl(documents[2 * third:])))
    process = start("--input", "table.parquet", "b*.jsonl*", directory="out", cwd=tmp_path, num_proc=num_proc, backend=backend)
    out, _ = finish(process)
    assert shards_in(tmp_path / "out") == reference(documents)
    assert f"{backend}: " in out and "python train_gpt2.py --data out" in out


def test_a_document_larger_than_any_block(documents, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 2000)
    rng = random.Random(1)
    large = " ".join(rng.choices([d for d in documents if "<|" not in d], k=2000))
    texts = ["short", large, "", large[::-1], "日本語" * 10000, "end"]
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(texts))
    fine("--input", tmp_path / "a.txt", directory=tmp_path / "out")
    assert shards_in(tmp_path / "out") == reference(texts)
    sizes = sorted(len(corpus.SEPARATOR.join(block.records)) for block in corpus.read_blocks([tmp_path / "a.txt"], "text"))
    assert sizes[-2] < 20_000 < 90_000 < sizes[-1] < 110_000, "text without spaces is one block"


def test_shard_names_and_numbers(documents, tmp_path):
    path = write(tmp_path / "jsonl.jsonl", documents[:100])
    fine("--input", path, "--val_shards", 2, directory=tmp_path / "mine", shard_size=1000)
    files = reference(documents[:100], 1000, val_shards=2)
    assert shards_in(tmp_path / "mine") == files
    assert {p.name for p in (tmp_path / "mine").glob("*.npy")} == {"mine" + name for name in files}


def test_max_shards_can_be_raised_later(documents, tmp_path, capsys):
    path, files = write(tmp_path / "jsonl.jsonl", documents), reference(documents, 10_000)
    for n in (1, 3, 5):
        fine("--input", path, "--max_shards", n, directory=tmp_path / "out", shard_size=10_000)
        assert shards_in(tmp_path / "out") == dict(list(files.items())[:n])
        meta = json.loads((tmp_path / "out" / "meta.json").read_text())
        assert meta["shards"] == n and meta["tokens"] == n * 10_000
    fine("--input", path, directory=tmp_path / "out", shard_size=10_000)
    fine("--input", path, directory=tmp_path / "whole", shard_size=10_000)
    a, b = (json.loads((tmp_path / d / "meta.json").read_text()) for d in ("out", "whole"))
    assert shards_in(tmp_path / "out") == files and a | {"name": "whole"} == b
    assert "--max_shards 5" in capsys.readouterr().out
    before = everything_in(tmp_path / "out")
    fine("--input", path, directory=tmp_path / "out", shard_size=10_000)  # again: nothing to do
    assert "out is complete" in capsys.readouterr().out and everything_in(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["windows.jsonl", "array.json", "jsonl.JSONL.zst", "groups.parquet", "text.txt.gz"])
@pytest.mark.parametrize("backend", ["tiktoken", "gigatoken"])
def test_every_format_with_a_vocabulary_of_ones_own(documents, vocabulary, tmp_path, monkeypatch, name, backend):
    """In small blocks, so that large documents come in pieces."""
    monkeypatch.setattr(corpus, "BLOCK", 2000)
    documents = [d for d in documents if not name.startswith("text") or "<|" not in d][-700:]
    file, library = vocabulary
    fine("--input", write(tmp_path / name, documents), "--tokenizer", file, directory=tmp_path / "out", shard_size=9000,
         backend=backend, num_proc=1 if backend == "tiktoken" else 3)
    assert shards_in(tmp_path / "out") == reference(documents, 9000, library=library)


@pytest.mark.parametrize("kind", ["gpt2", "own"])
def test_continuing_after_ten_kills(documents, tmp_path, kind):
    rng, flags = random.Random(2), ["--input", write(tmp_path / "table.parquet", documents * 4)]
    if kind == "own":
        (tmp_path / "v.json").write_text(train_vocabulary(short(documents), VocabularyConfig(vocab_size=2000)), "utf-8")
        flags += ["--tokenizer", tmp_path / "v.json"]
    options = dict(cwd=tmp_path, shard_size=10_000)
    finish(start(*flags, directory="a/out", **options))
    for _ in range(10 if kind == "gpt2" else 4):
        process = start(*flags, directory="b/out", **options)
        wanted, n = rng.randrange(4), len(list(tmp_path.glob("b/out/*.npy")))
        while len(list(tmp_path.glob("b/out/*.npy"))) < n + wanted and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run ended before the kill"
        assert not (tmp_path / "b/out/meta.json").exists(), "meta.json means complete"
    kept = {p: p.stat().st_mtime_ns for p in tmp_path.glob("b/out/*.npy")}
    assert len(kept) > 2
    out, _ = finish(start(*flags, directory="b/out", **options))
    assert "whole shards: continuing" in out
    assert everything_in(tmp_path / "a/out") == everything_in(tmp_path / "b/out")
    assert sum(p.stat().st_mtime_ns != kept[p] for p in kept) <= 1, "complete shards were rewritten"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_current_block(documents, tmp_path, number):
    process = start("--input", write(tmp_path / "table.parquet", documents * 20), directory="out", cwd=tmp_path, shard_size=10_000)
    while not list(tmp_path.glob("out/*.npy")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    _, err = finish(process, 128 + number)
    assert "the same command continues" in err and not list(tmp_path.glob("out/*.tmp"))


BAD = [(b"not json at all", "not JSON"), (b'{"text": "cut', "not JSON"), (b"[1, 2]", "not an object with fields, but a list"),
       (b'{"txt": "x", "id": 1}', "no key 'text', but txt, id"), (b'{"text": 7}', "'text' is not a string, but a int"),
       (b'{"text": null}', "not a string"), (b'{"text": "\xff\xfe"}', "not UTF-8"), (b"[" * 100_000, "not JSON"),
       (b'{"text": "' + b" " * 600_000 + b'"}', "white spaces in a row")]


@pytest.mark.parametrize("backend", ["tiktoken", "gigatoken"])
def test_damaged_records_are_counted_shown_and_skipped(tmp_path, capsys, backend):
    good = [f"good {i}" for i in range(len(BAD))] + ["half a pair \ud83d of surrogates"]
    lines = [x for i, (bad, _) in enumerate(BAD) for x in (json.dumps({"text": good[i]}).encode(), bad)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, json.dumps({"text": good[-1]}).encode()]))
    fine("--input", tmp_path / "a.jsonl", directory=tmp_path / "out", backend=backend)
    out, err = capsys.readouterr()
    assert shards_in(tmp_path / "out") == reference(good)
    assert f"{len(good)} documents, {len(BAD)} damaged records skipped" in out
    for i, (_, reason) in enumerate(BAD[:fineweb.SHOWN]):
        assert re.search(rf"skipped .*a\.jsonl, line {2 * i + 2}: {re.escape(reason)}", err), err
    assert err.count("skipped ") == fineweb.SHOWN
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["skipped"] == len(BAD)
    with pytest.raises(UserError, match="was made without --strict, 9 records were skipped; choose another directory"):
        fine("--input", tmp_path / "a.jsonl", "--strict", directory=tmp_path / "out", backend=backend)


def test_advice_for_too_few_shards(documents, tmp_path, capsys):
    path = write(tmp_path / "jsonl.jsonl", documents[-1:])
    for flags, said, unsaid in ([["--shard_size", 10**8], "there are no training shards: to train, start again with another --output_dir, --val_shards 1 --shard_size", "to train on it"],
                                [["--shard_size", 10**8, "--val_shards", 0], "there are no validation shards: ", "to train on it"],
                                [["--shard_size", 10_000], "to train on it: python train_gpt2.py --data", "there are no"],
                                [["--shard_size", 10_000, "--max_shards", 1], "is complete up to --max_shards 1", "there are no"]):
        fineweb.main([*map(str, ["--input", path, "--output_dir", tmp_path / str(len(list(tmp_path.iterdir()))), *flags])])
        out = capsys.readouterr().out
        assert re.search(said, out) and unsaid not in out, out


@pytest.mark.parametrize("bad, reason", BAD)
def test_strict_stops_at_the_first_damaged_record(tmp_path, bad, reason):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + bad + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl, line 2: .*{re.escape(reason)}"):
        fine("--input", tmp_path / "a.jsonl", "--strict", directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_text_and_tables(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo<|endoftext|>bad\nline \xff here<|endoftext|>three")
    table = pa.table({"text": pa.array(["four", None, b"\xff", "five"], pa.binary()).view(pa.string())})
    pq.write_table(table, tmp_path / "b.parquet")
    fine("--input", tmp_path / "a.txt", tmp_path / "b.parquet", directory=tmp_path / "out")
    err = capsys.readouterr().err
    assert shards_in(tmp_path / "out") == reference(["one\ntwo", "three", "four", "five"])
    assert re.findall(r"(a\.txt|b\.parquet), (.*)", err) == [
        ("a.txt", "line 3: not UTF-8"), ("b.parquet", "row 2: no text (null)"), ("b.parquet", "row 3: not UTF-8")]
    # Of a document larger than a block, only the damaged part is skipped. The rest stays together.
    monkeypatch.setattr(corpus, "BLOCK", 1000)
    words = ["word"] * 3000
    (tmp_path / "c.txt").write_bytes(b"\xff" + " ".join(words).encode() + b"<|endoftext|>next")
    fine("--input", tmp_path / "c.txt", directory=tmp_path / "out2")
    tokens = np.load(tmp_path / "out2/out2_val_000000.npy")
    assert np.flatnonzero(tokens == 50256).tolist() == [0, len(tokens) - 2] and 1000 < len(tokens) < 3000


def cut_gz(path):
    path.write_bytes(gzip.compress(jsonl(["a" * 100_000]))[:-20])


@pytest.mark.parametrize("name, make, message", [
    ("none.jsonl", lambda p: None, r"none\.jsonl: no such file, or not readable; give files"),
    ("a.csv", lambda p: p.write_text("a"), r"a\.csv: unknown format; give a \.jsonl"),
    ("a.parquet.gz", lambda p: p.write_text("a"), r"a\.parquet\.gz: unknown format"),
    ("dir.txt", lambda p: p.mkdir(), r"dir\.txt: no such file, or not readable; give files"),
    ("a.jsonl", lambda p: p.write_text(""), r"a\.jsonl: no text in it, 0 records were skipped"),
    ("a.txt", lambda p: p.write_text(""), "no text in it, 0 records were skipped"),
    ("a.json", lambda p: p.write_text("[]"), "no text in it, 0 records were skipped"),
    ("a.jsonl", lambda p: p.write_text('{"body": 1, "n": 2}\n' * 3), r"a\.jsonl: no text in it, 3 records were skipped"),
    ("a.parquet", lambda p: pq.write_table(pa.table({"body": ["x"], "n": [1]}), p), r"a\.parquet: cannot be read \(not exactly one column 'text', but body, n\); .*--text_key"),
    ("a.parquet", lambda p: pq.write_table(pa.table({"text": [1]}), p), r"a\.parquet: cannot be read \(Unsupported cast from int64"),
    ("a.parquet", lambda p: pq.write_table(pa.table({"text": [["x"]]}), p), "Unsupported cast from list"),
    ("a.parquet", lambda p: pq.write_table(pa.table({"text": pa.array([], pa.string())}), p), "no text in it, 0 records were skipped"),
    ("a.parquet", lambda p: p.write_text("not parquet at all"), r"a\.parquet: cannot be read"),
    ("a.jsonl.gz", lambda p: p.write_text("not gzip"), r"a\.jsonl\.gz: cannot be read"),
    ("a.jsonl.gz", cut_gz, r"a\.jsonl\.gz: cannot be read \(Truncated"),
    ("a.jsonl.zst", lambda p: p.write_text("not zstd"), r"a\.jsonl\.zst: cannot be read"),
    ("a.json", lambda p: p.write_text('[{"text": "x"}, {"text": '), r"a\.json: cannot be read \(Expecting value: line 1 column 26"),
    ("a.json", lambda p: p.write_text('[{"text": "x"} {"text": "y"}]'), r"a\.json: cannot be read \(Expecting ',' delimiter: line 1 column 16"),
])
def test_unusable_sources(tmp_path, name, make, message):
    make(tmp_path / name)
    with pytest.raises(UserError, match=message) as error:
        fine("--input", tmp_path / name, directory=tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists(), "the failed run left files"


@pytest.mark.parametrize("flags, message", [
    (["--shard_size", "0"], "--shard_size 0: must be at least 1"), (["--val_shards", "-1"], "must be at least 0"),
    (["--max_shards", "0"], "at least 1"), (["--backend", "fast"], "--backend fast: must be one of auto, tiktoken, gigatoken"),
    (["--input", "a.txt", "--dataset", "x"], "they choose data of the hub"), (["--inptu", "a"], "did you mean --input")])
def test_impossible_flags(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        fineweb.main(flags)


def test_refuses_a_directory_with_other_shards(documents, tmp_path):
    path = write(tmp_path / "jsonl.jsonl", documents[:50])
    fine("--input", path, directory=tmp_path / "out", shard_size=500)
    before = everything_in(tmp_path / "out")
    with pytest.raises(UserError, match=r"holds other shards \(another shard_size\); choose another directory"):
        fine("--input", path, directory=tmp_path / "out", shard_size=600)
    path.write_bytes(path.read_bytes()[:-20] + b" " * 18 + b"}\n")  # the file size stays the same
    with pytest.raises(UserError, match=r"\(another source\)"):
        fine("--input", path, directory=tmp_path / "out", shard_size=500)
    assert everything_in(tmp_path / "out") == before
    (tmp_path / "foreign").mkdir()
    np.save(tmp_path / "foreign" / "edufineweb_train_000001.npy", np.zeros(3, np.uint16))
    with pytest.raises(UserError, match=r"holds other shards \(without meta\.json\)"):
        fine("--input", path, directory=tmp_path / "foreign")
    assert len(everything_in(tmp_path / "foreign")) == 1
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot write \(.*\); choose another place"):
        fine("--input", path, directory=tmp_path / "file")


def test_killed_just_before_the_end(documents, tmp_path, capsys):
    path = write(tmp_path / "jsonl.jsonl", documents[:50])
    fine("--input", path, directory=tmp_path / "out", shard_size=500)
    before = everything_in(tmp_path / "out")
    # All shards exist. Only the last rename is missing.
    (tmp_path / "out/meta.json").rename(tmp_path / "out/progress.json")
    fine("--input", path, directory=tmp_path / "out", shard_size=500)
    assert everything_in(tmp_path / "out") == before


def test_missing_and_damaged_shards_are_refused(documents, tmp_path):
    path = write(tmp_path / "jsonl.jsonl", documents[:50])
    fine("--input", path, directory=tmp_path / "out", shard_size=500)
    before = everything_in(tmp_path / "out")
    shard = tmp_path / "out" / "out_train_000002.npy"
    short = io.BytesIO()
    np.save(short, np.zeros(499, np.uint16))
    for damage, message in ((shard.unlink, "000002.npy: not a readable shard"),
                            (lambda: shard.write_bytes(before[shard.name][:-7]), "000002.npy: not a readable shard"),
                            (lambda: shard.write_bytes(short.getvalue()), "its checksum is not the recorded one")):
        damage()
        with pytest.raises(UserError, match=message):
            fine("--input", path, directory=tmp_path / "out", shard_size=500)
    assert set(everything_in(tmp_path / "out")) <= set(before)
    shard.write_bytes(before[shard.name])
    (tmp_path / "out").rename(tmp_path / "renamed")
    fine("--input", path, directory=tmp_path / "renamed", shard_size=500)
    assert everything_in(tmp_path / "renamed") == before


def test_full_disk(documents, tmp_path):
    path = write(tmp_path / "jsonl.jsonl", documents)
    limit = 2 * SHARD + 128  # the size of a shard in bytes
    finish(start("--input", path, "--max_shards", "1", directory="out", cwd=tmp_path))
    process = start("--input", path, directory="out", cwd=tmp_path, limits={resource.RLIMIT_FSIZE: limit - 1000})
    _, err = finish(process, 2)
    assert re.search(r"error: out/out_train_000001\.npy: cannot write \(File too large\); .*the same command continues", err)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["out_val_000000.npy", "progress.json"]
    finish(start("--input", path, directory="out", cwd=tmp_path))
    assert shards_in(tmp_path / "out") == reference(documents)


def test_gigatoken_must_agree_with_tiktoken(documents, tmp_path, monkeypatch, capsys):
    path, encode = write(tmp_path / "jsonl.jsonl", documents[:1500]), fineweb.encode

    def one_token_wrong(texts, tokenizer, backend):
        tokens = encode(texts, tokenizer, backend)
        tokens[len(tokens) // 2] += backend == "gigatoken"
        return tokens

    monkeypatch.setattr(fineweb, "encode", one_token_wrong)
    fine("--input", path, directory=tmp_path / "out")
    assert "encode this text differently; tiktoken is used" in capsys.readouterr().err
    assert shards_in(tmp_path / "out") == reference(documents[:1500])


@pytest.mark.parametrize("backend", ["auto", "gigatoken"])
def test_without_gigatoken(documents, tmp_path, monkeypatch, capsys, backend):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    fineweb.get_gigatoken.cache_clear()
    path = write(tmp_path / "jsonl.jsonl", documents[:50])
    if backend == "gigatoken":
        with pytest.raises(UserError, match="pip install gigatoken"):
            fine("--input", path, directory=tmp_path / "out", backend=backend)
    else:
        fine("--input", path, directory=tmp_path / "out", backend=backend)
        assert "tiktoken: " in capsys.readouterr().out and shards_in(tmp_path / "out") == reference(documents[:50])


def test_training_on_the_shards(documents, tmp_path):
    path = write(tmp_path / "table.parquet", documents[-1:] * 2)  # English
    fine("--input", path, "--max_shards", 2, directory=tmp_path / "mine", shard_size=20_000)
    out, _ = train("--data", "mine", "--vocab_size", 50257, "--max_steps", 2, cwd=tmp_path)
    assert "not complete" not in out
    assert float(read_log(tmp_path / "log/baby")[0, "val"]) == pytest.approx(np.log(50257), abs=0.1)
    (tmp_path / "mine/meta.json").rename(tmp_path / "mine/progress.json")
    assert "note: mine is not complete" in train("--data", "mine", "--vocab_size", 50257, "--max_steps", 1, cwd=tmp_path)[0]


def parquet(documents, extra=0):
    file = io.BytesIO()
    blob = [os.urandom(extra // len(documents)) for _ in documents]
    pq.write_table(pa.table({"text": documents, "blob": blob}), file, compression="none")
    return file.getvalue()


def test_reads_a_dataset_from_the_hub(documents, tmp_path):
    """The real `datasets` with a local hub: a named configuration, cut downloads, no network."""
    documents = documents[:1500]
    readme = "---\nconfigs:\n- config_name: default\n  data_files: data/*\n- config_name: sample-10BT\n  data_files: sample/10BT/*\n---\n"
    files = {"README.md": readme.encode(), "data/0.parquet": parquet(["wrong"]),
             "sample/10BT/000.parquet": parquet(documents[:700], 4_000_000), "sample/10BT/001.parquet": parquet(documents[700:])}
    with stand_in_hub({"HuggingFaceFW/fineweb-edu": files}, cut=3) as (url, requests):
        env = dict(HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"), HF_TOKEN="hf_secret")
        out, err = finish(start(directory="out", cwd=tmp_path, env=env, online=True))
        assert shards_in(tmp_path / "out") == reference(documents)
        assert {p.name.split("_")[0] for p in (tmp_path / "out").glob("*.npy")} == {"edufineweb"}
        meta = json.loads((tmp_path / "out/meta.json").read_text())
        assert meta["source"] == dict(dataset="HuggingFaceFW/fineweb-edu", name="sample-10BT", rows=1500, revision=COMMIT)
        got = [headers for method, path, headers in requests if method == "GET" and path.endswith(".parquet")]
        ranges = [int(re.search(r"\d+", h["range"])[0]) for h in got if "range" in h]
        assert len(ranges) >= 2 and min(ranges) >= 2**20 and sorted(ranges) == ranges, "restarted"
        assert not any("data/0.parquet" in path for _, path, _ in requests)
        assert all(h["authorization"] == "Bearer hf_secret" for h in got)
        _, err = finish(start("--name", "nosuch", directory="b", cwd=tmp_path, env=env, online=True), 2)
        assert "error: HuggingFaceFW/fineweb-edu: BuilderConfig 'nosuch' not found. Available: ['default', 'sample-10BT']" in err
        _, err = finish(start("--text_key", "body", directory="b", cwd=tmp_path, env=env, online=True), 2)
        assert "(not exactly one column 'body', but text, blob)" in err
    # without the hub, cached data can still be read
    finish(start(directory="offline", cwd=tmp_path, env=env))
    assert everything_in(tmp_path / "offline") == everything_in(tmp_path / "out")
    _, err = finish(start("--dataset", "some/other", directory="b", cwd=tmp_path, env=env), 2)
    assert re.search("error: some/other: Couldn't reach", err) and not (tmp_path / "b").exists()


def test_retries_when_the_hub_fails(documents, tmp_path):
    files = {"README.md": b"hi", "data/train.parquet": parquet(documents[:20])}
    with stand_in_hub({"some/texts": files}, fail=2) as (url, requests):
        env = dict(HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"))
        _, err = finish(start("--dataset", "some/texts", directory="out", cwd=tmp_path, env=env, online=True))
    assert "trying again in 1 s" in err and "trying again in 2 s" in err
    assert shards_in(tmp_path / "out") == reference(documents[:20])


def test_continuing_needs_the_same_blocks(documents, tmp_path):
    """Another version of pyarrow may split a table into other blocks."""
    path = write(tmp_path / "table.parquet", documents)
    fine("--input", path, "--max_shards", 1, directory=tmp_path / "out", shard_size=10_000)
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    meta["next"][2] += 1
    (tmp_path / "out/meta.json").write_text(json.dumps(meta))
    before = everything_in(tmp_path / "out")
    with pytest.raises(UserError, match=r"table\.parquet: this pyarrow version cuts the file differently; start again with another --output_dir"):
        fine("--input", path, directory=tmp_path / "out", shard_size=10_000)
    assert everything_in(tmp_path / "out") == before
