"""For programs of tests that run train_gpt2.py, or train_large.py."""

import sys

import train_gpt2
import train_large


def choose_main():
    """Returns main of train_large.py if the flags contain --large, which it removes."""
    if "--large" in sys.argv:
        sys.argv.remove("--large")
        return train_large.main
    return train_gpt2.main
