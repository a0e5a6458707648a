"""Gives the logits of trained models to referee.py.

experiment.py copies this program into the copy with the change and starts it there, so `model` is
the model.py of the change. The arguments are run directories. The first line of the output is the
source of the tokenizer of the first one, as JSON. After that, each line of the input is a question
in JSON: the index of a run, R rows of T ids, and a position in each row, or null for all positions.
The answer is a line with the shape of the logits, then the logits.
"""

import json
import os
import sys

import torch


def main():
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What the change prints must not get into the answers.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    from model import GPT  # may print, too

    places = sys.argv[1:]
    run = 0
    model, tokenizer = load(GPT, places[run])
    write_line(answers, tokenizer.source)
    for line in sys.stdin:
        asked_run, rows, positions = json.loads(line)
        if asked_run != run:  # only one model is in memory
            run = asked_run
            model, _ = load(GPT, places[run])
        idx = torch.tensor(rows)  # (R, T)
        if positions is None:
            logits = model(idx)[0].float()  # (R, T, vocab_size)
        else:
            # The head is not computed for the other positions, because it may be the largest part.
            hidden = model.hidden(idx)[range(len(rows)), positions]  # (R, C)
            logits = model.logits(hidden).float()  # (R, vocab_size)
        write_line(answers, list(logits.shape))
        answers.write(logits.numpy().tobytes())
        answers.flush()


def load(GPT, place):
    """Loads the model of a run -> (GPT, Tokenizer)."""
    model, tokenizer = GPT.load(place)
    return model.requires_grad_(False).eval(), tokenizer


def write_line(file, value):
    """Writes a value as a line of JSON."""
    file.write(json.dumps(value).encode() + b"\n")
    file.flush()


if __name__ == "__main__":
    main()
