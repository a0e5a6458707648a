"""Reads documents and records from files: JSON lines, a JSON array, CSV, Parquet, Arrow, or text.

Reading a large file needs only a few megabytes of memory. But a JSON array and a single record must
fit in memory as a whole. A document in a .txt file must also fit in memory, unless the caller
allows large documents to be cut.

A record is a dict, or JSON as bytes. If a line of JSON is damaged, or if a row of CSV has too many
fields, only this record is damaged, and read_documents continues with the next record. After any
other damage, read_documents stops with an error.
"""

import codecs
import csv
import gzip
import io
import itertools
import json
import os
import re
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path

from plaingpt.errors import UserError, explaining, first_line, require
from plaingpt.files import check_pointer, read_json, reading
from plaingpt.tokenizer import clean_text

BLOCK = 2**20  # bytes to read at a time
RECORDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
KINDS = (*RECORDS, ".txt")
OTHER_NAMES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}
COMPRESSIONS = (".gz", ".zst")
GZIP = b"\x1f\x8b"  # the first bytes of a gzip file
ZSTANDARD = b"\x28\xb5\x2f\xfd"
SEPARATOR = b"<|endoftext|>"  # between the documents of a .txt file
# Matches bytes up to the last place where a token of GPT-2 certainly ends. Such a place is before a
# space or line break, and after a printable ASCII character or a byte that cannot end a Unicode
# space.
CUT = re.compile(rb".*[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?=[ \n])", re.S)


@dataclass
class Document:
    """A document, or a piece of a large document."""

    where: str  # such as "a.jsonl, record 7"
    text: str | None = None  # None if the document is damaged
    problem: str = ""  # why the document is damaged
    begins: bool = True  # False if this piece continues the previous piece
    done: int = 0  # number of bytes read so far, in all files


def kind_of(path):
    """Returns the kind of a file, from its name, such as ".jsonl" for a.JSONL.gz and a.ndjson."""
    path = Path(Path(path).name.lower())
    if path.suffix in COMPRESSIONS:
        path = Path(path.stem)
    return OTHER_NAMES.get(path.suffix, path.suffix)


def find_files(patterns):
    """Returns the paths of the files that the patterns match, each file once.

    Each pattern is the path of a file or a directory, or a glob pattern. The name of an existing
    file may contain "[" or "*", so an existing path is never treated as a glob pattern.
    """
    found = {}  # {absolute path: path}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            names = find_inside(path)
        elif path.exists():
            names = [path]
        else:
            names = sorted(glob(pattern, recursive=True))
        for name in names or [pattern]:
            path = Path(name)
            found[path.resolve()] = path
    paths = list(found.values())
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file; give files, a glob pattern or a directory")
        if kind_of(path) not in KINDS:
            raise UserError(f"{path}: unknown format; fineweb.py --help names the known formats")
    return paths


def find_inside(directory):
    """Returns the paths of the data files in a directory.

    If there is a state.json, which `datasets` writes in save_to_disk, returns the files that
    state.json names. Otherwise, returns all .arrow files, or if there are none, all files in a
    known format. Skips cache-*.arrow: `datasets` writes these files after map, filter, sort or
    shuffle.
    """
    state = directory / "state.json"
    if state.exists():
        with reading(state):
            return [directory / file["filename"] for file in read_json(state)["_data_files"]]
    paths = [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and not path.name.startswith(".") and not path.match("cache-*.arrow")
    ]
    tables = [path for path in paths if path.suffix == ".arrow"]
    return tables or [path for path in paths if kind_of(path) in KINDS]


def find_hub_files(dataset, name=None):
    """Finds the split "train" of a data set. Returns (paths or URLs of its files, revision).

    If the data set consists of Parquet files on the Hugging Face Hub, returns their URLs. The
    caller then downloads only the columns that it needs, and stores no file. If the files have a
    different format, or if the cache of `datasets` already contains the data set, returns the paths
    of the Arrow files in this cache.
    """
    datasets = require("datasets")
    # Network errors have no common class, so this block catches exceptions of all kinds.
    with explaining(f"{dataset}: cannot be loaded", "check the name, the network and HF_ENDPOINT"):
        builder = datasets.load_dataset_builder(dataset, name)
        cache = Path(builder.cache_dir)
        files = [str(file) for file in (builder.config.data_files or {}).get("train", [])]
        are_urls = all(re.fullmatch(r"hf://.*\.parquet", file) for file in files)
    if cache.exists() or not (files and are_urls):
        files = load_hub(dataset, name)
    return files, cache.name


def load_hub(dataset, name=None, split="train"):
    """Downloads a data set, unless the cache of `datasets` contains it.

    Returns the paths of the Arrow files in this cache. If the Hugging Face Hub does not answer
    within five seconds, uses only the cache.
    """
    datasets = require("datasets")
    if not datasets.config.HF_HUB_OFFLINE:
        import requests

        try:
            requests.head(datasets.config.HF_ENDPOINT, timeout=5)
        except requests.RequestException:
            datasets.config.HF_HUB_OFFLINE = True  # this setting stays until the program ends
    # Network errors have no common class, so this block catches exceptions of all kinds.
    with explaining(f"{dataset}: cannot be loaded", "check the name, the network and HF_ENDPOINT"):
        data = datasets.load_dataset(dataset, name, split=split)
    return [Path(file["filename"]) for file in data.cache_files]


def open_file(path):
    """Opens a path, or the URL of a Parquet file, for reading bytes in a `with` block."""
    if isinstance(path, str):
        return require("fsspec").open(path)
    check_pointer(path)
    return open(path, "rb")


def count_bytes(path):
    """Returns the size of a file. path: as in open_file."""
    with open_file(path) as file:
        return file.seek(0, os.SEEK_END)


def check_encoding(name, start):
    """Raises UserError if a file is UTF-16, which some Windows programs write.

    name: name of the file in the message. start: at least the first two bytes of the file.
    """
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{name}: is UTF-16; convert it to UTF-8")


def decompress(path, file):
    """Returns a file object that reads the decompressed contents of an open binary file.

    path: as in open_file. If the contents are not compressed, reads them unchanged.
    """
    if isinstance(path, str):  # a Parquet file on the hub
        return file
    start = file.peek()
    if start.startswith(GZIP):
        file = io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK)
    elif start.startswith(ZSTANDARD):
        import pyarrow as pa

        stream = pa.CompressedInputStream(pa.PythonFile(file), "zstd")
        file = io.BufferedReader(stream, BLOCK)
    check_encoding(path, file.peek())
    return file


def read_items(path, file, columns=(), skip=0):
    """Yields the records of an open file. A record is a dict, or JSON as bytes.

    If the file is not JSON, CSV, Parquet or Arrow, each line is a record: {"text": line, "is_line":
    True}. columns: as in choose_columns. skip: the caller does not need the first `skip` records.
    In a Parquet file, this function then skips whole row groups, and yields None for each row of a
    skipped row group.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        yield from read_parquet(file, columns, skip)
    elif kind == ".arrow":
        yield from read_arrow(file, columns)
    elif kind in (".csv", ".tsv"):
        yield from read_csv(file, kind, columns)
    elif kind == ".json" and file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from json.loads(file.read().decode("utf-8-sig"))
    elif kind in (".json", ".jsonl"):
        yield from (line for line in file if line.strip())
    else:
        for line in io.TextIOWrapper(file, "utf-8-sig", newline="\n"):
            yield {"text": line, "is_line": True}


def read_csv(file, kind, columns):
    """Yields the rows of a .csv or .tsv file as dicts. The first row contains the column names.

    In a .tsv file, a quotation mark is an ordinary character. columns: as in choose_columns. Raises
    ValueError if a row is damaged, or if two chosen columns have the same name.
    """
    csv.field_size_limit(2**31 - 1)  # characters; Windows accepts no larger limit
    style = dict(delimiter=",") if kind == ".csv" else dict(delimiter="\t", quoting=csv.QUOTE_NONE)
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    rows = filter(None, csv.reader(text, strict=True, **style))  # without empty lines
    n = 0
    try:
        names = next(rows, [])
        choose_columns(names, columns)
        for row in rows:
            n += 1
            record = dict(zip(names, row))
            if any(row[len(names) :]):
                record[None] = row[len(names) :]  # as csv.DictReader does
            yield record
    except csv.Error as error:
        raise ValueError(f"record {n + 1}: {error}") from None


def read_parquet(file, columns, skip):
    """Yields the rows of a Parquet file as dicts. Yields None for each row of a skipped row group.

    Decodes only the columns of choose_columns. Does not map the file into memory, because mapped
    pages would count as memory of the process. columns: as in choose_columns. skip: as in
    read_items.
    """
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False)
    chosen = choose_columns(table.schema_arrow.names, columns)
    groups = list(range(table.num_row_groups))
    n = 0  # rows of the skipped row groups
    while groups and n + table.metadata.row_group(groups[0]).num_rows <= skip:
        n += table.metadata.row_group(groups.pop(0)).num_rows
    yield from itertools.repeat(None, n)
    for batch in table.iter_batches(256, groups, chosen, use_threads=False):
        yield from batch.select(chosen).to_pylist()


def read_arrow(file, columns):
    """Yields the rows of an Arrow file as dicts. `datasets` writes such files.

    columns: as in choose_columns.
    """
    import pyarrow as pa

    batches = pa.ipc.open_stream(file)
    chosen = choose_columns(batches.schema.names, columns)
    for batch in batches:
        yield from batch.select(chosen).to_pylist()


def choose_columns(names, columns):
    """Returns the names of the columns that the caller needs.

    names: the names of all columns of a table. columns: the names of the columns that the caller
    may read. If the table contains none of these columns, returns all names, for the error message
    of the caller. Raises ValueError if two of the returned columns have the same name.
    """
    chosen = [name for name in names if name in columns] or names
    for name in chosen:
        if name and chosen.count(name) > 1:  # a dict would keep only the last of these columns
            raise ValueError(f"two columns are named {name!r}")
    return chosen


def parse_record(item):
    """Returns a record of read_items as a dict. Raises ValueError if the record is damaged."""
    if isinstance(item, bytes):
        try:
            item = json.loads(item.decode("utf-8-sig"))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None
    if not isinstance(item, dict):
        raise ValueError(f"not an object with fields, but a {type(item).__name__}")
    if None in item:
        raise ValueError("more fields than column names")
    return item


def read_records(paths, columns=()):
    """Yields the records of files as dicts. Raises UserError if a record is damaged.

    The field `where` of a dict says where the record comes from, such as "a.jsonl, record 7". A
    file contains JSON lines, a JSON array, CSV, Parquet, Arrow, or lines of text. columns: as in
    choose_columns.
    """
    for path in map(Path, paths):
        with explaining(f"{path}: cannot be read", "check it"), open_file(path) as file:
            items = read_items(path, decompress(path, file), columns)
            for n, item in enumerate(items, start=1):
                where = f"{path}, record {n}"
                with explaining(f"{where}: is damaged", "correct it", ValueError):
                    record = parse_record(item)
                yield {**record, "where": where}


def read_documents(paths, text_key="text", cut=False, skip=0):
    """Yields the Documents of the files, in order, without the first `skip` Documents.

    paths: a list of paths, or of URLs of Parquet files. text_key: the field or column that contains
    the text. cut: whether to yield large documents of a .txt file (above 4 MB) in pieces. With
    GPT-2's tokenizer, all pieces together have the same tokens as the whole document.
    """
    n = 0  # number of Documents so far, in all files
    n_before = 0  # number of bytes in all files before `path`
    for path in paths:
        remedy = "check it" if isinstance(path, Path) else "check the network"
        with explaining(f"{path}: cannot be read", remedy), open_file(path) as raw:
            size = raw.seek(0, os.SEEK_END)
            raw.seek(0)
            for document in read_file(path, decompress(path, raw), text_key, cut, skip - n):
                n += 1
                if n > skip:
                    yield replace(document, done=n_before + raw.tell())
        n_before += size


def read_file(path, file, text_key, cut, skip):
    """Yields the Documents of an open file. The first `skip` Documents may be None."""
    if kind_of(path) != ".txt":
        for n, item in enumerate(read_items(path, file, [text_key], skip), start=1):
            yield make_document(f"{path}, record {n}", item, text_key) if n > skip else None
        return
    begins = True
    for n, piece, is_last in split_text(file, cut):
        document = make_document(f"{path}, record {n}", {"text": piece}, "text", begins)
        yield document
        # If the first pieces of a document are damaged, the document begins with the next piece.
        begins = is_last or (begins and document.text is None)


def split_text(file, cut=False):
    """Splits a .txt file into documents, or into pieces of documents if `cut` is True.

    Yields (number of the document, bytes, whether the document ends here). A file may begin or end
    with a separator, so whitespace before the first separator or after the last separator is not a
    document.
    """
    block = file.read(BLOCK).removeprefix(codecs.BOM_UTF8)
    if not block:
        return
    rest = b""  # the start of a document whose end is not read yet
    n = 1  # the number of the document in `rest`
    begins = True  # False if `rest` continues a cut document
    is_first = True  # False after the first separator
    while block:
        *documents, rest = (rest + block).split(SEPARATOR)
        for document in documents:
            if document.strip() or not (is_first and begins):
                yield n, document, True
                n += 1
            begins = True
            is_first = False
        if cut and len(rest) > 4 * BLOCK and (piece := CUT.match(rest)):
            yield n, piece[0], False
            rest = rest[piece.end() :]
            begins = False
        # After each block, this loop scans the unfinished document from its start. Larger blocks of
        # a long document keep the number of these scans small.
        block = file.read(max(BLOCK, len(rest)))
    if rest.strip() or is_first or not begins:
        yield n, rest, True


def make_document(where, item, text_key, begins=True):
    """Returns a record of read_items as a Document. If it is damaged, `problem` says why."""
    try:
        return Document(where, find_text(parse_record(item), text_key), begins=begins)
    except (ValueError, UserError) as error:
        return Document(where, problem=first_line(error), begins=begins)


def find_text(record, text_key):
    """Returns the text of a record, a dict. Raises ValueError if the record has no text."""
    if text_key not in record:
        raise ValueError(f"no key {text_key!r}; existing keys: {', '.join(record) or 'none'}")
    text = record[text_key]
    if isinstance(text, bytes):  # from a .txt file, or from a column of bytes
        text = text.decode()
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} is not a string, but a {type(text).__name__}")
    return clean_text(text)
