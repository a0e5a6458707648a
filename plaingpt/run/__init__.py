"""A training run: its configuration, its directory, its log and what it prints."""
