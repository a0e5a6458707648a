"""Chooses the program that a helper of the tests runs: train_gpt2.py or train_large.py."""

import sys

import train_gpt2
import train_large


def choose_main():
    """Returns main of train_large.py if the flags contain --large, or main of train_gpt2.py.

    Removes --large from the flags.
    """
    if "--large" in sys.argv:
        sys.argv.remove("--large")
        return train_large.main
    return train_gpt2.main
