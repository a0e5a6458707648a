"""What a program does not import, because it takes a second and helps nobody."""

import subprocess
import sys

from plaingpt.distributed.parts import make_whole_gpt

import pytest
import torch
from conftest import ROOT

from model import GPT, GPTConfig

TINY_GPT = GPTConfig(block_size=8, vocab_size=256, n_layer=1, n_head=2, n_embd=4)


def imported_by(source):
    """Runs Python code in a new process -> the names of all modules that it has imported."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{source}\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
@pytest.mark.parametrize("program", ["experiment", "fineweb", "tokenizer"])
def test_programs_that_compute_nothing_import_no_torch(program):
    assert "torch" not in imported_by(f"import {program}")


@pytest.mark.slow
def test_loading_a_model_imports_no_compiler(tmp_path):
    checkpoint = dict(model=GPT(TINY_GPT).state_dict(), model_config=vars(TINY_GPT))
    torch.save(checkpoint | dict(tokenizer="bytes"), tmp_path / "model.pt")
    flags = ["--checkpoint", str(tmp_path / "model.pt"), "--max_new_tokens", "3"]
    modules = imported_by(f"import generate; generate.main({flags!r})")
    assert "torch" in modules
    assert not modules & {"torch._dynamo", "torch._inductor", "sympy"}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_imports_no_compiler(tmp_path, optimizer):
    """torch.optim would import it, in 0.8 s of a start of 2 s."""
    (tmp_path / "my.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    flags = f"--data {tmp_path}/my.txt --max_steps 2 --log_dir {tmp_path}/run --device cpu"
    flags = f"{flags} --optimizer {optimizer} --n_layer 1 --n_embd 8 --n_head 2 --sample_every 0"
    modules = imported_by(f"import train_gpt2; train_gpt2.main({flags.split()!r})")
    assert "torch" in modules
    assert not modules & {"torch._dynamo", "torch._inductor", "sympy"}


def test_a_gpt_without_memory_may_draw_a_parameter_of_its_own():
    class OwnGPT(GPT):
        def __init__(self, config, activation_checkpointing=False):
            super().__init__(config, activation_checkpointing)
            self.scale = torch.nn.Parameter(torch.nn.init.normal_(torch.empty(4), std=0.5))

    shapes = {name: p.shape for name, p in make_whole_gpt(OwnGPT, TINY_GPT).named_parameters()}
    assert shapes == {name: p.shape for name, p in OwnGPT(TINY_GPT).named_parameters()}
