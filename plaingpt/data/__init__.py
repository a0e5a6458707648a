"""Turns documents into training sequences: tokenizers, shards, data sets, and pairs."""
