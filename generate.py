"""Generates text with a trained model.

  python generate.py                              newest checkpoint in log/
  python generate.py --checkpoint log/baby --prompt "MARLOW: "
  python generate.py --model gpt2 --prompt "Hello, I'm a language model,"
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from plaingpt.checkpoint import find_model, load_model
from plaingpt.cli import UserError, check_json, parse_flags, print0, run, write_json
from plaingpt.device import memory_advice, setup


@dataclass
class GenerateConfig:
    checkpoint: Annotated[str | None, "checkpoint or run directory [newest in log/]"] = None
    model: Annotated[str | None, "or GPT-2 of Hugging Face: a name or a directory"] = None
    prompt: Annotated[str | None, "text to continue [start from nothing]"] = None
    prompts: Annotated[str | None, "or a file with one prompt a line"] = None
    num_samples: Annotated[int, "texts for each prompt", "at least 1"] = 2
    max_new_tokens: Annotated[int, "tokens to add to the prompt", "at least 0"] = 500
    temperature: Annotated[float, "higher: more random; 0: likeliest token", "at least 0"] = 0.8
    top_k: Annotated[int, "draw from the k likeliest tokens; 0: all", "at least 0"] = 50
    top_p: Annotated[float, "keep top probabilities up to sum p", "above 0 and at most 1"] = 1.0
    seed: Annotated[int, "random seed", f"at least 0 and at most {2**63 - 1}"] = 42
    json: Annotated[str | None, "also write prompts and texts to this file"] = None
    device: Annotated[str, "cuda, mps or cpu"] = "auto"


def read_prompts(config):
    """The prompts -> [(where each is from, text)]. Raises UserError."""
    if config.prompts is None:
        return [("--prompt", config.prompt or "")]
    if config.prompt is not None:
        raise UserError("--prompt and --prompts exclude each other; give one")
    where = f"--prompts {config.prompts}"
    try:
        lines = Path(config.prompts).read_text(encoding="utf-8-sig", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror}); give a text file") from error
    lines = lines[:-1] if lines[-1] == "" else lines
    if not lines:
        raise UserError(f"{where}: is empty; write one prompt a line")
    return [(f"{where}, line {n}", line) for n, line in enumerate(lines, start=1)]


def main(argv=None):
    config = GenerateConfig(**parse_flags(__doc__, GenerateConfig, argv=argv))
    check_json(config.json)
    prompts, name, device = read_prompts(config), find_model(config), setup(config.device)[2]
    model, tokenizer = load_model(name)
    model.to(device).eval()
    n_vocab, T = model.config.vocab_size, model.config.block_size
    ids_of_prompts = []
    for where, prompt in prompts:
        ids = [tokenizer.end_of_text, *tokenizer.encode(prompt)]
        if max(ids) >= n_vocab:
            raise UserError(f"{where}: token id {max(ids)}: the model has only {n_vocab} ids")
        if len(ids) > T:
            raise UserError(f"{where}: has {len(ids) - 1} tokens; give at most {T - 1}")
        ids_of_prompts.append(ids)
    print0(f"{name}, {sum(p.numel() for p in model.parameters()):,} parameters, on {device}\n")
    results = []
    for number, ids in enumerate(ids_of_prompts):
        idx = torch.tensor([ids] * config.num_samples, device=device)  # (num_samples, prompt)
        with memory_advice(f"--num_samples {config.num_samples}: out of memory; give fewer"):
            idx = model.generate(idx, config.max_new_tokens, config.temperature, config.top_k,
                                 config.top_p, config.seed)  # (num_samples, prompt + new)
        texts = [tokenizer.decode(row[1:]) for row in idx.tolist()]
        results.append(dict(prompt=tokenizer.decode(ids[1:]), texts=texts))
        for i, text in enumerate(texts):
            title = f"sample {i} of prompt {number}" if len(prompts) > 1 else f"sample {i}"
            print(f"--- {title} ---\n{text}\n", flush=True)
    if config.json:
        write_json(config.json, results)


if __name__ == "__main__":
    run(main)
