"""From documents to sequences: tokenizers, shards, data sets, pairs, and their order."""
