"""Chooses the program that faulty.py, memory.py and auxiliary.py run."""

import sys

import train_gpt2
import train_large


def choose_main():
    """Returns main of train_large.py if the flags contain --large, else main of train_gpt2.py.

    Removes --large from the flags.
    """
    if "--large" in sys.argv:
        sys.argv.remove("--large")
        return train_large.main
    return train_gpt2.main
