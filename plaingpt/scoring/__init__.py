"""Benchmarks: examples, rows of tokens, scores, and the program that prints the metrics."""
