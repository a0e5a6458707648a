"""Lets a trained model write.

  python generate.py                                                   from the newest checkpoint under log/
  python generate.py --checkpoint log/baby --prompt "MARLOW: "         from a run, or from one checkpoint of it
  python generate.py --model gpt2 --prompt "Hello, I'm a language model," --top_k 50

Without a prompt the model starts from nothing. A file of prompts holds one a line.
"""

# Read next: bench.py, how fast a step is.

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from plaingpt.checkpoint import find_model, load_model
from plaingpt.cli import UserError, check_json, parse_flags, print0, run, write_json
from plaingpt.device import setup
from tokenizer import decode, get_encoding, start_id


@dataclass
class GenerateConfig:
    checkpoint: str = None  # a checkpoint, or a run directory, whose newest counts [the newest under log/]
    model: str = None  # or weights of Hugging Face's GPT-2: a name, such as gpt2-xl, or a directory
    prompt: str = None  # the text to go on from
    prompts: str = None  # or a file of such texts, one a line
    num_samples: int = 2  # texts for each prompt
    max_new_tokens: int = 500  # tokens to add; nothing stops earlier
    temperature: float = 0.8  # below 1: safer, above: wilder; 0: always the likeliest token
    top_k: int = 50  # draw from so many of the likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the likeliest tokens that together have this probability
    seed: int = 42  # of the draw
    json: str = None  # also write prompts and texts to this file
    device: str = "auto"  # cuda, mps or cpu


def read_prompts(config):
    """The prompts that the flags mean -> [(where it is given, prompt)], at least one. Raises UserError."""
    if config.prompts is None:
        return [("--prompt" if config.prompt is not None else "", config.prompt or "")]
    if config.prompt is not None:
        raise UserError("--prompt and --prompts exclude each other: give one")
    try:
        lines = Path(config.prompts).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {config.prompts}: is not UTF-8 (byte {error.start}); give a text") from error
    except OSError as error:
        raise UserError(f"--prompts {config.prompts}: cannot be read ({error.strerror}); give a text file") from error
    if not lines:
        raise UserError(f"--prompts {config.prompts}: is empty; write one prompt a line")
    return [(f"--prompts {config.prompts}, line {n}", line) for n, line in enumerate(lines, start=1)]


def encode(where, prompt, encoding, gpt_config):
    """A prompt -> its ids, after the one that starts a text. Raises UserError if the model cannot go on from it."""
    if where and not re.sub("|".join(map(re.escape, encoding.special_tokens_set)), "", prompt):
        raise UserError(f"{where} {prompt!r}: there is nothing to go on from; leave it out, and a text is begun")
    try:
        prompt.encode()  # tiktoken would replace what is none
        ids = [start_id(encoding.name, gpt_config.vocab_size), *encoding.encode_ordinary(prompt)]
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: is not UTF-8 (character {error.start}); write it in UTF-8") from error
    if max(ids) >= gpt_config.vocab_size:
        raise UserError(f"{where}: has token id {max(ids)}, but this model knows {gpt_config.vocab_size} ids only; write it "
                        "otherwise")
    if len(ids) > gpt_config.block_size:
        raise UserError(f"{where}: has {len(ids) - 1} tokens, and this model reads {gpt_config.block_size - 1}; give less")
    return ids


def main(argv=None):
    config = GenerateConfig(**parse_flags(__doc__, GenerateConfig, argv=argv))
    for name, least in dict(num_samples=1, max_new_tokens=0, temperature=0, top_k=0, seed=0).items():
        if not least <= getattr(config, name) < math.inf:
            raise UserError(f"--{name} {getattr(config, name)} cannot be: it is a number from {least} up")
    if 0 < config.temperature < 1e-3:
        raise UserError(f"--temperature {config.temperature} cannot be: it is 0, for always the likeliest, or from 0.001 up")
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top_p {config.top_p} cannot be: it is above 0 and at most 1, say 0.9")
    check_json(config.json)
    prompts, name = read_prompts(config), find_model(config)
    _, _, device = setup(config.device)
    model, tokenizer = load_model(name)
    model, encoding = model.to(device), get_encoding(tokenizer)  # once: it takes as long as many prompts
    prompts = [(prompt, encode(where, prompt, encoding, model.config)) for where, prompt in prompts]
    print0(f"{name}, {sum(p.numel() for p in model.parameters()):,} parameters, on {device}\n")
    results = []
    for number, (prompt, ids) in enumerate(prompts):
        idx = torch.tensor([ids] * config.num_samples, device=device)  # (num_samples, T)
        out = model.generate(idx, config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.seed)
        texts = [decode(tokenizer, row[1:]) for row in out.tolist()]
        results.append(dict(prompt=prompt, texts=texts))
        for i, text in enumerate(texts):
            print(f"--- sample {i}" + f" of prompt {number}" * (len(prompts) > 1) + f" ---\n{text}\n", flush=True)
    if config.json:
        write_json(config.json, results)


if __name__ == "__main__":
    run(main)
