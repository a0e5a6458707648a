"""Experiments: copies, trains and compares two programs, and stores a list of the verdicts."""
