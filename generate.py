"""Generates text with a trained model.

  python generate.py                          uses the newest checkpoint in log/
  python generate.py --checkpoint log/baby --prompt "MARLOW: "
  python generate.py --model gpt2 --prompt "Hello, I'm a language model,"
  python generate.py --prompts questions.jsonl --json answers.json
  python generate.py --interactive            reads prompts until Ctrl-D

Text is printed while the model generates it. A generated text ends at
<|endoftext|>, at the string of --stop, or after --max_new_tokens tokens. In
interactive mode, Ctrl-C ends the current text. If you stop the program, the
file of --json contains the texts so far.
"""

import signal
import sys
from contextlib import suppress
from dataclasses import dataclass

from plaingpt.checkpoint import find_newest_model, list_model_files
from plaingpt.device import Dtype
from plaingpt.documents import RECORDS, kind_of, read_records
from plaingpt.errors import UserError, explaining, run_program
from plaingpt.files import check_output, write_json
from plaingpt.flags import flag, parse_flags
from plaingpt.memory import memory_advice
from plaingpt.pretrained import load_model
from plaingpt.process import setup
from plaingpt.sampling import attention_for_many_shapes, generate_tokens
from plaingpt.scoring.benchmark import get_fields
from plaingpt.terminal import print0, visible
from plaingpt.tokenizer import note_unknown

import torch

from model import GPT


@dataclass
class GenerateConfig:
    checkpoint: str | None = flag(None, "checkpoint or run directory [newest in log/]")
    model: str | None = flag(
        None, "instead of --checkpoint: name or directory of a Hugging Face GPT-2", either=True
    )
    prompt: str | None = flag(None, "prompt: text to continue [empty]", empty=True, path=False)
    prompts: str | None = flag(
        None,
        "instead of --prompt: text file with one prompt per line, or .jsonl, .csv or similar file "
        "with the field prompt",
        either=True,
    )
    interactive: bool = flag(
        False, "instead of --prompt: read prompts from the terminal", either=True
    )
    num_samples: int = flag(1, "number of texts to generate per prompt", at_least=1)
    max_new_tokens: int = flag(500, "maximum number of tokens to generate per text", at_least=0)
    stop: str | None = flag(None, r"end a text before this string, such as \n", line_breaks=True)
    ignore_end: bool = flag(False, "do not end a text at <|endoftext|>")
    temperature: float = flag(0.8, "higher: more random; 0: greedy decoding", at_least=0)
    top_k: int = flag(50, "sample from the k most likely tokens; 0: all", at_least=0)
    top_p: float = flag(
        1.0, "sample from the most likely tokens with total probability p", above=0, at_most=1
    )
    seed: int = flag(42, "random seed", at_least=0, at_most=2**63 - 1)
    json: str | None = flag(None, "also write prompts and texts to this file")
    device: str = flag("auto", "cuda, mps or cpu")
    dtype: Dtype = flag("auto", "dtype of the weights; float32 is the most precise")


def tokenize_prompt(prompt, tokenizer, T):
    """Returns the ids of end_of_text and of a prompt. Raises UserError for more than T ids."""
    ids = [tokenizer.end_of_text, *tokenizer.encode(prompt)]
    note_unknown(tokenizer, [ids], "the prompt")
    if len(ids) > T:
        raise UserError(f"{prompt[:20]!r}...: contains {len(ids) - 1} tokens; give at most {T - 1}")
    return ids


def read_prompts(path):
    """Returns the prompts in a file, as a list of strings.

    The file contains records with the field prompt, or it is a text file with one prompt per line.
    """
    if kind_of(path) in RECORDS:
        return [get_fields(record, prompt=str)[0] for record in read_records([path], ["prompt"])]
    with (
        explaining(
            f"--prompts {path}: cannot be read", "give a UTF-8 text file", (OSError, ValueError)
        ),
        open(path, encoding="utf-8-sig") as file,
    ):
        return [line.removesuffix("\n") for line in file]


def ask_prompts(tokenizer, T):
    """Reads prompts from the terminal until Ctrl-D. Yields the ids of each prompt, at most T."""
    # With readline, a user can edit a line with the arrow keys. Windows has no readline.
    with suppress(ImportError):
        import readline  # noqa: F401
    print("Ctrl-C ends a text, Ctrl-D ends the program")
    while True:
        try:
            yield tokenize_prompt(input("> "), tokenizer, T)
        except (UserError, KeyboardInterrupt) as message:  # KeyboardInterrupt has no message
            print(message)
        except EOFError:
            print()
            return


def decode_new(ids, n_prompt, tokenizer, config):
    """Decodes the ids after the prompt, up to end_of_text or --stop. Returns (text, ended).

    n_prompt: the number of ids of the prompt. ended: whether end_of_text or --stop ends the text.
    """
    prompt = ids[1:n_prompt]
    new = ids[n_prompt:]
    # For the tokenizer "bytes", end_of_text is a line break, which may occur within a text.
    ended = tokenizer.source != "bytes" and tokenizer.end_of_text in new and not config.ignore_end
    if ended:
        new = new[: new.index(tokenizer.end_of_text)]
    text = tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]
    if config.stop and config.stop in text:
        return text.partition(config.stop)[0], True
    return text, ended


def write_texts(model, tokenizer, ids, config, seed):
    """Generates num_samples texts from a prompt, and prints them.

    Prints the first text while the model generates it. In interactive mode, Ctrl-C ends the texts.
    ids: the ids of end_of_text and of the prompt. seed: the random seed. Returns {"prompt":
    prompt, "texts": [prompt + generated text]}.
    """
    n = config.num_samples
    prompt = tokenizer.decode(ids[1:])
    options = dict(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=seed,
    )
    idx = torch.tensor([ids] * n, device=model.lm_head.weight.device)  # (n, T)
    texts = [""] * n  # without the prompt
    n_shown = 0  # number of printed characters of the first text
    print(visible(f"--- sample 0 ---\n{prompt}"), end="", flush=True)
    stops = [KeyboardInterrupt] if config.interactive else []
    with (
        suppress(*stops),
        attention_for_many_shapes(),
        memory_advice(f"--num_samples {n}: out of memory; choose fewer samples or a smaller model"),
    ):
        for new in generate_tokens(model, idx, config.max_new_tokens, **options):
            idx = torch.cat([idx, new], dim=1)
            decoded = [decode_new(row, len(ids), tokenizer, config) for row in idx.tolist()]
            texts = [text for text, _ in decoded]
            # The last characters are not printed yet: the next tokens may complete a character
            # or the string of --stop.
            n_settled = max(0, len(texts[0]) - len(config.stop or ""))
            settled = texts[0][:n_settled].rstrip("\ufffd")
            print(visible(settled[n_shown:]), end="", flush=True)
            n_shown = max(n_shown, len(settled))
            if all(ended for _, ended in decoded):
                break
    print(visible(f"{texts[0][n_shown:]}\n"), flush=True)
    for i, text in enumerate(texts[1:], start=1):
        print(visible(f"--- sample {i} ---\n{prompt}{text}\n"), flush=True)
    return dict(prompt=prompt, texts=[prompt + text for text in texts])


def main(argv=None):
    config = GenerateConfig(**parse_flags(__doc__, GenerateConfig, argv=argv))
    prompts = read_prompts(config.prompts) if config.prompts else [config.prompt or ""]
    name = config.model or find_newest_model(config.checkpoint)
    check_output("--json", config.json, [config.prompts, *list_model_files(name)])
    process = setup(config.device, config.dtype)
    model, tokenizer = load_model(name, GPT)
    model.to(process.device, process.dtype)
    if process.device.type == "cpu" and process.dtype == torch.float32:
        # A CPU multiplies a tall matrix by a vector faster if the matrix is in column-major order.
        for p in model.parameters():
            if p.dim() == 2 and len(p) >= p.size(1):
                p.data = p.t().contiguous().t()
    T = model.config.block_size
    ids_of_prompts = [tokenize_prompt(prompt, tokenizer, T) for prompt in prompts]
    print0(
        f"{name}, {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{process.dtype_name} on {process.device}\n"
    )
    if config.interactive:
        ids_of_prompts = ask_prompts(tokenizer, T)
    results = []
    try:
        for i, ids in enumerate(ids_of_prompts):
            # All prompts of a file use the same seed, so the texts of a prompt do not depend on the
            # other prompts. In interactive mode, each prompt uses a different seed, so a repeated
            # prompt yields a different text.
            seed = (config.seed + i) % 2**63 if config.interactive else config.seed
            results.append(write_texts(model, tokenizer, ids, config, seed))
    finally:
        if config.json:
            write_json(config.json, results)


if __name__ == "__main__":
    # An exception ends the `try` block of main, which then writes the file of --json.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_program(main)
