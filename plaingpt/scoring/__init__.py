"""Benchmarks: questions, rows of tokens, scores, and the program that prints them."""
