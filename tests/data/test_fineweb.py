"""From text to shards: compares every input format with a reference, and tests damaged input.

test_reliability.py tests more faults: kills, a full disk, files of the user.
"""

import functools
import gzip
import io
import json
import os
import random
import re

from plaingpt.documents import Document, read_documents
from plaingpt.errors import UserError
from plaingpt.files import checksum_of_places, lock
from plaingpt.pretrained import build_library
from plaingpt.tokenizer import get_tokenizer, load_tokenizer

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, everything_in, names, program
from stand_in_hub import COMMIT, parquet, stand_in_hub

import fineweb

SHARD = 20_000
HARD = [
    "",
    "<|endoftext|>",
    "a<|endoftext|>b <|endoftext|>",
    "日本語の文章。　全角の空白\u3000",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 ﷽",
    "\x00\x01\x1b[0m\x7f\ufeff",
    " \t\n\r\n\x0b\x85\xa0\u2028 ",
    "  leading",
    "trailing \n\n",
    "I'll we've 'S 'd '' 1234567890 ½ ①",
    "\ufffd",
    "مرحبا שלום हिन्दी ไทย",
    "x" * 3000,
    " " * 3000,
    "\n" * 3000 + "x",
    '{"text": "json"}\\u0041\\',
    "<|endoftext",
    "|>",
    "\U0010ffff",
]


@pytest.fixture(scope="session")
def documents():
    """More than 500 documents: English texts, and texts that are hard for tokenizers."""
    rng, english = random.Random(0), (ROOT / "input.txt").read_text()
    documents = []
    for _ in range(500):
        start, length = rng.randrange(len(english)), rng.randrange(10, 600)
        easy, hard = english[start : start + length], rng.choices(HARD, k=rng.choice([1, 3]))
        documents.append(easy if rng.random() < 0.7 else "".join(hard))
    return documents + HARD + [english[:150_000]]


@functools.cache  # many tests have the same documents
def encoded(documents):
    gpt2 = get_tokenizer("gpt2")
    return [i for document in documents for i in [50256, *gpt2.encode(document)]]


def reference(documents, shard_size=SHARD, val_shards=1):
    """Returns the shards that build-nanogpt would write: {end of the file name: content}."""
    tokens, files = encoded(tuple(documents)), {}
    for i in range(0, len(tokens), shard_size):
        file, index = io.BytesIO(), i // shard_size
        np.save(file, np.array(tokens[i : i + shard_size], np.uint16))
        split = "val" if index < val_shards else "train"
        files[f"_{split}_{index:06d}.npy"] = file.getvalue()
    return files


def shards_in(directory):
    files = directory.glob("*.npy")
    return {re.sub(".*(?=_(val|train)_)", "", p.name): p.read_bytes() for p in files}


def facts_of(directory):
    return json.loads((directory / "meta.json").read_text())


def jsonl(documents, **options):
    records = (json.dumps({"id": i, "text": d}, **options) for i, d in enumerate(documents))
    return "".join(f"{record}\n" for record in records).encode()


def write(path, documents):
    """Writes the documents in the format that the file name selects."""
    name = path.name.split(".")[0]
    if path.suffix == ".parquet":
        values = [d.encode() for d in documents] if name == "binary" else documents
        column = pa.array(values, pa.large_string() if name == "large" else None)
        table = pa.table({"id": range(len(documents)), "text": column})
        pq.write_table(table, path, row_group_size=100 if name == "groups" else None)
        return path
    records = [{"text": d} for d in documents]
    data = dict(
        jsonl=jsonl(documents, ensure_ascii=False),
        ascii=jsonl(documents),
        array=json.dumps(records, ensure_ascii=False, indent=1).encode(),
        windows=b"\xef\xbb\xbf" + jsonl(documents).replace(b"\n", b"\r\n\r\n"),
        text="<|endoftext|>".join(documents).encode(),
    )[name]
    if path.suffix == ".gz":  # two gzip members, as from `cat a.gz b.gz`
        data = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
    if path.suffix == ".zst":
        data = pa.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)
    return path


def fine(*flags, directory, shard_size=SHARD, num_proc=2):
    fineweb.main(
        [
            *map(str, flags),
            "--output_dir",
            str(directory),
            "--shard_size",
            str(shard_size),
            "--num_proc",
            str(num_proc),
        ]
    )


def fineweb_py(*flags, directory="out", shard_size=SHARD, **options):
    """Runs fineweb.py in a new process. Returns (stdout, stderr)."""
    return program(
        "--output_dir",
        directory,
        "--shard_size",
        shard_size,
        *flags,
        program="fineweb.py",
        **options,
    )


def test_csv_and_jsonl_give_the_same_shards(tmp_path):
    texts = ["one, two", 'a "quote"\nand a line', "\u6d77\u6e2f"]
    rows = "".join('{},"{}"\n'.format(i, text.replace('"', '""')) for i, text in enumerate(texts))
    (tmp_path / "a.csv").write_text(f"id,text\n{rows}", "utf-8-sig")
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    for kind in ("csv", "jsonl"):
        fine("--input", tmp_path / f"a.{kind}", directory=tmp_path / kind)
    assert shards_in(tmp_path / "csv") == shards_in(tmp_path / "jsonl") == reference(texts)


NAMES = [
    "jsonl.jsonl",
    "ascii.jsonl",
    "jsonl.json",
    "array.json",
    "windows.jsonl",
    "jsonl.jsonl.gz",
    "jsonl.JSONL.zst",
    "array.json.gz",
    "table.parquet",
    "groups.parquet",
    "large.parquet",
    "binary.parquet",
    "text.txt",
    "text.txt.gz",
    "text.txt.zst",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2**20, 5000])  # one read and one batch, or many
def test_every_format_gives_the_reference_shards(documents, tmp_path, monkeypatch, name, size):
    monkeypatch.setattr("plaingpt.documents.BLOCK", size)
    monkeypatch.setattr(fineweb, "BATCH", size)
    if name.startswith("text"):
        documents = [d for d in documents if "<|" not in d]
    fine("--input", write(tmp_path / name, documents), directory=tmp_path / "out")
    assert shards_in(tmp_path / "out") == reference(documents)
    meta, shards = facts_of(tmp_path / "out"), list((tmp_path / "out").glob("*.npy"))
    assert (meta["documents"], meta["skipped"], meta["next"]) == (len(documents), 0, None)
    assert meta["tokens"] == sum(len(np.load(path)) for path in shards)
    assert names(tmp_path / "out", "*.*[!y]") == ["meta.json"]


@pytest.mark.slow
@pytest.mark.parametrize("num_proc", [1, 3])
def test_several_files_and_threads(documents, tmp_path, num_proc):
    """The documents keep the order of the files after --input."""
    a, b = len(documents) // 3, 2 * len(documents) // 3
    write(tmp_path / "table.parquet", documents[:a])
    write(tmp_path / "jsonl.jsonl", documents[a:b])
    write(tmp_path / "jsonl.jsonl.gz", documents[b:])
    out, _ = fineweb_py("--input", "table.parquet", "jsonl*", "--num_proc", num_proc, cwd=tmp_path)
    assert shards_in(tmp_path / "out") == reference(documents)
    assert "python train_gpt2.py --data out" in out


def test_a_document_of_more_than_four_megabytes(documents, tmp_path, monkeypatch):
    """fineweb.py cuts such a document only for GPT-2's tokenizer: cuts do not change its tokens."""
    monkeypatch.setattr("plaingpt.documents.BLOCK", 2000)
    rng, path = random.Random(1), tmp_path / "text.txt"
    large = " ".join(rng.choices([d for d in documents if "<|" not in d], k=2000))
    texts = ["short", large, "", large[::-1], "日本語" * 10000, "end"]
    fine("--input", write(path, texts), directory=tmp_path / "out")
    assert shards_in(tmp_path / "out") == reference(texts)
    pieces = list(read_documents([path], cut=True))
    sizes = sorted(len(piece.text.encode()) for piece in pieces)
    assert sizes[-2] < 20_000 < 90_000 <= sizes[-1] < 110_000, "text without spaces is one piece"
    assert [d.text for d in read_documents([path])] == texts


def test_a_text_may_begin_or_end_with_a_separator(tmp_path, monkeypatch):
    """There is no empty document before the first separator or after the last separator."""
    end, path = "<|endoftext|>", tmp_path / "text.txt"
    for before in ("", end, f"\n{end}"):
        for after in ("", end, f"{end}\n"):
            path.write_text(f"{before}\none{end}{end}two\n\xff{after}", encoding="latin-1")
            found = list(read_documents([path]))
            assert [document.text for document in found] == ["\none", "", None]
            numbers = [int(document.where.rpartition(" ")[2]) for document in found]
            assert numbers == [1, 2, 3]
    path.write_text(f"{end}\n")
    assert list(read_documents([path])) == []
    # Together, the pieces of a cut document contain all whitespace of the document.
    monkeypatch.setattr("plaingpt.documents.BLOCK", 50)
    text = "word " * 100 + "\n" * 100
    for data in (text, f"{end}{text}", f"{text}{end}"):
        path.write_text(data)
        pieces = list(read_documents([path], cut=True))
        assert "".join(piece.text for piece in pieces) == text and len(pieces) > 2
        assert [piece.begins for piece in pieces].count(True) == 1


def test_max_shards_can_be_raised_later(documents, tmp_path, capsys):
    path, files = write(tmp_path / "jsonl.jsonl", documents), reference(documents, 10_000, 2)
    out, flags = tmp_path / "out", ["--input", path, tmp_path / "*.jsonl", "--val_shards", 2]
    for n in (1, 3, 5):
        fine(*flags, "--max_shards", n, directory=out, shard_size=10_000)
        assert shards_in(out) == dict(list(files.items())[:n])
        printed = capsys.readouterr().out
        extent = f"up to --max_shards {n}: {n} shards (for validation: {min(n, 2)})"
        assert f"out is complete {extent}" in printed
        assert ("to train on" if n > 2 else "all shards are validation shards") in printed
    fine(*flags, directory=out, shard_size=10_000)
    fine(*flags, directory=tmp_path / "whole", shard_size=10_000)
    assert {p.name for p in out.glob("*.npy")} == {"out" + name for name in files}
    assert facts_of(out) | {"name": "whole"} == facts_of(tmp_path / "whole")
    before = everything_in(out)
    fine(*flags, directory=out, shard_size=10_000)  # again: nothing to do
    assert "out is complete:" in capsys.readouterr().out and everything_in(out) == before


def test_a_batch_has_a_maximum_number_of_documents():
    """Damaged documents have no text, so a limit for the length of texts is not enough."""
    documents = [Document("a.jsonl", problem="no key 'text'")] * 2500
    sizes = [len(batch) for batch in fineweb.make_batches(documents)]
    assert sizes == [1000, 1000, 500]


def test_continues_after_shards_with_longer_batches(documents, tmp_path, monkeypatch):
    """fineweb.py continues after shards of version 2.1, whose batches contained more documents.

    Likewise, the test shortens the batches between two runs of fineweb.py.
    """
    path, out = write(tmp_path / "jsonl.jsonl", documents), tmp_path / "out"
    fine("--input", path, "--max_shards", 2, directory=out, shard_size=5000)
    assert facts_of(out)["next"] == [0, 10_000]
    monkeypatch.setattr(fineweb, "DOCUMENTS", 7)
    fine("--input", path, directory=out, shard_size=5000)
    assert shards_in(out) == reference(documents, 5000)


def test_the_tokenizer_is_written_once(documents, tmp_path):
    """A training run may start before all shards exist. tokenizer.json must then be complete."""
    path, out = write(tmp_path / "jsonl.jsonl", documents[:50]), tmp_path / "out"
    library = build_library([bytes([i]) for i in range(256)], {"<|endoftext|>": 256})
    library.save(str(tmp_path / "t.json"))
    flags = ["--input", path, "--tokenizer", tmp_path / "t.json"]
    fine(*flags, "--max_shards", 1, directory=out, shard_size=5000)
    before = (out / "tokenizer.json").stat()
    source = load_tokenizer(tmp_path / "t.json").source
    assert (out / "tokenizer.json").read_text("utf-8") == source
    fine(*flags, directory=out, shard_size=5000)
    after = (out / "tokenizer.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len([*out.glob("*.npy")]) > 1


def test_a_mistake_unlocks_the_directory(tmp_path):
    """The directory is unlocked even if the traceback still exists, as in a notebook."""
    path, out = write(tmp_path / "jsonl.jsonl", ["a"]), tmp_path / "out"
    fine("--input", path, directory=out)
    with pytest.raises(
        UserError, match="its files were written with a different shard_size"
    ) as error:
        fine("--input", path, directory=out, shard_size=600)
    os.close(lock(out, "--output_dir"))
    assert error.tb is not None


@pytest.mark.slow
def test_the_last_line_of_fineweb_works_as_printed(tmp_path):
    (tmp_path / "my.txt").write_text((ROOT / "input.txt").read_text()[:100_000])
    out, _ = program(
        "--input", "my.txt", "--output_dir", "mine", cwd=tmp_path, program="fineweb.py"
    )
    command = re.search(r"^to train on it: python train_gpt2.py (.+)\n\Z", out, re.M)[1]
    small = "--n_layer 1 --n_head 1 --n_embd 16 --max_steps 2 --val_tokens 64 --sample_tokens 1 "
    small += "--block_size 32 --total_batch_size 64"
    out, _ = program(*command.split(), *small.split(), cwd=tmp_path)
    assert "preset mini on mine (" in out and "step     1/2" in out
    assert (tmp_path / "log/mini/model_000002.pt").is_file()


BAD = [
    (b"not json at all", "not JSON"),
    (b'{"text": "cut', "not JSON"),
    (b"[1, 2]", "not an object with fields, but a list"),
    (b'{"txt": "x", "id": 1}', "no key 'text'; existing keys: txt, id"),
    (b'{"text": 7}', "'text' is not a string, but a int"),
    (b'{"text": null}', "not a string"),
    (b'{"text": "\xff\xfe"}', "'utf-8' codec can't"),
    (b"[" * 100_000, "not JSON"),
    (b'{"text": "' + b" " * 600_000 + b'"}', "consecutive whitespace characters"),
]


def test_damaged_records_are_counted_shown_and_skipped(tmp_path, capsys):
    good = [f"good {i}" for i in range(len(BAD))] + ["half a pair \ud83d of surrogates"]
    lines = [json.dumps({"text": document}).encode() for document in good]
    for i, (bad, _) in enumerate(BAD):
        lines.insert(2 * i + 1, bad)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    fine("--input", tmp_path / "a.jsonl", directory=tmp_path / "out")
    err = capsys.readouterr().err
    assert shards_in(tmp_path / "out") == reference(good)
    for i, (_, reason) in enumerate(BAD[: fineweb.SHOWN]):
        assert re.search(rf"skipped .*a\.jsonl, record {2 * i + 2}: {re.escape(reason)}", err), err
    assert err.count("skipped ") == fineweb.SHOWN
    with pytest.raises(
        UserError, match=r"a\.jsonl, record 2: not JSON .*; correct this record, or remove"
    ):
        fine("--input", tmp_path / "a.jsonl", "--strict", directory=tmp_path / "strict")
    assert not list(tmp_path.glob("strict/*.npy"))


def test_damaged_records_are_counted_up_to_max_shards(tmp_path, capsys):
    lines = [jsonl([f"good {i}"]) + b"{}\n" for i in range(300)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    for n in (2, 3, 1000):  # the second run and the third run continue in the middle of a batch
        flags = ["--input", tmp_path / "a.jsonl", "--max_shards", n]
        fine(*flags, directory=tmp_path / "out", shard_size=50)
        out, err = capsys.readouterr()
        assert "300 damaged records skipped" in out
        assert err.count("skipped ") == (fineweb.SHOWN if n == 2 else 0)
        assert facts_of(tmp_path / "out")["skipped"] == 300


def test_damaged_text_and_tables(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo<|endoftext|>bad\n\xff here<|endoftext|>three")
    pq.write_table(pa.table({"text": ["four", None, "five"]}), tmp_path / "b.parquet")
    fine("--input", tmp_path / "a.txt", tmp_path / "b.parquet", directory=tmp_path / "out")
    assert shards_in(tmp_path / "out") == reference(["one\ntwo", "three", "four", "five"])
    assert re.findall(r"(a\.txt|b\.parquet), (.*)", capsys.readouterr().err) == [
        (
            "a.txt",
            "record 2: 'utf-8' codec can't decode byte 0xff in position 4: invalid start byte",
        ),
        ("b.parquet", "record 2: 'text' is not a string, but a NoneType"),
    ]
    # If a piece of a cut document is damaged, only this piece is skipped, and the rest remains one
    # document.
    monkeypatch.setattr("plaingpt.documents.BLOCK", 1000)
    words = " ".join(["word"] * 3000).encode()
    for i, data in enumerate([b"\xff" + words, words[:9000] + b"\xff" + words]):
        (tmp_path / "c.txt").write_bytes(b"first<|endoftext|>" + data + b"<|endoftext|>next")
        fine("--input", tmp_path / "c.txt", directory=tmp_path / f"c{i}")
        tokens = np.load(tmp_path / f"c{i}/c{i}_val_000000.npy")
        starts = np.flatnonzero(tokens == 50256).tolist()
        assert starts == [0, 2, len(tokens) - 2] and 1000 < len(tokens) < 3000 + 2000 * i


def test_refuses_a_directory_with_other_shards(documents, tmp_path):
    path, out = write(tmp_path / "jsonl.jsonl", documents[:50]), tmp_path / "out"
    fine("--input", path, "--max_shards", 2, directory=out, shard_size=500)
    before = everything_in(out)
    with pytest.raises(
        UserError, match=r"its files were written with a different shard_size; use a new directory"
    ):
        fine("--input", path, directory=out, shard_size=600)
    write(path, documents[:60])
    with pytest.raises(UserError, match="its files were written with a different source"):
        fine("--input", path, directory=out, shard_size=500)
    assert everything_in(out) == before


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--name x", "--name: belongs to --dataset; remove --name or --input"),
        ("--end_of_text </s>", "--end_of_text: gpt2 has its own end-of-text token; remove this"),
        ("--end_of_text \n --tokenizer bytes", "--end_of_text: bytes has its own end-of"),
    ],
)
def test_flags_that_would_do_nothing(tmp_path, flags, message):
    path = write(tmp_path / "text.txt", ["a"])
    with pytest.raises(UserError, match=message):
        fine("--input", path, *flags.split(" "), directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_end_of_text_of_the_vocabulary_may_be_given():
    assert load_tokenizer("gpt2", "<|endoftext|>") is get_tokenizer("gpt2")


def test_which_edits_the_checksum_of_places_finds(tmp_path):
    path = tmp_path / "a"
    for size in (0, 1, 2**16, 2**16 + 1, 2**22 - 1, 2**22):  # a file up to 4 MiB is read whole
        data = bytearray(size)
        path.write_bytes(data)
        before = checksum_of_places([path])
        for place in random.Random(size).sample(range(size), min(size, 20)):
            data[place] = 1
            path.write_bytes(data)
            data[place] = 0
            assert checksum_of_places([path]) != before, (size, place)
    data = bytearray(2**23)
    path.write_bytes(data)
    before = checksum_of_places([path])
    found = []
    last = 2**23 - 2**16  # where the last of the 64 evenly spaced places begins
    for place in (0, last * 32 // 63, 2**23 - 1, 2**16):
        path.write_bytes(data[:place] + b"1" + data[place + 1 :])
        found.append(checksum_of_places([path]) != before)
    assert found == [True, True, True, False]


def test_a_missing_shard_is_refused(documents, tmp_path):
    path, out = write(tmp_path / "jsonl.jsonl", documents[:50]), tmp_path / "out"
    fine("--input", path, directory=out, shard_size=500)
    before, shard = everything_in(out), out / "out_train_000002.npy"
    shard.unlink()
    with pytest.raises(
        UserError, match="a shard is missing; restore the shard, or use a new directory"
    ):
        fine("--input", path, directory=out, shard_size=500)
    shard.write_bytes(before[shard.name])
    # This simulates that fineweb.py was killed just before it wrote meta.json.
    (out / "meta.json").rename(out / "progress.json")
    out = out.rename(tmp_path / "renamed")
    fine("--input", path, directory=out, shard_size=500)
    assert everything_in(out) == before


@pytest.fixture
def hub(tmp_path):
    """Serves a stand-in for FineWeb-Edu. Yields (run, files, requests).

    run: a function that runs fineweb.py several times in one process, then executes statements, and
    returns (stdout, stderr). files: {path: bytes}, to which a test adds files. requests: a list,
    which always contains all requests so far.
    """
    configs = dict(default="data", **{"sample-10BT": "sample/10BT"})
    readme = "".join(f"- config_name: {k}\n  data_files: {v}/*\n" for k, v in configs.items())
    files = {
        "README.md": f"---\nconfigs:\n{readme}---\n".encode(),
        "data/0.parquet": parquet([dict(text="wrong")]),
    }
    (tmp_path / "all.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import fineweb, datasets\n"
        "from plaingpt.errors import UserError\n"
        "for flags in eval(sys.argv[1]):\n"
        f"    try: fineweb.main(['--shard_size', '{SHARD}', '--output_dir', *flags])\n"
        "    except UserError as error: print('error:', error)\n"
        "exec(sys.argv[2])\n"
    )
    with stand_in_hub({"HuggingFaceFW/fineweb-edu": files}) as (url, requests):
        env = dict(HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"), HF_TOKEN="hf_secret")

        def run(*flags, then="", online=True):
            options = dict(cwd=tmp_path, program=tmp_path / "all.py", env=env, online=online)
            return program(flags, then, **options)

        yield run, files, requests


def ranges_of(requests):
    """Returns (path, authorization, first byte) for each download of a part of a .parquet file."""
    found = []
    for method, path, headers in requests:
        if method == "GET" and path.endswith(".parquet"):
            first = int(re.match(r"bytes=(\d+)-", headers["range"])[1])
            found.append((path, headers["authorization"], first))
    return found


def add_documents(files, documents, cut):
    """Adds two files: documents[:cut] and documents[cut:]. Returns the names of the files."""
    rows = [dict(text=document, n=i) for i, document in enumerate(documents)]
    names = ["sample/10BT/000.parquet", "sample/10BT/001.parquet"]
    for name, part in zip(names, (rows[:cut], rows[cut:])):
        files[name] = parquet(part, row_group_size=30)
    return names


@pytest.mark.slow
def test_reads_a_dataset_from_the_hub_by_ranges(documents, tmp_path, hub):
    """The package `datasets` reads a named configuration from a local hub.

    The cache of `datasets` must contain no text.
    """
    run, files, requests = hub
    add_documents(files, documents[:500], 200)
    out, err = run(["out"], ["b", "--name", "nosuch"], ["b", "--text_key", "body"])
    assert shards_in(tmp_path / "out") == reference(documents[:500])
    assert {p.name.split("_")[0] for p in tmp_path.glob("out/*.npy")} == {"edufineweb"}
    assert facts_of(tmp_path / "out")["source"] == dict(
        dataset="HuggingFaceFW/fineweb-edu", name="sample-10BT", revision=COMMIT
    )
    got = ranges_of(requests)
    assert got and all("10BT" in path and "hf_secret" in key for path, key, _ in got)
    kept = {path.suffix for path in tmp_path.glob("home/**/*")}
    assert kept and not kept & {".arrow", ".parquet"}
    name, key = re.findall("^error: (.*)", out, re.M)
    assert "fineweb-edu: cannot be loaded (BuilderConfig 'nosuch' not found." in name
    assert "000.parquet, record 1: no key 'body'; existing keys: text, n" in err
    assert "or --text_key" in key


@pytest.mark.slow
def test_a_restart_does_not_download_what_is_done(tmp_path, hub):
    run, files, requests = hub
    rng = random.Random(0)
    texts = [rng.randbytes(5000).hex() for _ in range(500)]  # row groups of 170 kB
    names = add_documents(files, texts, 120)
    n_shards = len(reference(texts))
    run(["out", "--max_shards", str(n_shards * 2 // 3)])
    n_done, _ = facts_of(tmp_path / "out")["next"]
    assert n_done >= 150, "the first file, and a row group of the second file"
    requests.clear()
    run(["out"])
    assert shards_in(tmp_path / "out") == reference(texts)
    group = pq.ParquetFile(io.BytesIO(files[names[1]])).metadata.row_group((n_done - 120) // 30)
    firsts = {name: [] for name in names}
    for path, _, first in ranges_of(requests):
        firsts[path[path.index("sample") :]].append(first)
    # Of the first file, fineweb.py downloads only the end, which contains the footer.
    assert min(firsts[names[0]]) >= len(files[names[0]]) - 2**16
    assert min(firsts[names[1]]) >= group.column(0).dictionary_page_offset


@pytest.mark.slow
def test_the_cache_of_version_2_serves_without_a_network(documents, tmp_path, hub):
    """fineweb.py uses a data set that version 2.1 downloaded into the cache of `datasets`.

    The file progress.json of version 2.1 also contains the number of rows of the data set.
    """
    run, files, requests = hub
    add_documents(files, documents[:500], 200)
    load = "datasets.load_dataset('HuggingFaceFW/fineweb-edu', 'sample-10BT')"
    run(["whole"], ["out", "--max_shards", "2"], then=load)
    facts = facts_of(tmp_path / "out")
    facts["source"]["rows"] = 500
    (tmp_path / "out/progress.json").write_text(json.dumps(facts))
    (tmp_path / "out/meta.json").unlink()
    requests.clear()
    out, _ = run(["out"], ["offline"], ["b", "--dataset", "a/b"], online=False)
    assert not requests
    assert shards_in(tmp_path / "out") == reference(documents[:500])
    assert everything_in(tmp_path / "offline") == everything_in(tmp_path / "whole")
    assert re.search(r"^error: a/b: cannot be loaded \(Couldn't reach", out, re.M)
    run(["online"])  # the cached data set is not downloaded again
    assert shards_in(tmp_path / "online") == reference(documents[:500])
    assert not ranges_of(requests)
