"""Runs benchmarks and generates samples during a run, and checks the loss before the first step."""

import importlib.machinery

from plaingpt.base.errors import UserError
from plaingpt.base.terminal import print0
from plaingpt.distributed.process import on_rank0
from plaingpt.ops.sampling import attention_for_many_shapes, generate_tokens
from plaingpt.scoring.benchmark import load_examples
from plaingpt.scoring.score import TOKENS, make_rows, score

import torch
import torch.nn.functional as F

MOST_COMPARED = 128  # number of positions whose logits check_loss compares


def import_benchmarks(config):
    """Imports the modules that --evals names -> [(Benchmark, path of its data, or "")].

    Raises UserError if a module defines no BENCHMARK.
    """
    found = []
    if config.eval_every == 0:
        return found
    for item in config.evals.split(","):
        if not item:
            continue
        name, _, path = item.strip().partition("=")
        benchmark = None
        if "." not in name and importlib.machinery.PathFinder.find_spec(name) is not None:
            benchmark = getattr(importlib.import_module(name), "BENCHMARK", None)
        if benchmark is None:
            raise UserError(f"--evals {name}: no such benchmark; give a module, such as lambada")
        found.append((benchmark, path))
    return found


def load_evals(benchmarks, tokenizer, gpt_config):
    """Loads the data of benchmarks -> [(Benchmark, its examples, its rows)].

    benchmarks: [(Benchmark, path of its data, or "" for the Hugging Face Hub)]. Raises UserError if
    the data at a path cannot be loaded. If data from the hub cannot be loaded, prints a note and
    skips the benchmark.
    """
    evals = []
    for benchmark, path in benchmarks:
        try:
            examples = on_rank0(load_examples, benchmark, path)
            rows = make_rows(examples, tokenizer, gpt_config, benchmark.prompt_ids, benchmark.spare)
            evals.append((benchmark, examples, rows))
        except UserError as error:
            if path:
                raise
            print0(f"note: {benchmark.name} is skipped: {error}")
    return evals


def run_evals(evals, training, config, step):
    """Scores a model on all benchmarks -> {name: metric} on all processes. Prints the metrics.

    evals: from load_evals. training: a Training. config: TrainConfig.
    """
    model, process = training.raw_model, training.process
    figures = {}
    tokens = min(config.batch_size * model.config.block_size, TOKENS[process.device.type])
    model.eval()
    for benchmark, examples, rows in evals:
        scores = score(model, examples, rows, process, tokens)
        report = benchmark.report(examples, scores)
        figures[benchmark.stream] = report[benchmark.logged]
    model.train()
    texts = [f"{name} {value:.4f}" for name, value in figures.items()]
    print0(" | ".join([f"step {step}", *texts]))
    return figures


@torch.no_grad()
def check_loss(model, idx, autocast):
    """Raises UserError unless GPT.loss is the cross-entropy of GPT.logits.

    Training and validation call GPT.loss; benchmarks and generation call GPT.logits. If a user
    edits only one of these two methods, training and scoring use different models. This function
    calls both methods in the same way as validation.

    model: a GPT. idx: token ids, (1, T). autocast: a context manager for GPT.hidden.
    """
    idx = idx[:, :MOST_COMPARED]  # (1, n); also used as targets, which may be any ids
    precision = torch.get_float32_matmul_precision()
    model.eval()
    with attention_for_many_shapes():  # no training step has this shape
        with autocast:
            x = model.hidden(idx)  # (1, n, C)
        # In float32, without autocast, rounding errors stay below the threshold, so only an edit
        # can exceed the threshold. Large hidden states also reveal an edit that changes only large
        # logits, such as a soft-cap.
        torch.set_float32_matmul_precision("highest")
        x = 30 * x.float()
        losses = model.loss(x, idx, reduction="none")[0]  # (n)
        logits = model.logits(x)[0].float()  # (n, vocab_size)
        names = find_untrained(model, x, idx)
    torch.set_float32_matmul_precision(precision)
    model.train()
    expected = F.cross_entropy(logits, idx[0], reduction="none")  # (n)
    difference = (losses - expected).abs().max().item()
    what = None
    if difference > 1e-4 * (1 + logits.abs().max().item()):
        what = f"GPT.loss and the cross-entropy of GPT.logits differ by {difference:.2g} nats"
    elif names:
        what = f"GPT.logits uses {', '.join(names)}, but GPT.loss does not"
    if what:
        raise UserError(
            f"model.py: {what}; in GPT.loss, pass self.logits to loss_fn instead of "
            "self.lm_head.weight (an auxiliary loss that only training uses belongs in GPT.forward)"
        )


def find_untrained(model, x, targets):
    """Returns the names of the parameters that GPT.logits uses, but GPT.loss does not.

    Training would not change such a parameter. If the parameter is a bias of zero or a scale of
    one, it does not change the logits yet, so a comparison of losses cannot reveal it. x: hidden
    states, (1, n, C). targets: (1, n).
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inputs = [x.requires_grad_(), *parameters.values()]
    used = []
    with torch.enable_grad():
        loss = model.loss(x, targets)
        if isinstance(loss, tuple):  # an edited GPT.loss may also return metrics
            loss = loss[0]
        for result in (model.logits(x).sum(), loss):
            _, *gradients = torch.autograd.grad(result, inputs, allow_unused=True)
            used.append({name for name, g in zip(parameters, gradients) if g is not None})
    return sorted(used[0] - used[1])


def draw_samples(training, data, config):
    """Generates two samples -> list of strings. All processes must call this function.

    If the data contain pairs, the model answers prompts of the validation split, and each sample
    also contains the expected response. Like run_evals, raises Stopped after a signal.
    """
    model, process = training.raw_model, training.process
    model.eval()
    with process.autocast, attention_for_many_shapes():
        texts = answer_prompts(model, data, process)  # [] if the data contain no pairs
        if not texts:
            tokenizer = data.tokenizer
            idx = torch.full((2, 1), tokenizer.end_of_text, device=process.device)  # (2, 1)
            n_tokens = config.sample_tokens or (500 if tokenizer.name == "bytes" else 64)
            new = write_tokens(model, idx, n_tokens, process, temperature=0.8, top_k=50, seed=42)
            for ids in torch.cat(new, dim=1).tolist():  # n_tokens x (2, 1) -> (2, n_tokens)
                texts.append(tokenizer.decode(ids).strip())
    model.train()
    return texts


def answer_prompts(model, data, process):
    """Answers two prompts -> two strings, each with an answer and the expected response.

    Uses the first prompt of each of the first two sequences with pairs. Returns [] if the data
    contain no pairs. All processes must call this function.
    """
    T = model.config.block_size
    texts = []
    for tokens in data.val:
        if not tokens.has_pairs:
            continue
        starts = range(0, len(tokens) - 1, T)
        for start in starts[: 2 - len(texts)]:
            x, y = tokens.read_sequence(start, T)  # (T,) each
            texts.append(answer(model, x, y, data.tokenizer, process))
    return texts


def write_tokens(model, idx, n_tokens, process, **options):
    """Returns a list of all tokens that generate_tokens yields. Raises Stopped after a signal."""
    new = []
    for ids in generate_tokens(model, idx, n_tokens, **options):  # (B, 1)
        process.check_stop()
        new.append(ids)
    return new


def answer(model, x, y, tokenizer, process):
    """Answers the first prompt in a sequence of pairs -> string with both responses.

    The string contains the answer of the model, then the expected response. Both have the same
    number of tokens. x, y: inputs and targets, (T,) each.
    """
    first = int((y != -100).argmax())  # this position predicts the first token of the response
    last = y.tolist().index(tokenizer.end_of_text, first)  # a response ends with end_of_text
    n = last - first + 1
    idx = torch.from_numpy(x[None, : first + 1]).to(process.device)  # (1, first + 1)
    new = write_tokens(model, idx, n, process, temperature=0)  # n x (1, 1)
    ids = torch.cat([idx, *new], dim=1)[0, 1:].tolist()  # without end_of_text
    return f"{tokenizer.decode(ids)}\nexpected: {tokenizer.decode(y[first : first + n])}"
