"""A solution of task 11: learns the merges of byte pair encoding from a text."""


def learn_merges(text, n_merges):
    """Returns the list of merges: pairs of token ids, in the order in which they were learned."""
    ids = list(text)
    merges = []
    for new in range(256, 256 + n_merges):
        counts = {}
        for pair in zip(ids, ids[1:]):
            counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        merged = []
        i = 0
        while i < len(ids):
            if tuple(ids[i : i + 2]) == best:
                merged.append(new)
                i += 2
            else:
                merged.append(ids[i])
                i += 1
        ids = merged
    return merges
