"""Models that are split over processes. Only train_large.py imports these files."""
