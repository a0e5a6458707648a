"""The Story Cloze Test: which of two sentences ends a story of four? (Mostafazadeh et al. 2016, arXiv:1604.01696)

  python storycloze.py --data val2016.csv                the newest checkpoint under log/
  python storycloze.py --data val2016.csv --model gpt2

The data are not free to copy: their owners send them to whoever fills in the form at https://cs.rochester.edu/nlp/rocstories.
Their CSV files, of 2016 and of 2018, have these columns; other copies spell them input_sentence_1 to input_sentence_4,
sentence_quiz1, sentence_quiz2 and answer_right_ending:

  InputStoryid,InputSentence1,InputSentence2,InputSentence3,InputSentence4,RandomFifthSentenceQuiz1,
  RandomFifthSentenceQuiz2,AnswerRightEnding
  7,Max missed the bus.,He began to walk.,Rain came down.,A neighbour drove by.,She gave him a lift.,He sat on the bus.,1

The context is the four sentences, and the likelier ending counts as the model's answer. Chance is 0.5.

                    acc
  GPT-3 124M      0.633   GPT-3 paper, table H.1, on the test set of 2016, per token
"""

# Read next: wikitext.py.

import sys

from plaingpt import evaluation
from plaingpt.cli import run

STREAM = "story"  # in a run's log: the first figure
HUB = None
NO_DATA = ("the Story Cloze data come from their owners alone, who send them on request: fill in the form at "
           "https://cs.rochester.edu/nlp/rocstories, then --data FILE.csv (in training: --evals storycloze=FILE.csv)")
COLUMNS = {**{f"InputSentence{i}": str for i in (1, 2, 3, 4)}, "RandomFifthSentenceQuiz1": str,
           "RandomFifthSentenceQuiz2": str, "AnswerRightEnding": object}
METRICS = {
    "acc": "summed; as the harness",
    "acc_norm_token": "per token; as the GPT-3 paper",
}


def examples(records):
    """Records -> Examples with two endings. Raises ValueError for a record that is none."""
    for record in records:
        short = {plain(name): value for name, value in record.items()}
        record = {**record, **{name: short[plain(name)] for name in COLUMNS if plain(name) in short}}
        *story, a, b, label = evaluation.take(record, **COLUMNS)
        yield evaluation.choice(" ".join(story), [a, b], label, first_label=1)


def plain(name):
    """A column's name without what the spellings differ in."""
    return str(name).lower().replace("_", "").replace("randomfifth", "")


def report(examples, scores):
    """The figures, that of the log first."""
    lengths = dict(acc=1, acc_norm_token=scores.tokens)
    return {name: evaluation.accuracy(examples, scores, length) for name, length in lengths.items()}


if __name__ == "__main__":
    run(lambda: evaluation.main(sys.modules[__name__]))
