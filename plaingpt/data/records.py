"""Reads the records of files: JSON lines, a JSON array, CSV, Parquet, Arrow, or lines of text.

Only a few megabytes are in memory, whatever the size of a file. But a JSON array, a line, a .csv
file, and a benchmark's text file are read whole.
"""

import gzip
import io
import json
import zlib
from glob import glob
from pathlib import Path

from plaingpt.base.errors import UserError, explaining
from plaingpt.base.files import read_json, reading
from plaingpt.data.parsers import (
    BLOCK,
    TABLES,
    check_encoding,
    has_array,
    open_text,
    read_array,
    read_csv,
    read_json_lines,
    read_table,
)

RECORDS = (".jsonl", ".json", ".csv", *TABLES)
COMPRESSIONS = (".gz", ".zst")
# The libraries that read files raise these if a file is damaged.
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


def find_files(patterns):
    """Files, globs, and directories of .arrow files -> list of paths. Raises UserError.

    An existing path is no glob, even if it has a "[" or "*" in its name.
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
            raise UserError(f"{path}: no such file; give files, a glob or a split's directory")
        if kind_of(path) not in (*RECORDS, ".txt"):
            raise UserError(f"{path}: unknown format; fineweb.py --help names those that it reads")
    return paths


def find_arrow(directory):
    """Returns the paths of the .arrow files of a data set on disk. Raises UserError.

    After map, filter, sort or shuffle, `datasets` keeps files beside the data: cache-*.arrow.
    save_to_disk writes a state.json, which names the files of the data.
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
    """Returns the kind of a file, which its name tells: ".jsonl" for a.jsonl and a.JSONL.gz."""
    path = Path(path.name.lower())
    if path.suffix in COMPRESSIONS:
        path = Path(path.stem)
    return path.suffix


def decompress(path, file):
    """An open file of bytes -> a file with its uncompressed contents."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK)
    if suffix == ".zst":
        import pyarrow as pa

        stream = pa.CompressedInputStream(pa.PythonFile(file), "zstd")
        return io.BufferedReader(stream, BLOCK)
    return file


def read_items(path, file, columns=()):
    """Yields (where, item): a place such as "line 7", and a dict, JSON as bytes, or a ValueError.

    In a file of an unknown kind, each line is {"text": line}. columns: names of the fields that the
    caller needs; tables decode no other columns. Raises UserError.
    """
    check_encoding(path, file.peek())
    kind = kind_of(path)
    if kind in TABLES:
        yield from read_table(kind, file, columns)
    elif kind == ".json" and has_array(file):
        yield from read_array(file)
    elif kind in (".jsonl", ".json"):
        yield from read_json_lines(path, file, columns)
    elif kind == ".csv":
        yield from read_csv(file)
    else:
        for n, line in enumerate(open_text(file), start=1):
            yield f"line {n}", {"text": line}


def parse_record(item):
    """An item of read_items -> a dict. Raises ValueError."""
    if isinstance(item, ValueError):
        raise item
    if isinstance(item, bytes):
        try:
            item = json.loads(item.decode("utf-8-sig"))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None
    if not isinstance(item, dict):
        raise ValueError(f"not an object with fields, but a {type(item).__name__}")
    return item


def read_records(paths, columns=()):
    """Yields the records of files, as dicts. Their field `where` is the place. Raises UserError.

    A file has JSON lines, a JSON array, CSV, Parquet, Arrow, or lines of text. columns: as in
    read_items.
    """
    for path in map(Path, paths):
        with explaining(f"{path}: cannot be read", "check it", DAMAGE), open(path, "rb") as file:
            for where, item in read_items(path, decompress(path, file), columns):
                with explaining(f"{path}, {where}: is damaged", "correct it", ValueError):
                    record = parse_record(item)
                yield {**record, "where": f"{path}, {where}"}
