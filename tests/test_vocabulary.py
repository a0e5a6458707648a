"""Vocabularies of one's own, from a text to benchmarks, compared with the packages of Hugging Face."""

import itertools
import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, program, read_log
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_hub import stand_in_hub

import tokenizer
from plaingpt import corpus
from plaingpt.checkpoint import load_model
from plaingpt.cli import UserError
from plaingpt.shards import find_tokenizer
from plaingpt.tokenizer_json import BYTE_OF
from tokenizer import get_tokenizer, load_tokenizer

hf = pytest.importorskip("tokenizers")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def chinese(n_bytes, seed=0):
    """Sentences of words that are made from common characters: the text of a language with a Zipf law."""
    rng = random.Random(seed)
    characters = [chr(c) for c in range(0x4E00, 0x4E00 + 400)]
    words = ["".join(rng.choices(characters, k=rng.choice([1, 2, 2, 2, 3, 4]))) for _ in range(3000)]
    weights = list(itertools.accumulate(1 / (i + 1) for i in range(len(words))))
    parts, size = [], 0
    while size < n_bytes:
        sentence = "".join(rng.choices(words, cum_weights=weights, k=rng.randint(4, 12))) + rng.choice("，。。！？")
        parts.append(sentence + ("\n" if rng.random() < 0.2 else ""))
        size += len(parts[-1].encode())
    return "".join(parts)


@pytest.fixture(scope="module")
def zh(tmp_path_factory):
    """A directory with Chinese text in all formats, and a vocabulary zh.json of 8,000 ids."""
    d = tmp_path_factory.mktemp("zh")
    documents = [chinese(15_000, seed) for seed in range(24)]
    (d / "a.txt").write_text("<|endoftext|>".join(documents[:8]), "utf-8")
    (d / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[8:16]))
    import pyarrow as pa
    import pyarrow.parquet as pq
    pq.write_table(pa.table({"text": documents[16:]}), d / "c.parquet")
    out, _ = program("--input", "a.txt", "b.jsonl", "c.parquet", "--vocab_size", 8000, "--output", "zh.json",
                     cwd=d, program="tokenizer.py")
    (d / "out.txt").write_text(out)
    return d, documents


def reference(directory, file="zh.json"):
    library = hf.Tokenizer.from_file(str(directory / file))
    library.encode_special_tokens = True
    return library


def test_the_table_compares_with_gpt2(zh):
    d, _ = zh
    lines = (d / "out.txt").read_text().splitlines()
    assert lines[0] == "zh.json: 8,000 ids"
    ours, gpt2 = (float(next(line.split()[-1] for line in lines if line.split()[:1] == [name])) for name in ("zh.json", "gpt2"))
    assert ours > 1.8 * gpt2
    words = lines[lines.index("ten words:") + 1:][:10]
    assert all(" " in word.strip() for word in words)


def test_the_same_files_give_the_same_vocabulary(zh):
    d, _ = zh
    program("--input", "a.txt", "b.jsonl", "c.parquet", "--vocab_size", 8000, "--output", "again.json", cwd=d, program="tokenizer.py")
    assert (d / "again.json").read_bytes() == (d / "zh.json").read_bytes()


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4"])
def test_a_vocabulary_equals_the_library(pattern, tmp_path):
    """On arbitrary Unicode, and <|endoftext|> is the last id and never part of a text."""
    (tmp_path / "t.txt").write_text(chinese(60_000) + (ROOT / "input.txt").read_text()[:60_000])
    program("--input", "t.txt", "--vocab_size", 1500, "--pattern", pattern, "--output", "t.json", cwd=tmp_path, program="tokenizer.py")
    found, library = load_tokenizer(tmp_path / "t.json"), reference(tmp_path, "t.json")
    assert found.pattern == pattern and found.encoding and found.n_vocab == 1500 == library.get_vocab_size()
    assert found.end_of_text == 1499 == library.token_to_id("<|endoftext|>")

    @settings(max_examples=300, deadline=None)
    @given(st.one_of(TEXT, st.lists(st.sampled_from(["a", " ", "\n", "\r", "'ll", "1", "!", "中", "\u3000", "<|endoftext|>", "é"])).map("".join)))
    def check(text):
        ids = found.encode(text)
        assert ids == library.encode(text, add_special_tokens=False).ids and found.end_of_text not in ids
        assert found.decode(ids) == text == library.decode(ids, skip_special_tokens=False)
        assert found.encode_documents([text, text]).tolist() == 2 * [1499, *ids]

    check()
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for start in range(5 * (pattern == "gpt4"), len(every), 100_000):  # a tenth of all characters, others for each pattern
        text = "".join(f"a{c}1{c} {c}!\n" for c in every[start : start + 10_000])
        assert found.encode(text) == library.encode(text, add_special_tokens=False).ids


def handmade(merges, **changes):
    """The text of a byte-level tokenizer.json with these pairs."""
    letters = {byte: c for c, byte in BYTE_OF.items()}
    vocab = {letters[byte]: byte for byte in range(256)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    library = hf.Tokenizer(hf.models.BPE(vocab, merges))
    library.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = hf.decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    return json.dumps({**json.loads(library.to_str()), **changes}), library


def test_a_merge_list_that_is_no_ranking():
    """The token abc is only made from ab + c, but tiktoken would also merge a + bc."""
    source, library = handmade([("x", "y"), ("b", "c"), ("xy", "b"), ("xyb", "c")])
    found = get_tokenizer(source)
    assert found.encoding is None  # so `tokenizers` encodes
    assert found.encode("xybc bc") == library.encode("xybc bc").ids == [256, 257, 32, 257]
    source, library = handmade([("x", "y"), ("xy", "b"), ("xyb", "c")])
    assert get_tokenizer(source).encoding and get_tokenizer(source).encode("xybc") == library.encode("xybc").ids == [258]


def sentencepiece():
    """A tokenizer like Llama's: a space is U+2581, unknown characters are bytes, a prefix space."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for token in ("\u2581", "a", "b", "\u2581a", "ab"):
        vocab[token] = len(vocab)
    library = hf.Tokenizer(hf.models.BPE(vocab, [("\u2581", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("\u2581"), hf.normalizers.Replace(" ", "\u2581")])
    library.decoder = hf.decoders.Sequence([hf.decoders.Replace("\u2581", " "), hf.decoders.ByteFallback(),
                                            hf.decoders.Fuse(), hf.decoders.Strip(" ", 1, 0)])
    library.post_processor = hf.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def test_a_tokenizer_like_llamas(tmp_path):
    library = sentencepiece()
    library.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found.end_of_text == 2 and found.encoding is None and found.pattern is None
    for text in ("a ab", "中 ab </s>", "b"):
        library.encode_special_tokens = True
        assert found.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert found.decode(found.encode(text)) == text
    assert found.encode_documents(["a", "b"]).tolist() == [2, *found.encode("a"), 2, *found.encode("b")]
    sizes = dict(zip(["<s>", "<0xE4>", "\u2581a", "ab"], found.text_bytes(300)[[1, 3 + 0xE4, 262, 263]].tolist()))
    assert sizes == {"<s>": 0, "<0xE4>": 1, "\u2581a": 2, "ab": 2}


def test_the_old_pair_and_gpt2s_own_file(tmp_path):
    """vocab.json and merges.txt of GPT-2, made from its ranks, are the tokenizer "gpt2"."""
    from plaingpt.tokenizer_json import merge_bytes
    gpt2, letters = get_tokenizer("gpt2"), {byte: c for c, byte in BYTE_OF.items()}
    names = ["".join(letters[b] for b in token) for token in gpt2.token_bytes[:-1]]
    ranks = {token: i for i, token in enumerate(gpt2.token_bytes[:-1])}
    pairs = [merge_bytes(token, ranks, i) for token, i in ranks.items() if i > 255]
    assert all(len(pair) == 2 for pair in pairs)
    (tmp_path / "vocab.json").write_text(json.dumps({**{name: i for i, name in enumerate(names)}, "<|endoftext|>": 50256}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(
        " ".join("".join(letters[b] for b in part) for part in pair) + "\n" for pair in pairs))
    assert load_tokenizer(tmp_path) is gpt2 is load_tokenizer(tmp_path / "vocab.json")
    library = hf.ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    text = chinese(3000) + (ROOT / "input.txt").read_text()[:3000]
    assert library.encode(text).ids == gpt2.encode(text)


@pytest.mark.parametrize("end", [None, "[SEP]"])
def test_shards_equal_a_plain_loop(zh, tmp_path, end):
    """For every kind of file and any number of threads; with --end_of_text, too."""
    d, documents = zh
    library, flags = reference(d), []
    if end:
        settings = json.loads((d / "zh.json").read_text())
        settings["added_tokens"].append({**settings["added_tokens"][0], "id": 8000, "content": end})
        settings["added_tokens"][0]["content"] = "[CLS]"
        (d / "sep.json").write_text(json.dumps(settings))
        library, flags = reference(d, "sep.json"), ["--end_of_text", end]
    expected = [i for text in documents for i in [library.token_to_id(end or "<|endoftext|>"), *library.encode(text).ids]]
    for backend, n in (("auto", 1), ("tiktoken", 3)):
        out = tmp_path / f"s{n}"
        program("--input", d / "a.txt", d / "b.jsonl", d / "c.parquet", "--tokenizer", d / ("sep.json" if end else "zh.json"), *flags,
                "--output_dir", out, "--num_proc", n, "--shard_size", 9000, "--backend", backend, cwd=tmp_path, program="fineweb.py")
        assert np.concatenate([np.load(p) for p in sorted(out.glob("*.npy"), key=lambda p: p.name[-10:])]).tolist() == expected
        meta = json.loads((out / "meta.json").read_text())
        assert meta["documents"] == 24 and load_tokenizer(out).encode("中文") == library.encode("中文").ids


def test_shards_with_the_library_as_encoder(zh, tmp_path):
    """A vocabulary that tiktoken cannot have: with a normalizer. A text file of several blocks."""
    d, _ = zh
    settings = json.loads((d / "zh.json").read_text())
    settings["normalizer"] = {"type": "NFKC"}
    (tmp_path / "nfkc.json").write_text(json.dumps(settings))
    text = chinese(3 * 2**19, seed=7) + "ﬁn"
    (tmp_path / "t.txt").write_text(text, "utf-8")
    out, _ = program("--input", "t.txt", "--tokenizer", "nfkc.json", "--output_dir", "s", cwd=tmp_path, program="fineweb.py")
    assert out.startswith("tokenizers: ")
    tokens = np.concatenate([np.load(p) for p in sorted((tmp_path / "s").glob("*.npy"), key=lambda p: p.name[-10:])])
    assert tokens.tolist() == [7999, *reference(tmp_path, "nfkc.json").encode(text).ids]


def test_pieces_of_a_large_text_give_the_tokens_of_the_whole(monkeypatch, tmp_path):
    """With GPT-4's pattern a cut after a line break is right, before it is not."""
    monkeypatch.setattr(corpus, "BLOCK", 64)
    config = tokenizer.VocabularyConfig(vocab_size=400, pattern="gpt4")
    rng = random.Random(0)
    text = "".join(rng.choices(["中", "。", "\n", "\r\n", " ", "\u3000", "ab", "1", "!", "\x1c", "\u2028", "\x85"], k=9000))
    found = get_tokenizer(tokenizer.train_vocabulary([text] * 3, config))
    path = tmp_path / "t.txt"
    path.write_bytes(text.encode())
    blocks = [text for block in corpus.read_blocks([path], "text", cut="gpt4") for text in corpus.texts_of(block, "text")[0]]
    assert len(blocks) > 20 and "".join(blocks) == text
    assert [i for block in blocks for i in found.encode(block)] == found.encode(text)
    for pattern in ("bytes", None):  # without a known place to cut, the document stays whole
        (block,) = corpus.read_blocks([path], "text", cut=pattern)
        assert b"".join(block.records) == text.encode()


@pytest.mark.slow
def test_from_a_text_to_scores_and_transformers(zh, tmp_path):
    """Train, resume, generate, score, export; transformers gives the same ids and logits."""
    transformers = pytest.importorskip("transformers")
    d, documents = zh
    flags = [*TINY, "--max_steps", 6]
    shards = tmp_path / "shards"
    program("--input", d / "a.txt", "--tokenizer", d / "zh.json", "--output_dir", shards, cwd=tmp_path, program="fineweb.py")
    program(*flags, "--data", shards, "--log_dir", "a", cwd=tmp_path)
    log = read_log(tmp_path / "a")
    model, found = load_model(tmp_path / "a")
    assert model.config.vocab_size == 8000 and found.encode("中") == reference(d).encode("中").ids
    out, _ = program("--checkpoint", "a", "--prompt", "一丁", "--max_new_tokens", 5, cwd=tmp_path, program="generate.py")
    assert "一丁" in out
    (tmp_path / "t.txt").write_text(documents[3], "utf-8")
    program("--checkpoint", "a", "--data", "t.txt", "--json", "s.json", "--dtype", "float32", cwd=tmp_path, program="wikitext.py")
    scores = json.loads((tmp_path / "s.json").read_text())

    model.to_hf(tmp_path / "hf", found)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    peer = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    ids = auto(documents[3][:20])["input_ids"]
    assert ids == found.encode(documents[3][:20]) and auto.eos_token_id == found.end_of_text == peer.config.eos_token_id
    idx = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(model(idx)[0], peer(idx).logits, rtol=1e-4, atol=1e-4)
    assert load_model(tmp_path / "hf")[1].name == found.name
    # the same model of the hub, and with the older pair of files
    files = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    with stand_in_hub({"some/zh": files}) as (url, _):
        env = dict(HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1")
        program("--model", "some/zh", "--prompt", "一丁", "--max_new_tokens", 1, "--json", "hub.json", cwd=tmp_path,
                program="generate.py", online=True, env=env)
    assert json.loads((tmp_path / "hub.json").read_text("utf-8"))[0]["prompt"] == "一丁"
    settings = json.loads((tmp_path / "hf" / "tokenizer.json").read_text("utf-8"))["model"]
    (tmp_path / "hf" / "tokenizer.json").unlink()
    (tmp_path / "hf" / "vocab.json").write_text(json.dumps({**settings["vocab"], "<|endoftext|>": found.end_of_text}))
    (tmp_path / "hf" / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in settings["merges"]))
    assert load_model(tmp_path / "hf")[1].name == found.name
    # a text file with --tokenizer: the tokens of the shards but for the end-of-text ids
    program(*flags, "--data", d / "a.txt", "--tokenizer", d / "zh.json", "--log_dir", "b", cwd=tmp_path)
    assert load_model(tmp_path / "b")[1].name == found.name and log.keys() == read_log(tmp_path / "b").keys()
    assert scores["figures"]["token_perplexity"] > 100


def test_mixed_vocabularies_are_refused(zh, tmp_path):
    d, _ = zh
    for name, choice in (("zh", ["--tokenizer", d / "zh.json"]), ("en", [])):
        program("--input", d / "a.txt", *choice, "--output_dir", name, cwd=tmp_path, program="fineweb.py")
    program(*TINY, "--max_steps", 1, "--data", "en", "--log_dir", "a", cwd=tmp_path)
    name = r"tokenizer.json (8,000 ids, CRC-32 "
    for flags, messages in (
            (["--data", "zh", "--init_from", "a"], ["--data zh: has tokens of " + name, "but a was trained on gpt2"]),
            (["--data", "zh", "--resume", "--log_dir", "a"], ["--data zh: has tokens of " + name, "but a was trained on gpt2"]),
            (["--data", "en", "--tokenizer", d / "zh.json"], ["zh.json: is " + name, "en has tokens of gpt2"]),
            (["--data", "zh=0.5", "en=0.5"], ["--data en: has tokens of gpt2, but zh has those of " + name])):
        _, err = program(*TINY, *flags, cwd=tmp_path, status=2)
        assert err.startswith("error: ") and err.count("\n") == 1 and all(message in err for message in messages), err
    (tmp_path / "zh" / "tokenizer.json").unlink()  # lost: --tokenizer replaces it
    with pytest.raises(UserError, match="unknown tokenizer .*; add its tokenizer.json to the shards"):
        find_tokenizer(tmp_path / "zh")
    assert find_tokenizer(tmp_path / "zh", d / "zh.json").name.startswith(name)


@pytest.mark.parametrize("kind", ["gpt2", "bytes", "zh"])
def test_bits_per_byte_equals_a_hand_computation(zh, tmp_path, kind):
    """From the probabilities of the whole model, one token at a time; special tokens do not count."""
    d, documents = zh
    (tmp_path / "t.txt").write_text("<|endoftext|>".join(documents[:3]) + (ROOT / "input.txt").read_text()[:40_000], "utf-8")
    data, choice = tmp_path / "t.txt", []
    if kind != "bytes":  # shards: they have end-of-text ids
        choice = ["--tokenizer", d / "zh.json"] if kind == "zh" else []
        program("--input", data, *choice, "--output_dir", "s", "--shard_size", 3000, cwd=tmp_path, program="fineweb.py")
        data = tmp_path / "s"
    program(*TINY, "--max_steps", 1, "--data", data, "--log_dir", "a", "--val_tokens", 2048, cwd=tmp_path)
    model, found = load_model(tmp_path / "a")
    model.eval()
    if kind == "bytes":
        content = data.read_bytes()
        tokens = np.frombuffer(content, np.uint8)[len(content) * 9 // 10:]
    else:
        tokens = np.load(sorted(data.glob("*_val_*"))[0])
        assert (tokens[1:2049] == found.end_of_text).sum() <= 1
    tokens, nats, text_nats, n_bytes = tokens[:2049].astype(int).tolist(), [], 0.0, 0
    for start in range(0, 2048, 32):
        row = torch.tensor([tokens[start:start + 33]])
        with torch.no_grad():
            log_p = model(row[:, :-1])[0].double().log_softmax(-1)[0]
        for p, target in zip(log_p, row[0, 1:].tolist()):
            nats.append(-p[target].item())
            if target != found.end_of_text or kind == "bytes":
                text_nats -= p[target].item()
                n_bytes += len(found.token_bytes[target])
    log = read_log(tmp_path / "a")
    assert float(log[1, "val"]) == pytest.approx(np.mean(nats), rel=2e-6)
    assert float(log[1, "bpb"]) == pytest.approx(text_nats / n_bytes / math.log(2), rel=2e-6)
    if kind == "bytes":
        assert float(log[1, "bpb"]) == pytest.approx(float(log[1, "val"]) / math.log(2), rel=1e-6)


def test_special_ids_do_not_count_as_text(zh):
    found = load_tokenizer(zh[0] / "zh.json")
    sizes = found.text_bytes(8100)
    assert len(sizes) == 8100 and sizes[7999] == 0 and (sizes[8000:] == 0).all() and (sizes[:7999] > 0).all()


def test_a_bad_tokenizer_is_one_sentence(zh, tmp_path):
    d, _ = zh
    good = json.loads((d / "zh.json").read_text())
    many = {**good["model"], "vocab": {str(i): i for i in range(65537)}}
    for name, content, message in (
            ("broken", "{", "is not JSON"), ("list", "[1]", "is not JSON"), ("empty", "{}", "not a tokenizer.json of Hugging Face ('model')"),
            ("many", json.dumps({**good, "model": many}), "has 65,537 ids, but shards store at most 65,536"),
            ("no_end", json.dumps({**good, "added_tokens": []}), "name the token between documents with --end_of_text"),
            ("wrong", json.dumps({**good, "normalizer": {"type": "Magic"}}), None)):
        path = tmp_path / f"{name}.json"
        path.write_text(content)
        with pytest.raises(UserError, match="^--tokenizer .*; |rejects") as error:
            load_tokenizer(path).encode("a")
        assert message is None or message in str(error.value)
    for place in ("missing.json", str(tmp_path), "no/such/directory"):
        with pytest.raises(UserError, match=f"--tokenizer {place}: no tokenizer.json there"):
            load_tokenizer(place)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match="vocab.json cannot be read"):
        load_tokenizer(tmp_path)


def test_training_from_shards_imports_only_torch_and_numpy(zh, shards, tmp_path):
    """Training, samples and bits per byte: from shards of a vocabulary of one's own, and of bytes."""
    d, _ = zh
    program("--input", d / "a.txt", "--tokenizer", d / "zh.json", "--output_dir", "s", cwd=tmp_path, program="fineweb.py")
    flags = [*TINY, "--max_steps", "1", "--val_tokens", "256", "--parallel", "fsdp", "--data"]
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train_gpt2\n"
            f"for data in 's', {str(shards)!r}: train_gpt2.main({flags!r} + [data])\n"
            "found = {name.split('.')[0] for name in sys.modules} | {'plaingpt.parallel'} & set(sys.modules)\n"
            "print(found & {'plaingpt.parallel', 'tiktoken', 'tokenizers', 'transformers', 'datasets', 'pyarrow', 'matplotlib'})")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("--- sample 1 at step 1 ---") == done.stdout.count("step 1 | val loss") == 2
    assert done.stdout.count("bits per byte") >= 2 and done.stdout.endswith("set()\n")


def test_missing_input_and_package():
    with pytest.raises(UserError, match="--input: is missing"):
        tokenizer.main([])


def test_a_sample_of_few_large_documents(zh, tmp_path):
    """Pieces of about the size that was asked for, from all of the text."""
    (tmp_path / "t.txt").write_text("".join(str(i // 1000) * 1000 for i in range(0, 2_000_000, 1000)))
    config = tokenizer.VocabularyConfig(input=[str(tmp_path / "t.txt")], sample_bytes=200_000)
    size = (tmp_path / "t.txt").stat().st_size
    texts = tokenizer.read_sample(config)
    assert 190_000 < sum(map(len, texts)) < 220_000 and "1999" in "".join(texts) and "555" in "".join(texts) and size > 2_000_000
    train_on, held_out = tokenizer.hold_out(texts)
    assert sum(map(len, train_on)) + sum(map(len, held_out)) == sum(map(len, texts)) and held_out[0] not in train_on
    config.sample_bytes = 1
    assert len(tokenizer.read_sample(config)) == 1
    train_on, held_out = tokenizer.hold_out(["x" * 100])
    assert [len(train_on[0]), len(held_out[0])] == [95, 5]


def test_damaged_text_is_shown(zh, tmp_path):
    (tmp_path / "t.txt").write_bytes("中".encode()[:2])
    _, err = program("--input", "t.txt", cwd=tmp_path, program="tokenizer.py", status=2)
    assert "skipped t.txt, line 1: not UTF-8\n" in err and err.endswith("error: t.txt: no text in it; choose another file or --text_key\n")
    _, err = program("--input", "t.txt", "--output", "no/x.json", cwd=tmp_path, program="tokenizer.py", status=2)
    assert err == "error: --output no/x.json: cannot write there; give a file in a writable directory\n"


def test_a_tokenizer_of_the_hub(zh, tmp_path):
    """By its name: a tokenizer.json, or the older pair of files; other files are not downloaded."""
    d, _ = zh
    model = json.loads((d / "zh.json").read_text())["model"]
    old = {"vocab.json": json.dumps({**model["vocab"], "</s>": 7999}).encode(),
           "merges.txt": ("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])).encode()}
    repos = {"some/new": {"tokenizer.json": (d / "zh.json").read_bytes(), "model.safetensors": b"large"}, "some/old": old}
    with stand_in_hub(repos) as (url, requests):
        env = dict(HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1")
        for name, end in (("new", "<|endoftext|>"), ("old", "</s>")):
            program("--input", d / "a.txt", "--tokenizer", f"some/{name}", "--output_dir", name, cwd=tmp_path, program="fineweb.py",
                    online=True, env=env)
            found = load_tokenizer(tmp_path / name)
            assert found.special == {end: 7999} and found.encode("中文 a") == reference(d).encode("中文 a").ids
        _, err = program("--input", d / "a.txt", "--tokenizer", "some/missing", "--output_dir", "x", cwd=tmp_path,
                         program="fineweb.py", online=True, env=env, status=2)
        assert err.startswith("error: --tokenizer some/missing: ") and err.count("\n") == 1 and "HF_ENDPOINT" in err
        assert not any("safetensors" in path for method, path, _ in requests if method == "GET" and "resolve" in path)
