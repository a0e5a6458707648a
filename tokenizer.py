"""Trains a tokenizer on your own text.

  python tokenizer.py --input 'corpus/*.txt' --vocab_size 32000 --output zh.json
  python fineweb.py --input 'corpus/*.txt' --tokenizer zh.json --output_dir zh

--input accepts the same files as fineweb.py. The tokenizer is a byte-level BPE,
so it can encode any text. The output is a tokenizer.json in Hugging Face
format. First install the package tokenizers: pip install tokenizers
"""

import heapq
import json
import random
import sys
from dataclasses import dataclass

from plaingpt.documents import find_files, read_documents
from plaingpt.errors import UserError, require, run_program
from plaingpt.files import check_output, write_json
from plaingpt.flags import flag, parse_flags
from plaingpt.signals import end_at_once_on_ctrl_c
from plaingpt.terminal import print0
from plaingpt.tokenizer import END_OF_TEXT, get_tokenizer

PIECE = 10_000  # characters; read_sample splits documents into pieces of this size


@dataclass
class VocabularyConfig:
    input: list[str] | None = flag(None, "files or quoted glob patterns, as in fineweb.py")
    vocab_size: int = flag(32000, "vocabulary size; smaller if the text is small", above=256)
    output: str = flag("tokenizer.json", "file to write")
    text_key: str = flag("text", "field or column that contains the text")
    sample_bytes: int = flag(2 * 10**7, "train on a sample of at most this many bytes", at_least=1)


def read_sample(config):
    """Returns the texts to train on: a random sample of pieces of all files.

    The pieces contain at most sample_bytes bytes in total, unless a single piece is larger.
    """
    paths = find_files(config.input)
    random_key = random.Random(0).random
    sample = []  # a heap of (random key, piece): the pieces with the largest keys so far
    size = 0  # total bytes of the pieces in `sample`
    n_damaged = 0
    first_damaged = ""
    for document in read_documents(paths, config.text_key, cut=True):
        text = document.text or ""  # empty if the document is damaged
        if document.problem:
            n_damaged += 1
            first_damaged = first_damaged or f"{document.where}: {document.problem}"
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            heapq.heappush(sample, (random_key(), piece))
            size += len(piece.encode())
            while size > config.sample_bytes and len(sample) > 1:
                _, dropped = heapq.heappop(sample)
                size -= len(dropped.encode())
    if n_damaged:
        print0(f"skipped {n_damaged:,} damaged documents; the first is {first_damaged}")
    if not sample:
        raise UserError(f"{paths[0]}: contains no text; choose a different file or --text_key")
    return [piece for _, piece in sample]


def main(argv=None):
    config = VocabularyConfig(**parse_flags(__doc__, VocabularyConfig, argv=argv))
    if not config.input:
        raise UserError("--input: is missing; give text files")
    check_output("--output", config.output, [*config.input, *find_files(config.input)])
    texts = read_sample(config)
    # BPE merges the most frequent pairs first (Sennrich et al. 2016, arXiv:1508.07909).
    library = require("tokenizers").ByteLevelBPETokenizer()
    library.train_from_iterator(
        texts,
        config.vocab_size - 1,
        min_frequency=0,
        length=len(texts),
        show_progress=sys.stderr.isatty(),
    )
    library.add_special_tokens([END_OF_TEXT])  # END_OF_TEXT gets the last id
    source = library.to_str()
    write_json(config.output, json.loads(source))
    sample = "".join(texts[::20])
    for name, own in ((config.output, source), ("gpt2", "gpt2")):
        tokenizer = get_tokenizer(own)
        ratio = len(sample.encode()) / len(tokenizer.encode(sample))
        size = f"vocabulary size {tokenizer.n_vocab:,}"
        print0(f"{name}: {size}, {ratio:.2f} bytes per token of the text")


if __name__ == "__main__":
    end_at_once_on_ctrl_c()
    run_program(main)
