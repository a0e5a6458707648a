"""Tests added parameters and buffers, which the constructors of edited modules initialize."""

import pytest
import torch
from conftest import checkpoint, program, read_log, spawn
from edited import SMALL, WAYS, copy_program, edit_model, run

pytestmark = pytest.mark.slow  # each test starts a program

BEFORE = "        self.dropout = config.dropout\n"
SIZE = "        B, T, C = x.size()\n"
# Edits of model.py: nanoGPT's line that stores the causal mask in a buffer, and a line that passes
# the buffer to attention.
MASK = (
    (
        BEFORE,
        BEFORE
        + "        mask = torch.tril(torch.ones(config.block_size, config.block_size))\n"
        + '        self.register_buffer("bias", mask.view(1, 1, *mask.shape).bool(){})\n',
    ),
    (
        "        causal = mask is None and T > 1",
        "        if mask is None and T > 1:\n"
        "            mask = self.bias[:, :, :T, :T]\n"
        "        causal = mask is None and T > 1",
    ),
)


def test_a_buffer_as_a_mask(tmp_path):
    """If attention reads its causal mask from a buffer, the losses are the same in every layout.

    A checkpoint contains the buffer. --resume and generate.py load the buffer.
    """
    copy_program(tmp_path)
    run(tmp_path, "plain", 4)
    plain = read_log(tmp_path / "plain")
    (name, line), forward = MASK
    edit_model(tmp_path, (name, line.format("")), forward)
    run(tmp_path, "run", 4)
    log = read_log(tmp_path / "run")
    for key, value in plain.items():
        assert float(log[key]) == pytest.approx(float(value), rel=1e-5), key
    (tmp_path / "run/model_000004.pt").unlink()
    run(tmp_path, "run", 4, "--resume")
    assert read_log(tmp_path / "run") == log
    weights = checkpoint(tmp_path / "run", 4)["model"]
    assert "transformer.h.0.attn.bias" in weights
    flags = ["--checkpoint", "run", "--max_new_tokens", 5, "--device", "cpu"]
    program(*flags, cwd=tmp_path, program=tmp_path / "generate.py")
    for way, more in dict(WAYS, ddp=[]).items():
        run(tmp_path, way, 2, *more, processes=2)
        for key, value in read_log(tmp_path / way).items():
            assert float(value) == pytest.approx(float(log[key]), rel=1e-5), (way, key)
        assert checkpoint(tmp_path / way, 2)["model"].keys() == weights.keys()
    # If checkpoints omit the buffer, the losses stay the same, even after --resume and with FSDP.
    edit_model(tmp_path, (".bool())", ".bool(), persistent=False)"))
    for flags in ([], ["--resume"]):
        run(tmp_path, "other", 4, *flags)
        assert read_log(tmp_path / "other") == log
        weights = checkpoint(tmp_path / "other", 4)["model"]
        assert "transformer.h.0.attn.bias" not in weights
        (tmp_path / "other/model_000004.pt").unlink()
    run(tmp_path, "other fsdp", 2, *WAYS["fsdp"], processes=2)
    for key, value in read_log(tmp_path / "other fsdp").items():
        assert float(value) == pytest.approx(float(log[key]), rel=1e-5), key


def test_a_parameter_keeps_what_its_constructor_gave_it(tmp_path):
    """Adds a gain, an identity matrix, a matrix of zeros and a random matrix to attention.

    The initialization of these parameters is the same with one process, FSDP and PP.
    """
    copy_program(tmp_path)
    first = dict(
        gain="torch.tensor([0.5])",
        mix="torch.eye(config.n_embd)",
        zeros="torch.zeros(config.n_embd, config.n_embd)",
        drawn="0.1 * torch.randn(config.n_embd, config.n_embd)",
    )
    lines = [f"        self.{name} = nn.Parameter({code})\n" for name, code in first.items()]
    use = f"{SIZE}        x = x + x * self.gain + x @ (self.mix + self.zeros + self.drawn)\n"
    edit_model(tmp_path, (BEFORE, BEFORE + "".join(lines)), (SIZE, use))
    run(tmp_path, "run", 1)
    weights = checkpoint(tmp_path / "run", 1)["model"]
    drawn = "transformer.h.1.attn.drawn"
    for name, code in first.items():
        if name != "drawn":
            expected = eval(code.replace("config.n_embd", "16"))
            found = weights[f"transformer.h.0.attn.{name}"]
            assert (found - expected).abs().max() < 0.01, name  # one step causes a small change
    assert 0.05 < weights[drawn].std() < 0.15
    log = read_log(tmp_path / "run")
    for way in ("fsdp", "pp"):
        run(tmp_path, way, 1, *WAYS[way], processes=2)
        for key, value in read_log(tmp_path / way).items():
            assert float(value) == pytest.approx(float(log[key]), rel=1e-5), (way, key)
        found = checkpoint(tmp_path / way, 1)["model"][drawn]
        assert torch.allclose(found, weights[drawn], atol=1e-5)


def test_fsdp_refuses_a_scalar_with_its_own_sentence(tmp_path):
    copy_program(tmp_path)
    mix = "        self.mix = nn.Parameter(torch.tensor(0.5))\n"
    edit_model(tmp_path, (BEFORE, BEFORE + mix), (SIZE, f"{SIZE}        x = x + x * self.mix\n"))
    run(tmp_path, "run", 1)
    expected = torch.tensor(0.5)
    found = checkpoint(tmp_path / "run", 1)["model"]["transformer.h.0.attn.mix"]
    assert (found - expected).abs() < 0.01
    flags = [*SMALL, *WAYS["fsdp"]]
    path = tmp_path / "train_gpt2.py"
    process, *_ = spawn(*flags, processes=2, cwd=tmp_path, program=path)
    assert "Change mix to a 1D tensor" in process.communicate(timeout=60)[1]
