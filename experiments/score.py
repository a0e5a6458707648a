"""Does a run of experiment.py: trains a model, computes its held-out loss, and tests causality.

experiment.py copies score.py into its copies of the two programs, and starts score.py there, so
`import model` loads the model.py of the copy. The first argument is the path of a file with
validation sequences. The other arguments are the flags of train_gpt2.py.

If the file does not exist, score.py writes the validation sequences of the run into this file.
Otherwise, score.py writes score.json into the run directory. score.json contains the mean
cross-entropy of GPT.logits on the sequences in the file, in nats per token. Thus all runs of an
experiment are scored on the sequences of the baseline, and an edit of GPT.loss or of the validation
code does not change the score. A run with a score no longer needs its checkpoints, so score.py
deletes the checkpoints, except in the runs of seed 1.
"""

import math
import sys
from pathlib import Path

from plaingpt.data import Data, Sources
from plaingpt.errors import run_program
from plaingpt.files import read_facts, replacing, write_json
from plaingpt.flags import pick
from plaingpt.pretrained import load_model
from plaingpt.settings import CHANGE_NO_LOSS
from plaingpt.source_code import hash_of_program

import torch
import torch.nn.functional as F

import train_gpt2
from model import GPT, GPTConfig


def main():
    validation, place = Path(sys.argv[1]), Path(sys.argv[-1])  # the last flag is --log_dir
    train_gpt2.main(sys.argv[2:])
    other = sorted(CHANGE_NO_LOSS - {"device"})
    write_json(place / "program.json", dict(hash=hash_of_program(), change_no_loss=other))
    facts = read_facts(place / "run.json")
    config = pick(train_gpt2.TrainConfig, facts["train_config"])
    checkpoint = place / f"model_{config.max_steps:06d}.pt"
    if not validation.exists():
        with replacing(validation) as file:
            torch.save(read_validation(place, config, facts["model_config"]), file)
    elif checkpoint.exists():  # an interrupted run has no checkpoint of the last step
        torch.set_float32_matmul_precision("highest")
        device = "cpu" if config.device == "auto" else config.device
        sets = [(share, x.to(device), y.to(device)) for share, x, y in torch.load(validation)]
        model = load_model(checkpoint, GPT)[0].to(device).requires_grad_(False).eval()
        later = effect_of_later_tokens(model, sets[0][1])
        loss = sum(share * mean_loss(model, x, y) for share, x, y in sets)
        loss = loss if math.isfinite(loss) else None
        write_json(place / "score.json", dict(loss=loss, later=later))
        if config.seed != 1:  # look.py needs only the models of seed 1
            for model in place.glob("model_*.pt"):
                model.unlink()


def read_validation(place, config, model_config):
    """Returns the validation sequences of a run: a list with (share, x, y) for each data set.

    share: the weight of the data set in the loss. x, y: inputs and targets, (n, T), int64.
    """
    sources = Sources(config.data, config.tokenizer, config.val_fraction)
    data = Data(sources, load_model(place, GPT)[1], pick(GPTConfig, model_config))
    sets = []
    for share, tokens in zip(data.shares, data.val):
        loader = train_gpt2.make_val_loader(tokens, model_config["block_size"], config)
        n = max(1, min(config.val_tokens // loader.T, loader.lengths[0]))
        sets.append((float(share), *loader.batch(0, n, torch.device("cpu"))))
    return sets


def mean_loss(model, x, y):
    """Returns the mean cross-entropy in float32. x, y: (n, T). Ignores targets of -100."""
    nats = 0.0
    B = max(1, 2**24 // (x.size(1) * model.config.vocab_size))  # the logits need 64 MB
    for ids, targets in zip(x.split(B), y.split(B)):
        logits = model.logits(model.hidden(ids)).float()  # (B, T, vocab_size)
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    return nats / (y != -100).sum().item()


def effect_of_later_tokens(model, x):
    """Returns how much later tokens change earlier logits, relative to the largest logit.

    For each position, this function changes the tokens at this position and at all later positions,
    and compares the logits at the earlier positions. If T is above 128, it tests only 128 evenly
    spaced positions. x: (n, T).
    """
    T = x.size(1)
    effect = 0.0
    cuts = torch.linspace(1, T - 1, min(T - 1, 128)).round().long()
    for i, cut in enumerate(cuts.tolist()):
        true = x[i % len(x), None]  # (1, T)
        other = true.clone()
        other[:, cut:] = (true[:, cut:] + 1) % model.config.vocab_size
        # First the changed ids, then the true ids: if the model keeps a state between calls, such
        # as a cache, it has not yet seen the true ids.
        a, b = [model.logits(model.hidden(ids))[:, :cut].float() for ids in (other, true)]
        effect = max(effect, ((a - b).abs().max() / b.abs().max()).nan_to_num(1).item())
    return effect


if __name__ == "__main__":
    run_program(main)
