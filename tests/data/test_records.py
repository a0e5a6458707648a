"""Files that other people or programs wrote: many formats, unusual layouts, damaged records."""

import codecs
import csv
import gzip
import io
import json
import random
import re
import subprocess
import sys
from dataclasses import replace

from plaingpt.data import Sources, encode_text, open_splits
from plaingpt.documents import KINDS, find_files, read_documents, read_records
from plaingpt.errors import UserError
from plaingpt.files import check_pointer
from plaingpt.scoring.benchmark import load_examples
from plaingpt.shards import find_shards
from plaingpt.tokenizer import get_tokenizer

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, write_lines

import answers
import hellaswag
import lambada
import look
import wikitext


def documents_of(path, text_key="text"):
    """Reads a file. Returns (place, text or problem) for each document in the file.

    A place is, for example, "record 1".
    """
    found = []
    for document in read_documents([path], text_key):
        where = document.where.removeprefix(f"{path}, ")
        found.append((where, document.problem or document.text))
    return found


def test_csv_equals_pythons_reader(tmp_path):
    rng = random.Random(0)
    records = []
    for _ in range(300):
        texts = ["".join(rng.choices('ab ,"\n\u6d77', k=rng.randrange(12))) for _ in range(2)]
        records.append(dict(zip(("id", "text"), texts)))
    file = io.StringIO()
    writer = csv.DictWriter(file, ["id", "text"])
    writer.writeheader()
    writer.writerows(records)
    path = tmp_path / "a.csv"
    path.write_text(file.getvalue(), newline="")
    found = list(read_records([path]))
    assert [{k: r[k] for k in ("id", "text")} for r in found] == records
    places = [record["where"] for record in found]
    assert places == [f"{path}, record {n}" for n in range(1, 301)]


LONG = "long " * 50_000  # longer than the default limit of Python's module csv
CSV = f'text,author\none,Ada\n"two\nlines",Bob\n{LONG},Bob\n\nthree,,\n'
TEXTS = [("record 1", "one"), ("record 2", "two\nlines"), ("record 3", LONG), ("record 4", "three")]


def test_a_row_of_csv_with_too_many_fields_is_one_damaged_record(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"{CSV}Who came, and when?,Ada\nfour,Ada\n")
    places = [("record 5", "more fields than column names"), ("record 6", "four")]
    assert documents_of(path) == TEXTS + places
    message = r"a\.csv, record 5: is damaged \(more fields than column names\); correct it"
    with pytest.raises(UserError, match=message):
        list(read_records([path]))


def test_a_damaged_quotation_ends_a_csv_file(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    assert documents_of(path) == TEXTS
    for row, problem in (
        ('"a" b,Ada\n', "',' expected after '\"'"),
        ('"never closed,Ada\nfour,Ada\n', "unexpected end of data"),
    ):
        path.write_text(f"{CSV}{row}")
        message = re.escape(f"a.csv: cannot be read (record 5: {problem}); check it")
        with pytest.raises(UserError, match=message):
            documents_of(path)
        with pytest.raises(UserError, match=message):
            list(read_records([path]))


def test_a_tsv_file_has_no_quotation(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('id\ttext\n1\t"He said\n2\tan "x", y"\n')
    assert documents_of(path) == [("record 1", '"He said'), ("record 2", 'an "x", y"')]


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_a_large_csv_file_needs_little_memory(tmp_path):
    row = '1,"' + "a word, " * 500 + '"\n'
    (tmp_path / "a.csv").write_text("id,text\n" + row * 10_000)  # 40 MB
    code = """if True:
        import re
        from pathlib import Path
        from plaingpt.documents import read_documents
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
        before = peak()
        n = sum(len(document.text) for document in read_documents([Path("a.csv")]))
        print(n, peak() - before)
    """
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    out = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    n, kib = map(int, out.split())
    assert n == 40_000_000 and kib < 20_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_compression_is_known_by_the_first_bytes(tmp_path, name):
    data = b'{"text": "one"}\n'
    for contents in (data, gzip.compress(data), pa.compress(data, "zstd", asbytes=True)):
        (tmp_path / name).write_bytes(contents)
        assert documents_of(tmp_path / name) == [("record 1", "one")]


def test_a_directory_means_its_files_of_known_formats(tmp_path):
    names = ["a.txt", "b.JSONL.gz", "c.csv", "d.ndjson"]
    for name in (*names, ".hidden.txt", "notes.md", "model.bin", "cache-1.arrow"):
        (tmp_path / name).touch()
    (tmp_path / "inside.txt").mkdir()
    assert [path.name for path in find_files([str(tmp_path)])] == names
    with pytest.raises(UserError, match="no such file; give files, a glob pattern or a directory"):
        find_files([str(tmp_path / "inside.txt")])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pointer_of_git_lfs_is_named(tmp_path, kind):
    path = tmp_path / f"a{kind}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    for read in (documents_of, lambda path: list(read_records([path])), check_pointer):
        with pytest.raises(UserError) as error:
            read(path)
        pointer = "is a pointer of Git LFS instead of the file; run git lfs pull"
        assert str(error.value) == f"{path}: {pointer}"


@pytest.mark.parametrize("kind", KINDS)
def test_skipping_documents_changes_nothing_else(tmp_path, kind):
    """The last skipped document may be in the second file, or in the middle of a row group."""
    paths = [tmp_path / f"{i}{kind}" for i in range(2)]
    for i, path in enumerate(paths):
        texts = [f"text {i} {n}" for n in range(700)]
        if kind == ".parquet":
            pq.write_table(pa.table(dict(text=texts)), path, row_group_size=300)
        elif kind == ".arrow":
            table = pa.table(dict(text=texts))
            with pa.ipc.new_stream(path, table.schema) as file:
                file.write_table(table, 300)
        elif kind == ".txt":
            path.write_text("<|endoftext|>".join(texts))
        elif kind in (".csv", ".tsv"):
            path.write_text("".join(f"{text}\n" for text in ["text", *texts]))
        else:
            write_lines(path, [dict(text=text) for text in texts])
    whole = list(read_documents(paths))
    assert len(whole) == 1400 and whole[-1].where == f"{paths[1]}, record 700"
    for skip in (0, 1, 299, 300, 301, 600, 699, 700, 701, 1000, 1399, 1400):
        found = list(read_documents(paths, skip=skip))
        assert [replace(each, done=0) for each in found] == [
            replace(each, done=0) for each in whole[skip:]
        ]


def test_all_programs_read_the_same_bytes_of_a_text(tmp_path):
    """All programs keep Windows line endings, and omit a byte order mark."""
    path = tmp_path / "a.txt"
    text = b"One line.\r\nTwo \r lines.\r\n"
    path.write_bytes(codecs.BOM_UTF8 + text)
    tokenizer = get_tokenizer("bytes")
    assert encode_text(path, tokenizer).tobytes() == text  # as a training run reads it
    assert bytes(look.read_text(str(path), tokenizer, 99).ids[1:]) == text
    assert [document.text.encode() for document in read_documents([path])] == [text]
    (example,) = load_examples(wikitext.BENCHMARK, path)
    assert example.endings[0].encode() == text
    assert example.facts["bytes_before"] == len(text)
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\r\n1,"a\r\nb"\r\n2,c\r\n')
    assert documents_of(path) == [("record 1", "a\r\nb"), ("record 2", "c")]


def test_a_json_array(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([dict(text="a"), None, dict(text="[,\nb")]))
    assert [place for place, _ in documents_of(path)] == ["record 1", "record 2", "record 3"]
    path.write_text('[{"text": "a"},\n{"text": }]')
    with pytest.raises(
        UserError, match=r"a\.json: cannot be read \(.*: line 2 column 10 .*\); check"
    ):
        documents_of(path)


@pytest.mark.parametrize("kind", [".jsonl", ".ndjson", ".JSONLINES", ".csv", ".tsv"])
def test_every_kind_of_a_file_of_pairs(tmp_path, kind):
    """Training, benchmarks and fineweb.py read these files as pairs, and not as plain text."""
    end = "" if kind == ".tsv" else "\t"
    pairs = [dict(prompt=f"{i}, {i}+{i}=", response=f'"{2 * i}"{end}') for i in range(20)]
    path = tmp_path / f"a{kind}"
    rows = [["prompt", "response"], *(pair.values() for pair in pairs)]
    if kind == ".csv":
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(rows)
    elif kind == ".tsv":
        path.write_text("".join("\t".join(row) + "\n" for row in rows))
    else:
        write_lines(path, pairs)
    found = [{**record, "where": ""} for record in read_records([path])]
    assert found == [{**pair, "where": ""} for pair in pairs]
    assert find_files([path]) == [path]
    assert documents_of(path, "response")[-1][1] == f'"38"{end}'
    train, val = Sources([str(path)]).open(get_tokenizer("bytes"), 32)[0]
    assert train.has_pairs and val.has_pairs


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_utf16_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes('{"text": "one"}'.encode("utf-16"))
    for read in (documents_of, lambda path: list(read_records([path]))):
        with pytest.raises(UserError, match=f"{name}: is UTF-16; convert it to UTF-8"):
            read(path)
    if path.suffix == ".txt":
        with pytest.raises(UserError, match="is UTF-16; convert it to UTF-8"):
            open_splits(path, get_tokenizer("bytes"))


def test_json_in_another_layout_is_damaged_records(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [dict(text="one"), dict(text="two")]
    path.write_text(json.dumps(records))
    assert documents_of(path) == [("record 1", "not an object with fields, but a list")]
    path.write_text(json.dumps(dict(version="1.1", data=records)))
    assert documents_of(path) == [("record 1", "no key 'text'; existing keys: version, data")]
    path.write_text(json.dumps(records[0], indent=2))
    assert [problem[:8] for _, problem in documents_of(path)] == ["not JSON"] * 3
    with pytest.raises(UserError, match=r"a\.jsonl, record 1: is damaged \(not JSON .*\); correct"):
        list(read_records([path]))


def test_a_record_may_have_lists_and_the_first_one_may_be_damaged(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "notes": [{"a": 1}]}')
    assert documents_of(path) == [("record 1", "one")]
    for bad in ('{"text": "o', "[1, 2]", '{"notes": [{"a": 1}]}'):
        path.write_text(f'{bad}\n{{"text": "two"}}\n')
        places = documents_of(path)
        assert len(places) == 2 and places[1] == ("record 2", "two")


def test_gzip_with_zeros_at_its_end(tmp_path):
    """Tapes and block devices may pad a .gz file with zeros."""
    path = tmp_path / "a.jsonl.gz"
    data = gzip.compress(b'{"text": "one"}\n')
    path.write_bytes(data + bytes(512))
    assert documents_of(path) == [("record 1", "one")]
    for damaged in (data[:-9], data[:5], data[:15] + b"\xff" * 9 + data[24:], data + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read \(.*\); check it"):
            documents_of(path)


def test_tables_decode_only_the_columns_that_are_needed(tmp_path):
    """A column that is not needed may be damaged, or have a type that cannot be decoded."""
    path = tmp_path / "a.parquet"
    table = pa.table(dict(picture=[b"\xff" * 999, b"\xfe" * 999], text=["one", "two"]))
    pq.write_table(table, path, compression="none", use_dictionary=False)
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset : chunk.data_page_offset + 20] = bytes(20)  # destroys a page header
    path.write_bytes(data)
    assert documents_of(path) == [("record 1", "one"), ("record 2", "two")]
    with pytest.raises(UserError, match="cannot be read"):
        documents_of(path, text_key="picture")
    pq.write_table(pa.table(dict(prompt=["a"], response=["b"], more=["c"])), path)
    (record,) = read_records([path], columns=("prompt", "response"))
    assert record == dict(prompt="a", response="b", where=f"{path}, record 1")


@pytest.mark.slow  # imports `datasets`
def test_a_directory_of_save_to_disk_is_read_without_its_caches(tmp_path):
    import datasets

    texts = [f"text {i}" for i in range(100)]
    directory = tmp_path / "split[1]"
    datasets.Dataset.from_dict(dict(text=texts)).save_to_disk(directory, num_shards=2)
    saved = datasets.load_from_disk(directory)
    saved.map(lambda record: record).filter(lambda record: "1" in record["text"])
    saved.sort("text").shuffle(seed=1)
    assert len(list(directory.glob("*.arrow"))) > 2
    paths = find_files([str(directory)])
    assert [document.text for document in read_documents(paths)] == texts


def test_a_directory_of_arrow_files_is_read_without_caches(tmp_path):
    for name in ("a-00000.arrow", "a-00001.arrow", "cache-17.arrow", "._a-00000.arrow"):
        (tmp_path / name).touch()
    assert [path.name for path in find_files([str(tmp_path)])] == ["a-00000.arrow", "a-00001.arrow"]
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a-00001.arrow"}]}')
    assert [path.name for path in find_files([str(tmp_path)])] == ["a-00001.arrow"]
    for damaged in ("{}", "[", '{"_data_files": [7]}', '{"_data_files": [{}]}'):
        (tmp_path / "state.json").write_text(damaged)
        with pytest.raises(UserError, match=r"state\.json: is damaged \(.*\); "):
            find_files([str(tmp_path)])


def test_an_existing_path_is_no_glob(tmp_path):
    for name in ("notes[1].txt", "notes1.txt", "what?.txt", "whats.txt"):
        (tmp_path / name).touch()
    for name in ("notes[1].txt", "what?.txt"):
        assert find_files([str(tmp_path / name)]) == [tmp_path / name]
    assert len(find_files([str(tmp_path / "what*.txt")])) == 2
    (tmp_path / "what?.txt").unlink()
    assert find_files([str(tmp_path / "what?.txt")]) == [tmp_path / "whats.txt"]


def test_hidden_files_are_no_shards(tmp_path):
    """On some disks, macOS writes a hidden file next to each file.

    While rsync copies a file, it writes a hidden file.
    """
    for name in ("x_train_000001.npy", "._x_train_000001.npy", ".x_train_000002.npy.Ab3dEf"):
        (tmp_path / name).touch()
    for name in ("y.idx", "._y.idx", "._train.bin"):
        (tmp_path / name).touch()
    names = [path.name for path in find_shards(tmp_path, "train")]
    assert names == ["x_train_000001.npy", "y.idx"]


def test_a_tokenizer_in_meta_json_that_is_not_one(tmp_path):
    np.save(tmp_path / "a_train_000000.npy", np.zeros(99, np.uint16))
    for source in ("{", "{}", '{"model": {"vocab": []}}'):
        (tmp_path / "meta.json").write_text(json.dumps(dict(tokenizer=source)))
        with pytest.raises(UserError, match=r"meta\.json: is damaged \(.*\); restore it"):
            Sources([str(tmp_path)])


def test_a_date_out_of_range_in_a_table(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(dict(text=["a"], day=pa.array([10**15], pa.timestamp("s")))), path)
    assert documents_of(path) == [("record 1", "a")]
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read \(.*\); check it"):
        list(read_records([path]))


@pytest.mark.parametrize("benchmark", [answers, hellaswag, lambada, wikitext])
def test_benchmarks_read_only_the_columns_that_they_use(tmp_path, benchmark):
    """An unused column may contain a date after the year 9999, which Python cannot represent."""
    row = dict(text="a b", prompt="a", response="b", ctx="a", endings=["b", "c"], label=1)
    day = pa.array([10**15], pa.timestamp("s"))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({name: [value] for name, value in row.items()} | dict(day=day)), path)
    (example,) = load_examples(benchmark.BENCHMARK, path)
    expected = load_examples(benchmark.BENCHMARK, write_lines(tmp_path / "a.jsonl", [row]))
    assert [example] == expected


def test_two_columns_of_one_name_are_refused(tmp_path):
    """If a program read two such columns, one would be lost. Unread columns cause no error."""
    path = tmp_path / "a.csv"
    path.write_text("text,text\na,b\n")
    with pytest.raises(UserError, match="two columns are named 'text'"):
        list(read_records([path]))
    path.write_text("text,x,x\na,b,c\n")
    assert documents_of(path) == [("record 1", "a")]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["text", "x", "x"]), path)
    assert documents_of(path) == [("record 1", "a")]
    with pytest.raises(UserError, match="two columns are named 'x'"):
        list(read_records([path], columns=["x"]))
