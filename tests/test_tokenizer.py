"""The encodings against known ids, a few-line BPE, and each other."""

import pytest

import tokenizer
from tokenizer import decode, get_encoding, token_bytes

HARD = "It's  2 o'clock,\n\n\tMr. O'Neill'll say: naïve café — 日本語 🙂 don't   <|endoftext|> x\u0000y\r\n " + "a" * 300


def merge(word, ranks):
    """Byte-pair encoding as Sennrich et al. describe it: merge the pair of lowest rank until none is left."""
    parts = [bytes([b]) for b in word]
    while len(parts) > 1:
        rank, i = min((ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
        if rank == len(ranks):
            break
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[p] for p in parts]


def test_gpt2_known_ids():
    encoding = get_encoding("gpt2")
    assert encoding.n_vocab == 50257 and encoding.name == "gpt2"
    assert encoding.encode_ordinary("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert encoding.encode("<|endoftext|>", allowed_special="all") == [50256]
    assert 50256 not in encoding.encode_ordinary("<|endoftext|>")  # in a text it is ordinary


def test_gpt2_equals_a_plain_bpe():
    ranks = {token: rank for rank, token in enumerate(token_bytes("gpt2"))}
    for word in ("Hello", " unbelievable", " 日本語", "🙂", " 1234567", " antidisestablishmentarianism"):
        assert get_encoding("gpt2").encode_ordinary(word) == merge(word.encode(), ranks), word


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_round_trip(name):
    encoding = get_encoding(name)
    ids = encoding.encode_ordinary(HARD)
    assert decode(name, ids) == HARD == encoding.decode(ids)


def test_bytes_are_bytes():
    assert get_encoding("bytes").n_vocab == 256
    assert get_encoding("bytes").encode_ordinary("é\n") == [0xC3, 0xA9, 10]
    assert decode("bytes", [0xC3]) == "\ufffd"  # half a character


def test_every_id_decodes():
    assert decode("gpt2", [50256, 15496]) == "<|endoftext|>Hello"
    for i in (0, 255, 256, 50255):
        assert token_bytes("gpt2")[i] == get_encoding("gpt2").decode_single_token_bytes(i)


def test_damaged_ranks_are_refused(tmp_path, monkeypatch):
    data = bytearray(tokenizer.RANKS.read_bytes())
    data[1000] ^= 1
    (tmp_path / "gpt2.tiktoken").write_bytes(data)
    monkeypatch.setattr(tokenizer, "RANKS", tmp_path / "gpt2.tiktoken")
    token_bytes.cache_clear()
    with pytest.raises(ValueError, match="damaged"):
        get_encoding("gpt2")
    token_bytes.cache_clear()


def test_unknown_name():
    with pytest.raises(ValueError, match="'gpt2' or 'bytes'"):
        get_encoding("gpt4")
