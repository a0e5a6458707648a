"""Where text comes from: files, and data sets of the Hugging Face hub; in blocks of about a megabyte, for workers to take.

Whatever the size of a file, a few blocks of it are in memory. A record that cannot be used does not stop the rest.
"""

# Read next: evaluation.py, how models are scored.

import codecs
import csv
import functools
import itertools
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import NamedTuple

from plaingpt.cli import UserError, first_line

BLOCK = 2**20  # bytes of text in a block, more or less
TEXTS, TABLES = (".jsonl", ".json", ".txt"), (".parquet", ".arrow")  # kinds of file; texts may be compressed
SEPARATOR = b"<|endoftext|>"  # of the documents in a .txt file
# Where a document of more than four blocks is cut. GPT-2's tokens never run on from other characters into white space, so
# that the pieces give the tokens of the whole. The class: printable ASCII, and bytes that do not end any Unicode space.
CUT = re.compile(rb".*[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?=[ \n])", re.S)
LONG_SPACE = 500_000  # white spaces in a row; at a million tiktoken's regular expression runs out of stack
RETRIES = 4  # of a download, after 1, 2, 4, … seconds


class Block(NamedTuple):
    """A run of records of one file."""
    file: int  # the file's place in the list
    number: int  # the block's place in the file
    line: int  # of the first record, from 0: a line, a row of a table, an element of a JSON array
    done: int  # bytes of the file, as it lies on disk, that are used up at the block's end
    parse: Callable  # (data, text_key) -> pairs of a line in the block and its text, or a ValueError with what is wrong
    data: bytes


def find_files(patterns):
    """Files and globs -> list of paths. Raises UserError for what is not there, or not of a known kind, or not to be read."""
    paths = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
        if not found:
            raise UserError(f"{pattern}: no such file; give one, or a quoted glob such as 'texts/*.jsonl'")
        paths += map(Path, found)
    for path in paths:
        if path.is_dir():
            raise UserError(f"{path}: a directory; give the files in it, such as '{path}/*.jsonl'")
        kind, compression = kind_of(path)
        if kind not in TEXTS and (compression or kind not in TABLES):
            raise UserError(f"{path}: not a .jsonl, .json or .txt file, these also with .gz or .zst, nor a .parquet file")
        if not path.is_file() or not os.access(path, os.R_OK):
            raise UserError(f"{path}: not a file that can be read; give another, or the right to read it")
    return paths


def kind_of(path):
    """A file's kind and compression, by its name: (".jsonl", "gzip")."""
    suffixes = ["", *(s.lower() for s in path.suffixes)]
    compression = {".gz": "gzip", ".zst": "zstd"}.get(suffixes[-1])
    return (suffixes[-2] if compression else suffixes[-1]), compression


def load_hub(dataset, name=None, split="train", patient=True):
    """Downloads a data set -> (its Arrow files in the cache of `datasets`, its number of rows, its revision).

    A cut download goes on where it stopped, a failed one is tried again with back-off, and whole files stay in the cache;
    if not patient, a hub that does not answer is given up at once, and the cache is asked. HF_ENDPOINT, HF_TOKEN, HF_HOME
    and HF_HUB_OFFLINE are the library's own. Raises UserError.
    """
    silent = not patient and hub_is_silent()
    if silent:
        os.environ["HF_HUB_OFFLINE"] = "1"  # from here on the cache alone is asked; read when the library is imported
    import datasets
    import pyarrow as pa
    from huggingface_hub import constants

    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # datasets 3 would run a data set's own script, if asked to
    constants.DOWNLOAD_CHUNK_SIZE = BLOCK  # a chunk cut short is fetched again: let it be one megabyte, not ten
    for attempt in range(RETRIES + 1):
        try:
            data = datasets.load_dataset(dataset, name, split=split)
            break
        except Exception as error:  # the network's come from several libraries, under many names
            reason = f"{dataset}: {first_line(error.__cause__ or error)}"
            if silent:
                reason = f"{dataset}: the hub does not answer, and the cache holds no copy"
            if isinstance(error, (ValueError, FileNotFoundError)) or constants.HF_HUB_OFFLINE or attempt == RETRIES:
                raise UserError(f"{reason}; HF_ENDPOINT may name a mirror of the hub") from error
            print(f"{reason}; trying again in {2**attempt} s", file=sys.stderr)
            time.sleep(2**attempt)
    files, rows = [Path(f["filename"]) for f in data.cache_files], data.num_rows
    del data  # and with it the maps of its files
    pa.default_memory_pool().release_unused()  # what the library took to make Arrow files of others
    return files, rows, files[0].parent.name if files else None


@functools.cache
def hub_is_silent():
    """Whether the hub, or its mirror, says nothing within five seconds. It is asked once, and not if HF_HUB_OFFLINE is set."""
    if os.environ.get("HF_HUB_OFFLINE", "0") != "0":
        return False
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close()
    except urllib.error.HTTPError:
        pass  # an answer
    except (OSError, ValueError):
        return True
    return False


def read_records(path):
    """Every record of a file as a dict, and where it stands, such as "line 7". Raises UserError for what is no record.

    JSON lines, CSV with a line of names, Parquet, the Arrow files of `datasets`; of any other file each line is the "text".
    """
    path, where = Path(path), "start"
    kind = kind_of(path)[0]

    def lines(file):
        nonlocal where
        for n, line in enumerate(file, start=1):
            where = f"line {n}"
            yield line.decode("utf-8-sig")

    try:
        if kind in TABLES:
            import pyarrow as pa
            import pyarrow.parquet as pq

            file = pa.OSFile(str(path))
            batches = pq.ParquetFile(file).iter_batches() if kind == ".parquet" else pa.ipc.open_stream(file)
            for n, record in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield (where := f"row {n}"), record
            return
        with open(path, "rb") as file:
            if kind == ".csv":
                for record in csv.DictReader(lines(file)):
                    yield where, record
            elif kind in (".jsonl", ".json"):
                for line in filter(str.strip, lines(file)):
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError(f"not an object with fields, but a {type(record).__name__}")
                    yield where, record
            else:
                yield from ((where, {"text": line}) for line in lines(file))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, {where}: not JSON ({error.msg} at column {error.colno}); mend it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, {where}: not UTF-8; mend it") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or first_line(error)}); give a .jsonl, .csv, .parquet or "
                        "text file") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise UserError(f"{path}, {where}: {first_line(error)}; mend or fetch it again") from error


def read_blocks(paths, text_key, file=0, number=0):
    """All blocks of the files, in order, from block `number` of a file on. Raises UserError for a file that cannot be read."""
    for i in range(file, len(paths)):
        read = table_blocks if kind_of(paths[i])[0] in TABLES else line_blocks
        try:
            for n, block in enumerate(read(paths[i], text_key)):
                if i > file or n >= number:
                    yield Block(i, n, *block)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{paths[i]}: cannot be read ({first_line(error)}); fetch or make it again") from error


def texts_of(block, text_key):
    """A block -> its texts, and [(line of the file, from 1; what is wrong with it)] of the records that are skipped."""
    texts, skipped = [], []
    for n, text in block.parse(block.data, text_key):
        if isinstance(text, str) and len(text) >= LONG_SPACE and re.search(rf"\s{{{LONG_SPACE}}}", text):
            text = ValueError(f"more than {LONG_SPACE:,} white spaces in a row")
        if isinstance(text, str):
            texts.append(text)
        else:
            skipped.append((block.line + n + 1, str(text)))
    return texts, skipped


# --- JSON and plain text --------------------------------------------------------------------------------------------------

def line_blocks(path, text_key):
    """A text file, or a file of JSON records: whole lines, whole documents, or a piece of a very large document."""
    import pyarrow as pa  # which has both decompressors

    kind, compression = kind_of(path)
    with open(path, "rb") as raw:
        stream = pa.CompressedInputStream(pa.PythonFile(raw), compression) if compression else raw
        if not (first := stream.read(BLOCK).removeprefix(codecs.BOM_UTF8)):
            return
        chunks = itertools.chain([first], iter(lambda: stream.read(BLOCK), b""))
        find_end, parse = end_of_lines, parse_lines
        if kind == ".txt":
            chunks, find_end, parse = itertools.chain([SEPARATOR], chunks), end_of_documents, parse_text
        elif kind == ".json" and first.lstrip().startswith(b"["):
            chunks = array_lines(chunks)
        line, rest = 0, b""
        for chunk in itertools.chain(chunks, [None]):
            rest += chunk or b""
            end = len(rest) if chunk is None else find_end(rest)
            if end:
                yield line, raw.tell(), parse, rest[:end]
                line, rest = line + rest.count(b"\n", 0, end), rest[end:]


def end_of_lines(data):
    return data.rfind(b"\n") + 1


def end_of_documents(data):
    """Before the last separator; in a document of more than four blocks, before white space."""
    end = data.rfind(SEPARATOR)
    if end <= 0 and len(data) > 4 * BLOCK and (cut := CUT.match(data)):
        return cut.end()
    return max(0, end)


def array_lines(chunks):
    """A JSON array in chunks of bytes -> chunks of JSON lines, without ever holding the whole of it."""
    decoder, find_value = codecs.getincrementaldecoder("utf-8")("surrogateescape"), json.JSONDecoder().raw_decode
    text, between, after = "", re.compile(r"\s*\[\s*"), re.compile(r"\s*[],]")
    for chunk in chunks:
        text, at, lines = text + decoder.decode(chunk), 0, []
        while start := between.match(text, at):
            try:
                _, end = find_value(text, start.end())
            except (ValueError, RecursionError):  # it goes on in the next chunk
                break
            if not after.match(text, end):  # so may a number
                break
            lines.append(text[start.end():end].replace("\n", " ") + "\n")  # a line break is never inside a string
            at, between = end, re.compile(r"\s*,\s*")
        text = text[at:]
        yield "".join(lines).encode("utf-8", "surrogateescape")
    if not re.fullmatch(r"\s*(\[\s*)?\]\s*", text):
        raise ValueError("its JSON array is damaged or breaks off at " + repr(text.strip()[:40]))


def parse_lines(data, text_key):
    for n, line in enumerate(data.split(b"\n")):
        if line.strip():
            try:
                yield n, text_of(line, text_key)
            except ValueError as error:
                yield n, error


def text_of(line, text_key):
    """The text in a JSON record. Raises ValueError with what is wrong."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(record, dict):
        raise ValueError(f"not an object with fields, but a {type(record).__name__}")
    if text_key not in record:
        raise ValueError(f"no key {text_key!r}, but {first_line(', '.join(record) or 'none at all')} (--text_key)")
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} is not a string, but a {type(text).__name__}")
    if b"\\u" in line:  # half a surrogate pair is no text: U+FFFD, as in tiktoken
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def parse_text(data, text_key):
    """Documents, each led by the separator. What stands before the first, maybe nothing, goes on with the last one."""
    line = 0
    for i, piece in enumerate(data.split(SEPARATOR)):
        try:
            yield line, piece.decode()
        except UnicodeDecodeError as error:
            yield line + piece.count(b"\n", 0, error.start), ValueError("not UTF-8")
            if i == 0 or len(piece) > BLOCK:  # of a large document, this piece alone is skipped
                yield line, ""
        line += piece.count(b"\n")


# --- tables ---------------------------------------------------------------------------------------------------------------

def table_blocks(path, text_key):
    """A Parquet file, or an Arrow file as `datasets` keeps them: rows of one column, as an Arrow stream of its own.

    Read, not mapped: the pages of a map count as the process's memory, and grow with the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.OSFile(str(path)) as raw:
        size = raw.size()
        if kind_of(path)[0] == ".parquet":
            table = pq.ParquetFile(raw, buffer_size=BLOCK, pre_buffer=False)
            check_column(path, table.schema_arrow, text_key)
            n_rows = table.metadata.num_rows
            n_bytes = sum(table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups))
            batch_size = max(1, min(1024, n_rows * BLOCK // max(1, n_bytes)))
            batches = table.iter_batches(batch_size, columns=[text_key], use_threads=False)
            positions = (size * min(n_rows, n) // n_rows for n in itertools.count(batch_size, batch_size))
        else:
            batches = pa.ipc.open_stream(raw)
            check_column(path, batches.schema, text_key)
            positions = iter(raw.tell, None)
        row = done = 0
        for batch, position in zip(batches, positions):
            column = batch.column(text_key)
            step = max(1, len(column) * BLOCK // max(1, column.nbytes))
            for start in range(0, len(column), step):
                sink, part = pa.BufferOutputStream(), pa.record_batch([column.slice(start, step)], ["text"])
                with pa.ipc.new_stream(sink, part.schema) as writer:
                    writer.write_batch(part)
                yield row + start, done + (position - done) * (start + len(part)) // len(column), parse_table, sink.getvalue()
            row, done = row + len(column), position


def check_column(path, schema, text_key):
    import pyarrow as pa

    if text_key not in schema.names:
        raise UserError(f"{path} has no column {text_key!r}, but {', '.join(schema.names)} (--text_key)")
    kind = schema.field(text_key).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not str(kind).endswith(("string", "binary", "string_view", "binary_view")):
        raise UserError(f"{path}: the column {text_key!r} is no text, but {kind} (--text_key)")


def parse_table(data, text_key):
    import pyarrow as pa

    column = pa.ipc.open_stream(data).read_all().column(0)
    for n, value in enumerate(column.cast(pa.large_binary()).to_pylist()):
        try:
            yield n, value.decode()
        except (UnicodeDecodeError, AttributeError):
            yield n, ValueError("no text (null)" if value is None else "not UTF-8")
