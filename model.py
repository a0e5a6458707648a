"""GPT-2: computes logits, or a loss, from a batch of token ids.

Attention moves information between positions. The MLP processes each position separately. A block
adds the outputs of attention and MLP to the residual stream. A GPT consists of embeddings, blocks
and an output head; the token embedding and the head share one weight matrix. The parameters have
the same names as in OpenAI's GPT-2. In shape comments, B is the batch size, T is the sequence
length, and C is the number of channels. Attention has nh heads with hs channels each.

The lesson builds this model step by step: CausalSelfAttention (lesson/02_attention.py), MLP and
Block (03, 04), several heads and several blocks (05, 06), and a GPT without options (07_gpt2.py).

  GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"
  GPT-3: Brown et al. 2020, "Language Models are Few-Shot Learners", arXiv:2005.14165
"""

import math
from dataclasses import dataclass

from plaingpt.flags import flag
from plaingpt.loss import ChunkedCrossEntropy, matmul_dtype
from plaingpt.muon import Muon
from plaingpt.sampling import generate_tokens

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class GPTConfig:
    n_layer: int = flag(12, "number of blocks", above=0, at_most=1000)
    n_head: int = flag(12, "attention heads per block; must divide n_embd", above=0)
    n_embd: int = flag(768, "width of the residual stream, C", above=0, at_most=10**8)
    block_size: int = flag(1024, "maximum context length in tokens, T", above=0)
    vocab_size: int = flag(
        50257, "vocabulary size; the tokenizer overrides this default", above=0, at_most=10**9
    )
    dropout: float = flag(0.0, "dropout probability during training", at_least=0, at_most=1)


class CausalSelfAttention(nn.Module):
    """Each position attends to itself and to all earlier positions (Vaswani et al. 2017, 3.2)."""

    def __init__(self, config, index):
        super().__init__()
        self.index = index  # the block's number, from 0, for edits of this file
        self.n_head = config.n_head
        self.dropout = config.dropout
        # c_attn computes the query, key and value of all heads.
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, pos, cache=None, mask=None):
        """x: (B, T, C). pos: see GPT.hidden; not used here, because x already includes wpe(pos)."""
        B, T, C = x.size()
        qkv = self.c_attn(x).chunk(3, dim=2)  # 3 x (B, T, C)
        # (B, nh, T, hs) each. -1 is n_head, or with --tp the number of heads in this process.
        q, k, v = (t.view(B, T, -1, C // self.n_head).transpose(1, 2) for t in qkv)
        if cache is not None:
            k, v = cache.extend(k, v)  # (B, nh, T so far, hs) each
        dropout = self.dropout if self.training else 0.0
        causal = mask is None and T > 1  # a single new token attends to the whole cache
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)  # (B, nh, T, hs)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers with a GELU in between (the tanh approximation, as in GPT-2)."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.gelu(self.c_fc(x))  # (B, T, 4C)
        return self.dropout(self.c_proj(x))  # (B, T, C)


class Block(nn.Module):
    """A pre-norm block (GPT-2 paper, section 2.3).

    LayerNorm normalizes the inputs of attention and MLP, but not the residual stream itself.
    """

    def __init__(self, config, index):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, index)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, pos, cache=None, mask=None):
        x = x + self.attn(self.ln_1(x), pos, cache, mask)
        return x + self.mlp(self.ln_2(x))  # (B, T, C)


class GPT(nn.Module):
    """The language model."""

    config_class = GPTConfig  # plaingpt/checkpoint.py creates a GPTConfig from a checkpoint

    def __init__(self, config, activation_checkpointing=False, seed=None):
        """Builds and initializes the model.

        activation_checkpointing: if True, training stores only the input of each block, and the
        backward pass recomputes the other activations.
        seed: random seed for the initialization. If None, torch's current RNG state is used.
        """
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)  # for layers that draw their weights in the constructor
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([Block(config, i) for i in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied weights (Press & Wolf 2017)
        self.loss_fn = ChunkedCrossEntropy(config.vocab_size)
        self.init_weights(seed)

    def init_weights(self, seed=None):
        """Initializes the parameters as GPT-2 does. seed: see __init__."""
        if self.lm_head.weight.is_meta:  # tensors on the meta device have no values
            return
        if seed is not None:
            torch.manual_seed(seed)  # constructors may have drawn random numbers from the RNG
        initialized = set()
        for name, module in self.named_modules():
            own = set(module.parameters(recurse=False))
            if own - initialized:  # False for lm_head, whose only parameter is wte.weight
                self.init_layer(name, module)
            initialized |= own

    @torch.no_grad()
    def init_layer(self, name, module):
        """Initializes the parameters of one layer. Returns False if the layer has an unknown type.

        A layer of an unknown type keeps the initialization of its constructor. name: the name of
        the layer, such as "transformer.h.0.mlp.c_fc".
        """
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()  # the weights are 1, the biases are 0
            return True
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            return False
        std = 0.02
        if name.endswith(".c_proj"):
            # Each block adds two outputs to the residual stream. The smaller std of these 2 n_layer
            # projections keeps the variance of the sum constant (GPT-2 paper, section 2.3).
            std /= math.sqrt(2 * self.config.n_layer)
        # The CPU draws the random numbers, so the initialization is the same on every device.
        module.weight.copy_(torch.empty(module.weight.shape, device="cpu").normal_(std=std))
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()
        return True

    def hidden(self, idx, cache=None, pos=None, mask=None):
        """Returns the hidden states after the final LayerNorm: ids (B, T) -> (B, T, C).

        cache: a list with one KVCache per block, which contains the keys and values of earlier
        tokens.
        pos: the position of each token, (B, T), or (1, T) if all rows have the same positions.
        Default: the positions that follow the tokens in the cache.
        mask: bool, (B, 1, T, T so far); True allows attention. "T so far" includes the tokens in
        the cache. Default: a causal mask. The default requires T = 1 if the cache contains tokens.

        plaingpt/scoring passes pos and mask to pack the endings of several questions into one row.
        The padding tokens after these endings have position 0.
        """
        T = idx.size(1)
        start = cache[0].length if cache else 0  # number of tokens in the cache
        if start and T > 1 and mask is None:
            raise ValueError(f"{T} new tokens after a cache of {start} need a mask")
        if pos is None:
            if start + T > self.config.block_size:
                raise ValueError(f"{start + T} tokens exceed block_size {self.config.block_size}")
            pos = torch.arange(start, start + T, device=idx.device)[None]  # (1, T)
        t = self.transformer
        x = t.drop(t.wte(idx) + t.wpe(pos))  # (B, T, C)
        if x.is_cuda and matmul_dtype(x) == torch.bfloat16:
            x = x.bfloat16()  # a faster residual stream; LayerNorm still computes in float32
        for i, block in enumerate(self.transformer.h):
            if self.activation_checkpointing and torch.is_grad_enabled() and cache is None:
                # To save memory, checkpoint stores only the block's input, and the backward pass
                # recomputes the block with the same RNG state, so the dropout masks are the same.
                x = checkpoint(
                    block,
                    x,
                    pos,
                    None,
                    mask,
                    use_reentrant=False,
                )
            else:
                x = block(x, pos, cache[i] if cache else None, mask)
        return self.transformer.ln_f(x)

    def logits(self, x):
        """Applies the output head: (..., C) -> (..., vocab_size).

        If you edit this method, also edit GPT.loss.
        """
        return self.lm_head(x)

    def loss(self, x, targets, reduction="mean"):
        """Returns the cross-entropy in nats for hidden states x (B, T, C) and targets (B, T).

        Computes F.cross_entropy(self.logits(x).flatten(0, 1), targets.flatten()) in chunks.
        Targets of -100 are ignored; if all targets are ignored, the loss is 0.
        reduction: "mean", or "none", which returns the loss at each position, (B, T), without a
        gradient. The loss at an ignored target is then 0.
        """
        # loss_fn multiplies by lm_head.weight and computes the cross-entropy in one function. If
        # you edit self.logits, pass self.logits instead of the weight: loss_fn then calls
        # self.logits for each chunk, which is slower.
        return self.loss_fn(x, targets, self.lm_head.weight, reduction)

    def forward(self, idx, targets=None):
        """idx, targets: ids, (B, T). Returns (logits, None), or (None, loss) if targets are given.

        If targets are given, an edit of this method may return a third value: a dict of scalar
        tensors, such as {"z": z}. For each name, log.txt then contains the mean over a step, in
        which each micro-batch has the weight of its number of targets.
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x), None  # (B, T, vocab_size)
        # Add an auxiliary loss for training here: validation calls only hidden and loss.
        return None, self.loss(x, targets)

    def generate(self, idx, max_new_tokens, **options):
        """Appends generated ids to each row: (B, T) -> (B, T + max_new_tokens).

        options: seed, temperature, top_k and top_p, see generate_tokens.
        """
        return torch.cat([idx, *generate_tokens(self, idx, max_new_tokens, **options)], dim=1)

    def configure_optimizers(
        self, weight_decay, learning_rate, optimizer="adamw", muon_lr=None, muon_class=Muon
    ):
        """Returns [AdamW], or for optimizer="muon" [Muon, AdamW].

        muon_lr: the learning rate of Muon; if None, it equals learning_rate. muon_class: Muon, or a
        subclass.

        AdamW uses the betas and eps of the GPT-3 paper, appendix B. Weight decay applies to each
        parameter with two or more dimensions: to matrices and embeddings, but also to a parameter
        of shape (nh, 1, 1), if you add one. To exempt this parameter from weight decay, edit the
        condition of `vectors` below, for example with the name of the parameter.
        Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) updates the matrices of the
        blocks. Its updates are scaled to match the root mean square of AdamW's updates (Liu et al.
        2025, arXiv:2502.16982, section 2.2).
        """
        in_blocks = set(self.transformer.h.parameters())
        of_muon = []
        qkv = []
        matrices = []
        vectors = []
        for name, p in self.named_parameters():
            if p.dim() < 2:
                vectors.append(p)
            elif optimizer != "muon" or p not in in_blocks or p.dim() > 2:
                matrices.append(p)
            elif name.endswith(".c_attn.weight"):
                if len(p) != 3 * p.size(1):
                    raise ValueError(
                        f"{name} has {len(p)} rows instead of 3 * {p.size(1)}; for --optimizer "
                        "muon, write three separate layers for query, key and value"
                    )
                qkv.append(p)
            else:
                of_muon.append(p)
        optimizers = []
        if optimizer == "muon":
            groups = [dict(params=of_muon), dict(params=qkv, n_stacked=3)]
            muon = muon_class(groups, muon_lr or learning_rate, weight_decay=weight_decay)
            optimizers.append(muon)
        groups = [
            dict(params=matrices, weight_decay=weight_decay),
            dict(params=vectors, weight_decay=0.0),
        ]
        # fused=True updates the parameters faster.
        adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)
        optimizers.append(adamw)
        return optimizers

    def flops_per_token(self):
        """Returns the FLOPs per token of the forward and backward passes (PaLM paper, appendix B).

        Matrix multiplications need 6 FLOPs per weight of an nn.Linear. The loss pads the head to a
        multiple of 128 rows. Attention needs 12 n_layer n_embd T FLOPs. This formula counts all
        T x T attention scores, although a causal mask needs only half of them.
        """
        c = self.config
        weights = (-c.vocab_size % 128) * c.n_embd  # the padding
        for _, module in self.named_modules(remove_duplicate=False):  # a layer may occur twice
            if isinstance(module, nn.Linear):
                weights += module.weight.numel()
        return 6 * weights + 12 * c.n_layer * c.n_embd * c.block_size
