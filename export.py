"""Writes a checkpoint as a directory that Hugging Face transformers loads.

  python export.py                                newest checkpoint in log/
  python export.py --checkpoint log/baby --output my-gpt2

The directory contains the weights, the tokenizer and a model card, README.md.
First: pip install transformers
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

from plaingpt.checkpoint import load_model, newest_model
from plaingpt.cli import UserError, parse_flags, read_json, run, writing

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A GPT-2, trained with plainGPT.

```python
from transformers import pipeline

generate = pipeline("text-generation", model="{name}")
print(generate("Once upon a time")[0]["generated_text"])
```

The start token, the prompt and the new tokens must fit into {context} tokens. Every document
of the training data starts with `{start}`. The pipeline puts it before a prompt. The tokenizer does
not. {special}

| | |
|---|---|
{rows}
"""

FACTS = ("parameters", "n_layer", "n_head", "n_embd", "block_size", "vocab_size", "tokenizer",
         "data", "train_tokens", "max_steps", "total_batch_size", "optimizer", "max_lr",
         "dtype of training", "processes", "device", "started", "git_commit", "torch")


@dataclass
class ExportConfig:
    checkpoint: Annotated[str | None, "checkpoint or run directory [newest in log/]"] = None
    output: Annotated[str, "directory to write; replaces an earlier export"] = "my-gpt2"
    dtype: Annotated[Literal["float32", "bfloat16"], "number format of the weights"] = "float32"


def read_facts(path):
    """Facts of a run.json for the model card -> {name: value}, empty without the file."""
    facts = read_json(path)
    if not facts.keys() >= {"model_config", "train_config", "versions"}:
        return {}
    known = {**facts["model_config"], **facts["train_config"], **facts["versions"], **facts}
    places = known["data"] if isinstance(known["data"], list) else [known["data"]]
    known["data"] = ", ".join(Path(place).name for place in places)  # not the parent folders
    known["dtype of training"] = known["dtype"]
    return {name: known[name] for name in FACTS if known.get(name) is not None}


def main(argv=None):
    config = ExportConfig(**parse_flags(__doc__, ExportConfig, argv=argv))
    source, output = newest_model(config.checkpoint), Path(config.output)
    occupied = any(output.iterdir()) if output.is_dir() else output.exists()
    if occupied and not read_json(output / "tokenizer_config.json").get("end_of_text"):
        raise UserError(f"--output {output}: is a file, or has other files; give a new directory")
    facts = {"checkpoint": source.name, "dtype of the weights": config.dtype,
             **read_facts(source.with_name("run.json"))}
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    model, tokenizer = load_model(source)
    start = repr(tokenizer.decode([tokenizer.end_of_text]))
    with writing(output):
        model.to_hf(output, tokenizer, getattr(torch, config.dtype))
        special = "A byte tokenizer has no special token, so no text ends early."
        if tokenizer.special:
            special = "The name of a special token in a text is encoded as this token."
        card = CARD.format(name=output.resolve().name, start=start, rows=rows, special=special,
                           context=model.config.block_size)
        (output / "README.md").write_text(card, "utf-8")
    print(f"from {source}")
    for path in sorted(output.iterdir()):
        print(f"{path.stat().st_size:13,} bytes  {path}")
    print(f"""\nto use it, in Python:
from transformers import pipeline
print(pipeline("text-generation", model="{output}")("Once upon a time")[0]["generated_text"])""")


if __name__ == "__main__":
    run(main)
