"""Generates text with a trained model.

  python generate.py                              newest checkpoint in log/
  python generate.py --checkpoint log/baby --prompt "MARLOW: "
  python generate.py --model gpt2 --prompt "Hello, I'm a language model,"
  python generate.py --interactive                reads prompts until Ctrl-D

A text appears while it is made. It ends at <|endoftext|>, at --stop, or after
--max_new_tokens. In the interactive mode, Ctrl-C ends a text.
"""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from plaingpt.checkpoint import find_model, load_model
from plaingpt.cli import UserError, check_output, parse_flags, print0, run, write_json
from plaingpt.device import Dtype, choose_dtype, memory_advice, setup

MAX_ROWS = 32  # texts that are generated at a time


@dataclass
class GenerateConfig:
    checkpoint: Annotated[str | None, "checkpoint or run directory [newest in log/]"] = None
    model: Annotated[str | None, "or GPT-2 of Hugging Face: a name or a directory"] = None
    prompt: Annotated[str | None, "text to continue [start from nothing]"] = None
    prompts: Annotated[str | None, "or a file with one prompt a line"] = None
    interactive: Annotated[bool, "read prompts from the terminal"] = False
    num_samples: Annotated[int, "texts per prompt; 1 if greedy or interactive", "at least 1"] = 2
    max_new_tokens: Annotated[int, "tokens to add to the prompt", "at least 0"] = 500
    stop: Annotated[str | None, "end a text before this text"] = None
    ignore_end: Annotated[bool, "do not end a text at <|endoftext|>"] = False
    temperature: Annotated[float, "higher: more random; 0: likeliest token", "at least 0"] = 0.8
    top_k: Annotated[int, "draw from the k likeliest tokens; 0: all", "at least 0"] = 50
    top_p: Annotated[float, "keep top probabilities up to sum p", "above 0 and at most 1"] = 1.0
    seed: Annotated[int, "random seed", f"at least 0 and at most {2**63 - 1}"] = 42
    json: Annotated[str | None, "also write prompts and texts to this file"] = None
    device: Annotated[str, "cuda, mps or cpu"] = "auto"
    dtype: Annotated[Dtype, "number format of the weights; float32 is the most exact"] = "auto"


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


def encode(where, prompt, model, tokenizer):
    """A prompt -> its ids after end_of_text. Raises UserError if the model cannot read it."""
    n_vocab, T = model.config.vocab_size, model.config.block_size
    ids = [tokenizer.end_of_text, *tokenizer.encode(prompt)]
    if max(ids) >= n_vocab:
        raise UserError(f"{where}: token id {max(ids)}: the model has only {n_vocab} ids")
    if len(ids) > T:
        raise UserError(f"{where}: has {len(ids) - 1} tokens; give at most {T - 1}")
    return ids


class Text:
    """A text that grows token by token."""

    def __init__(self, ids, tokenizer, config):
        self.ids, self.tokenizer, self.stop = list(ids), tokenizer, config.stop
        self.n_prompt = self.n_shown = len(tokenizer.decode(ids))  # characters
        ends = tokenizer.special and not config.ignore_end  # a text of bytes has no end
        self.end = tokenizer.end_of_text if ends else None
        self.ended = False

    def add(self, token):
        """Adds a token, unless the text has ended, or this token ends it."""
        self.ended = self.ended or token == self.end
        if not self.ended:
            self.ids.append(token)
            self.ended = bool(self.stop) and self.stop in self.read()[self.n_prompt :]

    def read(self):
        return self.tokenizer.decode(self.ids)

    def whole(self):
        """The text, up to --stop."""
        text = self.read()
        at = text.find(self.stop, self.n_prompt) if self.stop else -1
        return text if at < 0 else text[:at]

    def next_part(self):
        """The text not shown yet. Holds back half a character, and a possible start of --stop."""
        text, stop = self.whole().rstrip("\ufffd"), self.stop or ""
        held = next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
        start, self.n_shown = self.n_shown, max(self.n_shown, len(text) - held)
        return text[start : self.n_shown]


def write_texts(model, tokenizer, prompts, config, titles):
    """Generates num_samples texts for each prompt and prints them, the first one while it grows.

    prompts: lists of ids, with end_of_text first. titles: of all texts; None: print no title and
    no prompt, and let Ctrl-C end the texts. Returns [{"prompt": its text, "texts": its texts}].
    """
    device, longest = model.lm_head.weight.device, max(map(len, prompts))
    rows = [ids for ids in prompts for _ in range(config.num_samples)]
    padding = [longest - len(ids) for ids in rows]
    idx = [[0] * n + ids for n, ids in zip(padding, rows)]
    texts = [Text(ids[1:], tokenizer, config) for ids in rows]
    try:
        if titles:
            print(f"{titles[0]}{texts[0].whole()}", end="", flush=True)
        with memory_advice(f"--num_samples {config.num_samples}: out of memory; give fewer"):
            for new in model.stream(
                    torch.tensor(idx, device=device), config.max_new_tokens, config.temperature,
                    config.top_k, config.top_p, config.seed, torch.tensor(padding, device=device),
                    len(prompts)):
                for text, token in zip(texts, new.flatten().tolist()):
                    text.add(token)
                print(texts[0].next_part(), end="", flush=True)
                if all(text.ended for text in texts):
                    break
    except KeyboardInterrupt:
        if titles:
            raise
    print(f"{texts[0].whole()[texts[0].n_shown :]}\n", flush=True)
    for title, text in zip(titles[1:] if titles else [""] * (len(texts) - 1), texts[1:]):
        print(f"{title}{text.whole() if titles else text.whole()[text.n_prompt :]}\n", flush=True)
    k, found = config.num_samples, [text.whole() for text in texts]
    return [dict(prompt=tokenizer.decode(ids[1:]), texts=found[i * k : (i + 1) * k])
            for i, ids in enumerate(prompts)]


def store_by_columns(model):
    """Stores the weights of the linear layers by columns: faster in float32 for a few tokens."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()  # (out, in)


def answer_prompts(model, tokenizer, config):
    """Reads prompts until the end of the input. Returns what write_texts returns for all."""
    results = []
    with contextlib.suppress(ImportError):  # edits a line with the arrow keys; not on Windows
        import readline  # noqa: F401
    print("Ctrl-C ends a text, Ctrl-D the program")
    while True:
        try:
            prompt = input("> ")
            if not sys.stdin.isatty():
                print(prompt)
            ids = encode("the prompt", prompt, model, tokenizer)
        except EOFError:
            print()
            return results
        except KeyboardInterrupt:
            print()
        except UserError as error:
            print(f"error: {error}")
        else:
            results += write_texts(model, tokenizer, [ids], config, None)
            config.seed = (config.seed + 1) % 2**63  # the same prompt gives another text


def main(argv=None):
    given = parse_flags(__doc__, GenerateConfig, argv=argv)
    config = GenerateConfig(**given)
    if config.interactive and given.keys() & {"prompt", "prompts"}:
        raise UserError("--interactive reads prompts; leave out --prompt and --prompts")
    check_output("--json", config.json)
    prompts, name, device = read_prompts(config), find_model(config), setup(config.device)[2]
    dtype = choose_dtype(config.dtype, device)
    model, tokenizer = load_model(name)
    model.to(device, dtype).eval()
    if device.type == "cpu" and dtype == torch.float32:
        store_by_columns(model)
    encoded = [encode(where, prompt, model, tokenizer) for where, prompt in prompts]
    print0(f"{name}, {sum(p.numel() for p in model.parameters()):,} parameters, "
           f"{str(dtype).removeprefix('torch.')} on {device}\n")
    if config.interactive or config.temperature == 0:
        config.num_samples = given.get("num_samples", 1)
    if config.interactive:
        results = answer_prompts(model, tokenizer, config)
    else:
        results, n = [], max(1, MAX_ROWS // config.num_samples)  # prompts at a time
        many = len(encoded) > 1
        for first in range(0, len(encoded), n):
            batch = encoded[first : first + n]
            titles = [f"--- sample {i}{f' of prompt {first + k}' if many else ''} ---\n"
                      for k in range(len(batch)) for i in range(config.num_samples)]
            results += write_texts(model, tokenizer, batch, config, titles)
    if config.json:
        write_json(config.json, results)


if __name__ == "__main__":
    run(main)
