"""Story Cloze Test: which of two sentences ends a story?
(Mostafazadeh et al. 2016, arXiv:1604.01696)

  python storycloze.py --data val2016.csv  scores the newest checkpoint in log/
  python storycloze.py --data val2016.csv --model gpt2

The data are not public. Request the data from their owners with the form at
https://cs.rochester.edu/nlp/rocstories. The CSV files of 2016 and of 2018
contain these columns (other spellings, such as sentence_quiz1, also work):

  InputStoryid,InputSentence1,InputSentence2,InputSentence3,InputSentence4,
  RandomFifthSentenceQuiz1,RandomFifthSentenceQuiz2,AnswerRightEnding

The context consists of the first four sentences of the story. The model's
answer is the ending that is more likely after the context. Chance accuracy is
0.5. docs/benchmarks.md contains the score of GPT-3.
"""

from plaingpt.scoring.benchmark import Benchmark, accuracy, bad_record, choice, get_fields
from plaingpt.scoring.program import launch

from model import GPT


def examples(records):
    """Turns each record into an Example with two endings."""
    for record in map(unify_names, records):
        story = get_fields(
            record,
            inputsentence1=str,
            inputsentence2=str,
            inputsentence3=str,
            inputsentence4=str,
        )
        *endings, answer = get_fields(
            record,
            sentencequiz1=str,
            sentencequiz2=str,
            answerrightending=int | str,
        )
        if str(answer) not in ("1", "2"):
            raise bad_record(record, f"AnswerRightEnding {answer!r}: must be 1 or 2")
        yield choice(record, " ".join(story), endings, int(answer) - 1)


def unify_names(record):
    """Returns a record whose field names have a uniform spelling.

    The files of 2016 and 2018 spell some names differently: both RandomFifthSentenceQuiz1 and
    sentence_quiz1 become sentencequiz1.
    """
    unified = {}
    for name, value in record.items():
        plain = str(name).lower().replace("_", "").replace("randomfifth", "")
        unified[plain] = value
    return unified


def report(examples, scores):
    """Computes one accuracy from log-likelihoods, and one from log-likelihoods per token."""
    per_token = accuracy(examples, scores, scores.tokens)
    return dict(acc=accuracy(examples, scores), acc_norm_token=per_token)


BENCHMARK = Benchmark(
    name="storycloze",
    doc=__doc__,
    stream="story",
    hub=None,
    examples=examples,
    report=report,
    figures=dict(
        acc="without length normalization; as in EleutherAI's harness",
        acc_norm_token="normalized per token; as in the GPT-3 paper",
    ),
    logged="acc",
    proportions=("acc", "acc_norm_token"),
)

if __name__ == "__main__":
    launch(BENCHMARK, GPT)
