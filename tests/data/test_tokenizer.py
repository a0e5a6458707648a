"""Compares the tokenizers `gpt2` and `bytes` with known ids.

test_vocabulary.py compares tokenizers with the package `tokenizers`.
"""

from plaingpt.documents import make_document
from plaingpt.errors import UserError
from plaingpt.tokenizer import get_tokenizer

import pytest


def test_gpt2_known_ids():
    gpt2 = get_tokenizer("gpt2")
    assert gpt2.n_vocab == 50257 and gpt2.name == "gpt2" and gpt2.end_of_text == 50256
    assert gpt2.encode("Hello, I'm a model,") == [15496, 11, 314, 1101, 257, 2746, 11]
    assert gpt2.encode_documents(["Hello", "", "<|endoftext|>"]).tolist() == [
        50256,
        15496,
        50256,
        50256,
        *gpt2.encode("<|endoftext|>"),
    ]
    assert 50256 not in gpt2.encode("<|endoftext|>")  # ordinary text


def test_a_million_spaces():
    """This text would make tiktoken's regular expression overflow its stack."""
    text = "a" + " " * 1_000_000
    with pytest.raises(
        UserError, match="500,000 or more consecutive whitespace characters; remove"
    ) as error:
        get_tokenizer("gpt2").encode(text)
    assert make_document("a.txt, record 1", {"text": text}, "text").problem == str(error.value)


def test_bytes_tokenizer():
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.n_vocab == 256 and tokenizer.end_of_text == ord("\n")
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 10]
    assert tokenizer.decode([0xC3]) == "\ufffd"  # half a character


def test_every_id_decodes():
    gpt2 = get_tokenizer("gpt2")
    assert gpt2.decode([50256, 15496]) == "<|endoftext|>Hello"
    assert gpt2.decode([15496, 50257, 60000]) == "Hello\ufffd\ufffd"  # padding ids have no bytes
    for i in (0, 255, 256, 50255):
        assert gpt2.token_bytes[i] == gpt2.encoding.decode_single_token_bytes(i)
