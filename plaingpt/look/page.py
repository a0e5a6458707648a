"""Writes the records of a text into one HTML file, which needs no network and no other files.

page.html contains the elements of the page, and page.css their style. page.js draws the recorded
numbers. If the page contains the weights of a small model, gpt.js runs the model on a text that the
reader types. The page stores arrays as Base64 strings: losses and weights in float32, and attention
weights in 8 bits, which is enough for a picture.
"""

import base64
import codecs
import html
import json
from dataclasses import dataclass
from pathlib import Path

from plaingpt.look.record import AttentionCall, BlockOutput, Record

import numpy as np

# If the attention weights of all snapshots take more bytes than this limit, the page contains only
# the attention weights of the last snapshot.
LIMIT = 2**24
SCRIPTS = ("gpt.js", "live.js", "page.js", "play.js")  # in the order in which they run


def split_text(ids, tokenizer):
    """Returns the tokens of a text as strings, one string per id.

    If the bytes of a character are split over several tokens, the character is in the string of the
    first of these tokens. A token that only continues a character has an empty string. A special
    token is represented by its string, such as </s>.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    begun = None  # the index of the token in which an incomplete character begins
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
    """Returns the string that the page shows for an id; <E4> for a byte that is not valid UTF-8."""
    data = bytes_of(i, tokenizer)
    name = name_of_special(i, tokenizer)
    if name is not None:
        return name
    if not data:  # the id is in the model's embedding, but not in the tokenizer's vocabulary
        return f"<{i}>"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(chr(b) if 32 <= b < 127 else f"<{b:02X}>" for b in data)


def name_of_special(i, tokenizer):
    """Returns the string of a special token, such as </s>, or None if the id is not special."""
    for name, special in tokenizer.special.items():
        if special == i:
            return name
    return None


def bytes_of(i, tokenizer):
    """Returns the bytes of an id; b"" for a special token or an id outside the vocabulary."""
    is_text = i < tokenizer.n_vocab and i not in tokenizer.special.values()
    return tokenizer.token_bytes[i] if is_text else b""


@dataclass
class Look:
    """What the page shows about one checkpoint of a run."""

    record: Record
    facts: str  # a description of the model
    sample: str  # the text that the model generates


@dataclass
class Snapshot:
    """What the page shows at one position of the slider: one Look for each run."""

    name: str  # such as "step 300"
    looks: list[Look]


@dataclass
class Text:
    """The text that a page shows."""

    ids: list[int]
    counted: list[bool] | None  # for pairs: whether each id belongs to a response
    note: str = ""  # a sentence about what the page omits

    def mean_of(self, losses):
        """Returns the mean of losses, (n,). For pairs, only tokens of the responses count."""
        if self.counted is not None:
            losses = losses[np.array(self.counted[1:])]
        return float(losses.mean(dtype=np.float64))


def build_page(text, snapshots, runs, tokenizer, live):
    """Returns the HTML file, as bytes.

    text: a Text. snapshots: list of Snapshots. runs: the names of the one or two runs. tokenizer:
    the tokenizer of the ids. live: the result of pack_model, or {"why": the reason why the page
    contains no model}.
    """
    n_bytes = sum(size_of_calls(look.record) for snapshot in snapshots for look in snapshot.looks)
    packed = []
    for snapshot in snapshots:
        with_attention = n_bytes <= LIMIT or snapshot is snapshots[-1]
        looks = [pack_look(look, with_attention) for look in snapshot.looks]
        packed.append(dict(name=snapshot.name, looks=looks))
    data = dict(
        runs=runs,
        note=text.note,
        ids=text.ids,
        tokens=split_text(text.ids, tokenizer),
        counted=text.counted,
        names={i: name_token(i, tokenizer) for i in find_ids(text, snapshots)},
        vocabulary=tokenizer.n_vocab,
        snapshots=packed,
        live=live,
    )
    return fill_template(" · ".join(runs), data)


def fill_template(title, data):
    """Returns page.html with the style, the scripts, the title and the data, as bytes."""
    script = "\n".join(map(read_part, SCRIPTS))
    page = read_part("page.html").replace("{{title}}", html.escape(title))
    page = page.replace("{{style}}", read_part("page.css")).replace("{{script}}", script)
    # Escaping each "<" prevents a text from ending the element <script>. JSON decodes the escape.
    # The data are inserted last, because a text may contain "{{title}}" or another placeholder.
    written = json.dumps(data, allow_nan=False).replace("<", r"\u003c")
    return page.replace("{{data}}", written).encode("utf-8", "backslashreplace")


def read_part(name):
    return Path(__file__).with_name(name).read_text("utf-8")


def find_ids(text, snapshots):
    """Returns all ids whose strings a page shows: the ids of the text, and the predicted ids."""
    ids = set(text.ids)
    for snapshot in snapshots:
        for look in snapshot.looks:
            ids.update(look.record.prediction.ids.ravel().tolist())
            for block in look.record.blocks:
                if block.prediction:
                    ids.update(block.prediction.ids.ravel().tolist())
    return sorted(ids)


def size_of_calls(record):
    """Returns how many bytes the attention weights of a Record take in a page, before Base64."""
    size = 0
    for call in record.calls:
        if call.weights is not None:
            nh, T, _ = call.weights.shape
            size += nh * T * T // 2
    return size


def pack_look(look, with_attention):
    """Returns a Look as a dict for JSON. with_attention: whether to add the attention weights."""
    record = look.record
    errors = [call.error for call in record.calls if call.weights is not None]
    return dict(
        facts=look.facts,
        sample=look.sample,
        prediction=pack_prediction(record.prediction),
        blocks=[pack_block(block) for block in record.blocks],
        calls=[pack_call(call) for call in record.calls] if with_attention else None,
        error=max(errors, default=None),
    )


def pack_prediction(prediction):
    """Returns a Prediction as a dict for JSON, with the arrays as Base64 strings."""
    return dict(
        losses=pack_array(prediction.losses, "<f4"),
        ranks=pack_array(prediction.ranks, "<u4"),
        ids=pack_array(prediction.ids, "<u4"),
        probs=pack_array(prediction.probs, "<f4"),
        k=prediction.ids.shape[1],
    )


def pack_block(block: BlockOutput):
    """Returns a BlockOutput as a dict for JSON."""
    if block.fault:
        return dict(name=block.name, fault=block.fault)
    prediction = pack_prediction(block.prediction)
    return dict(name=block.name, prediction=prediction, norms=pack_array(block.norms, "<f4"))


def pack_call(call: AttentionCall):
    """Returns an AttentionCall as a dict for JSON. A weight is stored as an integer, 0 to 255."""
    if call.fault:
        return dict(block=call.block + 1, fault=call.fault)
    weights = (call.weights.cpu().numpy() * 255).round().astype(np.uint8)  # (nh, T, T)
    # With a causal mask, only the lower triangle is not 0. The page stores the triangle row by row.
    rows, columns = np.tril_indices(weights.shape[1])
    is_causal = weights.sum(dtype=np.int64) == weights[:, rows, columns].sum(dtype=np.int64)
    stored = weights[:, rows, columns] if is_causal else weights
    heads = [pack_array(head, "u1") for head in stored]
    return dict(block=call.block + 1, causal=bool(is_causal), heads=heads)


def pack_array(values, dtype):
    """Converts an array to this dtype, and returns its bytes, row by row, as a Base64 string."""
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()
