"""Reads the records of files: JSON lines, a JSON array, CSV, Parquet, Arrow, or lines of text.

Only a few megabytes are in memory, whatever the size of a file. But a JSON array, a line, a .csv
file, and a benchmark's text file are read whole.
"""

import codecs
import csv
import io
import json
from glob import glob
from pathlib import Path

from plaingpt.base.errors import UserError, explaining

BLOCK = 2**20  # so many bytes are read at a time
TABLES = (".parquet", ".arrow")
RECORDS = (".jsonl", ".json", ".csv", *TABLES)
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # the values are pyarrow's names
# The libraries that read files raise these if a file is damaged.
DAMAGE = (OSError, ValueError, RecursionError, NotImplementedError, csv.Error)


def find_files(patterns):
    """Files, globs, and directories of .arrow files -> list of paths. Raises UserError."""
    found = {}  # lists each file once
    for pattern in patterns:
        if Path(pattern).is_dir():
            pattern = f"{pattern}/*.arrow"
        for name in sorted(glob(pattern, recursive=True)) or [pattern]:
            path = Path(name)
            found[path.resolve()] = path
    paths = list(found.values())
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file; give files, a glob or a split's directory")
        if kind_of(path) not in (*RECORDS, ".txt"):
            raise UserError(f"{path}: unknown format; fineweb.py --help names those that it reads")
    return paths


def kind_of(path):
    """Returns the kind of a file, which its name tells: ".jsonl" for a.jsonl and a.JSONL.gz."""
    path = Path(path.name.lower())
    if path.suffix in COMPRESSIONS:
        path = Path(path.stem)
    return path.suffix


def decompress(path, file):
    """An open file of bytes -> a file with its uncompressed contents."""
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return file
    import pyarrow as pa

    stream = pa.CompressedInputStream(pa.PythonFile(file), COMPRESSIONS[suffix])
    return io.BufferedReader(stream, BLOCK)


def read_items(path, file, column=None):
    """Yields (where, item): a place such as "line 7", and a dict, or JSON as bytes.

    CSV begins with a line of names. In a file of an unknown kind, each line is {"text": line}.
    Empty lines of JSON are left out. column: as in read_table.
    """
    kind = kind_of(path)
    unit = "line"
    first = 1  # the number of the first item
    if kind in TABLES:
        items = read_table(kind, file, column)
        unit = "row"
    elif kind == ".json" and has_array(file):
        items = json.loads(file.read())
    elif kind in (".jsonl", ".json"):
        items = map(bytes.strip, file)
    elif kind == ".csv":
        items = list(csv.DictReader(open_text(file)))
        first = 2  # the line of names is line 1
    else:
        items = ({"text": line} for line in open_text(file))
    for n, item in enumerate(items, start=first):
        if item != b"":
            yield f"{unit} {n}", item


def has_array(file):
    """Returns whether a file of JSON is an array. Otherwise, it has JSON lines."""
    return file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def open_text(file):
    """An open file of bytes -> a file with its text, whose lines end with "\\n"."""
    return io.StringIO(file.read().decode("utf-8-sig").replace("\r\n", "\n"))


def read_table(kind, file, column):
    """Yields the rows of Parquet, or of an Arrow file of `datasets`, as dicts.

    column: if the table has a column of this name, the dicts have only this one. The file is not
    memory-mapped, because mapped pages would count as memory of the process.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == ".parquet":
        table = pq.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False)
        batches = table.iter_batches(256, use_threads=False)
    else:
        batches = pa.ipc.open_stream(file)
    for batch in batches:
        if column in batch.schema.names:
            batch = batch.select([column])
        yield from batch.to_pylist()


def parse_record(item):
    """An item of read_items -> a dict. Raises ValueError."""
    if isinstance(item, bytes):
        try:
            item = json.loads(item.decode("utf-8-sig"))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None
    if not isinstance(item, dict):
        raise ValueError(f"not an object with fields, but a {type(item).__name__}")
    return item


def read_records(paths):
    """Yields the records of files, as dicts. Their field `where` is the place. Raises UserError.

    A file has JSON lines, a JSON array, CSV, Parquet, Arrow, or lines of text.
    """
    for path in map(Path, paths):
        with explaining(f"{path}: cannot be read", "check it", DAMAGE), open(path, "rb") as file:
            for where, item in read_items(path, decompress(path, file)):
                with explaining(f"{path}, {where}: is damaged", "correct it", ValueError):
                    record = parse_record(item)
                yield {**record, "where": f"{path}, {where}"}
