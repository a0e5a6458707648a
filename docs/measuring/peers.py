"""Does with Hugging Face transformers what programs of this repository do.

  python docs/measuring/peers.py generate my-gpt2 --max_new_tokens 128 --num_samples 8
  python docs/measuring/peers.py hellaswag my-gpt2 --data examples.jsonl --limit 200

my-gpt2 is a directory of export.py. docs/measure.py measures how long they take.
First: pip install transformers
"""

import argparse
import json

import torch
import torch.nn.functional as F
import transformers


def generate(model, tokenizer, config):
    """Continues a prompt with the likeliest tokens, and prints the texts."""
    idx = torch.tensor([tokenizer.encode(config.prompt)] * config.num_samples)  # (n, T)
    idx = model.generate(
        idx,
        attention_mask=torch.ones_like(idx),
        do_sample=False,
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
    )  # (n, T + max_new_tokens)
    for text in tokenizer.batch_decode(idx):
        print(text)


def hellaswag(model, tokenizer, config):
    """Scores HellaSwag as build-nanogpt does: a forward pass for each example, of four rows."""
    n_right = 0
    with open(config.data, encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    records = records[: config.limit or None]
    for record in records:
        context = tokenizer.encode(record["ctx"])
        endings = [tokenizer.encode(f" {ending}") for ending in record["endings"]]
        longest = max(map(len, endings))
        idx = torch.zeros(4, len(context) + longest, dtype=torch.long)  # (4, T)
        is_ending = torch.zeros(4, len(context) + longest)  # (4, T)
        for i, ending in enumerate(endings):
            end = len(context) + len(ending)
            idx[i, :end] = torch.tensor(context + ending)
            is_ending[i, len(context) : end] = 1
        logits = model(idx).logits[:, :-1].float()  # (4, T - 1, vocab_size)
        losses = F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten(), reduction="none")
        losses = losses.view(4, -1) * is_ending[:, 1:]  # (4, T - 1)
        means = losses.sum(dim=1) / is_ending.sum(dim=1)  # (4)
        n_right += int(means.argmin() == record["label"])
    print(f"acc_norm_token {n_right / len(records):.4f}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["generate", "hellaswag"])
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompt", default="The boats came home")
    parser.add_argument("--num_samples", type=int, default=1)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--data")
    parser.add_argument("--limit", type=int, default=0)
    config = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
    dtype = getattr(torch, config.dtype)
    model = transformers.GPT2LMHeadModel.from_pretrained(config.model, dtype=dtype).eval()
    run = generate if config.what == "generate" else hellaswag
    with torch.no_grad():
        run(model, tokenizer, config)


if __name__ == "__main__":
    main()
