"""The presets of train_gpt2.py. Each has values of some flags; the others have their defaults.

The sizes are from table 2 of the GPT-2 paper and table 2.1 of the GPT-3 paper. For 1.3B and 13B,
n_head x hs is not n_embd in that table. We corrected this. Learning rates and total batch sizes are
those of the GPT-3 model of about that size, but gpt2-xl has half the batch of GPT-3 1.3B. The
recipes of mini and baby are the best ones that we measured on two CPU cores.
"""

GPT3 = dict(block_size=2048)
BATCH_1M = dict(GPT3, total_batch_size=2**20, max_steps=9537, warmup_steps=358)
BATCH_2M = dict(GPT3, total_batch_size=2**21, max_steps=4768, warmup_steps=179)
SMALL = dict(
    optimizer="muon",
    max_lr=8e-3,
    min_lr=0.0,
    schedule="linear",
    batch_size=16,
    warmup_steps=100,
    val_tokens=65536,
    eval_every=0,
    save_every=500,
    log_every=100,
)
PRESETS = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024, max_lr=3e-4, batch_size=32),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280, max_lr=2.5e-4, batch_size=16),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600, max_lr=2e-4, batch_size=8),
    "gpt3-350m": dict(n_layer=24, n_head=16, n_embd=1024, max_lr=3e-4, batch_size=16, **GPT3),
    "gpt3-760m": dict(n_layer=24, n_head=16, n_embd=1536, max_lr=2.5e-4, batch_size=8, **GPT3),
    "gpt3-1.3b": dict(n_layer=24, n_head=16, n_embd=2048, max_lr=2e-4, batch_size=8, **BATCH_1M),
    "gpt3-2.7b": dict(n_layer=32, n_head=32, n_embd=2560, max_lr=1.6e-4, batch_size=4, **BATCH_1M),
    "gpt3-6.7b": dict(n_layer=32, n_head=32, n_embd=4096, max_lr=1.2e-4, batch_size=2, **BATCH_2M),
    "gpt3-13b": dict(n_layer=40, n_head=40, n_embd=5120, max_lr=1e-4, batch_size=1, **BATCH_2M),
    "mini": dict(
        SMALL,
        n_layer=4,
        n_head=3,
        n_embd=192,
        block_size=128,
        total_batch_size=2048,
        max_steps=2500,
    ),
    "baby": dict(
        SMALL,
        n_layer=2,
        n_head=2,
        n_embd=128,
        block_size=64,
        total_batch_size=1024,
        max_steps=2700,
        sample_every=900,
        vocab_size=256,  # the ids are bytes
    ),
    "finetune": dict(
        SMALL,
        optimizer="adamw",
        max_lr=5e-5,
        batch_size=4,
        total_batch_size=4096,
        max_steps=100,
        warmup_steps=10,
        dropout=0.1,
        log_every=10,
    ),
}
