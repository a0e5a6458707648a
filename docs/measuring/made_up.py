"""Makes up the data that docs/measure.py needs. They are the same each time."""

import json
import random

WORD_LENGTHS = range(3, 6)  # of the words that are reversed
N_TRAIN = 1800
N_TEST = 200


def write_lines(path, records):
    """Writes records as .jsonl."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")


def sums():
    """Returns pairs: sums of two numbers of two digits, each once, in a random order."""
    pairs = []
    for a in range(10, 100):
        for b in range(10, 100):
            pairs.append(dict(prompt=f"{a}+{b}=", response=str(a + b)))
    random.Random(1).shuffle(pairs)
    return pairs[: N_TRAIN + N_TEST]


def reversed_words():
    """Returns pairs: a word of random letters, each once, and the same word from its end."""
    rng = random.Random(2)
    words = {}  # a dict has each word once, and keeps their order
    while len(words) < N_TRAIN + N_TEST:
        letters = rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.choice(WORD_LENGTHS))
        words["".join(letters)] = None
    return [dict(prompt=f"{word} ", response=word[::-1]) for word in words]


def write_pairs(folder, name, pairs):
    """Writes folder/NAME-train.jsonl and folder/NAME-test.jsonl."""
    write_lines(folder / f"{name}-train.jsonl", pairs[:N_TRAIN])
    write_lines(folder / f"{name}-test.jsonl", pairs[N_TRAIN:])


def write_hellaswag(path, text, n_examples):
    """Writes examples with the lengths of HellaSwag's, but without sense.

    text: English, whose words they take.
    """
    rng = random.Random(3)
    words = text.split()
    examples = []
    for _ in range(n_examples):
        context = " ".join(rng.choices(words, k=rng.randint(20, 70)))
        endings = [" ".join(rng.choices(words, k=rng.randint(8, 28))) for _ in range(4)]
        examples.append(dict(ctx=context, endings=endings, label=rng.randrange(4)))
    write_lines(path, examples)


def write_english(path, text, n_bytes):
    """Writes documents of random words of an English text as .jsonl, up to a number of bytes.

    There are 1,000 different documents: a tokenizer remembers none of them.
    """
    rng = random.Random(4)
    words = text.split()
    lines = []
    for _ in range(1000):
        document = " ".join(rng.choices(words, k=rng.randint(50, 1500)))
        lines.append(json.dumps(dict(text=document)) + "\n")
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        while size < n_bytes:
            line = rng.choice(lines)
            file.write(line)
            size += len(line)


def write_chinese(path, n_bytes):
    """Writes sentences of random Chinese characters, up to a number of bytes.

    Nothing separates the words of a sentence. A few characters are frequent, as in a real text.
    """
    rng = random.Random(5)
    characters = [chr(0x4E00 + i) for i in range(3000)]
    weights = [1 / (i + 1) for i in range(3000)]
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        while size < n_bytes:
            sentence = rng.choices(characters, weights, k=rng.randint(5, 25))
            line = "".join(sentence) + "。\n"
            file.write(line)
            size += len(line.encode())
