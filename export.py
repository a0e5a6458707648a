"""Exports a checkpoint to a directory that Hugging Face transformers can load.

  python export.py                         exports the newest checkpoint in log/
  python export.py --checkpoint log/baby --output my-gpt2

The directory contains the weights, the tokenizer and a model card, README.md.
This program needs transformers: pip install transformers
"""

import tempfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from plaingpt.checkpoint import find_newest_model
from plaingpt.errors import UserError, run_program
from plaingpt.files import read_facts, read_json, writing
from plaingpt.flags import flag, parse_flags
from plaingpt.pretrained import load_model, save_gpt2
from plaingpt.terminal import print0

import torch

from model import GPT

EXAMPLE = """from transformers import pipeline
print(pipeline("text-generation", model="{name}")("Once upon a time")[0]["generated_text"])"""
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
# {name}
```python
{example}
```

| | |
|---|---|
{rows}
"""
# The model card lists these fields of run.json.
FACTS = (
    "parameters",
    "tokenizer",
    "train_tokens",
    "max_steps",
    "total_batch_size",
    "optimizer",
    "max_lr",
    "dtype",
    "device",
    "started",
    "git_commit",
)


@dataclass
class ExportConfig:
    checkpoint: str | None = flag(None, "checkpoint or run directory [newest checkpoint in log/]")
    output: str = flag("my-gpt2", "directory to write; an earlier export there is replaced")
    dtype: Literal["float32", "bfloat16"] = flag("float32", "dtype of the exported weights")


def check_directory(output, source):
    """Raises UserError if an export to `output` would replace files that are not an export.

    Raises UserError, too, if `output` is also the source, or if a user has edited the model card in
    `output`. output: the directory to write. source: the path of the checkpoint.
    """
    if output.resolve() == source.resolve():
        raise UserError(f"--output {output}: is also an input; give another directory")
    is_taken = any(output.iterdir()) if output.is_dir() else output.exists()
    # Only export.py writes the field end_of_text.
    if is_taken and not read_json(output / "tokenizer_config.json").get("end_of_text"):
        raise UserError(f"--output {output}: exists and is not an export; give a new directory")
    card = output / "README.md"
    if card.is_file() and is_edited(card.read_text("utf-8", "replace")):
        raise UserError(f"--output {output}: its README.md was edited; move this file away first")


def sign(card):
    """Returns the text of a model card with a checksum at its end. is_edited reads the checksum."""
    return f"{card}\n<!-- export.py, CRC-32 {zlib.crc32(card.encode()):08x} -->\n"


def is_edited(signed):
    """Returns whether a model card has changed since export.py wrote it.

    signed: the text of README.md. An unchanged text ends with the checksum that `sign` added.
    """
    card, _, _ = signed.rpartition("\n<!-- export.py")
    return sign(card) != signed


def make_card(source, model, tokenizer, config):
    """Returns the text of the model card. source: the path of the checkpoint. config: the flags."""
    facts = asdict(model.config)
    known = {}
    if source.match("model_*.pt"):  # otherwise, run.json may describe a different model
        run_json = read_facts(source.with_name("run.json"))
        known = run_json["train_config"] | run_json  # the dtype in run_json is never "auto"
    for fact in FACTS:
        if known.get(fact):
            facts[fact] = known[fact]
    facts["checkpoint"] = source.name
    facts["dtype of the weights"] = config.dtype
    facts["token before every text"] = repr(tokenizer.decode([tokenizer.end_of_text]))
    rows = [f"| {fact} | {value} |" for fact, value in facts.items()]
    name = Path(config.output).resolve().name
    return CARD.format(name=name, example=EXAMPLE.format(name=name), rows="\n".join(rows))


def main(argv=None):
    config = ExportConfig(**parse_flags(__doc__, ExportConfig, argv=argv))
    source = find_newest_model(config.checkpoint)
    output = Path(config.output)
    check_directory(output, source)
    model, tokenizer = load_model(source, GPT)
    card = make_card(source, model, tokenizer, config)
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        # An earlier export is replaced only after the new export is complete.
        with tempfile.TemporaryDirectory(dir=output) as new:
            save_gpt2(model, new, tokenizer, getattr(torch, config.dtype))
            Path(new, "README.md").write_text(sign(card), "utf-8")
            for path in Path(new).iterdir():
                path.replace(output / path.name)
    print0(f"{output}: exported from {source}\nto use the model in Python:")
    print0(EXAMPLE.format(name=output))


if __name__ == "__main__":
    run_program(main)
