"""Computes the validation losses of trained models again, from their logits.

experiment.py copies this program into the copy of the base and starts it there. So the data, their
order and the cross-entropy are those of the base, whatever the change does. audit_logits.py, in the
copy with the change, has the models: it gets ids, and gives logits.

The input is JSON: `facts` of the base, the path of audit_logits.py as `program`, and the run
directories as `places`. Adds two streams to the log of each run: audit, the loss, and later, by how
much later tokens change the logits.
"""

import json
import math
import subprocess
import sys

from plaingpt.data.data_sets import Data
from plaingpt.data.sources import Sources
from plaingpt.data.tokenizer import get_tokenizer

import numpy as np
import torch
import torch.nn.functional as F

from train_gpt2 import DataLoaderLite, GPTConfig


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
            step = facts["max_steps"]
            with open(f"{place}/log.txt", "a") as file:
                file.write(f"{step} audit {loss:.8g}\n{step} later {later:.8g}\n")


def audit(models, run, data, facts):
    """Computes the validation loss of a run, and the effect of later tokens -> (loss, effect).

    models: the process of audit_logits.py. run: the index of the run there. facts: of the base.
    """
    T = facts["model_config"]["block_size"]
    loss = 0.0
    for tokens, share in zip(data.val, data.shares):
        loader = DataLoaderLite([tokens], [1], T, shuffle=False)
        n = max(1, min(facts["val_tokens"] // T, *loader.lengths))
        for i in range(n):
            x, y = loader.batch(i, 1, torch.device("cpu"))  # (1, T) each
            logits = ask_for_logits(models, run, x[0])  # (T, vocab_size)
            nats = F.cross_entropy(logits, y[0], reduction="sum").item()
            loss += float(share) * nats / loader.count_targets(0, n)
    return loss, effect_of_later_tokens(models, run, x[0], logits)


def effect_of_later_tokens(models, run, ids, logits):
    """Returns the largest change of a logit when later tokens are cut off, over the largest logit.

    ids: (T). logits: (T, vocab_size), those that the model gives for the ids.
    """
    changes = []
    for t in range(1, len(ids), 9):
        last = ask_for_logits(models, run, ids[:t])[-1]  # (vocab_size)
        changes.append((last - logits[t - 1]).abs().max())
    return max(changes) / logits.abs().max()


def ask_for_logits(models, run, ids):
    """Returns the logits that the model of a run gives: ids (T) -> (T, vocab_size) float32."""
    models.stdin.write(json.dumps([run, ids.tolist()]).encode() + b"\n")
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
