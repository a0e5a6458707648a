"""Checks that the parts of a split GPT compute what the whole GPT computes.

If a user has edited model.py, the parts may compute something else. Before train_large.py splits
the real model, each check compares the training loss of a small GPT with the loss of its parts.
"""

import copy
from dataclasses import replace

from plaingpt.checkpoint import make_whole_gpt
from plaingpt.errors import UserError, explaining
from plaingpt.large.parts import fill_split_model, tie_head
from plaingpt.large.pipeline import keep_stage
from plaingpt.large.tensor_parallel import is_qkv, reorder_rows, split_gpt

import torch
import torch.distributed as dist
import torch.nn as nn

# An edited model.py may work for only one model size.
SMALL_FAILS = "a small test GPT of this model.py fails"


def check_stages(model, n_stages):
    """Raises UserError if the stages of a pipeline would not compute what the whole GPT computes.

    A stage passes only the residual stream to the next stage, and only the last stage calls
    GPT.forward. An edited model.py may need more than this. In this check, all stages run in one
    process.

    model: the GPT to split, of which this function uses only the class and the config.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        whole = make_small_gpt(type(model), model.config, "--pp")
        x, y = make_small_batch(whole.config)
        with explaining(f"--pp: {SMALL_FAILS}", "remove --pp"):
            # Copies the model first, because forward may store tensors that deepcopy rejects.
            parts = [copy.deepcopy(whole) for _ in range(n_stages)]
            expected = metrics_of_forward(whole, x, y)
        # An edited model.py may need the whole GPT, but a stage contains only a part.
        with explaining("--pp: model.py cannot run in stages", "remove --pp"):
            for stage, part in enumerate(parts):
                keep_stage(part, stage, n_stages)
                if stage < n_stages - 1:
                    x = part.hidden(x)  # (B, T, C)
            found = metrics_of_forward(part, x, y)
    if problem := compare_metrics(found, expected):
        raise UserError(f"--pp: {problem}; remove --pp")


def check_tensor_parallel(model, mesh, device):
    """Raises UserError if tensor parallelism would not compute what the whole GPT computes.

    PLAN in plaingpt/large/tensor_parallel.py is for the layers of GPT-2, and ParallelCrossEntropy
    is for the loss in plaingpt/loss.py. An edited model.py may need a different plan or loss. All
    processes of the mesh must call this function.

    model: as in check_stages. mesh: the mesh of tensor parallelism.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        whole = make_small_gpt(type(model), model.config, "--tp").to(device)
        x, y = (ids.to(device) for ids in make_small_batch(whole.config))  # (B, T) each
        with explaining(f"--tp: {SMALL_FAILS}", "remove --tp"):
            weights = whole.state_dict()
            expected = metrics_of_forward(whole, x, y)
            expected["loss"].backward()
            part = make_whole_gpt(type(model), whole.config)
            is_tied = part.lm_head.weight is part.transformer.wte.weight
            split_gpt(part, mesh)
            if is_tied:
                tie_head(part)
            fill_split_model(part, whole, weights, 0, device)
            found = metrics_of_forward(part, x, y)
            found["loss"].backward()
    torch.set_float32_matmul_precision(precision)
    # Each process has its own copy of a parameter that is not split, so possibly only one process
    # finds a problem. In this case, all processes raise the error.
    problem = compare_metrics(found, expected)
    wrong = find_wrong_gradient(part, whole, mesh)  # all processes must call this function
    if wrong and not problem:
        problem = f"the processes have different gradients of {wrong}"
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for problem in filter(None, problems):
        raise UserError(f"--tp: {problem}; remove --tp")


def find_wrong_gradient(part, whole, mesh):
    """Returns the name of a parameter whose gradient is different in the split GPT, or None.

    part: the split GPT. whole: the whole GPT. mesh: as in check_tensor_parallel.
    """
    wrong = None
    parameters = dict(part.named_parameters())
    for name, p in whole.named_parameters():
        if p.grad is None:
            continue
        grad = parameters[name].grad
        # The placements of the gradient may differ from the placements of the parameter:
        # RowwiseParallel returns a gradient with all rows, and with torch 2.11 the gradient may be
        # a partial sum.
        grad = grad.redistribute(placements=parameters[name].placements).full_tensor()
        if is_qkv(name):
            grad = reorder_rows(grad, 3, mesh.size(), back=True)
        difference = (grad - p.grad).abs().max()
        # The gradient of the bias of the keys is only rounding error, below 1e-6.
        if difference > 1e-3 * p.grad.abs().max() + 1e-6:
            wrong = wrong or name
    return wrong


def make_small_batch(config):
    """Returns random inputs and targets, (2, 16) each. config: the GPTConfig of the small GPT."""
    idx = torch.randint(config.vocab_size, (2, 17))
    return idx[:, :-1], idx[:, 1:]


def make_small_gpt(GPT, config, flag):
    """Returns a small GPT with random parameters, to test an edited model.py.

    The block_size of the small GPT is 16. Its vocabulary size is 64 x n_head, so tensor parallelism
    can split the vocabulary evenly. config: the GPTConfig of the real model. flag: --tp or --pp,
    for the message.
    """
    n = config.n_head
    shape = dict(n_embd=4 * n, vocab_size=64 * n, block_size=16, dropout=0.0)
    with explaining(f"{flag}: {SMALL_FAILS}", f"remove {flag}"):
        model = GPT(replace(config, **shape))
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)  # with smaller weights, an edit would hardly change the loss
    return model


def metrics_of_forward(model, x, y):
    """Returns the loss and the metrics that GPT.forward returns: {name: scalar tensor}."""
    _, loss, *more = model(x, y)
    return dict(loss=loss, **(more[0] if more else {}))


def compare_metrics(found, expected):
    """Returns a text if the parts compute a different loss or metric, or None if they do not.

    found, expected: the results of metrics_of_forward for the parts and for the whole GPT.
    """
    for name, value in expected.items():
        if not torch.allclose(value, found[name], rtol=1e-4, atol=1e-6):
            return (
                f"the parts of this model.py compute a different {name} from the whole model: "
                f"{found[name]:.6g} instead of {value:.6g}"
            )
    return None
