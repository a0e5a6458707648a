"""A user's own vocabulary, from a text to scores, compared with Hugging Face's packages."""

import functools
import gzip
import json
import math
import os
import random
import re
import shutil
import sys
import tracemalloc
from dataclasses import replace
from itertools import chain

from plaingpt.data import find_tokenizer
from plaingpt.documents import Document
from plaingpt.errors import UserError
from plaingpt.pretrained import build_library, load_model, save_gpt2
from plaingpt.scoring.program import run_benchmark
from plaingpt.tokenizer import get_tokenizer, load_tokenizer

import numpy as np
import pytest
import torch
from conftest import MODEL, ROOT, TINY, fresh, names, program, read_log, write_lines
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stand_in_hub import parquet, stand_in_hub

import fineweb
import generate
import tokenizer
import train_gpt2
import wikitext
from model import GPT

hf = pytest.importorskip("tokenizers")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PIECES = ["a", " ", "\n", "\r", "'ll", "1", "!", "中", "\u3000", "<|endoftext|>", "</s>", "é"]


@functools.cache
def library_of(name):
    """Returns the tokenizers.Tokenizer that corresponds to "gpt2" or "bytes"."""
    known = get_tokenizer(name)
    library = hf.Tokenizer.from_str(build_library(known.token_bytes, known.special).to_str())
    library.encode_special_tokens = True
    return library


def chinese(n, seed=0):
    """Returns a text of n random Chinese words. Their frequencies follow Zipf's law."""
    rng = random.Random(0)
    letters = [chr(c) for c in range(0x4E00, 0x4E00 + 400)]
    words = ["".join(rng.choices(letters, k=rng.choice([1, 2, 2, 3]))) for _ in range(3000)]
    rng.seed(seed)
    chosen = rng.choices(words, [1 / (i + 1) for i in range(3000)], k=n)
    return "".join(
        word + "。" * (i % 9 == 8) + "\n" * (i % 50 == 49) for i, word in enumerate(chosen)
    )


def run(main, *flags):
    """Runs a program in this process. main: the function main of the program."""
    main(list(map(str, flags)))


def make_shards(directory, out, *flags):
    """Makes shards from the two files of `zh` with fineweb.py. Returns all tokens, in order."""
    files = directory / "a.txt", directory / "b.jsonl"
    run(fineweb.main, "--input", *files, "--output_dir", out, *flags)
    return tokens_in(out)


def tokens_in(out):
    shards = [np.load(p) for p in sorted(out.glob("*.npy"), key=lambda path: path.name[-10:])]
    dtype = np.uint16 if find_tokenizer(out).n_vocab <= 65_536 else np.uint32
    assert {shard.dtype.type for shard in shards} == {dtype}
    return np.concatenate(shards).tolist()


@pytest.fixture(scope="module")
def zh(tmp_path_factory):
    """Returns (directory, documents).

    The directory contains the Chinese documents, in two files, and several tokenizers.
    """
    d, documents = tmp_path_factory.mktemp("zh"), [chinese(100 * n, n) for n in range(1, 21)]
    (d / "a.txt").write_text("<|endoftext|>".join(documents[:10]), "utf-8")
    lines = [json.dumps({"text": text}) + "\n" for text in documents[10:]]
    (d / "b.jsonl").write_text("".join(lines))
    for name in ("zh.json", "again.json"):
        out, _ = program(
            "--input",
            "a.txt",
            "b.jsonl",
            "--vocab_size",
            4000,
            "--output",
            name,
            cwd=d,
            program="tokenizer.py",
        )
    (d / "out.txt").write_text(out)
    changed = json.loads((d / "zh.json").read_text())
    changed["added_tokens"].append({**changed["added_tokens"][0], "id": 4000, "content": "[X]"})
    changed["normalizer"] = {"type": "NFKC"}
    (d / "nfkc.json").write_text(json.dumps(changed))
    llama().save(str(d / "llama.json"))
    large = json.loads((d / "zh.json").read_text())
    ids = {token: i + 66_000 * (i > 300) for token, i in large["model"]["vocab"].items()}
    unused = {f"unused {i}": i for i in range(301, 66_301)}
    large["model"]["vocab"] = {**ids, **unused, "<|endoftext|>": 69_999}
    large["added_tokens"][0]["id"] = 69_999
    (d / "large.json").write_text(json.dumps(large))
    return d, documents


def llama():
    """Returns a tokenizer like Llama's.

    The tokenizer adds a space before a text, writes each space as U+2581, and encodes unknown
    characters as bytes.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    vocab |= {token: 259 + i for i, token in enumerate(["\u2581", "a", "b", "\u2581a", "ab"])}
    merges = [("\u2581", "a"), ("a", "b")]
    library = hf.Tokenizer(
        hf.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    library.normalizer = hf.normalizers.Sequence(
        [hf.normalizers.Prepend("\u2581"), hf.normalizers.Replace(" ", "\u2581")]
    )
    library.decoder = hf.decoders.Sequence(
        [
            hf.decoders.Replace("\u2581", " "),
            hf.decoders.ByteFallback(),
            hf.decoders.Fuse(),
            hf.decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def reference(path):
    library = hf.Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    return library


@pytest.mark.slow
def test_a_new_vocabulary(zh):
    """Two runs of tokenizer.py on the same files write the same vocabulary.

    For these files, the new vocabulary needs fewer tokens than GPT-2's vocabulary.
    """
    d, _ = zh
    assert (d / "again.json").read_bytes() == (d / "zh.json").read_bytes()
    found, out = load_tokenizer(d / "zh.json"), (d / "out.txt").read_text()
    ours, gpt2 = re.findall(
        r"(?m)^(.*): vocabulary size (.*), ([\d.]+) bytes per token of the text$", out
    )
    assert ours[:2] == ("again.json", "4,000") and gpt2[:2] == ("gpt2", "50,257")
    assert float(ours[2]) > 1.8 * float(gpt2[2])
    assert found.n_vocab == 4000 and found.special == {"<|endoftext|>": 3999}


def test_a_small_text_gives_fewer_ids_than_asked_for(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two three\n" * 20)
    output = str(tmp_path / "a.json")
    flags = ["--input", str(tmp_path / "a.txt"), "--vocab_size", "5000", "--output", output]
    tokenizer.main(flags)
    n = load_tokenizer(output).n_vocab
    assert n < 300 and f"a.json: vocabulary size {n}, " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["zh.json", "nfkc.json", "llama.json", "large.json", "gpt2", "bytes"]
)
def test_ids_equal_the_library(zh, kind):
    """Compares the ids of English text, and of any Unicode text, with the package `tokenizers`.

    end_of_text precedes each document and, except for byte tokens, never occurs within a text.
    """
    known = kind in ("gpt2", "bytes")
    found = load_tokenizer(kind if known else zh[0] / kind)
    library = library_of(kind) if known else reference(zh[0] / kind)
    end = found.end_of_text
    every = [chr(c) for c in range(0, 0x110000, 250) if not 0xD800 <= c < 0xE000]

    @settings(max_examples=40, deadline=None)
    @given(st.one_of(TEXT, st.lists(st.sampled_from(PIECES)).map("".join)))
    @example("".join(f"a{c}1{c} {c}!\n" for c in every))
    @example((ROOT / "input.txt").read_text()[:5000])
    def compare(text):
        ids = found.encode(text)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert kind == "bytes" or end not in ids
        assert found.decode(ids) == library.decode(ids, skip_special_tokens=False)
        assert kind in ("nfkc.json", "llama.json") or found.decode(ids) == text
        assert found.encode_documents([text, "", text]).tolist() == [end, *ids, end, end, *ids]

    compare()
    assert found.encode("caf\udce9") == found.encode("caf\ufffd")  # a prompt in Latin-1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, unknown, options",
    [
        ("BertWordPiece", "[UNK]", {}),
        ("SentencePieceBPE", "<unk>", {}),
        ("SentencePieceUnigram", "<unk>", {"unk_token": "<unk>"}),
    ],
)
def test_a_vocabulary_that_is_not_byte_level(kind, unknown, options, tmp_path):
    """Bits per byte are NaN. fineweb.py prints which share of the tokens is the unknown token."""
    library, special = getattr(hf, f"{kind}Tokenizer")(), [unknown, "</s>"]
    library.train_from_iterator(
        ["the king the king "] * 9,
        vocab_size=90,
        show_progress=False,
        special_tokens=special,
        **options,
    )
    library.save(str(tmp_path / "t.json"))
    (tmp_path / "t.txt").write_text("the king " * 2000 + "中 " * 2000, "utf-8")
    flags = ["--tokenizer", "t.json", "--max_steps", 1, "--data", "t.txt"]
    out, _ = program(*TINY, *flags, cwd=tmp_path)
    assert (
        "\nnote: bits per byte need a byte-level tokenizer that does not change its input; " in out
    )
    assert "| nan bits per byte" in out
    flags = ["--tokenizer", "t.json", "--input", "t.txt", "--output_dir", "s", "--shard_size", 2000]
    out, _ = program(*flags, cwd=tmp_path, program="fineweb.py")
    path = max((tmp_path / "s").glob("*.npy"), key=lambda path: path.name[-10:])
    share = (np.load(path) == library.token_to_id(unknown)).mean()
    assert share > 0.4 and f"note: {share:.1%} of the tokens of s/{path.name} are the" in out
    assert "val_000000" not in out  # this shard contains only known text


def test_a_model_with_fewer_ids_than_its_tokenizer(tmp_path):
    """Somebody has added a token to the tokenizer, but not to the model."""
    tokenizer = get_tokenizer("bytes")
    save_gpt2(fresh(MODEL), tmp_path / "hf", tokenizer)
    settings = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    token = dict(
        id=256,
        content="[PAD]",
        special=True,
        single_word=False,
        lstrip=False,
        rstrip=False,
        normalized=False,
    )
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps({**settings, "added_tokens": [token]}))
    with pytest.raises(
        UserError, match="hf: the vocabulary of tokenizer.json is larger than the model's; correct"
    ):
        load_model(str(tmp_path / "hf"), GPT)


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_known_vocabularies_are_recognized(name, tmp_path):
    """The vocabularies of gpt2 and bytes are recognized in an older tokenizer.json.

    GPT-2's vocabulary is also recognized in the files vocab.json and merges.txt.
    """
    known = get_tokenizer(name)
    source = json.loads(library_of(name).to_str())
    source["end_of_text"] = "Ċ" if name == "bytes" else "<|endoftext|>"
    assert get_tokenizer(json.dumps(source)) is known
    split = source["pre_tokenizer"]
    split["add_prefix_space"] = True
    assert get_tokenizer(json.dumps(source)).name.startswith("tokenizer.json (")
    split["add_prefix_space"] = False
    del split["use_regex"]  # OpenAI's file on the hub lacks this entry
    assert get_tokenizer(json.dumps(source)) is known
    split["use_regex"] = False
    assert (get_tokenizer(json.dumps(source)) is known) == (name == "bytes")
    if name == "gpt2":
        model = source["model"]
        write_pair(tmp_path, {**model["vocab"], "<|endoftext|>": 50256}, model["merges"])
        assert load_tokenizer(tmp_path) is known is load_tokenizer(tmp_path / "vocab.json")


def write_pair(directory, vocab, merges):
    """Writes vocab.json and merges.txt, the files of older models without a tokenizer.json."""
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (directory / "vocab.json").write_text(json.dumps(vocab))
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")


@pytest.mark.slow
def test_a_model_with_the_older_files_of_its_tokenizer(zh, tmp_path):
    """vocab.json and merges.txt contain a vocabulary that is not GPT-2's.

    Without merges.txt, loading the model raises an error.
    """
    d, _ = zh
    save_gpt2(fresh(replace(MODEL, vocab_size=4000)), tmp_path, load_tokenizer(d / "zh.json"))
    bpe = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    write_pair(tmp_path, {**bpe["vocab"], "</s>": 3999}, bpe["merges"])
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    _, found = load_model(str(tmp_path), GPT)
    assert found.special == {"</s>": 3999}
    assert found.encode("中文 a") == reference(d / "zh.json").encode("中文 a").ids
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(UserError, match="not usable .*; give another tokenizer, or --end_of_text"):
        load_model(str(tmp_path), GPT)


@pytest.fixture(scope="module")
def older_gpt2(tmp_path_factory):
    """A directory with GPT-2's vocab.json and merges.txt."""
    directory = tmp_path_factory.mktemp("older")
    model = json.loads(library_of("gpt2").to_str())["model"]
    write_pair(directory, {**model["vocab"], "<|endoftext|>": 50256}, model["merges"])
    return directory


CHAT = "<|user|>Hi, it's  me<|end|>\n<|user|> <|pad|>é<|us"


@pytest.mark.parametrize(
    "added, special_tokens",
    [
        ({"<|end|>": 50258, "<|user|>": 50257}, {"eos_token": "<|endoftext|>"}),
        ({"<|endoftext|>": 50256, "<|pad|>": 50257}, {"pad_token": "<|pad|>"}),
        ({"<|user|>": 50257, "<|end|>": 50258}, {"additional_special_tokens": ["<|user|>"]}),
    ],
)
def test_added_tokens_beside_the_older_files(older_gpt2, tmp_path, added, special_tokens):
    """added_tokens.json contains the id of an added token, which may also occur within a text.

    transformers returns the same ids.
    """
    transformers = pytest.importorskip("transformers")
    directory = shutil.copytree(older_gpt2, tmp_path / "gpt2")
    (directory / "added_tokens.json").write_text(json.dumps(added))
    (directory / "special_tokens_map.json").write_text(json.dumps(special_tokens))
    found = load_tokenizer(directory)
    theirs = transformers.GPT2Tokenizer.from_pretrained(str(directory))
    assert found.n_vocab == len(theirs) == max(added.values()) + 1
    assert found.end_of_text == 50256
    for text in (CHAT, " ".join(added).replace("<|endoftext|>", "")):
        ids = found.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert found.decode(ids) == text == theirs.decode(ids)
    for token, i in added.items():
        assert found.decode([i]) == token
        assert token == "<|endoftext|>" or found.encode(f"a{token}b")[1] == i
    assert get_tokenizer(found.source) is found is not get_tokenizer("gpt2")
    assert found.text_bytes(50300)[found.encode(CHAT)].sum() == len(CHAT.encode())
    assert 50256 not in found.encode("<|endoftext|>")
    assert load_tokenizer(directory, list(added)[0]).end_of_text == list(added.values())[0]


def test_an_added_token_may_end_a_text(tmp_path):
    """An added token becomes end_of_text if the vocabulary itself has no end-of-text token."""
    model = json.loads(library_of("bytes").to_str())["model"]
    write_pair(tmp_path, model["vocab"], model["merges"])
    (tmp_path / "added_tokens.json").write_text('{"<|user|>": 257, "</s>": 256}')
    found = load_tokenizer(tmp_path)
    assert found.special == {"</s>": 256} and found.n_vocab == 258
    assert found.encode("a<|user|>") == [97, 257] and 256 not in found.encode("</s>")


@pytest.mark.parametrize("added", ['{"<|user|>": 50258}', '{"<|user|>": 7}', '["<|user|>"]', "{"])
def test_added_tokens_that_do_not_fit_are_one_sentence(older_gpt2, tmp_path, added):
    directory = shutil.copytree(older_gpt2, tmp_path / "gpt2")
    (directory / "added_tokens.json").write_text(added)
    with pytest.raises(UserError, match=r"added_tokens.json") as error:
        load_tokenizer(directory)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, flags, end",
    [
        ("zh.json", [], 3999),
        ("nfkc.json", ["--end_of_text", "[X]"], 4000),
        ("large.json", [], 69_999),
    ],
)
def test_shards_equal_a_plain_loop(zh, tmp_path, kind, flags, end):
    """The shards do not depend on the number of threads, or on an earlier run with --max_shards.

    The flag --end_of_text may choose the end-of-text token.
    """
    d, documents = zh
    library = reference(d / kind)
    expected = [i for text in documents for i in [end, *library.encode(text).ids]]
    for n in (1, 3) if kind == "zh.json" else (3,):
        flags = ["--tokenizer", d / kind, *flags, "--num_proc", n, "--shard_size", 6000]
        out = tmp_path / f"s{n}"
        assert make_shards(d, out, *flags, "--max_shards", 2) == expected[:12_000]
        assert make_shards(d, out, *flags) == expected
        assert load_tokenizer(out).encode("中文") == library.encode("中文").ids


@pytest.mark.slow
def test_from_a_text_to_scores(zh, tmp_path, monkeypatch):
    """Trains, generates text, and scores a model whose token ids need 32 bits.

    For the export of a model with its own vocabulary, see test_export.py.
    """
    (d, documents), kind = zh, "large.json"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text(documents[3], "utf-8")
    tokens = make_shards(d, tmp_path / "shards", "--tokenizer", d / kind)
    assert max(tokens) > 65_535
    small = "--max_steps 1 --total_batch_size 128 --val_tokens 128 --n_embd 8 --log_dir a".split()
    for data in (["shards"], [d / "a.txt", "--tokenizer", d / kind]):
        run(train_gpt2.main, *TINY, *small, "--data", *data)
        assert load_model(tmp_path / "a", GPT)[1].name == load_tokenizer(d / kind).name
    few = ["--prompt", "一丁", "--max_new_tokens", 20]
    run(generate.main, "--checkpoint", "a", *few, "--json", "a.json")
    flags = ["--checkpoint", "a", "--data", "t.txt", "--json", "b.json"]
    run_benchmark(wikitext.BENCHMARK, GPT, flags)
    texts, scores = (json.loads((tmp_path / f"{x}.json").read_text("utf-8")) for x in "ab")
    assert texts[0]["prompt"] == "一丁" and scores["figures"]["token_perplexity"] > 100


@pytest.mark.slow
def test_mixed_vocabularies_are_refused(zh, tmp_path, monkeypatch):
    d, _ = zh
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--n_embd", 8, "--max_steps", 1]
    for name, choice in (("zh", ["--tokenizer", d / "zh.json"]), ("en", [])):
        make_shards(d, tmp_path / name, *choice)
    run(train_gpt2.main, *flags, "--data", "en", "--log_dir", "a")
    for own, *messages in (
        ("--data zh --init_from a", "--data: the weights need token ids of gpt2"),
        ("--data zh --resume --log_dir a", "--data: the weights need token ids of gpt2"),
        (f"--data en --tokenizer {d}/zh.json", "en: contains tokens of gpt2; remove --tokenizer"),
        ("--data zh=0.5 en=0.5", "--data: zh uses tokenizer.json (", ", en uses gpt2; "),
    ):
        with pytest.raises(UserError) as error:
            run(train_gpt2.main, *flags, *own.split())
        text = str(error.value)
        assert "\n" not in text and all(message in text for message in messages), text
    (tmp_path / "zh" / "tokenizer.json").unlink()  # the file is lost, and --tokenizer replaces it
    run(train_gpt2.main, *flags, "--data", "zh", "--tokenizer", d / "zh.json", "--log_dir", "b")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "bytes", "zh.json"])
def test_bits_per_byte_equals_a_hand_computation(zh, tmp_path, kind):
    """The test computes the bits from the probabilities of all tokens.

    Special tokens do not count as text.
    """
    if kind == "bytes":
        data = ROOT / "input.txt"
        tokens = np.fromfile(data, np.uint8)
        tokens = tokens[len(tokens) * 9 // 10 :]
        total = (len(tokens) - 1) // 32
        starts = [i * total // 40 * 32 for i in range(40)]  # 40 evenly spaced sequences
    else:  # these shards contain end-of-text ids
        data = tmp_path / "s"
        make_shards(zh[0], data, "--tokenizer", zh[0] / kind if kind == "zh.json" else kind)
        tokens = np.load(min(data.glob("*_val_*")))
        starts = range(0, 40 * 32, 32)
    flags = "--max_steps 1 --n_embd 8 --total_batch_size 128 --val_tokens 1280".split()
    run(train_gpt2.main, *TINY, *flags, "--log_dir", tmp_path / "a", "--data", data)
    model, found = load_model(tmp_path / "a", GPT)
    rows = np.stack([tokens[start : start + 33] for start in starts])
    rows = torch.from_numpy(rows.astype(np.int64))
    y = rows[:, 1:].flatten()
    with torch.no_grad():
        logits = model.eval()(rows[:, :-1])[0].double()
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y, reduction="none")
    is_text = torch.tensor([kind == "bytes" or i != found.end_of_text for i in y.tolist()])
    n_bytes = sum(len(found.token_bytes[i]) for i in y[is_text].tolist())
    log = read_log(tmp_path / "a")
    assert float(log[1, "val"]) == pytest.approx(nats.mean().item(), rel=2e-6)
    bits_per_byte = nats[is_text].sum().item() / n_bytes / math.log(2)
    assert float(log[1, "bpb"]) == pytest.approx(bits_per_byte, rel=2e-6)


NO_FILE = "not usable ("


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", NO_FILE),
        (None, NO_FILE + "No such file"),
        ("{}", NO_FILE + "no field 'model'); give another"),
        ('{"model": {"type": "BPE"}}', NO_FILE + "Missing vocab/merges"),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
            NO_FILE + "no end-of-text token <|endoftext|> or ",
        ),
    ],
)
def test_a_bad_tokenizer_is_one_sentence(content, message, tmp_path):
    path = tmp_path / "t.json"
    if content:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        load_tokenizer(path)
    assert str(error.value).startswith(f"--tokenizer {path}: {message}")


def test_a_tokenizer_json_that_the_package_refuses(tmp_path):
    source = json.loads(library_of("bytes").to_str())
    source |= {"pre_tokenizer": {"type": "unknown"}, "end_of_text": "Ċ"}
    (tmp_path / "t.json").write_text(json.dumps(source))
    with pytest.raises(UserError, match="t.json: not usable .data did not match any"):
        load_tokenizer(tmp_path / "t.json")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "zh.json"])
def test_training_from_shards_imports_few_packages(zh, tmp_path, kind):
    """A run imports only torch and numpy and, for a tokenizer.json, the package `tokenizers`.

    The run also generates samples and computes bits per byte.
    """
    make_shards(zh[0], tmp_path / "s", "--tokenizer", zh[0] / kind if "." in kind else kind)
    flags = [*TINY, "--max_steps", "1", "--data", "s"]
    others = {"tiktoken", "tokenizers", "transformers", "datasets", "pyarrow"}
    (tmp_path / "a.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in [*sys.modules]:\n    if name.split('.')[0] in {others!r}:\n"
        "        del sys.modules[name]  # imported before by forked.py\n"
        f"import train_gpt2; train_gpt2.main({flags!r}); print({others!r} & sys.modules.keys())"
    )
    out, _ = program(cwd=tmp_path, program=tmp_path / "a.py")
    assert "--- sample 1 at step 1 ---" in out and "bits per byte" in out
    assert out.endswith("set()\n" if kind == "gpt2" else "{'tokenizers'}\n")


def test_the_package_is_missing(tmp_path, monkeypatch):
    """Without the package `tokenizers`, loading a tokenizer.json raises a one-sentence error.

    The tokenizer `gpt2` does not need this package.
    """
    byte_json = tmp_path / "t.json"
    byte_json.write_text(json.dumps(json.loads(library_of("bytes").to_str())))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="^the package tokenizers is missing: pip install"):
        load_tokenizer(byte_json, "Ċ")
    assert load_tokenizer("gpt2").encode("Hello") == [15496]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.json", "a.jsonl", "a.csv", "a.parquet"])
@pytest.mark.parametrize("n_documents", [4, 8000])
def test_a_sample_is_from_all_of_the_text(tmp_path, name, n_documents):
    """The sample comes from all parts of the text, in small, large and compressed files."""
    n = 8000 // n_documents
    documents = []
    for i in range(n_documents):
        documents.append("".join(f"{j:04} " * 100 for j in range(n * i, n * i + n)))
    path = write_documents(tmp_path / name, documents)  # 4 MB
    config = tokenizer.VocabularyConfig(input=[str(path)], sample_bytes=200_000)
    text = "".join(tokenizer.read_sample(config))
    assert 190_000 <= len(text) <= 200_000
    quarters = [int(number) // 2000 for number in re.findall(r"\b\d{4}\b", text)]
    assert all(share > 0.1 for share in np.bincount(quarters, minlength=4) / len(quarters))


def write_documents(path, documents):
    """Writes documents in the format that the file name selects. Returns the path."""
    rows = [dict(text=document) for document in documents]
    if path.suffix == ".parquet":
        data = parquet(rows)
    elif path.suffix == ".csv":
        data = "\n".join(["text", *documents]).encode()
    elif path.suffix == ".json":
        data = json.dumps(rows).encode()
    elif path.suffix == ".jsonl":
        data = "\n".join(map(json.dumps, rows)).encode()
    else:
        data = "<|endoftext|>".join(documents).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_a_piece_may_be_larger_than_the_sample(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 50_000)
    config = tokenizer.VocabularyConfig(input=[str(tmp_path / "a.txt")], sample_bytes=1)
    assert tokenizer.read_sample(config) == ["a" * 10_000]


def test_damaged_documents_take_no_memory(tmp_path, monkeypatch, capsys):
    good = Document("a.jsonl, record 1", "text")
    damaged = (Document(f"a.jsonl, record {i}", problem="not JSON") for i in range(2, 20_002))
    monkeypatch.setattr(tokenizer, "read_documents", lambda *_, **__: chain([good], damaged))
    (tmp_path / "a.jsonl").touch()
    tracemalloc.start()
    config = tokenizer.VocabularyConfig(input=[str(tmp_path / "a.jsonl")])
    assert tokenizer.read_sample(config) == ["text"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = "skipped 20,000 damaged documents; the first is a.jsonl, record 2: not JSON\n"
    assert capsys.readouterr().out == message
    assert peak < 200_000  # bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, error",
    [
        ("", "--input: is missing; give text files"),
        ("--input t.txt", "t.txt: contains no text; choose a different file or --text_key"),
        ("--input t.txt --output no/x.json", "--output no/x.json: cannot write there; give a file"),
        ("--input *.txt --output ./t.txt", "--output ./t.txt: is also an input; give another file"),
    ],
)
def test_mistakes(flags, error, tmp_path):
    (tmp_path / "t.txt").write_bytes("中".encode()[:2])
    out, err = program(*flags.split(), cwd=tmp_path, program="tokenizer.py", status=2)
    assert err.splitlines()[-1].startswith(f"error: {error}"), err
    assert ("skipped 1 damaged documents; the first is t.txt, record 1" in out) == ("no " in error)
    assert names(tmp_path) == ["t.txt"] and (tmp_path / "t.txt").stat().st_size == 2


def test_the_output_is_no_file_of_a_data_set(tmp_path):
    state = write_lines(tmp_path / "state.json", [dict(_data_files=[dict(filename="a.arrow")])])
    (tmp_path / "a.arrow").touch()
    with pytest.raises(UserError, match="state.json: is also an input; give another file"):
        tokenizer.main(["--input", str(tmp_path), "--output", str(state)])


def test_the_output_may_be_a_pipe(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the old harbour bell rang twice. " * 20)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        flags = ["--input", str(tmp_path / "a.txt"), "--vocab_size", "270", "--output", str(pipe)]
        tokenizer.main(flags)
        assert len(json.load(reader)["model"]["vocab"]) == 269  # without <|endoftext|>
    assert f"{pipe}: vocabulary size 270, 1.7" in capsys.readouterr().out


@pytest.mark.slow
def test_a_tokenizer_of_the_hub(zh, tmp_path):
    """fineweb.py downloads only the files of the tokenizer from the hub, and no weights.

    These files are tokenizer.json, or vocab.json, merges.txt and added_tokens.json.
    """
    d, _ = zh
    files = ["--input", d / "a.txt"]
    bpe = json.loads((d / "zh.json").read_text())["model"]
    write_pair(tmp_path, {**bpe["vocab"], "</s>": 3999}, bpe["merges"])
    (tmp_path / "added_tokens.json").write_text('{"<|user|>": 4000}')
    names = ("vocab.json", "merges.txt", "added_tokens.json")
    old = {name: (tmp_path / name).read_bytes() for name in names}
    new = {"tokenizer.json": (d / "zh.json").read_bytes(), "model.safetensors": b"large"}
    with stand_in_hub({"some/new": new, "some/old": old}) as (url, requests):
        env = dict(HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1")
        for name, end in (("new", "<|endoftext|>"), ("old", "</s>")):
            flags = [*files, "--tokenizer", f"some/{name}", "--output_dir", name]
            program(*flags, cwd=tmp_path, program="fineweb.py", online=True, env=env)
            found = load_tokenizer(tmp_path / name)
            assert found.special == {end: 3999}
            assert found.encode("中文 a") == reference(d / "zh.json").encode("中文 a").ids
            assert (4000 in found.encode("<|user|>")) == (name == "old")
        flags = [*files, "--tokenizer", "some/missing"]
        _, err = program(*flags, cwd=tmp_path, program="fineweb.py", online=True, env=env, status=2)
    assert err.startswith("error: --tokenizer some/missing: not usable (") and err.count("\n") == 1
    assert not any("resolve" in path and "safetensors" in path for _, path, _ in requests)
