"""Checkpoints: reading, writing, those of other programs, and where a run starts."""
