"""WikiText-103: how well does a model predict Wikipedia articles?
(Merity et al. 2016, arXiv:1609.07843)

  python wikitext.py                              scores the newest checkpoint
  python wikitext.py --model gpt2 --stride 512    uses windows that overlap
  python wikitext.py --data wiki.test.raw         reads any text file

The 62 test articles come from the hub, or from a file. WikiText is split into
words (" old " ; 2 @,@ 000 m long). This program joins the words again, as in
the GPT-2 paper (section 3.1). A text without titles (= Title =) stays as it is:
<|endoftext|> separates the documents of a text file, and each record of another
file, such as .jsonl, is a document. Word perplexity divides the log-likelihood
by the number of words in the split text, so it is comparable for models with
different tokenizers.

The model reads an article longer than its context in windows without overlap.
With --stride N, the windows advance by N tokens. Each token then has more
context, and the run takes longer.
docs/benchmarks.md contains the scores of GPT-2.
"""

import math
import re
from dataclasses import dataclass

from plaingpt.base.flags import flag
from plaingpt.data.tokenizer import END_OF_TEXT, clean_text
from plaingpt.scoring.benchmark import Benchmark, Example, get_fields, perplexity
from plaingpt.scoring.program import launch

from model import GPT

TITLE = r"[^\S\n]*= (?!=).*(?<!=) =[^\S\n]*$"  # the line " = Title = "
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
REPLACEMENTS = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


@dataclass
class Options:
    stride: int = flag(0, "tokens by which windows advance; 0: no overlap", at_least=0)


def examples(records, stride=Options.stride):
    """Turns records into Examples, one for each article. Raises UserError."""
    for page in pages(records):
        # This counts words like EleutherAI's harness: white space at either end adds an empty word.
        n_words = len(re.split(r"\s+", page))
        facts = dict(words=n_words, bytes_before=len(page.encode()))
        text = page
        if re.match(rf"(?m){TITLE}", page.lstrip()):  # a text without titles stays as it is
            text = detokenize(page)
        yield Example([""], [text], stride=stride, facts=facts)


def pages(records):
    """Yields articles, or the documents that fineweb.py reads.

    Joins the lines of a text file, and splits them before titles and at <|endoftext|>. Of another
    file, each record is a document, unless a record begins with a title: they are WikiText's lines.
    """
    texts = []
    has_lines = False
    for record in records:
        (text,) = get_fields(record, text=str)
        # clean_text replaces half a surrogate pair, which UTF-8 cannot encode.
        texts.append(clean_text(text))
        is_title = re.match(rf"(?m){TITLE}", text.lstrip())
        has_lines = has_lines or bool(is_title) or "is_line" in record
    if not has_lines:
        yield from filter(str.strip, texts)
        return
    # The hub stores an empty line as "", without its space.
    text = "\n".join((text or " ").removesuffix("\n") for text in texts) + "\n"
    if re.search(rf"(?m)^{TITLE}", text):  # a text without titles stays as it is
        text = text.replace("\r\n", "\n")
    for page in re.split(rf"(?m)\n(?={TITLE})|{re.escape(END_OF_TEXT)}", text):
        if page.strip():
            yield page


def detokenize(text):
    """Joins WikiText's words into normal text, with the rules of the harness in their order."""
    text = text.replace("s '", "s'")
    # The slashes are a mistake of the harness, so the pattern hardly ever matches.
    text = re.sub("/' [0-9]/", "/'[0-9]/", text)
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)  # inside numbers and compounds
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for left, right in BRACKETS:
        text = strip_inside(text, left, right)
    for old, new in REPLACEMENTS:
        text = text.replace(old, new)
    return text


def strip_inside(text, left, right):
    """Removes the spaces after each left mark and before the right mark that follows it.

    The harness does this with one expression, which takes quadratic time if marks are not closed.
    """
    # Every left mark in `text + last` has a right mark after it, so every search succeeds.
    text, last, rest = text.rpartition(right)
    inside = rf"\{left}([^\{right}]*)\{right}"
    return re.sub(inside, lambda match: f"{left}{match[1].strip()}{right}", text + last) + rest


def report(examples, scores):
    """Computes the perplexities and the bits per byte."""
    nats = -scores.log_likelihood.sum()
    words = sum(example.facts["words"] for example in examples)
    n_bytes = sum(example.facts["bytes_before"] for example in examples)
    return dict(
        word_perplexity=perplexity(nats / words),
        token_perplexity=perplexity(nats / scores.tokens.sum()),
        bits_per_byte=nats / n_bytes / math.log(2),
    )


BENCHMARK = Benchmark(
    name="wikitext",
    doc=__doc__,
    stream="wikitext",
    examples=examples,
    report=report,
    columns=("text",),
    hub=dict(dataset="Salesforce/wikitext", name="wikitext-103-raw-v1", split="test"),
    options=(Options,),
    figures=dict(
        word_perplexity="per word of the split text; as in papers and the harness",
        token_perplexity="per token; only for the same tokenizer",
        bits_per_byte="per byte of the split text; as the harness",
    ),
    logged="word_perplexity",
)

if __name__ == "__main__":
    launch(BENCHMARK, GPT)
