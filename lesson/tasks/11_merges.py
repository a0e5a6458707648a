"""Byte pair encoding: learn the merges from a text.

Check it with: python lesson/check.py 11
"""


def learn_merges(text, n_merges):
    """Returns the list of merges: pairs of token ids, in the order in which they were found.

    text: bytes. At first, each byte is a token, and its id is its value. Then, n_merges times:

    1. Count all pairs of neighbouring ids. In "aaa", the pair (97, 97) occurs twice.
    2. Choose the most frequent pair. If several pairs are equally frequent, choose the smallest
       one, as Python compares tuples.
    3. Give this pair the next free id: 256 for the first merge, 257 for the second, and so on.
       Replace each occurrence of the pair by this id, from left to right, so "aaa" becomes 256, 97.

    The text always has at least two ids left. GPT-2's tokenizer first cuts a text into words, and
    merges only inside them. Here, the text is one piece.

    Example: learn_merges(b"ababc", 2) is [(97, 98), (256, 99)]. After the first merge, the ids are
    256, 256, 99. Both of their pairs occur once, and (256, 99) is smaller than (256, 256).
    """
    raise NotImplementedError
