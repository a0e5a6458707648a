"""LAMBADA: which word ends a passage that only its whole gives away? (Paperno et al. 2016, arXiv:1606.06031)

  python lambada.py                                      the newest checkpoint under log/
  python lambada.py --model gpt2 --dtype float32         GPT-2, as exactly as can be

The 5,153 test passages, as OpenAI prepared them, come from the hub (EleutherAI/lambada_openai), from a file of records

  {"text": "Ada hid the ring in the teapot, and a week later, when the guests had gone, she lifted the lid of the teapot"}

or from a text file, one passage a line. The context is all but the last word, the ending is that word with its space. It is
right if each of its tokens, and many words have several, is the likeliest one. The accuracy of the last token alone, after
those before it, is easier: it is here because it is often reported as the other, and may not be compared with it.

                    acc  perplexity
  GPT-2 124M     0.3256       40.06   EleutherAI's lm-evaluation-harness, task lambada_openai, which this file computes
  GPT-2 117M     0.4599       35.13   GPT-2 paper, table 3; the accuracy with a filter against stop words
  GPT-2 345M     0.5548       15.60   the same
  GPT-2 762M     0.6012       10.87   the same
  GPT-2 1542M    0.6324        8.63   the same
  GPT-3 124M      0.427       18.6    GPT-3 paper, table H.1
"""

# Read next: storycloze.py.

import math
import sys

from plaingpt import evaluation
from plaingpt.cli import run

STREAM = "lambada"  # in a run's log: the first figure
HUB = dict(dataset="EleutherAI/lambada_openai", name="default", split="test")
METRICS = {
    "acc": "the last word, all of it; as the harness",
    "perplexity": "of the last word; as the harness",
    "last_token_acc": "the last token; not comparable with papers",
}


def examples(records):
    """Records -> Examples with one ending. Raises ValueError for a record that is none."""
    for record in records:
        text, = evaluation.take(record, text=str)
        if text in ("\n", "\r\n"):  # an empty line of a text file
            continue
        context, _, word = text.rstrip("\r\n").rpartition(" ")
        if not word.strip():
            raise ValueError(f"no word at the end: {text[-20:]!r}")
        yield evaluation.Example(context, [" " + word])


def report(examples, scores):
    """The figures, that of the log first."""
    return dict(acc=float(scores.greedy.mean()), perplexity=math.exp(-scores.log_likelihood.mean()),
                last_token_acc=float(scores.last_greedy.mean()))


if __name__ == "__main__":
    run(lambda: evaluation.main(sys.modules[__name__]))
