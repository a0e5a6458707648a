"""Texts from files and from the Hugging Face hub, in blocks of about a megabyte.

Only a few blocks are in memory, whatever the size of a file; but a JSON array is read whole.
"""

import codecs
import csv
import io
import itertools
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
import zlib
from glob import glob
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plaingpt.cli import UserError, first_line
from plaingpt.megatron import find_index, read_index

BLOCK = 2**20  # bytes of text in a block, roughly
TABLES = (".parquet", ".arrow")
SEPARATOR = b"<|endoftext|>"  # between the documents of a .txt file
# A document of more than four blocks is cut at a place that is never inside a token. So the pieces
# have the tokens of the whole document. gpt2: before a space or line break that follows printable
# ASCII or a byte that ends no Unicode space. gpt4: after a line break that no space follows.
CUTS = dict(
    gpt2=re.compile(rb".*[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?=[ \n])", re.S),
    gpt4=re.compile(rb".*\n(?=.{3})(?!\s|[\x1c-\x1f]|\xc2[\x85\xa0]|\xe1\x9a\x80|"
                    rb"\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)", re.S))
LONG_SPACE = 500_000
RETRIES = 4  # of a download, after 1, 2, 4 and 8 seconds


class Block(NamedTuple):
    """Consecutive records of one file."""

    file: int  # index of the file
    number: int  # index of the block in its file
    done: int  # bytes on disk of all files up to the end of this block
    kind: str  # "lines" of JSON, "text", "table", or "ids" of Megatron's data
    line: int  # from 0: the first record's line, row, document, or index in a JSON array
    records: list  # their bytes; None for an empty row of a table; arrays of ids


def find_files(patterns):
    """Files and globs -> list of paths. Raises UserError for what cannot be read."""
    paths = []
    for pattern in patterns:
        paths += map(Path, sorted(glob(pattern, recursive=True)) or [pattern])
    paths = [path.with_suffix(".bin") if path.suffix == ".idx" else path for path in paths]
    for path in paths:
        if not (path.is_file() and os.access(path, os.R_OK)):
            raise UserError(f"{path}: no such file, or not readable; give files or a quoted glob")
        kind, compression = kind_of(path)
        known = kind in TABLES or find_index(path)
        if kind not in (".jsonl", ".json", ".txt") and (compression or not known):
            raise UserError(f"{path}: unknown format; give a .jsonl, .json or .txt file, also with "
                            ".gz or .zst, a .parquet file, or Megatron's .idx file")
    return paths


def kind_of(path):
    """A file's kind and compression, by its name: (".jsonl", "gzip")."""
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    compression = {".gz": "gzip", ".zst": "zstd"}.get(suffixes[-1])
    return suffixes[-2] if compression else suffixes[-1], compression


def checksum(path):
    """CRC-32 of the first and the last megabyte of a file."""
    with open(path, "rb") as file:
        first = file.read(2**20)
        file.seek(max(0, path.stat().st_size - 2**20))
        return zlib.crc32(file.read(2**20), zlib.crc32(first))


def load_hub(dataset, name=None, split="train", patient=True):
    """Downloads a data set -> (its Arrow files in the cache, number of rows, revision).

    A failed download is repeated, and continues where it stopped. If not patient, and the hub
    does not answer, only the cache is used. Raises UserError.
    """
    if not patient and os.environ.get("HF_HUB_OFFLINE", "0") == "0" and not hub_answers():
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
    import datasets
    import pyarrow as pa
    from huggingface_hub import constants

    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # datasets 3 could run code of a data set
    constants.DOWNLOAD_CHUNK_SIZE = BLOCK  # a chunk that is cut off is fetched again
    data = retry(dataset, datasets.load_dataset, dataset, name, split=split)
    files, n_rows = [Path(file["filename"]) for file in data.cache_files], data.num_rows
    del data  # unmaps its files
    pa.default_memory_pool().release_unused()
    return files, n_rows, files[0].parent.name if files else None


def retry(name, download, *args, **kwargs):
    """Calls download(...), and again after an error of the network. Raises UserError.

    name: of the data set or model, for messages.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import RepositoryNotFoundError

    for attempt in itertools.count():
        try:
            return download(*args, **kwargs)
        except Exception as error:  # network errors come from several libraries
            reason = f"{name}: {first_line(error.__cause__ or error)}"
            lasting = (ValueError, FileNotFoundError, RepositoryNotFoundError)
            final = isinstance(error, lasting) or constants.HF_HUB_OFFLINE
            if final or attempt == RETRIES:
                raise UserError(f"{reason}; check the name, or set HF_ENDPOINT to a "
                                "mirror") from error
            print(f"{reason}; trying again in {2**attempt} s", file=sys.stderr)
            time.sleep(2**attempt)


def hub_answers():
    """Whether the hub, or its mirror, gives any answer in five seconds."""
    try:
        url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        urllib.request.urlopen(url, timeout=5).close()
    except (OSError, ValueError) as error:
        return isinstance(error, urllib.error.HTTPError)
    return True


def read_records(path):
    """Yields (where, record): a place such as "line 7", and a dict. Raises UserError.

    JSON lines, CSV with a line of names, Parquet, Arrow. In other files a line is {"text": line}.
    """
    path, n = Path(path), 0
    unit = "row" if kind_of(path)[0] in TABLES else "line"
    try:
        for n, record in enumerate(parse_file(path), start=1):
            if record is not None:
                yield f"{unit} {n}", record
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or first_line(error)}); "
                        "give a .jsonl, .csv, .parquet or text file") from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}, {unit} {n + 1}: {explain(error)}; correct the file") from error


def parse_file(path):
    """Yields a dict for each line or row, None for a line without a record."""
    kind = kind_of(path)[0]
    if kind in TABLES:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file, parquet = pa.OSFile(str(path)), kind == ".parquet"
        batches = pq.ParquetFile(file).iter_batches() if parquet else pa.ipc.open_stream(file)
        yield from (row for batch in batches for row in batch.to_pylist())
        return
    with open(path, "rb") as file:
        lines = (line.decode("utf-8-sig") for line in file)
        if kind == ".csv":
            names = next(csv.reader(lines), [])
            yield None
            yield from csv.DictReader(lines, names)
        elif kind in (".jsonl", ".json"):
            yield from (parse_json(line) if line.strip() else None for line in lines)
        else:
            yield from ({"text": line.replace("\r\n", "\n")} for line in lines)


def parse_json(line):
    """A JSON object -> dict. Raises ValueError."""
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"not an object with fields, but a {type(record).__name__}")
    return record


def explain(error):
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else first_line(error)


def read_blocks(paths, text_key, file=0, number=0, cut="gpt2"):
    """Yields all blocks in order, from block `number` of paths[file] on. Raises UserError.

    cut: a key of CUTS. With another value documents stay whole, however large they are.
    """
    starts = [0, *itertools.accumulate(path.stat().st_size for path in paths)]
    for i in range(file, len(paths)):
        if kind_of(paths[i])[0] in TABLES:
            blocks = table_blocks(paths[i], text_key)
        elif find_index(paths[i]):
            blocks = id_blocks(paths[i])
        else:
            blocks = line_blocks(paths[i], cut)
        try:
            for n, (done, *block) in enumerate(blocks):
                if i > file or n >= number:
                    yield Block(i, n, starts[i] + done, *block)
        except (OSError, ValueError, EOFError, RecursionError, NotImplementedError) as error:
            raise UserError(f"{paths[i]}: cannot be read ({first_line(error)}); "
                            "repair it, or choose another file or --text_key") from error


def line_blocks(path, cut):
    """Yields blocks of a text or JSON file: lines, documents, or pieces of a large document."""
    import pyarrow as pa  # it can decompress .gz and .zst

    kind, compression = kind_of(path)
    unit, separator = ("text", SEPARATOR) if kind == ".txt" else ("lines", b"\n")
    with open(path, "rb") as raw:
        stream = pa.CompressedInputStream(pa.PythonFile(raw), compression) if compression else raw
        read, line = stream.read, 0
        rest = read(BLOCK).removeprefix(codecs.BOM_UTF8)
        if kind == ".json" and rest.lstrip().startswith(b"["):
            records = json.loads(rest + read())
            rest, read = b"", io.BytesIO("\n".join(map(json.dumps, records)).encode()).read
        elif kind == ".txt" and rest:
            rest = SEPARATOR + rest
        more = True
        while more:
            more = read(BLOCK)
            rest += more
            end = find_end(rest, kind, cut) if more else len(rest)
            if end:
                block, rest = rest[:end], rest[end:]
                yield raw.tell(), unit, line, block.split(separator)
                line += block.count(b"\n")


def find_end(data, kind, cut):
    """Where a block may end: after a line, before a separator, inside of a large document."""
    if kind != ".txt":
        return data.rfind(b"\n") + 1
    end = data.rfind(SEPARATOR)
    if end <= 0 and len(data) > 4 * BLOCK and cut in CUTS and (piece := CUTS[cut].match(data)):
        return piece.end()
    return max(0, end)


def table_blocks(path, text_key):
    """Yields blocks of a Parquet file, or of an Arrow file of `datasets`: rows of one column.

    The file is not memory-mapped: mapped pages would count as memory of the process.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.OSFile(str(path)) as raw:
        n_rows = None
        if kind_of(path)[0] == ".parquet":
            table = pq.ParquetFile(raw, buffer_size=BLOCK, pre_buffer=False)
            schema, n_rows = table.schema_arrow, table.metadata.num_rows
            batches = table.iter_batches(256, columns=[text_key], use_threads=False)
        else:
            batches = pa.ipc.open_stream(raw)
            schema = batches.schema
        if schema.names.count(text_key) != 1:
            raise ValueError(f"not exactly one column {text_key!r}, but {', '.join(schema.names)}")
        row = 0
        for batch in batches:
            column = batch.column(text_key)
            values = column.cast(pa.large_binary()).to_pylist()
            done = raw.size() * (row + len(values)) // n_rows if n_rows else raw.tell()
            step = max(1, len(values) * BLOCK // max(1, column.nbytes))
            for start in range(0, len(values), step):
                yield done, "table", row + start, values[start : start + step]
            row += len(values)


def id_blocks(path):
    """Yields blocks of Megatron's X.bin: the ids of whole documents."""
    dtype, starts = read_index(find_index(path))
    first = 0
    with open(path, "rb") as file:
        while first < len(starts) - 1:
            last = int(np.searchsorted(starts, starts[first] + BLOCK // 4, "right")) - 1
            last = max(last, first + 1)
            ids = np.fromfile(file, dtype, starts[last] - starts[first])
            documents = np.split(ids, starts[first + 1 : last] - starts[first])
            yield file.tell(), "ids", first, documents
            first = last


def texts_of(block, text_key):
    """The texts of a block, and [(line of the file, reason)] of its damaged records.

    The first text of a block of kind "text" continues the last document before it; it may be "".
    """
    texts, skipped = [], []
    for i, data in enumerate(block.records if block.kind != "ids" else ()):
        if block.kind == "lines" and not data.strip():
            continue
        try:
            texts.append(text_of(data, block.kind, text_key))
        except ValueError as error:
            if block.kind == "text":
                if i == 0 or len(data) > BLOCK:
                    texts.append("")  # skips only this piece of a large document
                before = [*block.records[:i], data[: getattr(error, "start", 0)]]
                i = sum(document.count(b"\n") for document in before)
            skipped.append((block.line + i + 1, explain(error)))
    return texts, skipped


def check_spaces(text):
    """Raises ValueError for so many spaces that tiktoken's regex would overflow its stack."""
    if len(text) >= LONG_SPACE and re.search(rf"\s{{{LONG_SPACE}}}", text):
        raise ValueError(f"{LONG_SPACE:,} or more white spaces in a row")


def text_of(data, kind, text_key):
    """The text of a record. Raises ValueError with the reason if it has none."""
    if data is None:
        raise ValueError("no text (null)")
    text = data.decode()
    if kind == "lines":
        record = parse_json(text)
        if text_key not in record:
            raise ValueError(f"no key {text_key!r}, but {', '.join(record) or 'none at all'}")
        text = record[text_key]
        if not isinstance(text, str):
            raise ValueError(f"{text_key!r} is not a string, but a {type(text).__name__}")
        if b"\\u" in data:  # half a surrogate pair becomes U+FFFD, as in tiktoken
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    check_spaces(text)
    return text
