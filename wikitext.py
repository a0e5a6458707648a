"""WikiText-103: how well does a model predict Wikipedia articles?
(Merity et al. 2016, arXiv:1609.07843)

  python wikitext.py                              scores the newest checkpoint
  python wikitext.py --model gpt2 --stride 512    uses overlapping windows
  python wikitext.py --data wiki.test.raw         scores your own text file

The 62 test articles come from the Hugging Face hub, or from a file whose name
begins with "wiki", such as wiki.test.raw. WikiText puts spaces around
punctuation marks (" old " ; 2 @,@ 000 m long). This program removes these
spaces, as in the GPT-2 paper (section 3.1). The text of any other file is not
changed. In a text file, <|endoftext|> separates the documents. In any other
file, such as .jsonl, each record is a document. The word perplexity divides the
log-likelihood by the number of words in the unchanged text, so models with
different tokenizers are comparable.

If an article is longer than the context of the model, the model reads it in
windows that do not overlap. With --stride N, the windows advance by N tokens.
Each token then has more context, and the run takes longer.
docs/benchmarks.md contains the scores of GPT-2.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from plaingpt.flags import flag
from plaingpt.scoring.benchmark import Benchmark, Example, get_fields, perplexity
from plaingpt.scoring.program import launch
from plaingpt.terminal import print0
from plaingpt.tokenizer import END_OF_TEXT, clean_text

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
    stride: int = flag(
        0, "tokens between the starts of consecutive windows; 0: the window length", at_least=0
    )


def examples(records, stride=Options.stride):
    """Turns records into Examples, one per article."""
    records = list(records)
    is_wikitext = find_format(records)
    for page in pages(records, is_wikitext):
        # n_words counts words as EleutherAI's harness does: whitespace at the start or at the end
        # of a page adds an empty word.
        n_words = len(re.split(r"\s+", page))
        facts = dict(words=n_words, bytes_before=len(page.encode()))
        text = detokenize(page) if is_wikitext else page
        yield Example([""], [text], stride=stride, facts=facts)


def find_format(records):
    """Returns whether the records are lines of WikiText.

    The records are WikiText if they contain a title, which is a line such as " = Title = ", and if
    the name of their file begins with "wiki". If they contain a title, but the file has a different
    name, prints a note.
    """
    for record in records:
        (text,) = get_fields(record, text=str)
        if re.match(rf"(?m){TITLE}", text.lstrip()):
            name = Path(record["where"]).name  # such as "wiki.test.raw, record 3"
            if name.startswith("wiki"):
                return True
            print0(
                f"note: {name} is a title as in WikiText; if this file contains WikiText, give the "
                "file a name that begins with wiki"
            )
            return False
    return False


def pages(records, is_wikitext):
    """Yields the articles of WikiText, or the documents of any other text.

    The lines of WikiText are joined, and then split before each title. The lines of a text file are
    joined, and then split at <|endoftext|>. In any other file, each record is a document.
    """
    # clean_text replaces lone surrogates, which UTF-8 cannot encode.
    texts = [clean_text(get_fields(record, text=str)[0]) for record in records]
    if is_wikitext:
        # On the hub, an empty line is stored as "" instead of " ".
        text = "\n".join((text or " ").removesuffix("\n") for text in texts) + "\n"
        texts = re.split(rf"(?m)\n(?={TITLE})", text.replace("\r\n", "\n"))
    elif any("is_line" in record for record in records):
        texts = "".join(texts).split(END_OF_TEXT)
    yield from filter(str.strip, texts)


def detokenize(text):
    """Restores normal spacing in WikiText. Applies the rules of EleutherAI's harness in order."""
    text = text.replace("s '", "s'")
    # The slashes are a mistake in the harness, so this regular expression hardly ever matches.
    text = re.sub("/' [0-9]/", "/'[0-9]/", text)
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)  # inside numbers and compound words
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for left, right in BRACKETS:
        text = strip_inside(text, left, right)
    for old, new in REPLACEMENTS:
        text = text.replace(old, new)
    return text


def strip_inside(text, left, right):
    """Removes the spaces after each left mark and before the right mark that follows it.

    The harness uses a single regular expression, which takes quadratic time if right marks are
    missing.
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
        word_perplexity="per word of the unchanged text; as in papers and the harness",
        token_perplexity="per token; comparable only between models with the same tokenizer",
        bits_per_byte="per byte of the unchanged text; as in the harness",
    ),
    logged="word_perplexity",
)

if __name__ == "__main__":
    launch(BENCHMARK, GPT)
