"""HellaSwag: which of four endings fits an everyday scene?
(Zellers et al. 2019, arXiv:1905.07830)

  python hellaswag.py                      scores the newest checkpoint in log/
  python hellaswag.py --model gpt2 --dtype float32
  torchrun --nproc_per_node=8 hellaswag.py --checkpoint log/gpt2

The 10,042 validation examples come from the Hugging Face hub, or from a file
with records such as:

  {"activity_label": "Making tea", "ctx_a": "A woman fills a kettle.",
   "ctx_b": "she", "ctx": "A woman fills a kettle. she",
   "endings": ["lights the stove.", "eats it.", "sings.", "naps."], "label": 0}

How the accuracy is computed:

  1. The tokenizer encodes the context alone, which gives n tokens, and then the
     context, a space and an ending together. The tokens of the ending are all
     tokens of the second encoding after its first n tokens.
  2. The log-likelihood of the ending is the sum of ln p over its tokens. p is
     the probability of a token, given the context and the earlier tokens of
     the ending; -ln p is the loss of the token.
  3. The log-likelihood is divided by the length of the ending: by its number of
     tokens in acc_norm_token, of characters in acc_norm_char, of bytes in
     acc_norm_byte, and by 1 in acc. The space before the ending does not count
     as a character or byte. A run logs acc_norm_token.
  4. The model's answer is the ending with the highest result (argmax). The
     accuracy is the fraction of examples whose answer is the label.

plaingpt/scoring/score.py computes the log-likelihoods, and `report` in this
file computes the accuracies. Chance accuracy is 0.25. docs/benchmarks.md
contains the scores of GPT-2 and GPT-3.
"""

import re
from dataclasses import dataclass
from typing import Literal

from plaingpt.flags import flag
from plaingpt.scoring.benchmark import Benchmark, accuracy, choice, get_fields
from plaingpt.scoring.program import launch

from model import GPT


@dataclass
class Options:
    style: Literal["completion", "harness"] = flag(
        "completion", "prompt format: build-nanogpt's (completion) or EleutherAI's (harness)"
    )


def examples(records, style=Options.style):
    """Turns each record into an Example with four endings. style: the value of --style."""
    for record in records:
        endings, context, label = get_fields(record, endings=list, ctx=str, label=int | str)
        if style == "harness":
            activity, a, b = get_fields(record, activity_label=str, ctx_a=str, ctx_b=str)
            context = clean(f"{activity}: {a} {b.capitalize()}")
            endings = [clean(str(ending)) for ending in endings]
        yield choice(record, context, endings, label)


def clean(text):
    """Removes WikiHow's markup, such as [header] and [step], as EleutherAI's harness does."""
    text, bracket, rest = text.strip().replace(" [title]", ". ").rpartition("]")
    return (re.sub(r"\[.*?\]", "", text + bracket) + rest).replace("  ", " ")


def report(examples, scores):
    """Computes four accuracies. Each accuracy divides log-likelihoods by a different length."""
    # The space at the start of an ending does not count as a character or byte.
    chars = [len(ending) - 1 for example in examples for ending in example.endings]
    lengths = dict(
        acc_norm_token=scores.tokens,
        acc=1,
        acc_norm_char=chars,
        acc_norm_byte=scores.bytes - 1,
    )
    return {name: accuracy(examples, scores, length) for name, length in lengths.items()}


BENCHMARK = Benchmark(
    name="hellaswag",
    doc=__doc__,
    stream="hella",
    examples=examples,
    report=report,
    hub=dict(dataset="Rowan/hellaswag", split="validation"),
    columns=("ctx", "endings", "label", "activity_label", "ctx_a", "ctx_b"),
    options=(Options,),
    figures=dict(
        acc_norm_token="normalized per token; build-nanogpt's acc_norm (--style completion)",
        acc="without length normalization",
        acc_norm_char="normalized per character; the harness's acc_norm (--style harness)",
        acc_norm_byte="normalized per byte; the harness's acc_bytes (--style harness)",
    ),
    logged="acc_norm_token",
    proportions=("acc_norm_token", "acc", "acc_norm_char", "acc_norm_byte"),
)

if __name__ == "__main__":
    launch(BENCHMARK, GPT)
