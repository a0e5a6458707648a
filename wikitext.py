"""WikiText-103: how well does a model foretell Wikipedia's good articles? (Merity et al. 2016, arXiv:1609.07843)

  python wikitext.py                                     the newest checkpoint under log/
  python wikitext.py --model gpt2 --stride 512           GPT-2, every token after at least 512 others
  python wikitext.py --data wiki.test.raw                a file; any text will do

The 62 articles of the test split, which WikiText-2 shares, come from the hub (Salesforce/wikitext), from a text file, or
from records {"page": "…"}, one an article. The text is cut into words:

   = Harbour =

   The harbour , built in 1890 @-@ 1 , is 2 @,@ 000 m long ; the " Old Quay " is older .

GPT-2 never read such text, and so its authors scored it with the cutting undone ("invertible de-tokenizers", GPT-2 paper,
section 3.1), but counted per word of the text as it is: the likelihood of the whole is the same, and so perplexities per word
compare between models with different tokens. Perplexity per token does not, though it is often seen beside it.

Each article begins with the id that starts a text; one longer than the model's context is read in windows. They follow each
other without overlap, unless --stride makes them move on by fewer tokens, which gives each more context, and takes longer.

                word_perplexity
  GPT-2 124M              37.37   EleutherAI's lm-evaluation-harness, task wikitext, which this file computes by default
  GPT-2 117M              37.50   GPT-2 paper, table 3
  GPT-2 345M              26.37   the same
  GPT-2 762M              22.05   the same
  GPT-2 1542M             17.48   the same
"""

# Read next: generate.py.

import math
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

from plaingpt import evaluation
from plaingpt.cli import UserError, run

STREAM = "wikitext"  # in a run's log: the first figure
HUB = dict(dataset="Salesforce/wikitext", name="wikitext-103-raw-v1", split="test")
METRICS = {
    "word_perplexity": "per original word; as papers, the harness",
    "token_perplexity": "per token; only between equal encodings",
    "bits_per_byte": "per original byte; as the harness",
}


@dataclass
class Options:
    stride: int = 0  # tokens by which a window moves on; 0: by the model's whole context, so that none overlap


class Page(NamedTuple):
    """An article, as an Example with one ending."""
    context: str
    endings: list
    stride: int
    words: int  # of the text as it was
    bytes_before: int  # its length then, in UTF-8


def examples(records, stride=0):
    """Records, of articles or of lines, -> Pages. Raises ValueError for a record that is none."""
    if stride < 0:
        raise UserError(f"--stride {stride} cannot be: it is a number from 0 up")
    for page in pages(records):
        words = len(re.split(r"\s+", page))  # as the harness counts: white space at an end of the page adds an empty one
        yield Page("", [detokenize(page)], stride or math.inf, words, len(page.encode()))


def pages(records):
    """Articles as they are; lines are put together and cut again before each heading of a single equals sign."""
    lines, text, found = [], "", [[]]
    for record in records:
        if "page" in record:
            yield from evaluation.take(record, page=str)
        else:
            text, = evaluation.take(record, text=str)
            text = text or " \n"  # in the hub's records an empty line is empty; in the file it has a space
            lines += text.removesuffix("\n").split("\n")
    for line in lines + [""] * text.endswith("\n"):  # the last line break belongs to the last article
        if re.fullmatch(r"\s*= (?!=).*(?<!=) =\s*", line):
            found.append([])
        found[-1].append(line)
    yield from filter(str.strip, map("\n".join, found))


def detokenize(text):
    """Undoes WikiText's cutting into words, by the harness's rules and in their order."""
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)  # inside numbers and compounds
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for left, right in ("()", "[]", "{}", '""', "''"):
        text = re.sub(rf"\{left}\s*([^\{right}]*?)\s*\{right}", rf"{left}\1{right}", text)
    for n in (4, 3, 2):
        text = text.replace(" ".join("=" * n), "=" * n)  # headings
    for old, new in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(old, new)
    return text


def report(pages, scores):
    """The figures, that of the log first."""
    nats = -scores.log_likelihood.sum()
    words, n_bytes = (sum(getattr(page, name) for page in pages) for name in ("words", "bytes_before"))
    return dict(word_perplexity=math.exp(nats / words), token_perplexity=math.exp(nats / scores.tokens.sum()),
                bits_per_byte=nats / n_bytes / math.log(2))


if __name__ == "__main__":
    run(lambda: evaluation.main(sys.modules[__name__]))
