"""Unusual tokenizer.json files: they change or omit text, or find an end-of-text token in a text.

In each test, the package `tokenizers` builds a tokenizer with different settings, and returns the
expected ids.
"""

import json
from dataclasses import replace

from plaingpt.data import open_pairs, open_splits
from plaingpt.errors import UserError
from plaingpt.scoring.benchmark import Example
from plaingpt.scoring.benchmark import prompt_ids as harness_ids
from plaingpt.scoring.score import make_rows
from plaingpt.tokenizer import get_tokenizer, load_tokenizer, note_unknown

import numpy as np
import pytest
from conftest import write_lines

import answers
import core
import fineweb
import generate
import lambada
from model import GPTConfig
from train_gpt2 import TrainConfig, load_evals

hf = pytest.importorskip("tokenizers")
TEXT = "Tiếng Việt: đã  uống cà phê.\n한국어 문장입니다. It's 12 o'clock, isn't it?\n"
LETTERS = hf.pre_tokenizers.ByteLevel.alphabet()
END = "<|endoftext|>"


def byte_level(letters=LETTERS, **options):
    """Returns a byte-level BPE.

    The vocabulary contains `letters`, each of which stands for a byte, and some merged tokens.
    """
    library = hf.Tokenizer(hf.models.BPE(**options))
    library.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=len(letters) + 41,
        initial_alphabet=sorted(letters),
        special_tokens=[END],
        show_progress=False,
    )
    library.train_from_iterator(["It's the clock, isn't it? " * 9], trainer)
    return library


def load(library, **changes):
    """Converts a tokenizers.Tokenizer to a Tokenizer.

    changes: name=value, for each field of the tokenizer's JSON that gets a different value.
    """
    return get_tokenizer(json.dumps(json.loads(library.to_str()) | changes))


def split(behavior):
    return hf.pre_tokenizers.Split(hf.Regex(r"\s+"), behavior)


def sequence(*steps):
    last = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return hf.pre_tokenizers.Sequence([*steps, last])


PARTS = {
    "plain": {},
    "like Llama 3": dict(pre_tokenizer=sequence(split("isolated"))),
    "digits": dict(pre_tokenizer=sequence(hf.pre_tokenizers.Digits(True))),
    "a space before a text": dict(pre_tokenizer=hf.pre_tokenizers.ByteLevel()),
    "spaces removed": dict(pre_tokenizer=sequence(split("removed"))),
    "words": dict(pre_tokenizer=sequence(hf.pre_tokenizers.Whitespace())),
    "NFD": dict(normalizer=hf.normalizers.NFD()),
    "StripAccents": dict(normalizer=hf.normalizers.StripAccents()),
    "Replace": dict(normalizer=hf.normalizers.Replace("  ", " ")),
    "in a sequence": dict(normalizer=hf.normalizers.Sequence([hf.normalizers.NFC()])),
}


@pytest.mark.parametrize("kind", PARTS)
def test_bits_per_byte_are_right_or_not_there(kind, capsys):
    """Either the bytes of a text's ids add up to the bytes of the text, or all ids have 0 bytes."""
    library = byte_level()
    for name, part in PARTS[kind].items():
        setattr(library, name, part)
    tokenizer = load(library)
    sizes = tokenizer.text_bytes(tokenizer.n_vocab)
    has_sizes = kind in ("plain", "like Llama 3", "digits")
    assert sizes[tokenizer.encode(TEXT)].sum() == (len(TEXT.encode()) if has_sizes else 0)
    assert (sizes.sum() > 0) == has_sizes
    note = "note: bits per byte need a byte-level tokenizer that does not change its input; "
    assert (note in capsys.readouterr().out) == (not has_sizes)


def test_an_added_token_that_takes_the_spaces_beside_it(capsys):
    """The added token "clock" also replaces the spaces before it, but contains no spaces."""
    library = byte_level()
    library.add_tokens([hf.AddedToken("clock", lstrip=True, normalized=False)])
    tokenizer = load(library)
    assert len(tokenizer.encode("a  clock")) == 2
    assert tokenizer.text_bytes(tokenizer.n_vocab).sum() == 0


def test_a_unigram_without_an_unknown_token():
    """The package `tokenizers` can encode the letter a, but raises an error for the letter b.

    A model can be trained on texts without b.
    """
    tokenizer = load(hf.Tokenizer(hf.models.Unigram([("</s>", 0.0), ("a", -1.0)])))
    assert tokenizer.encode("aa") == [1, 1] and tokenizer.text_bytes(2).tolist() == [0, 0]
    with pytest.raises(UserError, match="^tokenizer.json: not usable .*; give another file$"):
        tokenizer.encode("b")


def test_the_letters_of_an_added_token_stand_for_no_bytes():
    library = byte_level()
    # In a token that is not an added token, these letters stand for a space and the byte 0xE9.
    library.add_tokens(["\u0120\xe9"])
    assert load(library).token_bytes[-1] == "\u0120\xe9".encode()


def test_a_line_break_that_ends_a_text_is_text():
    """The end-of-text token is a line break, as with byte tokens.

    A line break may also occur within a text, and then counts as text.
    """
    tokenizer = load(byte_level(), end_of_text="Ċ")
    ids = tokenizer.encode("a\nb")
    assert tokenizer.decode(ids) == "a\nb" and tokenizer.end_of_text == ids[1]
    assert tokenizer.text_bytes(tokenizer.n_vocab)[ids].tolist() == [1, 1, 1]


def byte_letters(text):
    """Returns the letters that a byte-level vocabulary needs for the bytes of a text."""
    pieces = hf.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return set("".join(piece for piece, _ in pieces))


def characters(**options):
    """Returns a BPE tokenizer whose vocabulary is a few characters.

    The tokenizer has an unknown token or none.
    """
    names = ["<|endoftext|>", *"Theboats. ", options.get("unk_token", "x")]
    vocab = {name: i for i, name in enumerate(names)}
    return hf.Tokenizer(hf.models.BPE(vocab, [], **options))


def test_a_vocabulary_that_leaves_text_out_is_noted(capsys):
    """The package `tokenizers` omits unknown characters or bytes without a message."""
    text = "The boats. 中文文本没有空格。"
    for library in (byte_level(byte_letters("The boats.")), characters()):
        tokenizer = load(library)
        assert (
            capsys.readouterr().out == "note: the tokenizer omits text that its vocabulary lacks\n"
        )
        known = library.encode("The boats. ").ids
        assert tokenizer.encode(text) == library.encode(text).ids == known
        assert tokenizer.text_bytes(tokenizer.n_vocab).sum() == 0
        capsys.readouterr()
    for name in ("gpt2", "bytes"):
        get_tokenizer(name)
    fallback = {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    model = hf.models.BPE({END: 0, **fallback}, [], byte_fallback=True)
    for library in (byte_level(), hf.Tokenizer(model), characters(unk_token="[UNK]")):
        load(library)
    assert capsys.readouterr().out == ""


def test_programs_note_how_much_of_a_text_is_unknown(tmp_path, capsys):
    """There is a note about a training text, pairs, each shard, a prompt, and examples to score."""
    characters(unk_token="[UNK]").save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    (tmp_path / "t.txt").write_text("The boats. 中文" * 200, "utf-8")
    open_splits(tmp_path / "t.txt", tokenizer)
    note = "note: {:.1%} of the tokens of {} are the unknown token\n"
    assert capsys.readouterr().out == note.format(2 / 13, f"{tmp_path}/t.txt")
    pair = dict(prompt="The boats. ", response="中文 ")
    write_lines(tmp_path / "p.jsonl", [pair] * 20)
    open_pairs(tmp_path / "p.jsonl", tokenizer, T=16)
    assert capsys.readouterr().out == note.format(2 / 14, f"{tmp_path}/p.jsonl")
    out = str(tmp_path / "s")
    flags = ["--tokenizer", str(tmp_path / "t.json"), "--output_dir", out, "--shard_size", "1301"]
    fineweb.main(["--input", str(tmp_path / "t.txt"), *flags])
    # In the first shard, end_of_text precedes the document.
    lines = capsys.readouterr().out.splitlines(keepends=True)
    assert [line for line in lines if "unknown" in line] == [
        note.format(200 / 1301, f"{out}/s_val_000000.npy"),
        note.format(200 / 1300, f"{out}/s_train_000001.npy"),
    ]
    generate.tokenize_prompt("The boats. 中文", tokenizer, 16)
    assert capsys.readouterr().out == note.format(2 / 14, "the prompt")
    examples = [Example(["The boats. "], ["中文 "])]
    make_rows(examples, tokenizer, GPTConfig())
    assert capsys.readouterr().out == note.format(2 / 14, "the examples")


def test_text_that_is_left_out_does_not_keep_its_neighbours_apart():
    """After "中" is omitted, "a" and "b" merge, as in the package `tokenizers`."""
    vocab = {END: 0, "a": 1, "b": 2, "ab": 3}
    library = hf.Tokenizer(hf.models.BPE(vocab, [("a", "b")]))
    assert load(library).encode("a中b") == library.encode("a中b").ids == [3]


def test_an_unknown_token_is_counted(capsys):
    """The note says which share of the tokens is the unknown token.

    If the vocabulary contains all bytes, no token is the unknown token.
    """
    fallback = {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    text = "note: 50.0% of the tokens of it are the unknown token\n"
    for vocab, note in (({}, text), (fallback, ""), ({**fallback, "<0xE4>": 999}, "")):
        vocab = {"<unk>": 0, "</s>": 1, **vocab, "a": 300}
        model = hf.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
        tokenizer = load(hf.Tokenizer(model))
        note_unknown(tokenizer, [tokenizer.encode("a中"), tokenizer.encode("a文")], "it")
        assert capsys.readouterr().out == note
    tokenizer = load(byte_level(unk_token=END))  # end_of_text is never an unknown token
    assert tokenizer.unknown is None and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_end_of_text_may_not_be_the_unknown_token():
    """If end_of_text were the unknown token, each unknown word would end a document."""
    pieces = [("</s>", 0.0), ("a", -1.0)]
    for model in (
        hf.models.Unigram(pieces, unk_id=0),
        hf.models.WordLevel({"</s>": 0, "a": 1}, unk_token="</s>"),
    ):
        with pytest.raises(ValueError, match="^</s> is also the unknown token$"):
            load(hf.Tokenizer(model))


def with_end(kind):
    """Returns a tokenizers.Tokenizer that encodes the string `</s>` to the end-of-text token.

    kind: the part of the tokenizer that causes this.
    """
    pieces = ["<unk>", "a", "b", "<", "/", "s", ">", " ", "</s>", "s>", "</"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    if kind == "unigram":
        scores = [(piece, -(len(piece) ** 0.5)) for piece in pieces]
        library = hf.Tokenizer(hf.models.Unigram(scores, 0, False))
    elif kind == "words":
        library = hf.Tokenizer(hf.models.WordLevel(ids, unk_token="<unk>"))
        library.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    elif kind == "merges":
        merges = [("s", ">"), ("<", "/"), ("</", "s>")]
        library = hf.Tokenizer(hf.models.BPE(ids, merges, unk_token="<unk>"))
    else:
        library = hf.Tokenizer(hf.models.BPE(ids, [], unk_token="<unk>", ignore_merges=True))
    if kind == "not special":
        library.add_tokens([hf.AddedToken("</s>", special=False)])
    elif kind == "special":
        library.add_special_tokens(["</s>"])
    return library


@pytest.mark.parametrize(
    "kind", ["unigram", "words", "merges", "not special", "special", "ignore_merges"]
)
def test_the_name_of_end_of_text_in_a_text_is_no_end(kind):
    """If a text contains the string `</s>`, its ids must not contain the end-of-text token.

    A text without this string has the same ids as in the package `tokenizers`.
    """
    library = with_end(kind)
    tokenizer = load(library)
    end = library.token_to_id("</s>")
    assert tokenizer.end_of_text == end
    assert end in library.encode("</s>").ids
    for text in ("a </s> b", "</s>", "a</s>"):
        assert end not in tokenizer.encode(text)
    assert tokenizer.encode_documents(["a </s> b", "</s>"]).tolist().count(end) == 2
    assert tokenizer.encode("a s> b") == library.encode("a s> b").ids
    if kind in ("unigram", "merges", "not special"):
        assert "</s>" in tokenizer.decode(tokenizer.encode("a</s>")).replace(" ", "")
    assert tokenizer.decode([end]) == "</s>"


def test_dropout_is_off():
    """A text always has the same ids, even if the tokenizer.json enables the dropout of merges."""
    library = byte_level()
    expected = library.encode(TEXT).ids
    library.model.dropout = 0.9
    tokenizer = load(library)
    assert {tuple(tokenizer.encode(TEXT)) for _ in range(9)} == {tuple(expected)}
    assert np.array_equal(tokenizer.encode_documents([TEXT])[1:], expected)


def test_a_refused_vocabulary_is_one_sentence(tmp_path):
    library = hf.Tokenizer(hf.models.Unigram([("</s>", 0.0), ("a", -1.0)], unk_id=0))
    library.save(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match=r"not usable \(</s> is also the unknown token\); give"):
        load_tokenizer(tmp_path / "t.json")
    settings = json.loads(byte_level().to_str())
    settings["model"]["vocab"]["zzz"] = 5
    (tmp_path / "t.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="not usable .two tokens have the same id.; give"):
        load_tokenizer(tmp_path / "t.json")


def superwords():
    """Returns a BPE of characters that merges "red hat", with its space, into one token."""
    vocab = {letter: i for i, letter in enumerate(["<|endoftext|>", *"redhat "])}
    merges, last = [], "r"
    for letter in "ed hat":
        merges.append((last, letter))
        last += letter
        vocab[last] = len(vocab)
    return hf.Tokenizer(hf.models.BPE(vocab, merges))


@pytest.mark.parametrize("name", ["harness", "answers", "core"])
def test_an_ending_without_tokens_of_its_own_is_refused(name):
    """With an ending that adds no tokens, the accuracy of every model would be 100%."""
    lost = Example(["red"], ["中文"], kind="language_modeling")
    prompt_ids = dict(harness=harness_ids, answers=answers.prompt_ids, core=core.prompt_ids)[name]
    config = GPTConfig(block_size=16)
    with pytest.raises(
        UserError, match="the ending '中文' after 'red' adds no tokens to the context; "
    ):
        make_rows([lost], load(characters()), config, prompt_ids)
    # "red hat" is one token, and so is "red".
    joined = Example(["red"], [" hat"], kind="language_modeling")
    if name == "harness":
        with pytest.raises(UserError, match="the ending ' hat' after 'red' adds no tokens"):
            make_rows([joined], load(superwords()), config, prompt_ids)
    else:
        (row,) = make_rows([joined], load(superwords()), config, prompt_ids)
        assert len(row.endings[0][0]) > 0


def test_evals_of_a_run_skip_a_benchmark_that_the_tokenizer_cannot_score(capsys, monkeypatch):
    """The data of the benchmark come from the hub, so the user has made no mistake."""
    benchmark = replace(lambada.BENCHMARK, load=lambda *_: [Example(["red"], ["中文"])])
    monkeypatch.setattr(lambada, "BENCHMARK", benchmark)
    config = TrainConfig(evals=["lambada"])
    assert load_evals(config, load(characters()), GPTConfig()) == []
    assert "note: lambada is skipped: the ending '中文' after 'red'" in capsys.readouterr().out
    with pytest.raises(UserError, match="adds no tokens to the context"):
        load_evals(replace(config, evals=["lambada=a.jsonl"]), load(characters()), GPTConfig())
