"""GPT-2, the model: a batch of token ids in, logits and a loss out.

Read it from the bottom of a block upwards: attention mixes positions, the MLP works on each position alone, a block adds
both to the residual stream, and `GPT` stacks the blocks between an embedding and a head that share one matrix.
Parameter names are those of OpenAI's and Hugging Face's GPT-2. This file knows nothing of data, files or processes;
read tokenizer.py next, then train_gpt2.py.

  GPT-1: Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training"
  GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"
  GPT-3: Brown et al. 2020, "Language Models are Few-Shot Learners", arXiv:2005.14165
"""

# Read next: tokenizer.py, what ids are; then train_gpt2.py.

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

ROWS_AT_ONCE = 384, 8192  # positions whose logits are in memory together, on a CPU and on a GPU


@dataclass
class GPTConfig:
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads in a block; divides n_embd
    n_embd: int = 768  # width of the residual stream
    block_size: int = 1024  # T, the longest context, in tokens
    vocab_size: int = 50257  # ids, unpadded: 50257 for GPT-2's encoding (so for shards), 256 for bytes (so for a text)


# GPT-2 paper, table 2, and GPT-3 paper, table 2.1. GPT-3 XL is printed there with 24 heads of 128, which is not 2048.
PRESETS = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),  # 1558M
    "gpt3-1.3b": dict(n_layer=24, n_head=16, n_embd=2048, block_size=2048),
    "gpt3-2.7b": dict(n_layer=32, n_head=32, n_embd=2560, block_size=2048),
    "baby": dict(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=256),  # bytes, for a laptop
}


class CausalSelfAttention(nn.Module):
    """Every position gathers from itself and the positions before it (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value of all heads at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, cache=None, mask=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=2)  # 3 x (B, T, C), or narrower where a process has some of the heads only
        q, k, v = (t.view(B, T, -1, C // self.n_head).transpose(1, 2) for t in (q, k, v))  # (B, nh, T, hs)
        if cache is not None:
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(cache, (k, v))) if cache else (k, v)
            cache[:] = k, v  # (B, nh, T so far, hs)
        # A single new token may look at all that is cached; otherwise the mask is the lower triangle, unless one is given.
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and T > 1)  # (B, nh, T, hs)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C): heads side by side again
        return self.c_proj(y)  # (B, T, C)


class MLP(nn.Module):
    """Two linear layers around a GELU, in the tanh form that GPT-2 was trained with."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))  # (B, T, C) -> (B, T, 4C) -> (B, T, C)


class Block(nn.Module):
    """Pre-norm: the residual stream itself is never normalised, so gradients reach every layer (GPT-2, section 2.3)."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, cache=None, mask=None):
        x = x + self.attn(self.ln_1(x), cache, mask)
        return x + self.mlp(self.ln_2(x))  # (B, T, C)


class GPT(nn.Module):
    """The language model. Raises ValueError if the heads do not divide the width."""

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError(f"n_embd {config.n_embd} is not a multiple of n_head {config.n_head}")
        self.config = config
        self.activation_checkpointing = False  # True: compute a block twice, so as not to keep what is in it
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied (Press and Wolf 2017): a third of the 124M
        for name, p in self.named_parameters():
            if p.dim() < 2:
                nn.init.constant_(p, 1.0 if name.endswith("weight") else 0.0)  # gains of the norms; every bias
            else:
                # Each block adds to the residual stream twice, so 2 n_layer terms of equal variance pile up in it;
                # scaling what writes into it keeps the sum near one term's size (GPT-2, section 2.3).
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02)

    def hidden(self, idx, cache=None, pos=None, mask=None):
        """The residual stream after the last norm.

        idx: (B, T) ids. cache: None, or one list per block that holds the keys and values of the tokens before `idx`,
        empty at first; it is extended in place. Rows that are not simply one text bring the position of each token,
        pos: (B, T) below block_size, and what it may look at, mask: (B, 1, T, T) bool. Returns (B, T, C).
        A stage of a pipeline (parallel.py) has None for the modules of the others: what it is given, and returns, is then
        the residual stream between two blocks.
        """
        T = idx.size(1)
        if pos is None:
            start = cache[0][0].size(2) if cache and cache[0] else 0
            if start + T > self.config.block_size:
                raise ValueError(f"{start + T} tokens do not fit a block_size of {self.config.block_size}")
            pos = torch.arange(start, start + T, device=idx.device)  # (T)
        x = idx if self.transformer.wte is None else self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        for i, block in enumerate(self.transformer.h):
            if block is None:
                continue
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, None if cache is None else cache[i], mask)
        return x if self.transformer.ln_f is None else self.transformer.ln_f(x)

    def logits(self, x):
        """The head: (..., C) -> (..., vocab_size).

        On a GPU the matrix is padded to a multiple of 128 rows for this one product, because its kernels work in tiles; the
        padded columns are cut off again at once, so no parameter, loss, sample or file ever contains them.
        """
        if x.device.type == "cpu":
            return self.lm_head(x)
        weight = F.pad(self.lm_head.weight, (0, 0, 0, -self.config.vocab_size % 128))  # (padded, C)
        return F.linear(x, weight)[..., : self.config.vocab_size]

    def forward(self, idx, targets=None):
        """idx, targets: (B, T) ids. Returns the logits (B, T, vocab_size) and None; with targets, None and the loss.

        The loss is the mean cross-entropy in nats. Its logits are never all in memory: see LinearCrossEntropy.
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x), None
        return None, self.loss(x, targets)

    def loss(self, x, targets):
        """(B, T, C) from `hidden` and the ids (B, T) to come -> the mean cross-entropy in nats."""
        return LinearCrossEntropy.apply(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), torch.is_grad_enabled())

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, seed=0):
        """Appends `max_new_tokens` sampled ids to each row of idx: (B, T) -> (B, T + max_new_tokens).

        temperature 0 is greedy; top_k keeps the k likeliest tokens, top_p the smallest set of likeliest tokens whose
        probabilities reach p (Holtzman et al. 2020, arXiv:1904.09751). Only `seed` decides the draw: the global random
        state is neither read nor moved. Raises ValueError for an empty prompt or values out of range.
        """
        if idx.size(1) == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
            raise ValueError("temperature and top_k must not be negative, and top_p must lie in (0, 1]")
        generator = torch.Generator(device=idx.device).manual_seed(seed)
        cache, T = None, self.config.block_size
        for _ in range(max_new_tokens):
            if cache is None or idx.size(1) > T:
                # Positions are absolute: once the window slides, every cached key is at the wrong one.
                cache, new = [[] for _ in self.transformer.h], idx[:, -T:]
            else:
                new = idx[:, -1:]
            logits = self.logits(self.hidden(new, cache)[:, -1]).float()  # (B, vocab_size)
            idx = torch.cat([idx, sample(logits, temperature, top_k, top_p, generator)], dim=1)
        return idx

    def crop_block_size(self, block_size):
        """Shortens the context for good, by dropping the last positions: less memory when fine-tuning."""
        self.config.block_size = block_size
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].clone())  # (T, C)

    def configure_optimizers(self, weight_decay, learning_rate, muon_lr=None):
        """The optimizers of a step -> [AdamW], or, given a muon_lr, [Muon, AdamW].

        AdamW (GPT-3, appendix B): matrices and embeddings decay; biases and gains, which multiply no input, do not.
        Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) moves a block's matrix by the orthogonal matrix nearest
        to its momentum, so by as much in every direction; embedding, head and vectors are left to AdamW. Its steps are
        scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2), so that rate and decay carry over.
        The groups carry the parameters' names, so that a saved state says what it belongs to, and the peak of their rate.
        """
        named = list(self.named_parameters())
        hidden = [(n, p) for n, p in named if muon_lr and p.dim() >= 2 and ".h." in n]
        taken = {n for n, _ in hidden}
        matrices, vectors = ([(n, p) for n, p in named if (p.dim() >= 2) == m and n not in taken] for m in (True, False))
        groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=vectors, weight_decay=0.0)]
        for group in groups:
            group["param_names"] = []  # filled by the optimizer, unless there are none: not every stage of a pipeline has both
        fused = named[0][1].device.type in ("cuda", "cpu", "mps")
        optimizers = [torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)]
        if muon_lr:
            muon = torch.optim.Muon(hidden, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            optimizers.insert(0, muon)
        for group in (g for optimizer in optimizers for g in optimizer.param_groups):
            group["initial_lr"] = group["lr"]
        return optimizers

    def flops_per_token(self, causal=False):
        """Floating-point operations of one token's forward and backward at full context (PaLM, appendix B).

        6 for each weight of a matrix product (2 forward, 4 backward), the padded head included, embeddings and vectors
        not; and 12 n_layer n_embd T for attention. That counts all T x T scores, the usual convention; causal=True
        counts the half below the diagonal that a causal kernel computes.
        """
        c = self.config
        matrices = 12 * c.n_layer * c.n_embd**2 + (c.vocab_size + -c.vocab_size % 128) * c.n_embd
        attention = 12 * c.n_layer * c.n_embd * c.block_size
        return 6 * matrices + (attention // 2 if causal else attention)

    @classmethod
    def from_pretrained(cls, name_or_dir):
        """GPT-2 from Hugging Face: "gpt2", "gpt2-medium", … or a local directory.

        Raises ImportError without transformers, OSError if nothing is found, ValueError if it is no plain GPT-2.
        """
        transformers = import_transformers()
        transformers.utils.logging.disable_progress_bar()  # weights load at once; a download has a bar of its own
        transformers.utils.logging.set_verbosity_error()  # what else it says, the checks below say in a line
        hf_config = transformers.AutoConfig.from_pretrained(name_or_dir, trust_remote_code=False)
        plain = dict(model_type="gpt2", activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True,
                     scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
        for key, value in plain.items():
            if getattr(hf_config, key, None) != value:
                raise ValueError(f"{name_or_dir}: {key} is {getattr(hf_config, key, None)!r}, GPT-2 has {value!r}")
        if hf_config.n_inner not in (None, 4 * hf_config.n_embd):
            raise ValueError(f"{name_or_dir}: n_inner is {hf_config.n_inner}, GPT-2 has 4 x n_embd = {4 * hf_config.n_embd}")
        hf, info = transformers.GPT2LMHeadModel.from_pretrained(name_or_dir, output_loading_info=True)
        if info["missing_keys"]:  # transformers only warns, and leaves them random
            raise ValueError(f"{name_or_dir}: no weights for {', '.join(sorted(info['missing_keys']))}")
        model = cls(GPTConfig(n_layer=hf_config.n_layer, n_head=hf_config.n_head, n_embd=hf_config.n_embd,
                              block_size=hf_config.n_positions, vocab_size=hf_config.vocab_size))
        model.load_state_dict(transpose_conv1d(hf.float().state_dict()))
        return model

    def to_hf(self, directory):
        """Writes the model as a Hugging Face GPT-2 that `from_pretrained` reads. Raises ImportError without transformers."""
        transformers = import_transformers()
        c = self.config
        end = c.vocab_size - 1 if c.vocab_size == 50257 else None  # <|endoftext|>; other encodings have none
        hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, n_positions=c.block_size, vocab_size=c.vocab_size,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=end, eos_token_id=end))
        hf.load_state_dict(transpose_conv1d(self.state_dict()))
        hf.save_pretrained(directory)


class LinearCrossEntropy(torch.autograd.Function):
    """The head and its loss as one function: x (N, C), weight (vocab_size, C), targets (N) -> mean cross-entropy in nats.

    The logits of GPT-2 are 65 times as wide as what they are made of. So the rows go through in chunks, and each chunk's
    gradient is formed at once from its logits, which are then gone (Hsu et al. 2024, "Liger Kernel", arXiv:2410.10989,
    section 3.2). The products follow the autocast; softmax, loss and the weight's gradient are summed in float32, since 8
    bits of mantissa would lose a sum over 50,000 terms. The mean's 1/N waits for the backward: float16 has no room for it.

    A process may hold some rows of the weight only, and the targets counted from the first of them. It then gives a function
    across(tensor, "sum" or "max") over all that hold some (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3).
    """

    @staticmethod
    def forward(ctx, x, weight, targets, with_gradient, across=lambda tensor, op: tensor):
        device, N, V = x.device.type, x.size(0), weight.size(0)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        rows = ROWS_AT_ONCE[0 if device == "cpu" else 1]
        w = weight.new_zeros(V + -V % 128, weight.size(1), dtype=dtype)  # (padded V, C): products work in tiles
        w[:V] = weight
        loss = torch.zeros((), device=x.device)
        if with_gradient:
            dx, dw = torch.empty_like(x), torch.zeros(w.shape, device=x.device)  # (N, C), (padded V, C)
        for x_part, y, i in zip(x.to(dtype).split(rows), targets[:, None].split(rows), range(0, N, rows)):
            logits = x_part @ w.t()  # (rows, padded V)
            logits[:, V:] = -math.inf
            p = logits.float()
            p -= across(p.amax(1, keepdim=True), "max")
            here = (0 <= y) & (y < V)  # (rows, 1) whether the target's logit is in this process
            y = y.where(here, 0)
            picked = p.gather(1, y) * here
            norm, picked = across(torch.cat([p.exp_().sum(1, keepdim=True), picked], dim=1), "sum").split(1, dim=1)  # (rows, 1)
            loss -= picked.sum()
            loss += norm.log().sum()
            if with_gradient:  # that of a row's loss by its logits is softmax - onehot
                p = logits.copy_(p.div_(norm).scatter_add_(1, y, -here.float()))
                dx[i:i + rows] = p @ w
                for total, part in zip(dw.split(8192), (p.t() @ x_part).split(8192)):
                    total += part  # in parts, because each is first turned into float32
        if with_gradient:
            ctx.save_for_backward(across(dx, "sum"), dw[:V])
        return loss / N

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        grad = grad / len(dx)
        return grad * dx, grad * dw, None, None, None


def sample(logits, temperature, top_k, top_p, generator):
    """Draws one id for each row: (B, vocab_size) -> (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p < 1:
        probs, order = F.softmax(logits, dim=-1).sort(descending=True)  # (B, vocab_size)
        beyond = probs.cumsum(dim=-1) - probs >= top_p  # what comes before a token already reaches p: never the first
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -math.inf)
    return torch.multinomial(F.softmax(logits, dim=-1), num_samples=1, generator=generator)


def transpose_conv1d(state_dict):
    """OpenAI's Conv1D keeps a linear layer's weight as (in, out), nn.Linear as (out, in): turns either into the other."""
    conv1d = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    return {name: t.t().contiguous() if name.endswith(conv1d) else t for name, t in state_dict.items()}


def import_transformers():
    try:
        import transformers
    except ImportError as error:
        raise ImportError("GPT-2's weights come and go through transformers: pip install transformers") from error
    return transformers
