"""What the page shows for each token of a text."""

import codecs


def split_text(ids, tokenizer):
    """Splits a text into the texts of its tokens -> list of texts, one for each id.

    A character whose bytes are in several tokens belongs to the first one. The text of a token
    that only continues a character is empty. Special ids have their names.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    begun = None  # the index of the token in which the character begins that is not complete
    for i in ids:
        name = name_of_special(i, tokenizer)
        text = decoder.decode(bytes_of(i, tokenizer), final=name is not None)
        if begun is not None and text:
            texts[begun] += text[0]
            text = text[1:]
            begun = None
        texts.append(name or text)
        is_complete = not decoder.getstate()[0]
        if begun is None and not is_complete:
            begun = len(texts) - 1
    if begun is not None:
        texts[begun] += decoder.decode(b"", final=True)
    return texts


def name_token(i, tokenizer):
    """Returns the text of a single id. Bytes that are no character are shown like <E4>."""
    data = bytes_of(i, tokenizer)
    name = name_of_special(i, tokenizer)
    if name is not None:
        return name
    if not data:  # it is no token of the vocabulary, but the model has a row for it
        return f"<{i}>"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(chr(b) if 32 <= b < 127 else f"<{b:02X}>" for b in data)


def name_of_special(i, tokenizer):
    """Returns the name of a special id, or None."""
    for name, special in tokenizer.special.items():
        if special == i:
            return name
    return None


def bytes_of(i, tokenizer):
    """Returns the bytes of an id; none for a special one, and for one beyond the vocabulary."""
    is_text = i < tokenizer.n_vocab and i not in tokenizer.special.values()
    return tokenizer.token_bytes[i] if is_text else b""
