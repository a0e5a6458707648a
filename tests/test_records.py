"""Records of others: damaged rows, other layouts, and the files of other programs."""

import codecs
import csv
import gzip
import io
import json
import random
import re

from plaingpt.base.errors import UserError
from plaingpt.base.files import checksum_of_places
from plaingpt.data.data_sets import Sources, encode_text, open_splits
from plaingpt.data.documents import find_files, read_documents, read_records
from plaingpt.data.shards import find_shards
from plaingpt.data.tokenizer import get_tokenizer
from plaingpt.scoring.benchmark import load_examples

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_lines

import answers
import fineweb
import hellaswag
import lambada
import look
import wikitext


def documents_of(path, text_key="text"):
    """Returns [(where without the directory, text or problem)] of a file."""
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
    line = 2  # where the record begins
    for record in found:
        assert record["where"] == f"{path}, line {line}"
        line += 1 + (record["id"] + record["text"]).count("\n")


def test_the_first_damaged_row_of_csv_ends_the_file(tmp_path):
    path = tmp_path / "a.csv"
    long = "long " * 50_000  # above the limit of Python's module csv
    good = f'text,author\none,Ada\n"two\nlines",Bob\n{long},Bob\n\nthree,,\n'
    path.write_text(good)
    found = [("line 2", "one"), ("line 3", "two\nlines"), ("line 5", long), ("line 7", "three")]
    assert documents_of(path) == found
    for row, problem in (
        ("Who came, and when?,Ada\n", "3 fields for 2 column names"),
        ('"a" b,Ada\n', "',' expected after '\"'"),
        ('"never closed,Ada\nfour,Ada\n', "unexpected end of data"),
    ):
        path.write_text(f"{good}{row}")
        message = re.escape(f"a.csv: cannot be read (line 8: {problem}); check it")
        with pytest.raises(UserError, match=message):
            documents_of(path)
        with pytest.raises(UserError, match=message):
            list(read_records([path]))


def test_all_programs_read_the_same_bytes_of_a_text(tmp_path):
    """With the line ends of Windows. A byte order mark is no text."""
    path = tmp_path / "a.txt"
    text = b"One line.\r\nTwo \r lines.\r\n"
    path.write_bytes(codecs.BOM_UTF8 + text)
    tokenizer = get_tokenizer("bytes")
    assert encode_text(path, tokenizer).tobytes() == text  # as a run
    assert bytes(look.read_text(str(path), tokenizer, 99).ids[1:]) == text
    assert [document.text.encode() for document in read_documents([path])] == [text]
    (example,) = load_examples(wikitext.BENCHMARK, path)
    assert example.endings[0].encode() == text
    assert example.facts["bytes_before"] == len(text)
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\r\n1,"a\r\nb"\r\n2,c\r\n')
    assert documents_of(path) == [("line 2", "a\r\nb"), ("line 4", "c")]


def test_places_in_an_array_are_items(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([dict(text="a"), None, dict(text="[,\nb")]))
    assert [place for place, _ in documents_of(path)] == ["item 1", "item 2", "item 3"]
    path.write_text('[{"text": "a"},\n{"text": }]')
    with pytest.raises(
        UserError, match=r"a\.json: cannot be read \(.*: line 2 column 10 .*\); check"
    ):
        documents_of(path)


@pytest.mark.parametrize("kind", [".jsonl", ".ndjson", ".JSONLINES", ".csv", ".tsv"])
def test_every_kind_of_a_file_of_pairs(tmp_path, kind):
    """Training, benchmarks and fineweb.py read it. None of them takes it for a text."""
    pairs = [dict(prompt=f"{i}, {i}+{i}=", response=f'"{2 * i}"\t') for i in range(20)]
    path = tmp_path / f"a{kind}"
    if kind in (".csv", ".tsv"):
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, delimiter="," if kind == ".csv" else "\t")
            writer.writerows([["prompt", "response"], *(pair.values() for pair in pairs)])
    else:
        write_lines(path, pairs)
    found = [{**record, "where": ""} for record in read_records([path])]
    assert found == [{**pair, "where": ""} for pair in pairs]
    assert find_files([path]) == [path]
    assert documents_of(path, "response")[-1][1] == '"38"\t'
    train, val = Sources([str(path)]).open(get_tokenizer("bytes"), 32)[0]
    assert train.has_pairs and val.has_pairs


RECORDS = [dict(text="one"), dict(text="two")]
LAYOUTS = {
    "array.jsonl": (
        json.dumps(RECORDS),
        "contains a JSON array, not one object per line; rename the file to .json",
    ),
    "indented.jsonl": (
        json.dumps(RECORDS, indent=1),
        "contains a JSON array, not one object per line",
    ),
    "pretty.jsonl": (
        "\n".join(json.dumps(r, indent=2) for r in RECORDS),
        "contains JSON objects of several lines; write each object in one line",
    ),
    "pretty.json": (
        json.dumps(dict(data=RECORDS), indent=2),
        "contains JSON objects of several lines; write each object in one line",
    ),
    "data.json": (
        json.dumps(dict(version="1.1", data=RECORDS)) + "\n",
        "is one object with the records in field 'data'; keep only this list",
    ),
    "utf16.jsonl": (json.dumps(RECORDS[0]).encode("utf-16"), "is UTF-16; convert it to UTF-8"),
    "utf16.csv": ("text\none\n".encode("utf-16"), "is UTF-16; convert it to UTF-8"),
    "utf16.txt": ("one".encode("utf-16"), "is UTF-16; convert it to UTF-8"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout_is_named(tmp_path, name):
    contents, message = LAYOUTS[name]
    path = tmp_path / name
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    for read in (documents_of, lambda path: list(read_records([path]))):
        with pytest.raises(UserError) as error:
            read(path)
        assert message in str(error.value) and str(path) in str(error.value)
    if path.suffix == ".txt":
        with pytest.raises(UserError, match="is UTF-16; convert it to UTF-8"):
            open_splits(path, get_tokenizer("bytes"))


def test_a_record_may_have_lists_and_the_first_one_may_be_damaged(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "notes": [{"a": 1}]}')
    assert documents_of(path) == [("line 1", "one")]
    for bad in ('{"text": "o', "[1, 2]", '{"notes": [{"a": 1}]}'):
        path.write_text(f'{bad}\n{{"text": "two"}}\n')
        places = documents_of(path)
        assert len(places) == 2 and places[1] == ("line 2", "two")


def test_gzip_with_zeros_at_its_end(tmp_path):
    """Tapes and block devices fill a file with zeros."""
    path = tmp_path / "a.jsonl.gz"
    data = gzip.compress(b'{"text": "one"}\n')
    path.write_bytes(data + bytes(512))
    assert documents_of(path) == [("line 1", "one")]
    for damaged in (data[:-9], data[:5], data[:15] + b"\xff" * 9 + data[24:], data + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read \(.*\); check it"):
            documents_of(path)


def test_tables_decode_only_the_columns_that_are_needed(tmp_path):
    """Another column may be damaged, or have a type that cannot be decoded."""
    path = tmp_path / "a.parquet"
    table = pa.table(dict(picture=[b"\xff" * 999, b"\xfe" * 999], text=["one", "two"]))
    pq.write_table(table, path, compression="none", use_dictionary=False)
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset : chunk.data_page_offset + 20] = bytes(20)  # a page header
    path.write_bytes(data)
    assert documents_of(path) == [("row 1", "one"), ("row 2", "two")]
    with pytest.raises(UserError, match="cannot be read"):
        documents_of(path, text_key="picture")
    pq.write_table(pa.table(dict(prompt=["a"], response=["b"], more=["c"])), path)
    (record,) = read_records([path], columns=("prompt", "response"))
    assert record == dict(prompt="a", response="b", where=f"{path}, row 1")


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
    """macOS writes such a file beside each file on some disks, and rsync while it copies."""
    for name in ("x_train_000001.npy", "._x_train_000001.npy", ".x_train_000002.npy.Ab3dEf"):
        (tmp_path / name).touch()
    for name in ("y.idx", "._y.idx", "._train.bin"):
        (tmp_path / name).touch()
    names = [path.name for path in find_shards(tmp_path, "train")]
    assert names == ["x_train_000001.npy", "y.idx"]


META = dict(
    source=dict(input=[["a.txt", 8]]),
    text_key="text",
    tokenizer="gpt2",
    shard_size=2,
    val_shards=1,
)


@pytest.mark.parametrize(
    "change",
    [
        dict(name="../victim/own"),
        dict(name="a/b"),
        dict(name=7),
        dict(shards="1"),
        dict(tokens=None),
        dict(skipped=-1),
        dict(next=[0]),
        dict(next=7),
        dict(next=[-1, 0]),
        dict(lost="x"),
        dict(shards=True),
    ],
)
def test_a_meta_json_of_another_hand_makes_fineweb_write_nothing(tmp_path, change):
    (tmp_path / "victim").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "a.txt").write_text("a boat b")
    meta = META | dict(input_checksum=checksum_of_places([tmp_path / "a.txt"]))
    (tmp_path / "out/meta.json").write_text(json.dumps(meta | change))
    flags = ["--input", str(tmp_path / "a.txt"), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"meta\.json: is damaged \(.*\); use a new directory"):
        fineweb.main([*flags, "--shard_size", "2"])
    assert not list(tmp_path.glob("*/*.npy"))


def test_a_tokenizer_in_meta_json_that_is_not_one(tmp_path):
    np.save(tmp_path / "a_train_000000.npy", np.zeros(99, np.uint16))
    for source in ("{", "{}", '{"model": {"vocab": []}}'):
        (tmp_path / "meta.json").write_text(json.dumps(dict(tokenizer=source)))
        with pytest.raises(UserError, match=r"meta\.json: is damaged \(.*\); restore it"):
            Sources([str(tmp_path)])


def test_a_date_out_of_range_in_a_table(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(dict(text=["a"], day=pa.array([10**15], pa.timestamp("s")))), path)
    assert documents_of(path) == [("row 1", "a")]
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read \(.*\); check it"):
        list(read_records([path]))


@pytest.mark.parametrize("benchmark", [answers, hellaswag, lambada, wikitext])
def test_benchmarks_read_only_the_columns_that_they_use(tmp_path, benchmark):
    """The others may have a date after the year 9999, which Python has not."""
    row = dict(text="a b", prompt="a", response="b", ctx="a", endings=["b", "c"], label=1)
    day = pa.array([10**15], pa.timestamp("s"))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({name: [value] for name, value in row.items()} | dict(day=day)), path)
    (example,) = load_examples(benchmark.BENCHMARK, path)
    expected = load_examples(benchmark.BENCHMARK, write_lines(tmp_path / "a.jsonl", [row]))
    assert [example] == expected


def test_two_columns_of_one_name_are_refused(tmp_path):
    """One of them would be lost. Columns that nobody reads may have one name."""
    path = tmp_path / "a.csv"
    path.write_text("text,text\na,b\n")
    with pytest.raises(UserError, match="two columns are named 'text'"):
        list(read_records([path]))
    path.write_text("text,x,x\na,b,c\n")
    assert documents_of(path) == [("line 2", "a")]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["text", "x", "x"]), path)
    assert documents_of(path) == [("row 1", "a")]
    with pytest.raises(UserError, match="two columns are named 'x'"):
        list(read_records([path], columns=["x"]))
