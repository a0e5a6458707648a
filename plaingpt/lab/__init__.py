"""Experiments: copies, trains and compares two programs, and keeps a list of the verdicts."""
