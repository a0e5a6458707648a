"""Checkpoints: reading, writing, and those of other programs."""
