"""Reads the documents of files, one after the other, and marks the damaged ones.

Only a few megabytes are in memory, whatever the size of a file, except for what records.py reads
whole, and for a document of a .txt file that may not be cut.
"""

import codecs
import re
from dataclasses import dataclass

from plaingpt.base.errors import UserError, explaining, first_line
from plaingpt.data.parsers import BLOCK, check_encoding
from plaingpt.data.records import DAMAGE, decompress, kind_of, parse_record, read_items
from plaingpt.data.text import clean_text

SEPARATOR = b"<|endoftext|>"  # is between the documents of a .txt file
# Matches bytes up to the last place that is surely not inside a token of GPT-2. The place is before
# a space or line break. The byte before it is printable ASCII, or it ends no Unicode space.
CUT = re.compile(rb".*[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?=[ \n])", re.S)


@dataclass
class Document:
    """A document, or a piece of a large one."""

    where: str  # where it begins, such as "a.jsonl, line 7"
    text: str | None = None  # None if it is damaged
    problem: str = ""  # why it is damaged
    begins: bool = True  # False if this piece continues the one before it
    done: int = 0  # bytes on disk that were read so far, of all files


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
    if kind_of(path) != ".txt":
        for where, item in read_items(path, file, [text_key]):
            yield make_document(f"{path}, {where}", item, text_key)
        return
    check_encoding(path, file.peek())
    begins = True
    for line, piece, is_last in split_text(file, cut):
        document = make_document(f"{path}, line {line}", {"text": piece}, "text")
        document.begins = begins
        yield document
        # If the first pieces of a document are damaged, the document begins after them.
        begins = is_last or (begins and document.text is None)


def split_text(file, cut):
    """Yields (number of the first line, bytes, whether a document ends here) of a .txt file.

    White space before the first separator, or after the last one, is no document: a file may begin
    or end with a separator.
    """
    block = file.read(BLOCK).removeprefix(codecs.BOM_UTF8)
    if not block:
        return
    rest = b""  # the document whose end was not read yet
    line = 1  # where it begins
    begins = True  # False if `rest` continues a document that was cut
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
        # The longer a document that cannot be cut, the larger the next block: after each block,
        # the document is scanned again.
        block = file.read(max(BLOCK, len(rest)))
    if rest.strip() or not n_separators or not begins:
        yield line, rest, True


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
