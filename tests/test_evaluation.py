"""Compares the benchmarks with transformers without batching, and with manual calculations."""

import csv
import json
import math
import re
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from conftest import TINY, overfit, program, read_log, train
from stand_in_hub import stand_in_hub

import hellaswag
import lambada
import storycloze
import wikitext
from model import GPT, GPTConfig
from plaingpt import evaluation
from plaingpt.cli import UserError, run
from plaingpt.evaluation import Example, make_rows, score
from tokenizer import get_tokenizer

T = 48  # context of the tiny model; some rows below are longer
WORDS = "the old harbour bell rang twice and few in Wrenmouth's café had ever counted the antidisestablishmentarian gulls".split()
CPU = torch.device("cpu")
FULL = torch.autocast("cpu", enabled=False)


def some_words(rng, n):
    return " ".join(rng.choice(WORDS, n))


def hellaswag_records():
    rng, records = np.random.default_rng(0), []
    for i in range(24):
        a, b = some_words(rng, rng.integers(2, 30)) + ".", some_words(rng, 2) if i % 3 else ""
        endings = [some_words(rng, rng.integers(1, 14)) + "." for _ in range(4)]
        if i % 4 == 0:  # the markup of WikiHow
            a, endings[1] = f"[header] How to [title] {a} [step] Begin", f"[substeps] {endings[1]} [title] Then"
        records.append(dict(activity_label=some_words(rng, 2), ctx_a=a, ctx_b=b, ctx=f"{a} {b}", endings=endings, label=i % 4))
    # A string as in the hub's files, and an empty context.
    records[5]["label"], records[7]["ctx"] = str(records[5]["label"]), ""
    # this ending alone is longer than the model's context
    records[9]["endings"][2] = some_words(rng, 60)
    return records


def lambada_records():
    rng = np.random.default_rng(1)
    texts = [some_words(rng, rng.integers(3, 40)) for _ in range(16)]
    return [dict(text=text) for text in [*texts, "Wrenmouth", "a  b", texts[3] + " antidisestablishmentarianism"]]


def storycloze_records():
    rng, records = np.random.default_rng(2), []
    for i in range(12):
        sentences = [some_words(rng, 4 + i % 5) + "." for _ in range(6)]
        records.append(dict(zip(["InputStoryid", *(f"InputSentence{k}" for k in (1, 2, 3, 4)), "RandomFifthSentenceQuiz1",
                                 "RandomFifthSentenceQuiz2", "AnswerRightEnding"], [str(i), *sentences, str(1 + i % 2)])))
    return records


# Two articles as in WikiText, which is split into words, and the same two as ordinary text.
PAGES = [" = Gull = \n \n The gull 's cry , heard at 5 @.@ 3 km , is \" loud \" ( very ) . \n \n = = Range = = \n \n"
         + " Gulls breed in 1 @,@ 200 places . " * 9 + "\n ",
         " = Old Quay = \n \n The Old Quay was built well @-@ nigh 90 years ago ; few counted . \n \n"]
TEXTS = [" = Gull =\n\nThe gull's cry, heard at 5.3 km, is \"loud\" (very).\n\n== Range ==\n\n"
         + "Gulls breed in 1,200 places.  " * 8 + "Gulls breed in 1,200 places.\n", " = Old Quay =\n\nThe Old Quay was built well-nigh 90 years ago; "
         "few counted.\n\n"]


def write_data(directory):
    """Writes the data of each benchmark in a published format -> {benchmark: path}."""
    def jsonl(name, records):
        (directory / name).write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        return directory / name

    with open(directory / "story.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, storycloze_records()[0])
        writer.writeheader()
        writer.writerows(storycloze_records())
    (directory / "wiki.raw").write_text(" \n" + "\n".join(PAGES), encoding="utf-8")
    return dict(hellaswag=jsonl("hellaswag.jsonl", hellaswag_records()), lambada=jsonl("lambada.jsonl", lambada_records()),
                storycloze=directory / "story.csv", wikitext=directory / "wiki.raw")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny GPT-2 in Hugging Face format, overfitted to some of lambada_records; and the data."""
    directory = tmp_path_factory.mktemp("evaluation")
    torch.manual_seed(0)
    model, tokenizer = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=T)), get_tokenizer("gpt2")
    ids = [tokenizer.encode(r["text"])[-T - 1:] for r in lambada_records()[:8]]
    overfit(model, ids, last=1)  # so that more last tokens than whole words are right
    model.to_hf(directory / "model")
    return directory / "model", write_data(directory)


def reference(hf, context, ending):
    """Scores one context and one ending, both token ids, with transformers.

    -> for each token of the ending: log-likelihood, and whether it is the greedy choice
    """
    ids = (context + ending)[-T - 1:]
    n = min(len(ending), T)
    with torch.no_grad():
        log_probs = hf.lm_head(hf.transformer(torch.tensor([ids[:-1]]))[0][0, -n:]).log_softmax(-1)
    target = torch.tensor(ids[-n:])
    return log_probs.gather(1, target[:, None])[:, 0], log_probs.argmax(-1) == target


def pair(context, ending):
    """The token ids of a context and an ending, as EleutherAI's harness defines them."""
    encode, stripped = get_tokenizer("gpt2").encode, context.rstrip()
    whole = encode(context + ending)
    n = len(encode(stripped))
    return whole[:n] and encode(stripped) or [50256], whole[n:]


def harness_context(r):
    def clean(text):
        return re.sub("\\[.*?\\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
    return clean(r["activity_label"] + ": " + r["ctx_a"] + " " + r["ctx_b"].capitalize()), [clean(e) for e in r["endings"]]


def questions(name):
    """The questions of each benchmark, written without our code -> [(context, endings)]."""
    if name == "hellaswag":
        return [(r["ctx"], [" " + e for e in r["endings"]]) for r in hellaswag_records()]
    if name == "hellaswag harness":
        return [(c, [" " + e for e in endings]) for c, endings in map(harness_context, hellaswag_records())]
    if name == "lambada":
        return [(" ".join(r["text"].split(" ")[:-1]), [" " + r["text"].split(" ")[-1]]) for r in lambada_records()]
    return [(" ".join(r[f"InputSentence{k}"] for k in (1, 2, 3, 4)), [" " + r[f"RandomFifthSentenceQuiz{k}"] for k in (1, 2)])
            for r in storycloze_records()]


def run_benchmark(name, tiny, tmp_path, *flags, processes):
    """Runs a benchmark in float32 -> the content of the --json file."""
    flags = ["--model", tiny[0], "--data", tiny[1][name], "--dtype", "float32", "--device", "cpu", "--json",
             tmp_path / "out.json", *flags]
    if processes > 1:
        program(*flags, program=f"{name}.py", cwd=tmp_path, processes=processes)
    else:
        evaluation.main(sys.modules[name].BENCHMARK, list(map(str, flags)))
    return json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["hellaswag", "hellaswag harness", "lambada", "storycloze"])
def test_each_example_matches_transformers_without_batching(name, tiny, tmp_path, capsys):
    hf = transformers.GPT2LMHeadModel.from_pretrained(tiny[0])
    expected = [[reference(hf, *pair(context, ending)) for ending in endings] for context, endings in questions(name)]
    style = ["--style", "harness"] if "harness" in name else []
    for size, processes in ((1, 1), (5000, 1), (200, 2)):
        result = run_benchmark(name.split()[0], tiny, tmp_path, "--tokens_per_forward", size, *style, processes=processes)
        assert len(result["examples"]) == len(expected)
        for found, endings in zip(result["examples"], expected):
            assert found["log_likelihood"] == pytest.approx([ll.sum().item() for ll, _ in endings], abs=1e-4)
            assert found["tokens"] == [len(ll) for ll, _ in endings]
            assert found["greedy"] == [bool(greedy.all()) for _, greedy in endings]
            assert found["last_greedy"] == [bool(greedy[-1]) for _, greedy in endings]
        printed = capsys.readouterr().out
        for figure, value in result["figures"].items():
            assert processes > 1 or re.search(rf"^{figure} +{value:,.4f} ", printed, re.M)
    figures, choices = result["figures"], [endings for _, endings in questions(name)]
    sums = [[ll.sum().item() for ll, _ in endings] for endings in expected]

    def accuracy(lengths, labels):
        return np.mean([max(range(len(s)), key=lambda i: s[i] / n[i]) == label for s, n, label in zip(sums, lengths, labels)])

    if name == "lambada":
        assert figures["acc"] == np.mean([bool(e[0][1].all()) for e in expected]) and 0 < figures["acc"] < 1
        assert figures["perplexity"] == pytest.approx(math.exp(-np.mean(sums)), rel=1e-5)
        assert figures["last_token_acc"] == np.mean([bool(e[0][1][-1]) for e in expected]) > figures["acc"]
        return
    labels = [i % 4 for i in range(24)] if "hellaswag" in name else [i % 2 for i in range(12)]
    assert figures["acc"] == accuracy([[1] * len(c) for c in choices], labels)
    assert figures["acc_norm_token"] == accuracy([[len(ll) for ll, _ in endings] for endings in expected], labels)
    if "hellaswag" in name:
        assert figures["acc_norm_char"] == accuracy([[len(e[1:]) for e in c] for c in choices], labels)
        assert figures["acc_norm_byte"] == accuracy([[len(e[1:].encode()) for e in c] for c in choices], labels)


@pytest.mark.parametrize("stride", [0, 16])
def test_perplexity_matches_transformers_without_batching(stride, tiny, tmp_path):
    """Predicts every token after the first once.

    Its context is the T tokens before it or, in a window, at least T - stride tokens.
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
        result = run_benchmark("wikitext", tiny, tmp_path, "--stride", stride, "--tokens_per_forward", size, processes=processes)
        found = [example["log_likelihood"][0] for example in result["examples"]]
        assert found == pytest.approx(expected, rel=1e-6)
    words, n_bytes = ([f(p) for p in PAGES] for f in (lambda p: len(re.split(r"\s+", p)), lambda p: len(p.encode())))
    assert [e["words"] for e in result["examples"]] == words
    tokens = sum(len(get_tokenizer("gpt2").encode(text)) for text in TEXTS)
    nats, figures = -sum(expected), result["figures"]
    assert figures["word_perplexity"] == pytest.approx(math.exp(nats / sum(words)), rel=1e-4)
    assert figures["token_perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert figures["bits_per_byte"] == pytest.approx(nats / sum(n_bytes) / math.log(2), rel=1e-4)


def test_wikitext_pages_are_joined_and_detokenized():
    assert [wikitext.detokenize(page) for page in PAGES] == TEXTS
    whole = " \n" + "\n".join(PAGES)
    lines = [dict(text=line) for line in whole.splitlines(keepends=True)]
    # The hub has empty lines without their space.
    hub = [dict(text="" if line.isspace() else line) for line in whole.splitlines(keepends=True)]
    for records in (lines, hub, [dict(text=whole)], [dict(page=page) for page in PAGES]):
        assert list(wikitext.pages(records)) == PAGES


class Parrot(GPT):
    """A byte model that predicts the last byte again: its logits are the embedding times itself."""

    def __init__(self):
        super().__init__(GPTConfig(n_layer=0, n_head=1, n_embd=256, block_size=8, vocab_size=256))
        torch.nn.init.zeros_(self.transformer.wpe.weight)
        self.transformer.wte.weight.data = 10 * torch.eye(256)


def scores_of(model, examples, autocast=FULL, tokens=1000, **ranks):
    rows = make_rows(examples, get_tokenizer("bytes"), model.config)
    return score(model, examples, rows, CPU, autocast, tokens, **ranks)


def test_an_ending_is_greedy_only_if_all_its_tokens_are():
    scores = scores_of(Parrot(), [Example(["xa"], ["aaa", "abb", "aab", "b"]), Example(["x a"], ["a"]), Example([""], ["\n\n"])])
    # A byte text starts after a line break.
    assert scores.greedy.tolist() == [True, False, False, False, True, True]
    assert scores.last_greedy.tolist() == [True, True, False, False, True, True]
    assert scores.tokens.tolist() == scores.bytes.tolist() == [3, 3, 3, 1, 1, 2]


def test_examples_longer_than_the_context_are_truncated():
    examples = [Example(["yxxxxxxxx"], ["x", "xx"]), Example(["a"], ["bbbbbbbbbbb"]), Example(["a"], ["bbbbbbbbbbb"], stride=3)]
    scores = scores_of(Parrot(), examples)
    assert scores.tokens.tolist() == [1, 2, 8, 11]  # the last 8 of 11 tokens; with windows all 11
    # The first b, which is wrong after an a, is scored only with windows.
    assert scores.greedy.tolist() == [True, True, True, False]
    right = -math.log1p(255 * math.exp(-160))  # ln_f scales the vector 10 * one-hot to length 16
    assert scores.log_likelihood[:3] == pytest.approx([right, 2 * right, 8 * right], abs=1e-5)
    assert scores.last_greedy.tolist() == [True] * 4


def test_windows_score_every_token_once_and_fill_the_context():
    for length in (1, 7, 8, 9, 20, 33):
        for stride in (1, 3, 8, 0):
            pieces = list(evaluation.windows([0], list(range(1, length + 1)), 8, stride))
            assert sum((piece for _, piece, _ in pieces), []) == list(range(1, length + 1))
            assert [is_last for _, _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
            for before, piece, _ in pieces:
                assert before + piece == list(range(before[0], piece[-1] + 1)) and len(before + piece) == min(9, piece[-1] + 1)
                assert before[0] == 0 or len(piece) <= (stride or 8)


def knowing(module, records):
    """A byte model overfitted to the right endings of a benchmark's records; and the examples."""
    torch.manual_seed(0)
    examples = list(module.examples(records))
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=80, vocab_size=256))
    overfit(model, [list((e.contexts[0] + e.endings[e.label]).encode()) for e in examples], last=20, steps=100, lr=3e-3)
    return model, examples


TEA = ["boils the kettle.", "drinks the kettle.", "sings in the tea.", "sells the moon."]
CHOICES = [dict(ctx=f"Number {i}: she", endings=TEA[i % 4:] + TEA[:i % 4], label=-i % 4) for i in range(8)]
STORIES = [{**dict.fromkeys((f"input_sentence_{k}" for k in (1, 2, 3, 4)), f"It was day {i}."), "sentence_quiz1": TEA[i % 2],
            "sentence_quiz2": TEA[1 - i % 2], "answer_right_ending": 1 + i % 2} for i in range(8)]
PASSAGES = [dict(text=f"On day {i} she drank her {word}") for i, word in enumerate(["tea", "coffee", "milk", "water"])]


@pytest.mark.parametrize("module, records", [(hellaswag, CHOICES), (storycloze, STORIES), (lambada, PASSAGES)])
def test_a_perfect_model_scores_1_and_a_uniform_model_scores_chance(module, records):
    model, examples = knowing(module, records)
    figures = module.report(examples, scores_of(model, examples))
    assert all(value == 1.0 for name, value in figures.items() if "acc" in name)
    for p in model.parameters():
        torch.nn.init.zeros_(p)  # all logits equal
    scores = scores_of(model, examples)
    assert scores.log_likelihood == pytest.approx(-scores.tokens * math.log(256), rel=1e-6)
    figures = module.report(examples, scores)
    if module is lambada:
        assert figures["acc"] == 0 and figures["perplexity"] == pytest.approx(256 ** np.mean(scores.tokens), rel=1e-4)
    else:  # a tie: the first ending counts, and each is right equally often
        assert figures["acc_norm_token"] == 1 / len(examples[0].endings)


def test_scores_do_not_depend_on_batching_or_padding():
    torch.manual_seed(1)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=256))
    many = [Example([some_words(np.random.default_rng(i), 1 + i % 7)], [" tea", " a long cup of coffee", " milk"])
            for i in range(9)]
    alone = [Example(e.contexts, [ending]) for e in many for ending in e.endings]
    expected = scores_of(model, alone, tokens=1)
    for tokens in (1, 150, 10**6):
        found = scores_of(model, many, tokens=tokens)
        assert found.log_likelihood == pytest.approx(expected.log_likelihood, abs=1e-4)
        assert found.tokens.tolist() == expected.tokens.tolist() and found.greedy.tolist() == expected.greedy.tolist()


def test_several_endings_share_one_copy_of_the_context():
    row, = make_rows([Example(["abc"], ["de", "fgh", "i"])], get_tokenizer("bytes"), GPTConfig(block_size=8, vocab_size=256))
    tokens, scored = evaluation.lay_out(row)
    ids, pos, part = tokens.T.tolist()
    assert bytes(ids) == b"abcdfg"  # the last token of an ending is only a target
    assert pos == [0, 1, 2, 3, 3, 4] and part == [0, 0, 0, 1, 2, 2]
    at, target, pair, is_last = scored.T.tolist()
    assert at == [2, 3, 2, 4, 5, 2] and bytes(target) == b"defghi"
    assert pair == [0, 0, 1, 1, 1, 2] and is_last == [0, 1, 0, 0, 1, 1]


def test_an_example_may_have_several_contexts_with_one_ending():
    """The pair with the highest likelihood wins. Examples may have different numbers of pairs."""
    examples = [Example(["xa", "xb", "xc"], ["bb"], label=1), Example(["xb", "xa"], ["a"], label=1), Example(["x"], ["x"]),
                Example(["a", "b"], ["a", "b"], label=3), Example(["a", "b"], ["b", "a"], label=3)]
    scores = scores_of(Parrot(), examples)
    alone = [Example([c], [e]) for example in examples for c in example.contexts for e in example.endings]
    assert scores.log_likelihood.tolist() == pytest.approx(scores_of(Parrot(), alone).log_likelihood.tolist())
    assert scores.greedy.tolist() == [False, True, False, False, True, True, True, False, False, True, False, True, True, False]
    assert scores.tokens.tolist() == scores.bytes.tolist() == [2, 2, 2] + [1] * 11
    assert evaluation.accuracy(examples, scores) == 3 / 5  # in a tie the first pair counts


def test_logits_are_float32_under_autocast():
    """GPT-2's logits are about -100, where bfloat16 values are 0.5 apart."""
    model = Parrot()
    model.transformer.wte.weight.data[:, 0] = 100.0  # adds the same value to all logits
    model.transformer.ln_f.bias.data[0] = 10.0
    model.transformer.wte.weight.data[ord("a"), 1] = 0.01  # makes one logit slightly larger
    model.transformer.ln_f.bias.data[1] = 5.0
    examples = [Example(["b"], ["c", "a"])]
    exact = scores_of(model, examples)
    rounded = scores_of(model, examples, torch.autocast("cpu", torch.bfloat16))
    assert rounded.log_likelihood == pytest.approx(exact.log_likelihood, abs=0.01)
    assert np.diff(rounded.log_likelihood) == pytest.approx(np.diff(exact.log_likelihood), abs=0.01)
    assert np.diff(exact.log_likelihood) == pytest.approx(0.05, abs=0.01)


def test_all_processes_run_equally_many_forward_passes_and_their_scores_add_up(monkeypatch):
    """Three processes with a third of the rows each, then six: two have the same rows."""
    model, dist = Parrot(), torch.distributed
    examples = [Example(["xa" * (1 + i % 3)], ["a" * (1 + i % 2), "b"]) for i in range(7)]
    whole, forward = scores_of(model, examples, tokens=8), evaluation.forward
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for copies in (1, 2):
        partial, counts = [], []
        monkeypatch.setattr(dist, "get_world_size", lambda copies=copies: 3 * copies)
        monkeypatch.setattr(dist, "all_reduce", lambda sums, partial=partial: partial.append(sums.clone()))
        for rank in range(3):
            monkeypatch.setattr(evaluation, "forward", lambda *args, rank=rank, counts=counts: counts.append(rank) or forward(*args))
            scores_of(model, examples, tokens=8, dp_rank=rank, dp_size=3)
        assert len(partial) == 3 and counts.count(0) == counts.count(1) == counts.count(2) > 1
        assert sum(partial)[0].numpy() == pytest.approx(whole.log_likelihood, rel=1e-6)
        assert sum(partial)[1].tolist() == whole.tokens.tolist()
        total = sum(partial) * copies
        monkeypatch.setattr(dist, "all_reduce", lambda sums, total=total: sums.copy_(total))
        scores = scores_of(model, examples, tokens=8, dp_rank=0, dp_size=3)
        assert scores.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-6)
        assert scores.tokens.tolist() == whole.tokens.tolist() and scores.greedy.tolist() == whole.greedy.tolist()


def test_progress_shows_rows_and_loss(monkeypatch):
    shown = []
    monkeypatch.setattr(evaluation, "show_progress", lambda *args: shown.append(args))
    scores = scores_of(Parrot(), [Example(["xa"], ["a", "b"]), Example(["x"], ["x"])], tokens=1)
    loss = -scores.log_likelihood.sum() / scores.tokens.sum()
    assert [args[:2] for args in shown] == [(1, 2), (2, 2)] and shown[1][2] == f"loss {loss:.3f}"


def test_hellaswag_styles():
    record = dict(activity_label="Roof repair", ctx_a="[header] How to fix [title] Find the hole. [step] Look  up", ctx_b="then you",
                  ctx="Find the hole. then you", endings=["[substeps] Climb. [title] Then", "b", "c", "d"], label=2)
    completion, = hellaswag.examples([record])
    assert completion == Example(["Find the hole. then you"], [" [substeps] Climb. [title] Then", " b", " c", " d"], 2)
    harness, = hellaswag.examples([record], style="harness")
    assert harness == Example(["Roof repair: How to fix. Find the hole. Look up Then you"], ["  Climb.. Then", " b", " c", " d"], 2)


GOOD = {"hellaswag": CHOICES[0], "storycloze": STORIES[0], "lambada": PASSAGES[0], "wikitext": dict(text="Some text.")}
WRONG = "is missing or has a wrong type"
BAD = [
    ("hellaswag", "x.jsonl", [{**CHOICES[0], "label": 4}], "line 2: label 4: must be one of 0, 1, 2, 3"),
    ("hellaswag", "x.jsonl", [{**CHOICES[0], "label": ""}], "line 2: label '': must be one of 0, 1, 2, 3"),
    ("hellaswag", "x.jsonl", [{**CHOICES[0], "label": None}], f"line 2: field 'label' {WRONG}"),
    ("hellaswag", "x.jsonl", [{**CHOICES[0], "endings": ["a", " ", "c", "d"]}], "line 2: an ending is empty or not a text"),
    ("hellaswag", "x.jsonl", [{**CHOICES[0], "endings": [1, 2, 3, 4]}], "line 2: an ending is empty or not a text"),
    ("hellaswag", "x.jsonl", [{"ctx": "a", "label": 0}], f"line 2: field 'endings' {WRONG}"),
    ("hellaswag", "x.jsonl", [{**CHOICES[0], "ctx": None}], f"line 2: field 'ctx' {WRONG}"),
    ("hellaswag", "x.jsonl", [[1, 2]], "line 2: not an object with fields, but a list"),
    ("hellaswag", "x.jsonl", "{broken", "line 2: not JSON"),
    ("hellaswag", "x.jsonl", b"\xff\xfe", "line 2: not UTF-8"),
    ("hellaswag", "x.txt", "text", f"line 1: field 'endings' {WRONG}"),
    ("hellaswag", "x.parquet", b"PAR1 no", "x.parquet, row 1: Parquet file size is 7 bytes"),
    ("storycloze", "x.jsonl", [{**STORIES[0], "answer_right_ending": 0}], "line 2: label 0: must be one of 1, 2"),
    ("storycloze", "x.jsonl", [{**STORIES[0], "sentence_quiz2": ""}], "line 2: an ending is empty or not a text"),
    ("storycloze", "x.csv", b"InputStoryid,InputSentence1\nx,\xff", "line 2: not UTF-8"),
    ("storycloze", "x.csv", "InputStoryid,InputSentence1\nx,y", f"line 2: field 'inputsentence2' {WRONG}"),
    ("lambada", "x.jsonl", [{"texts": "a b"}], f"line 2: field 'text' {WRONG}"),
    ("lambada", "x.jsonl", [{"text": "ends with a space "}], "line 2: no word at the end of 'ends with a space '"),
    ("lambada", "x.jsonl", [{"text": ""}], "line 2: no word at the end of ''"),
    ("wikitext", "x.jsonl", [{"pages": "a"}], f"line 2: field 'text' {WRONG}"),
    *((name, kind, "", "has no example") for name, kind in (("hellaswag", "e.jsonl"), ("storycloze", "e.csv"),
                                                                       ("lambada", "e.txt"), ("wikitext", "e.txt"))),
]


@pytest.mark.parametrize("name, file, bad, message", BAD)
def test_data_errors_name_file_line_and_reason(name, file, bad, message, tmp_path):
    path = tmp_path / file
    if isinstance(bad, list):
        path.write_text("".join(json.dumps(r) + "\n" for r in [GOOD[name], *bad]))
    elif file == "x.jsonl":
        bad = bad if isinstance(bad, bytes) else bad.encode()
        path.write_bytes(json.dumps(GOOD[name]).encode() + b"\n" + bad)
    else:
        path.write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    with pytest.raises(UserError) as error:
        evaluation.load_examples(sys.modules[name].BENCHMARK, path)
    assert str(error.value).startswith(str(path)) and message in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def baby(tmp_path_factory):
    directory = tmp_path_factory.mktemp("baby")
    train(cwd=directory)
    return directory


@pytest.mark.parametrize("name, flags, message", [
    ("hellaswag", ["--data", "nowhere.jsonl"], "nowhere.jsonl: cannot be read (No such file or directory)"),
    ("hellaswag", ["--data", "bad.jsonl"], "bad.jsonl, line 1: not JSON (Expecting value: line 1 column 1 (char 0))"),
    ("hellaswag", ["--style", "quiz"], "--style quiz: must be one of completion, harness"),
    ("hellaswag", ["--limit", "-1"], "--limit -1: must be at least 0"),
    ("hellaswag", ["--tokens_per_forward", "0"], "--tokens_per_forward 0: must be at least 1"),
    ("hellaswag", ["--json", "no/where.json"], "--json no/where.json: cannot write there"),
    ("hellaswag", ["--checkpoint", "no.pt"], "no checkpoint in no.pt"),
    ("hellaswag", ["--checkpoint", "log", "--model", "gpt2"], "exclude each other"),
    ("lambada", ["--style", "harness"], "unknown flag --style"),
    ("lambada", ["--dtype", "int8"], "--dtype int8: must be one of auto"),
    ("wikitext", ["--stride", "-1", "--data", "bad.jsonl"], "--stride -1: must be at least 0"),
    ("wikitext", ["--stride", "33", "--data", "w.txt"], "--stride 33: must be at most 32, the model's context"),
    ("storycloze", [], "not on the hub: fill in the form at https://cs.rochester.edu/nlp/rocstories"),
])
def test_each_mistake_gives_a_one_sentence_error(name, flags, message, baby, monkeypatch, capsys):
    (baby / "bad.jsonl").write_text("nothing\n")
    (baby / "w.txt").write_text("word " * 50)
    before = sorted(baby.rglob("*"))
    monkeypatch.chdir(baby)
    with pytest.raises(SystemExit) as stop:
        run(lambda: evaluation.main(sys.modules[name].BENCHMARK, flags))
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and message in err and err.count("\n") == 1 and err.startswith("error: ") and not out
    assert sorted(baby.rglob("*")) == before


def test_an_unreachable_hub_gives_a_one_sentence_error(baby):
    out, err = program(cwd=baby, program="hellaswag.py", status=2)
    assert err.startswith("error: Rowan/hellaswag: Couldn't reach 'Rowan/hellaswag' on the Hub") and err.count("\n") == 1


def test_the_newest_checkpoint_is_scored_on_data_of_any_format(baby, tiny):
    """Scores the newest checkpoint under log/. JSON lines, Parquet and text give equal scores."""
    records = hellaswag_records()[:6]
    for r in records:
        r["label"] = int(r["label"])
    pq.write_table(pa.Table.from_pylist(records), baby / "h.parquet")
    (baby / "h.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (baby / "l.txt").write_text("\n".join(r["text"] for r in lambada_records()) + "\n\n", encoding="utf-8")
    results = {}
    for name, data in (("hellaswag", "h.jsonl"), ("hellaswag", "h.parquet"), ("lambada", tiny[1]["lambada"]), ("lambada", "l.txt")):
        out, _ = program("--data", data, "--json", "o.json", "--limit", 5, cwd=baby, program=f"{name}.py")
        result = json.loads((baby / "o.json").read_text())
        facts = dict(benchmark=name, data=str(data), model="log/baby/model_000010.pt", parameters=34688, tokenizer="bytes", n_examples=5)
        for fact, value in facts.items():
            assert result[fact] == value and re.search(rf"^{fact} +{value}$", out, re.M)
        n = 20 if name == "hellaswag" else 5
        assert f"note: {n} of {n} endings, with context, were cut to 33 tokens" in out
        results[name, str(data)] = result["examples"]
    (a, b), (c, d) = (list(results.values())[i:i + 2] for i in (0, 2))
    assert a == b and c == d


def parquet(records):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records), sink)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with HellaSwag, LAMBADA and WikiText, used by all programs -> list of requests."""
    records = [{**r, "label": str(r["label"])} for r in CHOICES]
    repos = {"Rowan/hellaswag": {"data/validation-00000-of-00001.parquet": parquet(records)},
             "EleutherAI/lambada_openai": {"data/test-00000-of-00001.parquet": parquet(PASSAGES)},
             "Salesforce/wikitext": {
                 "README.md": b"---\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n  - split: test\n    path: raw/*\n---\n",
                 "raw/test-00000-of-00001.parquet": parquet([dict(text="" if line == " " else line + "\n") for line in PAGES[0].split("\n")])}}
    with stand_in_hub(repos) as (url, requests):
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield requests


def test_data_are_downloaded_from_the_hub_once(hub, baby):
    for name, n in (("hellaswag", 8), ("lambada", 4), ("wikitext", 1)):
        out, _ = program("--json", "o.json", cwd=baby, program=f"{name}.py", online=True)
        assert re.search(rf"^n_examples +{n}$", out, re.M)
        examples = json.loads((baby / "o.json").read_text())["examples"]
        # HF_HUB_OFFLINE=1: reads the cache
        program("--json", "o.json", cwd=baby, program=f"{name}.py")
        assert json.loads((baby / "o.json").read_text())["examples"] == examples
    assert sum(".parquet" in path and command == "GET" and "/resolve/" in path for command, path, _ in hub) == 3


@pytest.mark.slow
def test_training_with_benchmarks_gives_the_same_curve(hub, tmp_path):
    """Runs benchmarks at every fifth step, with data from the hub and from files. The losses do not change."""
    (tmp_path / "s.csv").write_text(",".join(STORIES[0]) + "\n" + "".join(",".join(map(str, r.values())) + "\n" for r in STORIES))
    for name, records in (("h", CHOICES), ("l", PASSAGES)):  # as in the hub
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    flags = ["--eval_every", 5, "--evals", "hellaswag,lambada,storycloze=../s.csv"]
    from_files = ["--eval_every", 5, "--evals", "hellaswag=../h.jsonl,lambada=../l.jsonl,storycloze=../s.csv"]
    for directory in ("without", "with", "two", "bf16", "compiled"):
        (tmp_path / directory).mkdir()
    train(cwd=tmp_path / "without")
    out, _ = train(*flags, cwd=tmp_path / "with", online=True)
    plain, log = read_log(tmp_path / "without" / "log" / "baby"), read_log(tmp_path / "with" / "log" / "baby")
    streams = {(step, stream) for step in (5, 10) for stream in ("hella", "lambada", "story")}
    assert {key: log[key] for key in plain} == plain and log.keys() - plain.keys() == streams
    assert f"step 10 | hella {float(log[10, 'hella']):.4f} | lambada " in out
    # hellaswag.py and a run of two processes give the same figures
    program("--json", "o.json", "--dtype", "float32", cwd=tmp_path / "with", program="hellaswag.py")
    result = json.loads((tmp_path / "with" / "o.json").read_text())
    assert result["model"].endswith("model_000010.pt")
    assert float(log[10, "hella"]) == pytest.approx(result["figures"]["acc_norm_token"])
    train(*from_files, cwd=tmp_path / "two", processes=2)
    two = read_log(tmp_path / "two" / "log" / "baby")
    assert {key: two[key] for key in streams} == {key: log[key] for key in streams}
    # resumed at a step with an evaluation: the log has each figure once, unchanged
    train(*from_files, "--resume", "--max_steps", 10, cwd=tmp_path / "with")
    assert read_log(tmp_path / "with" / "log" / "baby") == log
    # with compiled and with 16-bit training
    for directory, more in (("bf16", ["--dtype", "bfloat16"]), ("compiled", ["--compile", "--dtype", "float16"])):
        train(*from_files, *more, cwd=tmp_path / directory)
        assert streams <= read_log(tmp_path / directory / "log" / "baby").keys()


def test_unavailable_benchmarks_are_skipped_with_a_note(tmp_path):
    (tmp_path / "l.jsonl").write_text(json.dumps(PASSAGES[0]) + "\n")
    out, _ = train("--eval_every", 5, "--evals", "hellaswag,storycloze,lambada=l.jsonl", cwd=tmp_path)
    assert out.count("note: hellaswag is skipped: Rowan/hellaswag: Couldn't reach") == 1
    assert out.count("note: storycloze is skipped: the Story Cloze data are not on the hub") == 1
    log = read_log(tmp_path / "log" / "baby")
    assert (10, "lambada") in log and (10, "hella") not in log and (10, "train") not in log and (9, "train") in log


def test_training_does_not_wait_for_an_unreachable_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    out, err = train("--eval_every", 5, "--evals", "hellaswag,lambada", cwd=tmp_path, online=True)
    assert "note: hellaswag is skipped: Rowan/hellaswag: " in out
    assert "note: lambada is skipped: EleutherAI/lambada_openai: " in out
    assert "Retrying" not in out + err


def test_scores_of_the_last_checkpoint_stay_in_the_log_after_resume(tmp_path):
    (tmp_path / "l.jsonl").write_text(json.dumps(PASSAGES[0]) + "\n")
    train("--evals", "lambada=l.jsonl", "--val_every", 4, cwd=tmp_path)
    before = read_log(tmp_path / "log" / "baby")
    # A longer run would evaluate neither at step 10.
    assert (10, "lambada") in before and (10, "val") in before
    train("--evals", "lambada=l.jsonl", "--val_every", 4, "--max_steps", 12, "--resume", cwd=tmp_path)
    after = read_log(tmp_path / "log" / "baby")
    assert before.items() <= after.items() and (12, "lambada") in after and (10, "train") in after


@pytest.mark.parametrize("evals, message", [("hellaswag,arc", "--evals arc: must be one of hellaswag, lambada, storycloze, wikitext"),
                                            ("lambada=no.jsonl", "no.jsonl: cannot be read (No such file or directory)")])
def test_an_invalid_benchmark_is_reported_before_training(evals, message, tmp_path):
    _, err = train("--eval_every", 5, "--evals", evals, cwd=tmp_path, status=2)
    assert message in err and err.count("\n") == 1 and not (tmp_path / "log").exists()


def test_the_checkpoint_is_written_before_the_benchmarks_run(tmp_path, monkeypatch):
    import train_gpt2

    (tmp_path / "l.jsonl").write_text(json.dumps(PASSAGES[0]) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation, "score", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_gpt2.main([*TINY, "--eval_every", "5", "--save_every", "0", "--evals", "lambada=l.jsonl"])
    assert (tmp_path / "log" / "baby" / "model_000005.pt").exists()
