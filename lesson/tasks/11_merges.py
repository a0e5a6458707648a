"""Byte pair encoding: learn the merges from a text.

Check it with: python lesson/check.py 11
"""


def learn_merges(text, n_merges):
    """Returns the list of merges: pairs of token ids, in the order in which they were learned.

    text: bytes. At first, each byte is a token, whose id is the value of the byte. Then, repeat
    these steps n_merges times:

    1. Count all pairs of adjacent ids. In "aaa", the pair (97, 97) occurs twice.
    2. Choose the most frequent pair. If several pairs are equally frequent, choose the smallest
       pair, in Python's order of tuples.
    3. Assign the next free id to this pair: 256 in the first merge, 257 in the second, and so on.
       Replace each occurrence of the pair with this id, from left to right: "aaa" becomes 256, 97.

    Before each merge, at least two ids are left. GPT-2's tokenizer first splits a text into words,
    and merges ids only within a word. In this task, do not split the text.

    Example: learn_merges(b"ababc", 2) returns [(97, 98), (256, 99)]. After the first merge, the ids
    are 256, 256, 99. The pairs (256, 256) and (256, 99) both occur once, and (256, 99) is smaller.
    """
    raise NotImplementedError


if __name__ == "__main__":
    print(__doc__)
