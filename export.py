"""Writes a checkpoint as a directory that Hugging Face transformers loads.

  python export.py                         exports the newest checkpoint in log/
  python export.py --checkpoint log/baby --output my-gpt2

The directory contains the weights, the tokenizer and a model card, README.md.
It needs transformers: pip install transformers
"""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

from plaingpt.checkpoint import load_model, newest_model
from plaingpt.cli import UserError, parse_flags, print0, read_json, run_program, writing
from plaingpt.huggingface import save_gpt2

EXAMPLE = """from transformers import pipeline
print(pipeline("text-generation", model="{name}")("Once upon a time")[0]["generated_text"])"""
CARD = """---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n# {name}
```python\n{example}\n```\n\n| | |\n|---|---|\n{rows}\n"""
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
)  # of run.json, in the model card


@dataclass
class ExportConfig:
    checkpoint: Annotated[str | None, "checkpoint or run directory [newest in log/]"] = None
    output: Annotated[str, "directory to write; replaces an earlier export"] = "my-gpt2"
    dtype: Annotated[Literal["float32", "bfloat16"], "number format of the weights"] = "float32"


def main(argv=None):
    config = ExportConfig(**parse_flags(__doc__, ExportConfig, argv=argv))
    source, output = newest_model(config.checkpoint), Path(config.output)
    occupied = any(output.iterdir()) if output.is_dir() else output.exists()
    if occupied and not read_json(output / "tokenizer_config.json").get("end_of_text"):
        raise UserError(f"--output {output}: is a file, or has other files; give a new directory")
    model, tokenizer = load_model(source)
    run_json = read_json(source.with_name("run.json"))
    known = run_json.get("train_config", {}) | run_json  # run_json has the dtype that was chosen
    facts = asdict(model.config) | {name: known[name] for name in FACTS if known.get(name)}
    facts.update(
        {
            "checkpoint": source.name,
            "dtype of the weights": config.dtype,
            "token before every text": repr(tokenizer.decode([tokenizer.end_of_text])),
        }
    )
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    name = output.resolve().name
    card = CARD.format(name=name, example=EXAMPLE.format(name=name), rows=rows)
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        # An earlier export is replaced only when the new one is complete.
        with tempfile.TemporaryDirectory(dir=output) as new:
            save_gpt2(model, new, tokenizer, getattr(torch, config.dtype))
            Path(new, "README.md").write_text(card, "utf-8")
            for path in Path(new).iterdir():
                path.replace(output / path.name)
    print0(f"{output}: from {source}\nto use it, in Python:\n{EXAMPLE.format(name=output)}")


if __name__ == "__main__":
    run_program(main)
