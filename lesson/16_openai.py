"""Lesson 16: OpenAI's weights, and a score: how often does a model choose the true ending?

  python lesson/16_openai.py                  scores the model of lesson 14
  python lesson/16_openai.py --weights gpt2   scores OpenAI's GPT-2, from huggingface.co (548 MB);
                                              gpt2-medium, gpt2-large and gpt2-xl also work
  python lesson/16_openai.py --weights model.safetensors --hellaswag hellaswag_val.jsonl

HellaSwag is a benchmark: each question is the start of an everyday scene, with four endings to
choose from. Without --hellaswag, the program builds similar questions from the end of input.txt.

New: load_weights, load_encoding (of lesson 15), choose_ending, questions_from_text,
questions_of_hellaswag. Changed: GPT.
"""

import argparse
import base64
import json
import math
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--weights", default="log/lesson.pt")
parser.add_argument("--hellaswag", help="the file hellaswag_val.jsonl: one JSON record per line")
options = parser.parse_args()
seed = 1337
device = "cuda" if torch.cuda.is_available() else "cpu"


def load_weights(name):
    """Returns ({parameter name: tensor}, number of heads). name: the value of --weights."""
    if name.endswith(".pt"):
        if not os.path.exists(name):
            raise SystemExit(f"no {name}: first run lesson/14_resume.py, or use --weights gpt2")
        checkpoint = torch.load(name, map_location="cpu")
        return checkpoint["model"], checkpoint["n_head"]
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise SystemExit("OpenAI's weights need safetensors: pip install safetensors") from None
    if os.path.isdir(name):
        raise SystemExit(f"{name} is a directory; pass the file model.safetensors in it")
    path = name
    if not name.endswith(".safetensors"):
        path = f"log/{name}.safetensors"
        # If you cannot reach huggingface.co, set HF_ENDPOINT to the URL of a mirror.
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        if not os.path.exists(path):
            os.makedirs("log", exist_ok=True)
            url = f"{hub}/openai-community/{name}/resolve/main/model.safetensors"
            torch.hub.download_url_to_file(url, path)
    weights = {}
    for key, tensor in load_file(path).items():
        key = key.removeprefix("transformer.")  # only some files use this prefix
        # OpenAI's linear layers compute x @ weight, but nn.Linear computes x @ weight.T.
        if key.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
            tensor = tensor.T
        if not key.endswith((".attn.bias", ".attn.masked_bias")):  # these are masks, not weights
            weights[key] = tensor
    weights["lm_head.weight"] = weights["wte.weight"]  # the file contains the matrix once
    # The shapes of the weights do not show the number of heads. OpenAI's heads have 64 channels.
    return weights, weights["wte.weight"].size(1) // 64


weights, n_head = load_weights(options.weights)
vocab_size, n_embd = weights["wte.weight"].shape
block_size = len(weights["wpe.weight"])
n_layer = sum(name.endswith("ln_1.weight") for name in weights)


def load_encoding():
    """Loads GPT-2's tokenizer, as in lesson 15."""
    try:
        import tiktoken
    except ImportError:
        raise SystemExit("GPT-2's tokens need tiktoken: pip install tiktoken") from None
    ids = {}
    with open("plaingpt/gpt2.tiktoken", "rb") as file:
        for line in file:
            token, id = line.split()
            ids[base64.b64decode(token)] = int(id)
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks=ids,
        special_tokens={"<|endoftext|>": 50256},
    )


if vocab_size == 256:

    def encode(text):
        return list(text.encode())

    def decode(ids):
        return bytes(ids).decode(errors="replace")

else:
    encoding = load_encoding()
    encode = encoding.encode_ordinary
    decode = encoding.decode


class CausalSelfAttention(nn.Module):
    """For each position, computes a weighted mean of the values at this position and earlier ones.

    The query of a position says what the position looks for, its key says what the position offers,
    and its value is what the position passes on.
    """

    def __init__(self):
        super().__init__()
        # The c stands for convolution, OpenAI's name for a linear layer that all positions share.
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)  # computes query, key and value of all heads
        self.c_proj = nn.Linear(n_embd, n_embd)  # mixes the outputs of the heads

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=2)  # (B, T, C) each
        # Each head uses hs = C / nh channels. GPT-2 has 768 channels and 12 heads, so hs = 64.
        # transpose moves nh before T, because @ multiplies matrices in the last two dimensions.
        q = q.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, n_head, C // n_head).transpose(1, 2)  # (B, nh, T, hs)
        # This function divides the scores by sqrt(hs), masks later positions (is_causal=True), and
        # returns the weighted means of the values. Flash attention computes the scores in tiles
        # that fit into a small, fast memory. It never writes all T x T scores to the large, slow
        # memory.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):
    """Transforms the vector at each position, independently of all other positions."""

    def __init__(self):
        super().__init__()
        # c_fc computes 4C features per position, and c_proj mixes these features. The first
        # Transformer used the factor 4, and nearly all later Transformers have kept this factor.
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)  # fc means fully connected
        # GELU is a smooth version of max(0, x). GPT-2 approximates GELU with tanh. Without GELU,
        # the two linear layers would be equivalent to one, because the product of two matrices is
        # one matrix.
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * n_embd, n_embd)  # projects back to C channels

    def forward(self, x):
        x = self.gelu(self.c_fc(x))  # (B, T, 4C)
        return self.c_proj(x)  # (B, T, C)


class Block(nn.Module):
    """Attention and MLP. Each reads LayerNorm(x), and adds its output to x, the residual stream."""

    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # (B, T, C)


class GPT(nn.Module):
    """Computes a score for each token that may come next. The scores are called logits."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx):
        """idx: (B, T) token ids. Returns the logits, (B, T, vocab_size)."""
        pos = torch.arange(idx.size(1), device=idx.device)  # (T)
        x = self.wte(idx) + self.wpe(pos)  # (B, T, C)
        for block in self.h:
            x = block(x)  # (B, T, C)
        return self.lm_head(self.ln_f(x))

    def generate(self, idx, max_new_tokens, temperature=0.8, top_k=50):
        """Samples one token at a time, and appends it: (1, T) -> (1, T + max_new_tokens).

        A temperature below 1 makes likely tokens more likely. Only the top_k most likely tokens can
        be sampled. Each of the other tokens is unlikely, but their total probability is not small.
        """
        generator = torch.Generator(idx.device).manual_seed(seed)
        for _ in range(max_new_tokens):
            logits = self(idx[:, -block_size:])[:, -1] / temperature  # (1, vocab_size)
            smallest = logits.topk(top_k).values[:, [-1]]  # (1, 1), the k-th largest logit
            logits = logits.masked_fill(logits < smallest, -math.inf)
            new = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)  # (1, 1)
            idx = torch.cat([idx, new], dim=1)
        return idx


def choose_ending(context, endings):
    """Returns the index of the ending that has the highest mean log-likelihood per token.

    context: a list of ids. endings: a list of lists of ids.
    """
    losses = []
    for ending in endings:
        row = torch.tensor(context + ending, device=device)[-block_size - 1 :]  # (T+1)
        targets = row[1:]  # (T), the next token at each position
        logits = model(row[None, :-1])[0]  # (T, vocab_size)
        n = len(ending)  # the last n logits predict the tokens of the ending
        # cross_entropy returns the mean over these n tokens. A sum would favor short endings.
        losses.append(F.cross_entropy(logits[-n:], targets[-n:]).item())
    return losses.index(min(losses))


def questions_from_text(n_questions):
    """Yields (context, endings, label). label: the index of the true ending.

    context: 40 tokens. The true ending is the next 16 tokens of the text. The three wrong endings
    are 16 tokens each, from random places. All tokens are from the last 20,000 tokens of the text,
    which lessons 14 and 15 keep for validation.
    """
    random = np.random.default_rng(seed)
    with open("input.txt", "rb") as file:
        text = file.read()
    tokens = encode(text.decode(errors="replace"))[-20_000:]
    for _ in range(n_questions):
        places = random.integers(40, len(tokens) - 16, size=4).tolist()  # the true ending is first
        endings = [tokens[place : place + 16] for place in places]
        label = int(random.integers(4))
        endings[0], endings[label] = endings[label], endings[0]
        yield tokens[places[0] - 40 : places[0]], endings, label


def questions_of_hellaswag(path):
    """Yields (context, endings, label). A record contains "ctx", four "endings", and "label"."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            text = record["ctx"]
            context = encode(text)
            # Many tokens begin with a space, so encode context and ending as one text, and then
            # remove the tokens of the context.
            endings = [encode(f"{text} {ending}")[len(context) :] for ending in record["endings"]]
            yield context, endings, int(record["label"])


model = GPT()
model.load_state_dict(weights)
model.to(device)
with torch.no_grad():
    prompt = "MARLOW: " if vocab_size == 256 else "Hello, I'm a language model,"
    idx = torch.tensor([encode(prompt)], device=device)
    print(decode(model.generate(idx, 200)[0].tolist()))
    if options.hellaswag:
        questions = questions_of_hellaswag(options.hellaswag)
    else:
        questions = questions_from_text(300)
    right = []
    for context, endings, label in questions:
        right.append(choose_ending(context, endings) == label)
        if len(right) % 100 == 0:
            print(f"{sum(right)} of {len(right)} right")
# The standard error: how far a score on this many questions typically is from the score on
# infinitely many questions.
score = np.mean(right)
error = math.sqrt(score * (1 - score) / len(right))
print(f"score {score:.3f} +- {error:.3f}; guessing would score 0.250")
