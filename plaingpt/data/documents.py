"""Reads documents and records from files: JSON lines, a JSON array, CSV, Parquet, Arrow, or text.

Reading a large file needs only a few megabytes of memory. But these must fit in memory as a whole:
a JSON array, a single line, a .csv or .tsv file, and the text file of a benchmark. A document in a
.txt file must also fit in memory, but if the caller allows it, the document is cut instead.

Parsers yield (where, item). `where` is a place in the file, such as "line 7". An item is a dict, or
JSON as bytes. If a line of JSON is damaged, only one record is damaged. After any other damage,
reading ends.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path

from plaingpt.base.errors import UserError, explaining, first_line, require
from plaingpt.base.files import read_json, reading
from plaingpt.data.tokenizer import clean_text

BLOCK = 2**20  # bytes to read at a time
TABLES = (".parquet", ".arrow")
ARRAY_OF_OBJECTS = re.compile(rb"\[\s*(\{|$)")  # the start of an array of objects
OBJECT_OF_SEVERAL_LINES = re.compile(rb"\{(.*[,{\[])?$")  # an object of several lines
MOST_CHARACTERS = 2**31 - 1  # of a CSV field; Windows accepts no larger limit
RECORDS = (".jsonl", ".json", ".csv", ".tsv", *TABLES)
OTHER_NAMES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}
COMPRESSIONS = (".gz", ".zst")
# The libraries that read files raise these errors if a file is damaged.
DAMAGE = (
    OSError,
    ValueError,
    RecursionError,
    NotImplementedError,
    EOFError,
    MemoryError,
    ArithmeticError,  # a date out of range
    zlib.error,
)
SEPARATOR = b"<|endoftext|>"  # between the documents of a .txt file
# Matches bytes up to the last place where a token of GPT-2 certainly ends: before a space or line
# break, and after a printable ASCII character or a byte that cannot end a Unicode space.
CUT = re.compile(rb".*[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?=[ \n])", re.S)


def has_array(file):
    """Returns whether a JSON file is an array. Otherwise, the file contains JSON lines."""
    return file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def check_encoding(name, start):
    """Raises UserError if a file is UTF-16, which some Windows programs write.

    name: name of the file in the message. start: at least the first two bytes of the file.
    """
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{name}: is UTF-16; convert it to UTF-8")


def open_text(file):
    """Decodes an open binary file -> an open text file. Each line keeps its line end."""
    return io.StringIO(file.read().decode("utf-8-sig"))


def read_json_lines(path, file, columns):
    """Yields (where, JSON as bytes) for each line that is not empty.

    columns: as in check_layout.
    """
    is_first = True
    for n, line in enumerate(file, start=1):
        line = line.strip()
        if not line:
            continue
        if is_first:
            is_only = not file.peek().strip()
            check_layout(path, line.removeprefix(codecs.BOM_UTF8), is_only, columns)
            is_first = False
        yield f"line {n}", line


def check_layout(path, line, is_only, columns):
    """Raises UserError unless a JSON file contains one record per line.

    line: the first line. is_only: whether this is the only line. columns: field names of a record.
    """
    if ARRAY_OF_OBJECTS.match(line):
        raise UserError(
            f"{path}: contains a JSON array, not one object per line; rename the file to .json"
        )
    if OBJECT_OF_SEVERAL_LINES.match(line):
        raise UserError(
            f"{path}: contains JSON objects of several lines; write each object in one line"
        )
    if not is_only:
        return
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return  # a damaged record
    if not isinstance(record, dict) or any(name in record for name in columns):
        return
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            raise UserError(
                f"{path}: is one object with the records in field {name!r}; keep only this list"
            )


def read_array(file):
    """Yields (where, item) of a file that is a JSON array. Raises ValueError."""
    for n, item in enumerate(json.loads(file.read().decode("utf-8-sig")), start=1):
        yield f"item {n}", item


def read_csv(file, delimiter, columns):
    """Yields (where, dict) for the rows of a CSV file; its first row contains the names.

    Raises ValueError. columns: names of the columns that the caller may read, or ().
    """
    csv.field_size_limit(MOST_CHARACTERS)
    reader = csv.reader(open_text(file), delimiter=delimiter, strict=True)
    names = None
    line = 1  # the line where the next row begins
    try:
        for row in reader:
            if row and names is None:
                names = row
                choose_columns(names, columns)
            elif row:  # skips empty lines
                if any(row[len(names) :]):
                    raise csv.Error(f"{len(row)} fields for {len(names)} column names")
                yield f"line {line}", dict(zip(names, row))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {line}: {error}") from None


def read_table(kind, file, columns):
    """Yields (where, dict) for the rows of a Parquet file, or of an Arrow file of `datasets`.

    columns: as in choose_columns. Decodes only these columns. Does not map the file into memory,
    because mapped pages would count as memory of the process.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == ".parquet":
        table = pq.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False)
        chosen = choose_columns(table.schema_arrow.names, columns)
        batches = table.iter_batches(256, columns=chosen, use_threads=False)
    else:
        batches = pa.ipc.open_stream(file)
        chosen = choose_columns(batches.schema.names, columns)
    n = 0
    for batch in batches:
        for item in batch.select(chosen).to_pylist():
            n += 1
            yield f"row {n}", item


def choose_columns(names, columns):
    """Returns the names of a table's columns that the caller needs. Raises ValueError.

    columns: names of the columns that the caller may read. If the table contains none of these
    columns, returns all names, for the error message of the caller.
    """
    chosen = [name for name in names if name in columns] or names
    for name in chosen:
        if name and chosen.count(name) > 1:  # a dict would keep only the last of these columns
            raise ValueError(f"two columns are named {name!r}")
    return chosen


def find_files(patterns):
    """Returns the paths of the files that some patterns name.

    A pattern is a path, a glob, or a directory with .arrow files. An existing path may contain "["
    or "*", so this function never treats an existing path as a glob.
    """
    found = {}  # lists each file once
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            names = find_arrow(path)
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
            raise UserError(f"{path}: no such file; give files, a glob or the directory of a split")
        if kind_of(path) not in (*RECORDS, ".txt"):
            raise UserError(f"{path}: unknown format; fineweb.py --help names the known formats")
    return paths


def find_arrow(directory):
    """Returns the paths of the .arrow files of a data set on disk.

    After map, filter, sort or shuffle, `datasets` keeps cache-*.arrow files next to the data. These
    files are skipped. save_to_disk writes a state.json, which names the files of the data.
    """
    state = directory / "state.json"
    if state.exists():
        with reading(state):
            return [directory / file["filename"] for file in read_json(state)["_data_files"]]
    return [
        path
        for path in sorted(directory.glob("*.arrow"))
        if not path.name.startswith((".", "cache-"))
    ]


def kind_of(path):
    """Returns the kind of a file, from its name, such as ".jsonl" for a.JSONL.gz and a.ndjson."""
    path = Path(path.name.lower())
    if path.suffix in COMPRESSIONS:
        path = Path(path.stem)
    return OTHER_NAMES.get(path.suffix, path.suffix)


def decompress(path, file):
    """Returns an open file with the decompressed contents of an open binary file."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK)
    if suffix == ".zst":
        import pyarrow as pa

        stream = pa.CompressedInputStream(pa.PythonFile(file), "zstd")
        return io.BufferedReader(stream, BLOCK)
    return file


def read_items(path, file, columns=()):
    """Yields (where, item): a place such as "line 7", and a dict or JSON as bytes.

    In a text file, an item is {"text": line, "is_line": True}. columns: as in choose_columns.
    Raises UserError.
    """
    check_encoding(path, file.peek())
    kind = kind_of(path)
    if kind in TABLES:
        yield from read_table(kind, file, columns)
    elif kind == ".json" and has_array(file):
        yield from read_array(file)
    elif kind in (".jsonl", ".json"):
        yield from read_json_lines(path, file, columns)
    elif kind in (".csv", ".tsv"):
        yield from read_csv(file, "," if kind == ".csv" else "\t", columns)
    else:
        for n, line in enumerate(open_text(file), start=1):
            yield f"line {n}", {"text": line, "is_line": True}


def parse_record(item):
    """Returns an item of read_items as a dict. Raises ValueError."""
    if isinstance(item, bytes):
        try:
            item = json.loads(item.decode("utf-8-sig"))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None
    if not isinstance(item, dict):
        raise ValueError(f"not an object with fields, but a {type(item).__name__}")
    return item


def read_records(paths, columns=()):
    """Yields the records of files, as dicts.

    The field `where` of a dict says where the record comes from, such as "a.jsonl, line 7". A file
    contains JSON lines, a JSON array, CSV, Parquet, Arrow, or lines of text. columns: as in
    read_items.
    """
    for path in map(Path, paths):
        with explaining(f"{path}: cannot be read", "check it", DAMAGE), open(path, "rb") as file:
            for where, item in read_items(path, decompress(path, file), columns):
                with explaining(f"{path}, {where}: is damaged", "correct it", ValueError):
                    record = parse_record(item)
                yield {**record, "where": f"{path}, {where}"}


def load_hub(dataset, name=None, split="train", patient=True):
    """Downloads a data set -> (its Arrow files in the cache, number of rows, revision).

    patient: whether to wait for minutes if the Hugging Face Hub does not answer. If False, waits
    only five seconds, then uses only the cache.
    """
    datasets = require("datasets")
    if not (patient or datasets.config.HF_HUB_OFFLINE):
        import requests

        try:
            requests.head(datasets.config.HF_ENDPOINT, timeout=5)
        except requests.RequestException:
            datasets.config.HF_HUB_OFFLINE = True  # this setting stays until the program ends
    # Network errors come from several libraries.
    with explaining(f"{dataset}: cannot be loaded", "check the name, the network and HF_ENDPOINT"):
        data = datasets.load_dataset(dataset, name, split=split)
    files = [Path(file["filename"]) for file in data.cache_files]
    return files, data.num_rows, files[0].parent.name if files else None


@dataclass
class Document:
    """A document, or a piece of a large document."""

    where: str  # where the document begins, such as "a.jsonl, line 7"
    text: str | None = None  # None if the document is damaged
    problem: str = ""  # why the document is damaged
    begins: bool = True  # False if this piece continues the previous piece
    done: int = 0  # number of bytes read from disk so far, over all files


def read_documents(paths, text_key="text", cut=False):
    """Yields the Documents of the files, in order.

    text_key: field or column that contains the text. cut: whether to yield large documents of a
    .txt file (above 4 MB) in pieces. With GPT-2's tokenizer, all pieces together have the
    same tokens as the whole document.
    """
    n_before = 0  # bytes of all files before `path`
    for path in paths:
        with explaining(f"{path}: cannot be read", "check it", DAMAGE), open(path, "rb") as file:
            for document in read_file(path, decompress(path, file), text_key, cut):
                yield replace(document, done=n_before + file.tell())
        n_before += path.stat().st_size


def read_file(path, file, text_key, cut):
    """Yields the Documents of an open file."""
    if kind_of(path) != ".txt":
        for where, item in read_items(path, file, [text_key]):
            yield make_document(f"{path}, {where}", item, text_key)
        return
    check_encoding(path, file.peek())
    begins = True
    for line, piece, is_last in split_text(file, cut):
        document = make_document(f"{path}, line {line}", {"text": piece}, "text", begins)
        yield document
        # If the first pieces of a document are damaged, the document begins after them.
        begins = is_last or (begins and document.text is None)


def split_text(file, cut=False):
    """Yields (number of the first line, bytes, whether a document ends here) of a .txt file.

    A file may begin or end with a separator, so white space before the first separator and after
    the last separator is not a document.
    """
    block = file.read(BLOCK).removeprefix(codecs.BOM_UTF8)
    if not block:
        return
    rest = b""  # the document whose end is not read yet
    line = 1  # the line where `rest` begins
    begins = True  # False if `rest` continues a cut document
    n_separators = 0
    while block:
        *documents, rest = (rest + block).split(SEPARATOR)
        for document in documents:
            if document.strip() or n_separators or not begins:
                yield line, document, True
            line += document.count(b"\n")
            begins = True
            n_separators += 1
        if cut and len(rest) > 4 * BLOCK and (piece := CUT.match(rest)):
            yield line, piece[0], False
            line += piece[0].count(b"\n")
            rest = rest[piece.end() :]
            begins = False
        # After each block, this loop scans the whole document again. Therefore, the next block of a
        # long document is larger.
        block = file.read(max(BLOCK, len(rest)))
    if rest.strip() or not n_separators or not begins:
        yield line, rest, True


def make_document(where, item, text_key, begins=True):
    """Turns an item of read_items into a Document, which has a problem if the item is damaged."""
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
