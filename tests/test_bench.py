"""The benchmark: what it times, what it prints, and how it tells kernels apart."""

import json
import re

import pytest
import torch
from conftest import program

from bench import PlainGPT, kind
from model import GPT, GPTConfig


@pytest.mark.parametrize("expected, names", {
    "matmul": ["aten::mm", "aten::addmm", "aten::bmm", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopB_TNT",
               "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "ampere_bf16_s16816gemm_bf16_128x128",
               "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>"],
    "attention": ["aten::_scaled_dot_product_flash_attention_for_cpu_backward", "void pytorch_flash::flash_fwd_kernel<Flash>",
                  "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64_1x1x1_kernel0_0",
                  "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention)"],
    "optimizer": ["aten::_fused_adamw_", "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
                  "aten::linalg_vector_norm"],
    "communication": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)", "gloo:all_reduce"],
    "cross-entropy": ["aten::_log_softmax", "triton_red_fused_amax_exp_sub_sum_5", "LinearCrossEntropyBackward"],
    "norms and elementwise": ["aten::native_layer_norm", "triton_per_fused_native_layer_norm_3", "aten::gelu", "aten::add"],
}.items())
def test_kinds_of_kernels(expected, names):
    for name in names:
        assert kind(name) == expected, name


def test_kinds_by_caller():
    assert kind("aten::exp_", " LinearCrossEntropy") == "cross-entropy"
    assert kind("aten::mm", " LinearCrossEntropy") == "matmul"  # the head's product is a product
    assert kind("aten::mm", " Optimizer.step#Muon.step") == "optimizer"


def test_the_plain_step_is_the_same_model():
    torch.manual_seed(0)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=256)
    plain, ours, idx = PlainGPT(config), GPT(config), torch.randint(256, (2, 16))
    ours.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(idx, idx)[1], ours(idx, idx)[1])


ROW = (r"^ +{B} {name} +[\d,]+ +[\d,]+-[\d,]+ +(?P<tok_s>[\d,]+) +\d+\.\d\d +(?P<matmul>\d+\.\d)% +- +\d+\.\d\d +\d+\.\d +(?P<ratio>\d+\.\d\d)$")


@pytest.mark.slow
def test_bench_times_ours_and_a_peer_and_profiles(tmp_path):
    """Two batch sizes, one of which no machine can hold: the other's rows are there all the same."""
    out, _ = program("--preset", "baby", "--batch_size", 2, 10**12, "--block_size", 32, "--steps", 1, "--dtype", "float32",
                     "--device", "cpu", "--optimizer", "adamw", "--peer", "plain", "--profile", cwd=tmp_path, program="bench.py")
    rows = {name: re.search(ROW.format(B=2, name=name), out, re.M) for name in
            ("plainGPT eager float32", "plain eager float32", "plain compiled float32")}
    assert all(rows.values()), out
    assert rows["plainGPT eager float32"]["ratio"] == "1.00"
    assert len(re.findall("^10{12} .* does not fit into memory$", out, re.M)) == 3, out
    assert re.search(r"baby: 433,664 parameters, T=32, adamw, 2\.65 MFLOP a token with full attention", out), out
    shares = re.findall(r"^  (.+?) +[\d,.]+ ms +([\d.]+)%$", out, re.M)
    assert {name for name, share in shares if float(share) > 0} >= {"matmul", "attention", "cross-entropy", "optimizer"}
    assert sum(float(share) for _, share in shares) == pytest.approx(100, abs=0.5)
    assert json.loads((tmp_path / "bench_trace.json").read_text())["traceEvents"]
    assert [p.name for p in tmp_path.iterdir()] == ["bench_trace.json"]


@pytest.mark.parametrize("way", [[], ["--pp", 2]], ids=["ddp", "pp"])
def test_bench_on_two_processes(tmp_path, way):
    out, _ = program("--preset", "baby", "--batch_size", 2, "--block_size", 32, "--steps", 1, "--dtype", "float32", "--profile",
                     "--device", "cpu", *way, cwd=tmp_path, processes=2, program="bench.py")
    assert re.search(ROW.format(B=2, name="plainGPT eager float32"), out, re.M) and "muon" in out and "2 processes" in out
    assert float(re.search(r"communication +[\d.]+ ms +([\d.]+)%", out)[1]) > 0


@pytest.mark.parametrize("flags, sentence", [
    (["--preset", "gpt5"], "--preset gpt5 is none of gpt2"), (["--peer", "megatron"], "--peer megatron is none of plain, transformers"),
    (["--dtype", "fp8"], "--dtype fp8 is none of"), (["--batch_size", "many"], "--batch_size: invalid int value"),
    (["--batch_size", "0"], "--batch_size 0 cannot be"), (["--steps", "0"], "--steps 0 cannot be"),
    (["--optimizer", "sgd"], "--optimizer sgd is none of"), (["--pp", "2"], "--pp 2 takes a multiple of 2 processes"), (["--device", "toaster"], "--device toaster cannot be used"),
])
def test_mistakes_are_answered_by_one_sentence(tmp_path, flags, sentence):
    _, err = program(*flags, cwd=tmp_path, program="bench.py", status=2)
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1, err
