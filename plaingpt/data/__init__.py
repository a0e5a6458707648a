"""From texts to tokens: reading, tokenizers, shards, mixtures, pairs."""
