"""Reads and writes checkpoints, and reads checkpoints of other programs."""
