"""Parses files of records: JSON lines, a JSON array, CSV, Parquet, and Arrow.

Each function yields (where, item). `where` is a place such as "line 7". An item is a dict, JSON as
bytes, or the ValueError of a damaged record.
"""

import codecs
import csv
import io
import json
import re

from plaingpt.base.errors import UserError

BLOCK = 2**20  # so many bytes are read at a time
TABLES = (".parquet", ".arrow")
ARRAY_OF_OBJECTS = re.compile(rb"\[\s*(\{|$)")  # the start of such an array
BEFORE_ITEM = re.compile(r"[\s,]*")  # in an array
OBJECT_OF_SEVERAL_LINES = re.compile(rb"\{(.*[,{\[])?$")  # its first line
MOST_CHARACTERS = 2**31 - 1  # the largest limit that Windows takes


def has_array(file):
    """Returns whether a file of JSON is an array. Otherwise, it has JSON lines."""
    return file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def check_encoding(name, start):
    """Raises UserError if a file is UTF-16, as some programs of Windows write it.

    name: what the message calls the file. start: its first bytes, or more.
    """
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{name}: is UTF-16; convert it to UTF-8")


def open_text(file):
    """An open file of bytes -> a file with its text, whose lines end with "\\n"."""
    return io.StringIO(file.read().decode("utf-8-sig").replace("\r\n", "\n"))


def read_json_lines(path, file, columns):
    """Yields (where, JSON as bytes) for each line that is not empty. Raises UserError.

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
    """Raises UserError if a file of JSON does not have one record a line.

    line: the first one. is_only: whether it is the only one. columns: names of fields of a record.
    """
    if ARRAY_OF_OBJECTS.match(line):
        raise UserError(f"{path}: has a JSON array, not an object a line; name it .json")
    if OBJECT_OF_SEVERAL_LINES.match(line):
        raise UserError(f"{path}: has JSON objects of several lines; write each in one line")
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
                f"{path}: is one object, whose field {name!r} has the records; write only this list"
            )


def read_array(file):
    """Yields (where, item) of a file that is a JSON array. Raises ValueError."""
    text = file.read().decode("utf-8-sig")
    items = json.loads(text)
    decoder = json.JSONDecoder()
    place = text.index("[") + 1  # after the item before
    line = 1 + text.count("\n", 0, place)  # of this place
    for n, item in enumerate(items, start=1):
        start = BEFORE_ITEM.match(text, place).end()
        line += text.count("\n", place, start)
        yield f"line {line}, item {n}", item
        _, place = decoder.raw_decode(text, start)
        line += text.count("\n", start, place)


def read_csv(file):
    """Yields (where, dict or ValueError) of CSV, which begins with a line of names."""
    names = None
    for line, row in read_rows(open_text(file)):
        if isinstance(row, ValueError):
            if names is None:
                raise row
            yield f"line {line}", row
        elif names is None:
            names = row or None  # lines without a field are left out
            check_names(row)
        elif row:
            yield f"line {line}", make_record(names, row)


def check_names(names):
    """Raises ValueError if two columns have one name, because a record would have only the last."""
    for name in names:
        if name and names.count(name) > 1:
            raise ValueError(f"two columns are named {name!r}")


def read_rows(text):
    """Yields (number of its first line, list of fields) for each row of CSV, a file of text.

    Instead of the list, a row with a quote at a wrong place has a ValueError. An open quote would
    take all lines up to the next quote. So the next row begins in the line after the first one.
    """
    csv.field_size_limit(MOST_CHARACTERS)
    reader = csv.reader(text, strict=True)
    line = 1  # where the next row begins
    while True:
        start = text.tell()
        n_before = reader.line_num
        try:
            row = next(reader, None)
            n_lines = reader.line_num - n_before
        except csv.Error as error:
            row = ValueError(f"not CSV ({error})")
            text.seek(start)
            text.readline()
            n_lines = 1
        if row is None:
            return
        yield line, row
        line += n_lines


def make_record(names, row):
    """Returns the fields of a row as a dict, or a ValueError if some of them have no name."""
    if any(row[len(names) :]):
        return ValueError(f"{len(row)} fields for {len(names)} names; quote a text with commas")
    return dict(zip(names, row))


def read_table(kind, file, columns):
    """Yields (where, dict) for the rows of Parquet, or of an Arrow file of `datasets`.

    columns: if the table has all columns of these names, only they are decoded. The file is not
    memory-mapped, because mapped pages would count as memory of the process.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == ".parquet":
        table = pq.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False)
        chosen = choose_columns(table.schema_arrow, columns)
        batches = table.iter_batches(256, columns=chosen, use_threads=False)
    else:
        batches = pa.ipc.open_stream(file)
        chosen = choose_columns(batches.schema, columns)
    n = 0
    for batch in batches:
        for item in batch.select(chosen).to_pylist():
            n += 1
            yield f"row {n}", item


def choose_columns(schema, columns):
    """Returns the names of the columns to decode, see read_table."""
    has_all = columns and set(columns) <= set(schema.names)
    return list(columns) if has_all else schema.names
