"""Reads texts from files and from the Hugging Face hub, as a stream of records or documents.

Only a few megabytes are in memory, whatever the size of a file. But a JSON array, a line, a
document that may not be cut, a .csv file, and a benchmark's text file are read whole.
"""

import codecs
import csv
import io
import json
import re
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from plaingpt.cli import UserError, explaining, first_line

BLOCK = 2**20  # so many bytes are read at a time
TABLES = (".parquet", ".arrow")
SEPARATOR = b"<|endoftext|>"  # is between the documents of a .txt file
# Matches bytes up to the last place that is surely not inside a token of GPT-2. The place is before
# a space or line break. The byte before it is printable ASCII, or it ends no Unicode space.
CUT = re.compile(rb".*[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?=[ \n])", re.S)
LONG_SPACE = 500_000
# The libraries that read files raise these if a file is damaged.
DAMAGE = (OSError, ValueError, RecursionError, NotImplementedError, csv.Error)


@dataclass
class Document:
    """A document, or a piece of a large one."""

    where: str  # where it begins, such as "a.jsonl, line 7"
    text: str | None = None  # None if it is damaged
    problem: str = ""  # why it is damaged
    begins: bool = True  # False if this piece continues the one before it
    done: int = 0  # bytes on disk that were read so far, of all files


def find_files(patterns):
    """Files, globs, and directories of .arrow files -> list of paths. Raises UserError."""
    paths = []
    for pattern in patterns:
        if Path(pattern).is_dir():
            pattern = f"{pattern}/*.arrow"
        paths += map(Path, sorted(glob(pattern, recursive=True)) or [pattern])
    paths = [*{path.resolve(): path for path in paths}.values()]  # lists each file once
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file; give files, a glob or a split's directory")
        if kind_of(path)[0] not in (".jsonl", ".json", ".csv", ".txt", *TABLES):
            raise UserError(f"{path}: unknown format; fineweb.py --help names those that it reads")
    return paths


def kind_of(path):
    """Returns a file's kind and compression, which its name tells: (".jsonl", "gzip")."""
    path = Path(path.name.lower())
    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    return Path(path.stem).suffix if compression else path.suffix, compression


def load_hub(dataset, name=None, split="train", patient=True):
    """Downloads a data set -> (its Arrow files in the cache, number of rows, revision).

    patient: if False, and the hub does not answer in five seconds, only the cache is used.
    `datasets` itself would wait for minutes. Raises UserError.
    """
    import datasets
    import requests  # `datasets` needs this package, too

    if not (patient or datasets.config.HF_HUB_OFFLINE):
        try:
            requests.head(datasets.config.HF_ENDPOINT, timeout=5)
        except requests.RequestException:
            datasets.config.HF_HUB_OFFLINE = True  # stays so until this program ends
    # Network errors come from several libraries.
    with explaining(f"{dataset}: cannot be loaded", "check name, network, HF_ENDPOINT"):
        data = datasets.load_dataset(dataset, name, split=split)
    files = [Path(file["filename"]) for file in data.cache_files]
    return files, data.num_rows, files[0].parent.name if files else None


def read_items(path, file, column=None):
    """Yields (where, item): a place such as "line 7", and a dict, or JSON as bytes.

    CSV begins with a line of names. In a file of an unknown kind, each line is {"text": line}.
    Empty lines of JSON are left out. column: as in read_table.
    """
    kind, unit = kind_of(path)[0], "line"
    if kind in TABLES:
        items, unit = read_table(kind, file, column), "row"
    elif kind == ".json" and file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        items = json.loads(file.read())
    elif kind in (".jsonl", ".json"):
        items = map(bytes.strip, file)
    else:
        lines = io.StringIO(file.read().decode("utf-8-sig").replace("\r\n", "\n"))
        items = ({"text": line} for line in lines)
        if kind == ".csv":
            items = [b"", *csv.DictReader(lines)]  # b"" stands for the line of names
    for n, item in enumerate(items, start=1):
        if item != b"":
            yield f"{unit} {n}", item


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
        yield from (batch.select([column]) if column in batch.schema.names else batch).to_pylist()


def decompress(path, file):
    """An open file of bytes -> a file with its uncompressed contents."""
    compression = kind_of(path)[1]
    if not compression:
        return file
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file), compression), BLOCK)


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


def read_documents(paths, text_key="text", cut=False):
    """Yields the Documents of the files, in order. Raises UserError.

    text_key: field or column that holds the text. cut: whether to yield a document above 4 MB of a
    .txt file in pieces. Joined, the GPT-2 tokens of the pieces are those of the whole document.
    """
    n_before = 0  # bytes of the files before this one
    for path in paths:
        with explaining(f"{path}: cannot be read", "check it", DAMAGE), open(path, "rb") as file:
            for document in read_file(path, decompress(path, file), text_key, cut):
                document.done = n_before + file.tell()
                yield document
        n_before += path.stat().st_size


def read_file(path, file, text_key, cut):
    """Yields the Documents of an open file."""
    if kind_of(path)[0] == ".txt":
        n, begins = 1, True
        for data, ends in split_text(file, cut):
            document = make_document(f"{path}, line {n}", dict(text=data), "text")
            document.begins = begins
            yield document
            n += data.count(b"\n")
            begins = ends or (begins and document.text is None)
    else:
        for where, item in read_items(path, file, text_key):
            yield make_document(f"{path}, {where}", item, text_key)


def split_text(file, cut):
    """Yields (bytes, whether a document ends here) of a .txt file."""
    data, rest = file.read(BLOCK).removeprefix(codecs.BOM_UTF8), b""
    if not data:
        return
    while data:
        *documents, rest = (rest + data).split(SEPARATOR)
        yield from ((document, True) for document in documents)
        if cut and len(rest) > 4 * BLOCK and (piece := CUT.match(rest)):
            yield piece[0], False
            rest = rest[piece.end() :]
        # The longer a document that cannot be cut, the larger the next block: after each block,
        # the document is scanned again.
        data = file.read(max(BLOCK, len(rest)))
    yield rest, True


def make_document(where, item, text_key):
    """An item of read_items -> Document, with its text or the problem of a damaged record."""
    try:
        return Document(where, find_text(parse_record(item), text_key))
    except (ValueError, UserError) as error:
        return Document(where, problem=first_line(error))


def find_text(record, text_key):
    """Returns the text of a record, a dict. Raises ValueError if it has none, or UserError."""
    if text_key not in record:
        raise ValueError(f"no key {text_key!r}, but {', '.join(record) or 'none at all'}")
    text = record[text_key]
    if isinstance(text, bytes):  # from a .txt file, or from a column of bytes
        text = text.decode()
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} is not a string, but a {type(text).__name__}")
    return clean_text(text)


def clean_text(text):
    """Replaces each half of a surrogate pair with U+FFFD, as tiktoken does -> text.

    Raises UserError if a row of spaces would overflow the stack of tiktoken's regex.
    """
    # With (?<!\s), a match begins only at the first space of a row. Otherwise, the search would
    # take quadratic time.
    if len(text) >= LONG_SPACE and re.search(rf"(?<!\s)\s{{{LONG_SPACE}}}", text):
        raise UserError(f"{LONG_SPACE:,} or more white spaces in a row; remove some of them")
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
