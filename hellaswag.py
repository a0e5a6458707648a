"""HellaSwag: which of four endings does an everyday scene have? (Zellers et al. 2019, arXiv:1905.07830)

  python hellaswag.py                                    the newest checkpoint under log/
  python hellaswag.py --model gpt2 --dtype float32       GPT-2, as exactly as can be
  torchrun --nproc_per_node=8 hellaswag.py --checkpoint log/gpt2

The 10,042 validation examples come from the hub (Rowan/hellaswag), or from a file of such records:

  {"activity_label": "Making tea", "ctx_a": "A woman fills a kettle at the sink.", "ctx_b": "she", "ctx": "A woman fills a
   kettle at the sink. she", "endings": ["lights the stove and sets it down.", "eats it.", …, …], "label": 0}

A model never sees the four side by side: it tells how likely each ending is after the context, and the likeliest counts as
its answer. Chance is 0.25. Longer endings are less likely, so there are several ways to compare them:

                    acc     acc_norm
  GPT-2 124M     0.2859       0.2955   --style completion, per token   (llm.c, build-nanogpt)
  GPT-2 1558M    0.3842       0.4893   the same
  GPT-2 124M     0.2892       0.3114   --style harness, per character  (EleutherAI's lm-evaluation-harness)
  GPT-2 1558M    0.4004       0.5089   the same
  GPT-3 124M                   0.337   GPT-3 paper, table H.1: their prompt, per token
"""

# Read next: lambada.py.

import re
import sys
from dataclasses import dataclass

import numpy as np

from plaingpt import evaluation
from plaingpt.cli import UserError, run

STREAM = "hella"  # in a run's log: the first figure
HUB = dict(dataset="Rowan/hellaswag", split="validation")
METRICS = {
    "acc_norm_token": "per token; style completion: build-nanogpt's",
    "acc": "summed; either style: the others' acc",
    "acc_norm_char": "per character; style harness: its acc_norm",
    "acc_norm_byte": "per byte; style harness: its acc_bytes",
}


@dataclass
class Options:
    style: str = "completion"  # completion: context, space, ending; harness: as EleutherAI's lm-evaluation-harness has it


def examples(records, style="completion"):
    """Records -> Examples with four endings each. Raises ValueError for a record that is none."""
    if style not in ("completion", "harness"):
        raise UserError(f"--style {style} is none of completion, harness")
    for record in records:
        endings, label = evaluation.take(record, endings=list, label=object)
        if len(endings) != 4 or not all(isinstance(ending, str) for ending in endings):
            raise ValueError(f"'endings' are not 4 texts, but {str(endings)[:40]}")
        if style == "harness":
            activity, a, b = evaluation.take(record, activity_label=str, ctx_a=str, ctx_b=str)
            context, endings = clean(f"{activity}: {a} {b.capitalize()}"), [clean(ending) for ending in endings]
        else:
            context, = evaluation.take(record, ctx=str)
        yield evaluation.choice(context, endings, label)


def clean(text):
    """Without the marks of WikiHow's pages, such as [header] and [step], as the harness removes them."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def report(examples, scores):
    """The figures, that of the log first."""
    chars = np.array([len(ending) - 1 for example in examples for ending in example.endings])  # without the leading space
    lengths = dict(acc_norm_token=scores.tokens, acc=1, acc_norm_char=chars, acc_norm_byte=scores.bytes - 1)
    return {name: evaluation.accuracy(examples, scores, length) for name, length in lengths.items()}


if __name__ == "__main__":
    run(lambda: evaluation.main(sys.modules[__name__]))
