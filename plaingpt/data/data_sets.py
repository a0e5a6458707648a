"""The open data sets of a run."""

import re
from pathlib import Path

from plaingpt.data.tokenizer import get_tokenizer


class Data:
    """The open data sets of a run. Raises UserError.

    tokenizer: the Tokenizer of the run. gpt_config: the GPTConfig of the model that reads the data.
    For each data set, the lists train and val have its Tokens, shares has its Fraction, and names
    has its name in the log. fingerprints: {name of a split: text}. n_bytes_of_id: how many bytes of
    text each id stands for, (vocab_size,) int64.
    """

    def __init__(self, sources, tokenizer, gpt_config):
        self.shares = list(sources.shares.values())
        splits = sources.open(tokenizer, gpt_config.block_size, gpt_config.vocab_size)
        self.train = [train for train, _ in splits]
        self.val = [val for _, val in splits]
        self.n_bytes_of_id = tokenizer.text_bytes(gpt_config.vocab_size)
        self.tokenizer = tokenizer
        if tokenizer.name == "bytes":
            # In pairs, a line break ends a text. Without pairs, it does not, whatever the weights
            # of --init_from were trained on.
            has_pairs = any(tokens.has_pairs for tokens in self.val)
            self.tokenizer = get_tokenizer("lines" if has_pairs else "bytes")
        self.names = log_names(sources.shares)
        self.fingerprints = {
            "training split": fingerprint(self.train, self.shares),
            "validation split": fingerprint(self.val, self.shares),
        }


def log_names(paths):
    """Returns a name for each data set, without white space: the end of its path, or all of it.

    A path may have bytes that are not UTF-8. They become escapes such as \\udce9.
    """
    paths = [str(path).encode("utf-8", "backslashreplace").decode() for path in paths]
    names = [re.sub(r"\s", "_", Path(path).name) for path in paths]
    if len(set(names)) == len(names):
        return names
    return [re.sub(r"\s", "%20", path) for path in paths]


def fingerprint(sets, shares):
    """Describes a split: the number of tokens and the CRC-32 of each set, with its share."""
    texts = [tokens.fingerprint() for tokens in sets]
    if len(sets) > 1:
        texts = [f"{share} of {text}" for text, share in zip(texts, shares)]
    return " + ".join(texts)
