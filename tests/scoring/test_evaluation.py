"""Compares the scores of the benchmark programs with the scores of Hugging Face's GPT-2.

Hugging Face's GPT-2 scores one ending at a time. Some tests compare scores with values that are
easy to calculate.
"""

import csv
import importlib
import json
import math
import re
import sys
from types import SimpleNamespace

from plaingpt.errors import UserError
from plaingpt.pretrained import save_gpt2
from plaingpt.process import Process
from plaingpt.scoring import program as scoring_program
from plaingpt.scoring.benchmark import Example, accuracy, load_examples, perplexity
from plaingpt.scoring.score import ROUND, make_rows, score
from plaingpt.tokenizer import clean_text, get_tokenizer

import numpy as np
import pytest
import torch
import transformers
from conftest import (
    ALONE,
    ROOT,
    WORDS,
    overfit,
    program,
    randomise,
    read_log,
    train,
    write_lines,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_hub import parquet, stand_in_hub

import hellaswag
import lambada
import storycloze
import train_gpt2
import wikitext
from model import GPT, GPTConfig
from train_gpt2 import TrainConfig, load_evals, run_evals

T = 48  # context of the tiny model, in tokens; some examples below are longer


def some_words(rng, n):
    return " ".join(rng.choice(WORDS, n))


def hellaswag_records():
    rng, records = np.random.default_rng(0), []
    for i in range(24):
        a, b = some_words(rng, rng.integers(2, 30)) + ".", some_words(rng, 2) if i % 3 else ""
        endings = [some_words(rng, rng.integers(1, 14)) + "." for _ in range(4)]
        if i % 4 == 0:  # adds WikiHow's markup
            a = f"[header] How to [title] {a} [step] Begin"
            endings[1] = f"[substeps] {endings[1]} [title] Then"
        records.append(
            dict(
                activity_label=some_words(rng, 2),
                ctx_a=a,
                ctx_b=b,
                ctx=f"{a} {b}",
                endings=endings,
                label=i % 4,
            )
        )
    # The label of record 5 is a string, as on the Hugging Face hub. Record 7 has an empty context.
    records[5]["label"], records[7]["ctx"] = str(records[5]["label"]), ""
    # This ending alone is longer than the model's context.
    records[9]["endings"][2] = some_words(rng, 60)
    return records


def lambada_records():
    rng = np.random.default_rng(1)
    texts = [some_words(rng, rng.integers(3, 40)) for _ in range(16)]
    texts += ["Wrenmouth", "a  b", texts[3] + " antidisestablishmentarianism"]
    return [dict(text=text) for text in texts]


STORY_COLUMNS = [
    "InputStoryid",
    *(f"InputSentence{k}" for k in (1, 2, 3, 4)),
    "RandomFifthSentenceQuiz1",
    "RandomFifthSentenceQuiz2",
    "AnswerRightEnding",
]


def storycloze_records():
    rng, records = np.random.default_rng(2), []
    for i in range(12):
        sentences = [some_words(rng, 4 + i % 5) + "." for _ in range(6)]
        records.append(dict(zip(STORY_COLUMNS, [str(i), *sentences, str(1 + i % 2)])))
    return records


# PAGES contains two articles in WikiText's format, with spaces around punctuation marks. TEXTS
# contains the same articles as ordinary text.
PAGES = [
    ' = Gull = \n \n The gull \'s cry , heard at 5 @.@ 3 km , is " loud " ( very ) . \n \n '
    "= = Range = = \n \n" + " Gulls breed in 1 @,@ 200 places . " * 9 + "\n ",
    " = Old Quay = \n \n The Old Quay was built well @-@ nigh 90 years ago ; few counted . \n \n",
]
TEXTS = [
    ' = Gull =\n\nThe gull\'s cry, heard at 5.3 km, is "loud" (very).\n\n== Range ==\n\n'
    + "Gulls breed in 1,200 places.  " * 8
    + "Gulls breed in 1,200 places.\n",
    " = Old Quay =\n\nThe Old Quay was built well-nigh 90 years ago; few counted.\n\n",
]


def write_data(directory):
    """Writes the data of each benchmark in a published format. Returns {benchmark: path}."""
    with open(directory / "story.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, STORY_COLUMNS)
        writer.writeheader()
        writer.writerows(storycloze_records())
    (directory / "wiki.raw").write_text(" \n" + "\n".join(PAGES), encoding="utf-8")
    return dict(
        hellaswag=write_lines(directory / "hellaswag.jsonl", hellaswag_records()),
        lambada=write_lines(directory / "lambada.jsonl", lambada_records()),
        storycloze=directory / "story.csv",
        wikitext=directory / "wiki.raw",
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Returns the directory of a tiny GPT-2 in Hugging Face format, and the result of write_data.

    The model is overfitted to the last tokens of eight lambada_records.
    """
    directory = tmp_path_factory.mktemp("evaluation")
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=T))
    encode = get_tokenizer("gpt2").encode
    ids = [encode(r["text"])[-T - 1 :] for r in lambada_records()[:8]]
    overfit(model, ids, last=1)
    # The model now predicts the last token of a text correctly more often than the last word.
    save_gpt2(model, directory / "model", get_tokenizer("gpt2"))
    return directory / "model", write_data(directory)


def reference(hf, context, ending):
    """Scores an ending after a context with Hugging Face's GPT-2. context, ending: lists of ids.

    Returns two tensors with one value per scored token: the log-likelihood, and whether the token
    is the greedy choice.
    """
    ids = (context + ending)[-T - 1 :]
    n = min(len(ending), T)
    with torch.no_grad():
        log_probs = hf.lm_head(hf.transformer(torch.tensor([ids[:-1]]))[0][0, -n:]).log_softmax(-1)
    target = torch.tensor(ids[-n:])
    return log_probs.gather(1, target[:, None])[:, 0], log_probs.argmax(-1) == target


def pair(context, ending):
    """Returns the ids of a context and of an ending, as EleutherAI's harness splits them."""
    encode, stripped = get_tokenizer("gpt2").encode, context.rstrip()
    whole = encode(context + ending)
    n = len(encode(stripped))
    return whole[:n] and encode(stripped) or [50256], whole[n:]


def harness_clean(text):
    return re.sub("\\[.*?\\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def questions(name):
    """Builds the questions of a benchmark without plainGPT's code: [(context, endings)]."""
    if name == "hellaswag":
        return [(r["ctx"], [" " + e for e in r["endings"]]) for r in hellaswag_records()]
    if name == "hellaswag harness":
        return [
            (
                harness_clean(f"{r['activity_label']}: {r['ctx_a']} {r['ctx_b'].capitalize()}"),
                [" " + harness_clean(e) for e in r["endings"]],
            )
            for r in hellaswag_records()
        ]
    if name == "lambada":
        words = [r["text"].split(" ") for r in lambada_records()]
        return [(" ".join(w[:-1]), [" " + w[-1]]) for w in words]
    stories = [list(r.values()) for r in storycloze_records()]
    return [(" ".join(story[1:5]), [" " + story[5], " " + story[6]]) for story in stories]


def run_benchmark(name, tiny, tmp_path, *flags, processes):
    """Runs a benchmark program in float32. Returns the content of the --json file."""
    flags = [
        "--model",
        tiny[0],
        "--data",
        tiny[1][name],
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--json",
        tmp_path / "out.json",
        *flags,
    ]
    if processes > 1:
        program(*flags, program=f"{name}.py", cwd=tmp_path, processes=processes)
    else:
        scoring_program.run_benchmark(sys.modules[name].BENCHMARK, GPT, list(map(str, flags)))
    return json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hellaswag", "hellaswag harness", "lambada", "storycloze"])
def test_each_example_matches_transformers_without_batching(name, tiny, tmp_path, capsys):
    hf = transformers.GPT2LMHeadModel.from_pretrained(tiny[0])
    choices = [endings for _, endings in questions(name)]
    expected = [
        [reference(hf, *pair(context, ending)) for ending in endings]
        for context, endings in questions(name)
    ]
    sums = [[ll.sum().item() for ll, _ in endings] for endings in expected]
    n_tokens = [[len(ll) for ll, _ in endings] for endings in expected]
    style = ["--style", "harness"] if "harness" in name else []
    ways = [(1, 1), (5000, 1), (200, 2)]  # (tokens per forward pass, number of processes)
    for size, processes in ways if name == "hellaswag" else ways[:2]:
        result = run_benchmark(
            name.split()[0],
            tiny,
            tmp_path,
            "--tokens_per_forward",
            size,
            *style,
            processes=processes,
        )
        found, figures = result["examples"], result["figures"]
        for example, values in zip(found, sums, strict=True):
            assert example["log_likelihood"] == pytest.approx(values, abs=1e-4)
        assert [e["tokens"] for e in found] == n_tokens
        assert [e["greedy"] for e in found] == [[bool(g.all()) for _, g in e] for e in expected]
        assert [e["last_greedy"] for e in found] == [[bool(g[-1]) for _, g in e] for e in expected]
        printed = capsys.readouterr().out
        for figure, value in figures.items():
            text = f"{value:,.4f}"
            if "acc" in figure:  # the program also prints the standard error of an accuracy
                text += f" ± {math.sqrt(value * (1 - value) / len(found)):.4f}"
            assert processes > 1 or re.search(rf"^{figure} +{text}  +\w", printed, re.M)

    def accuracy(lengths):
        labels = [i % (4 if "hellaswag" in name else 2) for i in range(len(expected))]
        answers = [max(range(len(s)), key=lambda i: s[i] / n[i]) for s, n in zip(sums, lengths)]
        return np.mean(np.equal(answers, labels))

    if name == "lambada":
        assert figures["acc"] == np.mean([bool(e[0][1].all()) for e in expected])
        assert figures["perplexity"] == pytest.approx(math.exp(-np.mean(sums)), rel=1e-5)
        assert figures["last_token_acc"] == np.mean([bool(e[0][1][-1]) for e in expected])
        assert 0 < figures["acc"] < figures["last_token_acc"]
        return
    assert figures["acc"] == accuracy([[1] * len(c) for c in choices])
    assert figures["acc_norm_token"] == accuracy(n_tokens)
    if "hellaswag" in name:
        assert figures["acc_norm_char"] == accuracy([[len(e[1:]) for e in c] for c in choices])
        n_bytes = [[len(e[1:].encode()) for e in c] for c in choices]
        assert figures["acc_norm_byte"] == accuracy(n_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [0, 16])
def test_perplexity_matches_transformers_without_batching(stride, tiny, tmp_path):
    """The program scores each token once, except the first token.

    With --stride 0, windows do not overlap. With a larger stride, each window after the first
    window scores at most `stride` tokens. The other tokens of the window are only context.
    """
    hf = transformers.GPT2LMHeadModel.from_pretrained(tiny[0])
    expected = []
    for text in TEXTS:
        ids, total, end = [50256, *get_tokenizer("gpt2").encode(text)], 0.0, 1
        while end < len(ids):
            begin, end = end, min(len(ids), max(T + 1, end + (stride or T)))
            total += reference(hf, ids[:begin], ids[begin:end])[0].sum().item()
        expected.append(total)
    for size, processes in ((1, 1), (5000, 1), (100, 2)):
        result = run_benchmark(
            "wikitext",
            tiny,
            tmp_path,
            "--stride",
            stride,
            "--tokens_per_forward",
            size,
            processes=processes,
        )
        found = [example["log_likelihood"][0] for example in result["examples"]]
        assert found == pytest.approx(expected, rel=1e-6)
    words = [len(re.split(r"\s+", page)) for page in PAGES]
    assert [e["words"] for e in result["examples"]] == words
    tokens = sum(len(get_tokenizer("gpt2").encode(text)) for text in TEXTS)
    nats, figures = -sum(expected), result["figures"]
    assert figures["word_perplexity"] == pytest.approx(math.exp(nats / sum(words)), rel=1e-4)
    assert figures["token_perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    n_bytes = len("".join(PAGES).encode())
    assert figures["bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-4)


def test_perplexity_of_any_loss():
    assert perplexity(1.0) == pytest.approx(np.e) and perplexity(10000.0) == np.inf
    assert math.isnan(perplexity(math.nan)), "the loss of a model that has diverged"


@pytest.mark.slow
def test_text_without_spaces_has_an_infinite_perplexity_per_word(copy, tmp_path):
    (tmp_path / "zh.txt").write_text("海" * 500)
    flags = ["--checkpoint", "run", "--data", "zh.txt", "--json", "out.json"]
    out, _ = program(*flags, cwd=tmp_path, program="wikitext.py")
    assert re.search("word_perplexity +inf", out) and re.search(r"bits_per_byte +\d", out)
    # JSON cannot represent infinity.
    assert json.loads((tmp_path / "out.json").read_text())["figures"]["word_perplexity"] is None
    train(
        "--log_dir",
        "run",
        "--resume",
        "--max_steps",
        12,
        "--evals",
        "wikitext=zh.txt",
        cwd=tmp_path,
    )
    assert read_log(copy)[12, "wikitext"] == "inf"


def lines_of(*lines):
    """Returns records as plaingpt.documents reads them from the lines of a text file."""
    return [dict(text=line, where="", is_line=True) for line in lines]


def test_a_plain_text_is_not_changed():
    for end in ("", "\n", "\n\n"):
        (example,) = wikitext.examples(lines_of("a ( b ) ,\r\n", f"c{end}"))
        assert example.endings == [f"a ( b ) ,\r\nc{end}"]
        assert example.facts["bytes_before"] == len(f"a ( b ) ,\r\nc{end}")
    (example,) = wikitext.examples([dict(text="= AsciiDoc\n\n( b )\n", where="")])
    assert "( b )" in example.endings[0]


def test_the_mark_separates_the_documents_of_a_text():
    """<|endoftext|> separates documents. Scores and byte counts do not include <|endoftext|>."""
    lines = lines_of("<|endoftext|>a\n", "b<|endoftext|>\n", "<|endoftext|>c")
    found = [*wikitext.examples(lines)]
    assert [example.endings for example in found] == [["a\nb"], ["c"]]
    assert [example.facts["bytes_before"] for example in found] == [3, 1]


def test_a_record_is_a_document_as_fineweb_reads_it(tmp_path):
    """Each record of a .jsonl file is a document. In a record, <|endoftext|> is ordinary text."""
    texts = ["a\nb<|endoftext|>c", "  \n", "d\n"]
    path = write_lines(tmp_path / "a.jsonl", [dict(text=text) for text in texts])
    found = load_examples(wikitext.BENCHMARK, path)
    assert [example.endings for example in found] == [[texts[0]], [texts[2]]]


def test_half_of_a_surrogate_pair_in_a_page():
    """wikitext.py replaces half of a surrogate pair by U+FFFD."""
    (example,) = wikitext.examples([dict(text="a \ud800 b", where="")])
    assert example.endings == ["a \ufffd b"] and example.facts["bytes_before"] == 7


@pytest.mark.slow
def test_wikitext_pages_are_joined_and_detokenized(tmp_path):
    assert [wikitext.detokenize(page) for page in PAGES] == TEXTS
    whole = " \n" + "\n".join(PAGES)
    lines = [dict(text=line) for line in whole.splitlines(keepends=True)]
    # On the hub, an empty line is stored as "" instead of " ".
    hub = [dict(text="" if line.isspace() else line) for line in whole.splitlines(keepends=True)]
    for records in (lines, hub, [dict(text=whole)]):
        assert list(wikitext.pages(records, is_wikitext=True)) == PAGES
    path = tmp_path / "wiki.test.raw"
    path.write_bytes(whole.replace("\n", "\r\n").encode())  # Windows line endings
    found = load_examples(wikitext.BENCHMARK, path)
    assert [example.endings[0] for example in found] == TEXTS


@pytest.mark.parametrize("name", ["own.jsonl", "wiki.jsonl"])
def test_a_damaged_record_after_a_title_is_one_sentence(name, tmp_path):
    path = write_lines(tmp_path / name, [dict(text=" = Title = \n"), dict(text=None)])
    with pytest.raises(UserError, match="record 2: field 'text' is missing or has a wrong type"):
        load_examples(wikitext.BENCHMARK, path)


@pytest.mark.parametrize("name", ["own.txt", "own.jsonl"])
def test_a_title_does_not_make_a_text_wikitext(name, tmp_path, capsys):
    """The rules of WikiText apply only to a file whose name begins with "wiki".

    If they applied to every file, a single line such as " = Notes = " would change the spaces in a
    user's whole text.
    """
    text = "def f ( x ) :\n = Notes = \nreturn ( x , y )\n"
    path = tmp_path / name
    path.write_text(text if name == "own.txt" else json.dumps(dict(text=" = Notes = \n" + text)))
    (example,) = load_examples(wikitext.BENCHMARK, path)
    assert example.endings[0].endswith(text)
    assert f"note: {name}, record" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["foo :( bar\n" * 100_000, "foo(" + " " * 100_000 + "x", "[" * 100_000]
)
def test_unclosed_brackets_take_linear_time(text):
    """For such a long text, an algorithm that takes quadratic time would need hours."""
    clean_text(text + "\n" * 400_000 + text)
    assert hellaswag.clean(text).count("[") == text.count("[")
    assert "foo" in wikitext.detokenize("foo" + text)
    assert list(wikitext.examples([dict(text=" " * 100_000 + text, where="wiki")]))


@settings(max_examples=300)
@given(st.text("()[]\"' \n\u3000ab"))
def test_marks_in_brackets_as_in_the_harness(text):
    assert hellaswag.clean(text) == re.sub(r"\[.*?\]", "", text.strip()).replace("  ", " ")


def detokenize_as_the_harness(text):
    """Detokenizes a text as lm-evaluation-harness does.

    The source is lm_eval/tasks/wikitext/preprocess_wikitext.py.
    """
    for pattern, replacement in (
        (r"s '", "s'"),
        (r"/' [0-9]/", "/'[0-9]/"),
        *((rf" @\{mark}@ ", mark) for mark in "-,."),
        *((rf" \{mark} ", f"{mark} ") for mark in ":;.!?,"),
        (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
        (r"{\s*([^}]*?)\s*}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
        ("= = = =", "===="),
        ("= = =", "==="),
        ("= =", "=="),
        (" ° ", "°"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    ):
        text = re.sub(pattern, replacement, text)
    return text


PIECES = st.sampled_from([*"()[]{}\"':;.!?,/=°N7as \n\t\x1c\x85\u3000", " @-@ ", " @,@ ", "/' 7/"])


@settings(max_examples=500)
@given(st.lists(PIECES, max_size=40).map("".join))
def test_words_are_joined_as_in_the_harness(text):
    assert wikitext.detokenize(text) == detokenize_as_the_harness(text)


class Parrot(GPT):
    """A byte model that predicts that the last byte repeats.

    The model has no blocks. Its embedding, which is also its head, is 10 times the identity matrix.
    """

    def __init__(self):
        super().__init__(GPTConfig(n_layer=0, n_head=1, n_embd=256, block_size=8, vocab_size=256))
        torch.nn.init.zeros_(self.transformer.wpe.weight)
        self.transformer.wte.weight.data = 10 * torch.eye(256)


def scores_of(model, examples, dtype=torch.float32, tokens=1000):
    rows = make_rows(examples, get_tokenizer("bytes"), model.config)
    return score(model, examples, rows, Process(0, 1, torch.device("cpu"), dtype), tokens)


class TokenShift(GPT):
    """A GPT whose positions also read the previous position, as a causal convolution does."""

    def hidden(self, idx, *more, **options):
        x = super().hidden(idx, *more, **options)
        return x + torch.nn.functional.pad(x, (0, 0, 1, -1))


class OwnPositions(GPT):
    """A GPT that ignores `pos`, as an edited model.py may do.

    The position of a token is then its index in the row.
    """

    def hidden(self, idx, cache=None, pos=None, mask=None):
        return super().hidden(idx, cache, None, mask)


@pytest.mark.parametrize("kind", [GPT, TokenShift, OwnPositions])
def test_an_ending_has_the_same_score_alone(kind, capsys):
    """Endings of the same context share a row. Each ending has the same score as in its own row.

    If a model mixes the endings that share a row, each ending gets its own row.
    """
    examples = list(hellaswag.examples(hellaswag_records()[:4]))
    alone = [Example(each.contexts, [ending]) for each in examples for ending in each.endings]
    model = randomise(kind(GPTConfig(1, 1, 16, 1024, 256))).eval()
    expected = scores_of(model, alone).log_likelihood
    assert scores_of(model, examples).log_likelihood == pytest.approx(expected, abs=1e-3)
    note = "note: model.py mixes endings that share a row, so each ending gets its own row\n"
    assert capsys.readouterr().out == ("" if kind is GPT else note)


def knowing(module, records):
    """Returns (model, Examples of `records`). The model is overfitted to the right endings.

    module: the module of a benchmark. The tokens of the model are bytes.
    """
    torch.manual_seed(0)
    examples = list(module.examples(records))
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=80, vocab_size=256))
    rows = [list((e.contexts[0] + e.endings[e.label]).encode()) for e in examples]
    overfit(model, rows, last=20, steps=100, lr=1e-2)
    return model, examples


TEA = ["boils the kettle.", "drinks the kettle.", "sings in the tea.", "sells the moon."]
CHOICES = [
    dict(ctx=f"Number {i}: she", endings=TEA[i % 4 :] + TEA[: i % 4], label=-i % 4)
    for i in range(8)
]
STORIES = [
    {
        **{f"input_sentence_{k}": f"It was day {i}." for k in (1, 2, 3, 4)},
        "sentence_quiz1": TEA[i % 2],
        "sentence_quiz2": TEA[1 - i % 2],
        "answer_right_ending": 1 + i % 2,
    }
    for i in range(8)
]
PASSAGES = [
    dict(text=f"On day {i} she drank her {word}")
    for i, word in enumerate(["tea", "coffee", "milk", "water"])
]


@pytest.mark.parametrize(
    "module, records", [(hellaswag, CHOICES), (storycloze, STORIES), (lambada, PASSAGES)]
)
def test_a_perfect_model_scores_1_and_a_uniform_model_scores_chance(module, records):
    model, examples = knowing(module, records)
    figures = module.report(examples, scores_of(model, examples))
    assert all(figures[name] == 1.0 for name in module.BENCHMARK.proportions)
    for p in model.parameters():
        torch.nn.init.zeros_(p)  # all logits are then equal
    scores = scores_of(model, examples)
    assert scores.log_likelihood == pytest.approx(-scores.tokens * math.log(256), rel=1e-6)
    figures = module.report(examples, scores)
    if module is lambada:
        assert figures["acc"] == 0
        assert figures["perplexity"] == pytest.approx(256 ** np.mean(scores.tokens), rel=1e-4)
    else:  # all scores are equal, so the answer is always the first ending
        assert figures["acc_norm_token"] == 1 / len(examples[0].endings)


def test_an_example_may_have_several_contexts_with_one_ending():
    """The answer is the pair of context and ending with the highest log-likelihood.

    Examples may contain different numbers of pairs.
    """
    examples = [
        Example(["xa", "xb", "xc"], ["bb"], label=1),
        Example(["xb", "xa"], ["a"], label=1),
        Example(["x"], ["x"]),
        Example(["a", "b"], ["a", "b"], label=3),
        Example(["a", "b"], ["b", "a"], label=3),
    ]
    scores = scores_of(Parrot(), examples)
    alone = scores_of(
        Parrot(), [Example([c], [e]) for x in examples for c in x.contexts for e in x.endings]
    )
    assert scores.log_likelihood == pytest.approx(alone.log_likelihood)
    greedy = [0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0]
    assert scores.greedy.tolist() == alone.greedy.tolist() == greedy
    assert scores.tokens.tolist() == scores.bytes.tolist() == [2, 2, 2] + [1] * 11
    assert accuracy(examples, scores) == 3 / 5  # if scores are equal, the first pair is the answer


def test_logits_are_float32_under_autocast():
    """GPT-2's logits are near -100, where neighboring bfloat16 numbers differ by 0.5."""
    model = Parrot()
    model.transformer.wte.weight.data[:, 0] = 100.0  # adds the same value to all logits
    model.transformer.ln_f.bias.data[0] = 10.0
    model.transformer.wte.weight.data[ord("a"), 1] = 0.01  # makes one logit slightly larger
    model.transformer.ln_f.bias.data[1] = 5.0
    examples = [Example(["b"], ["c", "a"])]
    exact = scores_of(model, examples)
    rounded = scores_of(model, examples, torch.bfloat16)
    assert rounded.log_likelihood == pytest.approx(exact.log_likelihood, abs=0.01)
    assert np.diff(rounded.log_likelihood) == pytest.approx(np.diff(exact.log_likelihood), abs=0.01)
    assert np.diff(exact.log_likelihood) == pytest.approx(0.05, abs=0.01)


def test_rounded_rows_have_few_shapes_and_equal_scores(monkeypatch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=80, vocab_size=256))
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, n))) for n in rng.integers(2, 60, 80)]
    examples = [Example([text], [" a", " bcd"]) for text in texts]
    hidden, shapes, found = model.hidden, set(), {}
    model.hidden = lambda idx, **kwargs: shapes.add(idx.shape[1]) or hidden(idx, **kwargs)
    for multiple in (1, 64):
        shapes.clear()
        monkeypatch.setitem(ROUND, "cpu", multiple)
        scores = scores_of(model, examples, tokens=64)
        found[multiple] = scores.log_likelihood, len(shapes)
    np.testing.assert_allclose(found[64][0], found[1][0], rtol=1e-5)
    assert found[64][1] == 1 < 20 < found[1][1]


@pytest.mark.parametrize(
    "name, file, text, message",
    [
        (
            "hellaswag",
            "x.jsonl",
            {**CHOICES[0], "label": ""},
            "record 1: label '': must be from 0 to 3",
        ),
        ("hellaswag", "x.jsonl", {"ctx": "a", "label": 0}, "record 1: field 'endings' is missing"),
        ("hellaswag", "x.jsonl", "{broken", "record 1: is damaged (not JSON"),
        ("storycloze", "x.csv", "InputSentence1\nx", "record 1: field 'inputsentence2' is missing"),
        (
            "storycloze",
            "x.jsonl",
            {**dict.fromkeys(STORY_COLUMNS, "a"), "AnswerRightEnding": "0"},
            "record 1: AnswerRightEnding '0': must be 1 or 2;",
        ),
        ("lambada", "x.jsonl", {"text": "ends so "}, "record 1: no word at the end of 'ends so '"),
        ("wikitext", "x.txt", "", "no examples"),
    ],
)
def test_data_errors_name_file_record_and_reason(name, file, text, message, tmp_path):
    path = tmp_path / file
    text = json.dumps(text) if isinstance(text, dict) else text
    path.write_text("\n" + text if file == "x.jsonl" else text)
    with pytest.raises(UserError) as error:
        load_examples(sys.modules[name].BENCHMARK, path)
    assert str(error.value).startswith(str(path)) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_limit_ends_the_reading(tmp_path):
    """With a limit, load_examples does not read the damaged record after the last example."""
    path = write_lines(tmp_path / "a.jsonl", PASSAGES[:3])
    with open(path, "a") as file:
        file.write("{broken\n")
    for limit in (1, 3):
        assert len(load_examples(lambada.BENCHMARK, path, limit)) == limit
    with pytest.raises(UserError, match="record 4: is damaged"):
        load_examples(lambada.BENCHMARK, path)


@pytest.mark.slow
def test_data_of_any_format_give_equal_scores(copy, tiny, tmp_path):
    """Scores do not depend on the format of the data.

    The test compares JSON lines with Parquet for HellaSwag, and JSON lines with text for LAMBADA.
    """
    records = [{**r, "label": int(r["label"])} for r in hellaswag_records()]
    (tmp_path / "h.parquet").write_bytes(parquet(records))
    texts = [r["text"] for r in lambada_records()]
    (tmp_path / "l.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    for name, other, n in (("hellaswag", "h.parquet", 20), ("lambada", "l.txt", 5)):
        results = []
        for data in (tiny[1][name], other):
            flags = ["--checkpoint", "run", "--data", data, "--json", "o.json", "--limit", 5]
            out, _ = program(*flags, cwd=tmp_path, program=f"{name}.py")
            results.append(json.loads((tmp_path / "o.json").read_text()))
            assert f"note: {n} of {n} contexts with endings were cut to 33 tokens" in out
        facts = dict(
            benchmark=name, data=other, model="run/model_000010.pt", tokenizer="bytes", n_examples=5
        )
        for fact, value in facts.items():
            assert results[1][fact] == value and re.search(rf"^{fact} +{value}$", out, re.M)
        assert results[0]["examples"] == results[1]["examples"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Starts a stand-in for the Hugging Face hub. Yields the list of all requests so far.

    All programs use this stand-in, which contains examples of HellaSwag, LAMBADA and WikiText.
    """
    choices = [{**r, "label": str(r["label"])} for r in CHOICES]
    lines = [dict(text="" if line == " " else line + "\n") for line in PAGES[0].split("\n")]
    readme = (
        b"---\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n"
        b"  - split: test\n    path: raw/*\n---\n"
    )
    test = "test-00000-of-00001.parquet"
    repos = {
        "Rowan/hellaswag": {"data/validation-00000-of-00001.parquet": parquet(choices)},
        "EleutherAI/lambada_openai": {f"data/{test}": parquet(PASSAGES)},
        "Salesforce/wikitext": {"README.md": readme, f"raw/{test}": parquet(lines)},
    }
    with stand_in_hub(repos) as (url, requests):
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield requests


@pytest.mark.slow
def test_data_are_downloaded_from_the_hub_once(hub, copy, tmp_path):
    """Three programs download their data. When the programs run again offline, they read the cache.

    To save time, one process runs all three programs.
    """
    (tmp_path / "all.py").write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "offline = os.environ['HF_HUB_OFFLINE']\n"
        "for name in ('hellaswag', 'lambada', 'wikitext'):\n"
        "    sys.argv = [name, '--json', f'{name}{offline}.json', '--checkpoint', 'run']\n"
        f"    runpy.run_path(f'{ROOT}/{{name}}.py', run_name='__main__')\n"
    )
    for online in (True, False):
        out, _ = program(cwd=tmp_path, program=tmp_path / "all.py", online=online)
        assert re.findall(r"^n_examples +(\d+)$", out, re.M) == ["8", "4", "1"]
    for name in ("hellaswag", "lambada", "wikitext"):
        found, expected = (
            json.loads((tmp_path / f"{name}{offline}.json").read_text())["examples"]
            for offline in (1, 0)
        )
        assert found == expected
    downloads = [path for command, path, _ in hub if command == "GET" and "/resolve/" in path]
    assert sum(".parquet" in path for path in downloads) == 3


@pytest.mark.slow
def test_training_with_benchmarks_gives_the_same_curve(whole, tmp_path):
    """Benchmarks at every fifth step do not change the losses."""
    lines = [STORIES[0], *(story.values() for story in STORIES)]
    (tmp_path / "s.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    write_lines(tmp_path / "h.jsonl", CHOICES)
    write_lines(tmp_path / "l.jsonl", PASSAGES)
    files = ["--eval_every", 5, "--evals", "hellaswag=h.jsonl,lambada=l.jsonl,storycloze=s.csv"]
    train("--log_dir", "with", *files, cwd=tmp_path)
    plain, log = read_log(whole), read_log(tmp_path / "with")
    streams = {(step, stream) for step in (5, 10) for stream in ("hella", "lambada", "story")}
    assert {key: log[key] for key in plain} == plain and log.keys() - plain.keys() == streams
    # hellaswag.py, and a run with two processes, compute the same metrics.
    flags = "--json o.json --dtype float32 --checkpoint with --data h.jsonl".split()
    program(*flags, cwd=tmp_path, program="hellaswag.py")
    result = json.loads((tmp_path / "o.json").read_text())
    assert float(log[10, "hella"]) == pytest.approx(result["figures"]["acc_norm_token"])
    out, _ = train(*files, "--log_dir", "two", cwd=tmp_path, processes=2)
    assert f"step 10 | hella {float(log[10, 'hella']):.4f} | lambada " in out
    two = read_log(tmp_path / "two")
    assert {key: two[key] for key in streams} == {key: log[key] for key in streams}
    # A resumed run keeps the earlier metrics. read_log checks that no metric is logged twice.
    train(*files, "--log_dir", "with", "--resume", "--max_steps", 12, cwd=tmp_path)
    longer = read_log(tmp_path / "with")
    assert log.items() <= longer.items() and {(10, "train"), (12, "hella")} <= longer.keys()


@pytest.mark.slow
def test_unavailable_benchmarks_are_skipped_with_a_note(tmp_path, monkeypatch):
    """If a run cannot reach the hub, it does not wait."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    write_lines(tmp_path / "l.jsonl", PASSAGES)
    write_lines(tmp_path / "c.jsonl", [dict(query="q", choices=["a", "b"], gold=0)] * 2)
    out, err = train(
        "--evals",
        "hellaswag,storycloze,lambada=l.jsonl,core=c.jsonl",
        "--eval_every",
        5,
        cwd=tmp_path,
        online=True,
    )
    assert out.count("note: hellaswag is skipped: Rowan/hellaswag: cannot be loaded (") == 1
    assert out.count("note: storycloze is skipped: no data; give a file; storycloze.py ") == 1
    assert "Retrying" not in out + err
    log = read_log(tmp_path / "log" / "baby")
    assert {(step, stream) for step in (5, 10) for stream in ("lambada", "core")} < log.keys()
    assert (10, "hella") not in log


OWN = """from plaingpt.scoring.benchmark import Benchmark, Example
from plaingpt.scoring.program import launch
from model import GPT

def examples(records):
    for record in records:
        yield Example([record["text"]], [" tea"])

def report(examples, scores):
    return dict(acc_percent=37.5, share=0.5)

BENCHMARK = Benchmark(
    name="own", doc="", stream="mine", hub=None, examples=examples, report=report,
    figures=dict(acc_percent="in percent", share="of answers"),
    logged="share", proportions=("share",),
)

if __name__ == "__main__":
    launch(BENCHMARK, GPT)
"""


@pytest.mark.slow
def test_a_benchmark_says_what_its_figures_are(copy, tmp_path):
    """Only the fields of Benchmark describe a metric.

    Neither the name of a metric nor the order of the metrics in report() has an effect.
    """
    (tmp_path / "own.py").write_text(OWN)
    write_lines(tmp_path / "own.jsonl", PASSAGES)
    flags = ["--checkpoint", "run", "--data", "own.jsonl", "--json", "o.json"]
    out, _ = program(*flags, cwd=tmp_path, program=tmp_path / "own.py")
    assert re.search(r"^acc_percent +37\.5000 +in percent$", out, re.M)
    assert re.search(r"^share +0\.5000 ± 0\.2500 +of answers$", out, re.M)
    figures = json.loads((tmp_path / "o.json").read_text())["figures"]
    assert figures == dict(acc_percent=37.5, share=0.5)


def own_benchmark():
    names = {}
    exec(OWN, names)
    return names["BENCHMARK"]


def test_a_run_logs_the_figure_that_the_benchmark_names(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "own.jsonl", PASSAGES)
    model = Parrot()
    tokenizer = get_tokenizer("bytes")
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(BENCHMARK=own_benchmark()))
    (tmp_path / "own.py").touch()
    monkeypatch.setattr(train_gpt2, "__file__", str(tmp_path / "train_gpt2.py"))
    config = TrainConfig(batch_size=4, evals=[f"own={path}"])
    evals = load_evals(config, tokenizer, model.config)
    training = SimpleNamespace(raw_model=model, process=ALONE, config=config)
    assert run_evals(evals, training) == dict(mine=0.5)


@pytest.mark.parametrize(
    "name", ["hellaswag", "lambada", "storycloze", "wikitext", "core", "answers"]
)
def test_what_our_benchmarks_say_names_their_figures(name):
    benchmark = importlib.import_module(name).BENCHMARK
    assert {benchmark.logged, *benchmark.proportions} <= benchmark.figures.keys()
    assert set(benchmark.proportions) == {key for key in benchmark.figures if "acc" in key}


def test_names_of_evals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l.jsonl").write_text('{"text": "The boat came home"}\n')
    tokenizer, gpt_config = get_tokenizer("bytes"), GPTConfig(1, 1, 8, 64, 256)

    def load(*evals):
        config = TrainConfig(evals=[*evals], eval_every=1)
        return [found.name for found, *_ in load_evals(config, tokenizer, gpt_config)]

    assert load(" lambada=l.jsonl, wikitext=l.jsonl,") == ["lambada", "wikitext"]
    assert load("lambada=l.jsonl", "wikitext=l.jsonl") == ["lambada", "wikitext"]
    assert load("") == []
    for name in ("math", "this", "lambada.py", "docs/measure"):
        with pytest.raises(
            UserError, match=f"--evals {name}: no such benchmark; give a module, such"
        ):
            load(name)
    assert "this" not in sys.modules  # modules of other directories are not imported
