"""The exact-match metric: how often does a model generate the right response?

  python answers.py --data test.jsonl      scores the newest checkpoint in log/
  python answers.py --data test.jsonl --checkpoint log/baby --json scores.json

The file contains pairs of a prompt and a response, in the format that
train_gpt2.py --data reads:

  {"prompt": "12+34=", "response": "46"}

A response may end with <|endoftext|>. An answer is right if each token of the
response, and the end-of-text token after the response, is the most likely
token. Greedy decoding then generates exactly the response, and stops.
"""

from plaingpt.scoring.benchmark import Benchmark, Example, check_ending, get_fields
from plaingpt.scoring.program import launch
from plaingpt.tokenizer import END_OF_TEXT

from model import GPT


def examples(records):
    """Turns each record into an Example with one ending."""
    for record in records:
        prompt, response = get_fields(record, prompt=str, response=str)
        yield Example([prompt], [response.removesuffix(END_OF_TEXT)])


def prompt_ids(example, tokenizer):
    """Yields (ids of the prompt, [ids of the response]). Training uses the same ids."""
    prompt = tokenizer.encode(example.contexts[0])
    response = tokenizer.encode(example.endings[0])
    check_ending(response, example.contexts[0], example.endings[0])
    yield [tokenizer.end_of_text, *prompt], [[*response, tokenizer.end_of_text]]


def report(examples, scores):
    """Computes the fraction of prompts for which greedy decoding generates exactly the response."""
    return dict(acc=float(scores.greedy.mean()))


BENCHMARK = Benchmark(
    name="answers",
    doc=__doc__,
    stream="answers",
    columns=("prompt", "response"),
    hub=None,
    examples=examples,
    report=report,
    prompt_ids=prompt_ids,
    figures=dict(
        acc="fraction of prompts for which greedy decoding generates exactly the response"
    ),
    logged="acc",
    proportions=("acc",),
)

if __name__ == "__main__":
    launch(BENCHMARK, GPT)
