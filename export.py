"""Writes a checkpoint as a directory that Hugging Face transformers loads.

  python export.py                                newest checkpoint in log/
  python export.py --checkpoint log/baby --output my-gpt2

The directory contains the weights, the tokenizer and a model card, README.md.
First: pip install transformers
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

from plaingpt.checkpoint import load_model, newest_model
from plaingpt.cli import UserError, first_line, parse_flags, run, writing

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

The prompt and the new tokens together must fit into the context. The training data has `{start}`
before every document. The pipeline puts it before a prompt; the tokenizer does not. A special token
in a text, such as `<|endoftext|>`, is encoded as its own id.

| | |
|---|---|
{rows}
"""


@dataclass
class ExportConfig:
    checkpoint: Annotated[str | None, "checkpoint or run directory [newest in log/]"] = None
    output: Annotated[str, "directory to write; replaces an earlier export"] = "my-gpt2"
    dtype: Annotated[Literal["float32", "bfloat16"], "number format of the weights"] = "float32"


def describe(source, model, tokenizer, dtype):
    """Facts for the model card, from the model and from run.json beside it -> {name: value}."""
    c = model.config
    facts = dict(
        checkpoint=source.name, tokenizer=tokenizer.name,
        parameters=f"{sum(p.numel() for p in model.parameters()):,} in {dtype}",
        shape=f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} channels, context {c.block_size}")
    path = source.with_name("run.json")
    if not path.exists():
        return facts
    try:
        run = json.loads(path.read_text("utf-8"))
        train = run["train_config"]
        data = ", ".join(Path(place).name for place in train["data"])  # no directories of yours
        return facts | {
            "data": f"{data}: {run['train_tokens']:,} training tokens",
            "training": f"{train['max_steps']:,} steps of {train['total_batch_size']:,} tokens, "
                        f"{train['optimizer']}, peak learning rate {train['max_lr']:g}, "
                        f"{run['dtype']}, {run['processes']} x {run['device']}",
            "started": run["started"], "git commit": run["git_commit"],
            "versions": ", ".join(" ".join(pair) for pair in run["versions"].items())}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); restore or delete it"
                        ) from error


def main(argv=None):
    config = ExportConfig(**parse_flags(__doc__, ExportConfig, argv=argv))
    source, output = newest_model(config.checkpoint), Path(config.output)
    if output.exists() and not (output / "config.json").exists():
        if not output.is_dir() or any(output.iterdir()):
            raise UserError(f"--output {output}: has other files; give a new directory")
    model, tokenizer = load_model(source)
    facts = describe(source, model, tokenizer, config.dtype)
    start = repr(tokenizer.decode([tokenizer.end_of_text]))
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    with writing(output):
        model.to_hf(output, tokenizer, getattr(torch, config.dtype))
        card = CARD.format(name=output.resolve().name, start=start, rows=rows)
        (output / "README.md").write_text(card, "utf-8")
    for path in sorted(output.iterdir()):
        print(f"{path.stat().st_size:13,} bytes  {path}")
    print(f"""\nto use it, in Python:
from transformers import pipeline
print(pipeline("text-generation", model="{output}")("Once upon a time")[0]["generated_text"])""")


if __name__ == "__main__":
    run(main)
