"""A training run: its settings, its directory, its log, and its benchmarks and samples."""
