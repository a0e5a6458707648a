"""LAMBADA: what is the last word of a passage?
(Paperno et al. 2016, arXiv:1606.06031)

  python lambada.py                        scores the newest checkpoint in log/
  python lambada.py --model gpt2 --dtype float32

The 5,153 test passages, as OpenAI prepared them, come from the Hugging Face
hub, from a text file with one passage per line, or from a file with records
such as:

  {"text": "Ada hid the ring in the teapot, and later she opened the teapot"}

The context is the text before the last word. The ending is a space and the last
word. An answer is right if each token of the ending is the most likely token.
docs/benchmarks.md contains the scores of GPT-2 and GPT-3.
"""

from plaingpt.scoring.benchmark import Benchmark, Example, bad_record, get_fields, perplexity
from plaingpt.scoring.program import launch

from model import GPT


def examples(records):
    """Turns each record into an Example with one ending."""
    for record in records:
        text = get_fields(record, text=str)[0].rstrip("\r\n")
        if record["text"] and not text:
            continue  # the record is an empty line of a text file
        context, _, word = text.rpartition(" ")
        if not word.strip():
            raise bad_record(record, f"no word at the end of {text[-20:]!r}")
        yield Example([context], [" " + word])


def report(examples, scores):
    """Computes the accuracies and the perplexity of the last word of each passage."""
    return dict(
        acc=float(scores.greedy.mean()),
        last_token_acc=float(scores.last_greedy.mean()),
        perplexity=perplexity(-scores.log_likelihood.mean()),
    )


BENCHMARK = Benchmark(
    name="lambada",
    doc=__doc__,
    stream="lambada",
    examples=examples,
    report=report,
    columns=("text",),
    hub=dict(dataset="EleutherAI/lambada_openai", name="default", split="test"),
    figures=dict(
        acc="accuracy for the whole last word; as in EleutherAI's harness",
        perplexity="perplexity of the whole last word; as in EleutherAI's harness",
        last_token_acc="accuracy for the last token; not comparable with published results",
    ),
    logged="acc",
    proportions=("acc", "last_token_acc"),
)

if __name__ == "__main__":
    launch(BENCHMARK, GPT)
