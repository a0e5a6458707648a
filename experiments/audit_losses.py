"""Computes the validation losses of trained models again, from their logits.

experiment.py copies this program into the copy of the base and starts it there. So the data, their
order and the cross-entropy are those of the base, whatever the change does. audit_logits.py, in the
copy with the change, has the models: it gets ids, and gives logits.

The input is JSON: `facts` of the base, the path of audit_logits.py as `program`, and the run
directories as `places`. Adds three streams to the log of each run: audit, the loss; later, by how
much later tokens change the logits; and seen, which share of the validation sequences was trained.
"""

import json
import math
import subprocess
import sys

from plaingpt.base.flags import pick
from plaingpt.data.data_sets import Data
from plaingpt.data.sources import Sources
from plaingpt.data.tokenizer import get_tokenizer

import numpy as np
import torch
import torch.nn.functional as F
from record_run import POWERS

from train_gpt2 import GPTConfig, TrainConfig, make_val_loader


def main():
    given = json.load(sys.stdin)
    facts = given["facts"]
    command = [sys.executable, given["program"], *given["places"]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as models:
        tokenizer = get_tokenizer(read_line(models))
        sources = Sources(facts["data"], None, facts["val_fraction"])
        data = Data(sources, tokenizer, GPTConfig(**facts["model_config"]))
        if data.fingerprints["validation split"] != facts["validation split"]:
            raise ValueError("the change gives another tokenizer, so other data")
        for run, place in enumerate(given["places"]):
            loss, later = audit(models, run, data, facts)
            seen = share_of_seen(place, data, facts)
            step = facts["max_steps"]
            with open(f"{place}/log.txt", "a") as file:
                file.write(f"{step} audit {loss:.8g}\n{step} later {later:.8g}\n")
                file.write(f"{step} seen {seen:.8g}\n")


def audit(models, run, data, facts):
    """Computes the validation loss of a run, and the effect of later tokens -> (loss, effect).

    models: the process of audit_logits.py. run: the index of the run there. facts: of the base.
    """
    T = facts["model_config"]["block_size"]
    loss = 0.0
    changes = [torch.zeros(())]
    largest = torch.zeros(())
    for tokens, share in zip(data.val, data.shares):
        loader, n = open_measured(tokens, facts)
        for i in range(n):
            x, y = loader.batch(i, 1, torch.device("cpu"))  # (1, T) each
            # Each length below T has its turn in two sequences, so each position is compared twice.
            lengths = [t for t in range(1, T) if i in (t % n, (t + n // 2) % n)]
            # The model gets these first, so that it cannot remember the tokens that are replaced.
            replaced = logits_before(models, run, x[0], lengths, data.tokenizer.n_vocab)
            logits = ask_for_logits(models, run, x)  # (T, vocab_size)
            for t, row in zip(lengths, replaced):
                changes.append((row - logits[t - 1]).abs().max())
            largest = torch.maximum(largest, logits.abs().max())
            nats = F.cross_entropy(logits, y[0], reduction="sum").item()
            loss += float(share) * nats / loader.count_targets(0, n)
    return loss, torch.stack(changes).max() / largest


def open_measured(tokens, facts):
    """Returns the loader of a validation split, and how many of its sequences are measured.

    facts: of the base.
    """
    T = facts["model_config"]["block_size"]
    loader = make_val_loader(tokens, T, pick(TrainConfig, facts))
    return loader, max(1, min(facts["val_tokens"] // T, loader.lengths[0]))


def logits_before(models, run, ids, lengths, n_vocab):
    """Returns the last logits before the tokens that are replaced by others: a row for each length.

    ids: (T). lengths: how many of them stay, ascending. n_vocab: the number of ids.
    """
    T = len(ids)
    found = []
    size = max(1, 2**15 // T)  # rows in a forward pass
    for start in range(0, len(lengths), size):
        part = torch.tensor(lengths[start : start + size])  # (R)
        other = (ids + torch.randint(1, n_vocab, (len(part), T))) % n_vocab  # (R, T), none is equal
        rows = torch.where(torch.arange(T) < part[:, None], ids, other)  # (R, T)
        found += ask_for_logits(models, run, rows, part - 1)  # R x (vocab_size)
    return found


def share_of_seen(place, data, facts):
    """Returns the share of the measured validation sequences that a run has trained on.

    It counts sequences of the run that begin anywhere in the measured text, each once. place: the
    run directory, with the file trained.npy of record_run.py. facts: of the base.
    """
    trained = np.load(f"{place}/trained.npy")
    seen = 0.0
    for tokens, share in zip(data.val, data.shares):
        loader, n = open_measured(tokens, facts)
        T = loader.T
        width = min(T, len(POWERS))
        measured = []  # numbers of the sequences that begin in the measured text
        for i in range(n):
            start = i * loader.stride * T
            ids = tokens.read(start, min(T + width - 1, len(tokens) - start))
            measured.append(numbers_of_windows(ids, width))
        n_found = np.isin(trained, np.concatenate(measured)).sum()
        seen += float(share) * min(1.0, n_found / n)
    return seen


def numbers_of_windows(ids, width):
    """Returns number_of of record_run.py for each window of `width` ids, (n,) int64."""
    n_windows = len(ids) - width + 1
    numbers = np.zeros(n_windows, np.uint64)
    for k in range(width):
        numbers += ids[k : k + n_windows].astype(np.uint64) * np.uint64(POWERS[k])
    return numbers.view(np.int64)


def ask_for_logits(models, run, rows, positions=None):
    """Returns the logits that the model of a run gives, float32.

    rows: ids (R, T). positions: (R), one of each row; the logits are (R, vocab_size). None: all
    positions of the only row; (T, vocab_size).
    """
    asked = None if positions is None else positions.tolist()
    models.stdin.write(json.dumps([run, rows.tolist(), asked]).encode() + b"\n")
    models.stdin.flush()
    shape = read_line(models)
    data = bytearray(models.stdout.read(4 * math.prod(shape)))  # torch wants to write into it
    return torch.from_numpy(np.frombuffer(data, np.float32).reshape(shape))


def read_line(models):
    """Reads a line of JSON. If there is none, ends this program: the other one has said why."""
    line = models.stdout.readline()
    if not line:
        sys.exit(1)
    return json.loads(line)


if __name__ == "__main__":
    main()
