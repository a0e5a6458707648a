"""Devices, ranks, the search for a micro-batch size, and the thread that reads batches."""

import json
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

from plaingpt import batch_size
from plaingpt.device import choose_compile, find_device, peak_flops
from plaingpt.errors import UserError
from plaingpt.machine import read_ranks
from plaingpt.memory import memory_advice
from plaingpt.order import prefetch
from plaingpt.process import Process, setup
from plaingpt.signals import StopRequest

import pytest
import torch
import torch.distributed as dist
from conftest import ALONE, MODEL, ROOT, TINY, program, read_log

import plot
import train_gpt2
from model import GPT
from train_large import LargeConfig, ShardedTraining


def test_a_gpu_that_cannot_be_used_is_an_error(monkeypatch):
    """If the driver is too old, torch only warns and finds no GPU. find_device must raise an error.

    If CUDA_VISIBLE_DEVICES hides the GPU, find_device returns the CPU, without an error.
    """
    exists = Path.exists

    def ones(size, device):
        if device.type == "cuda":
            raise RuntimeError("The NVIDIA driver on your system is too old\nlonger text")

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "nvidia0" or exists(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"cannot use it .*is too old\); try --device cpu$"):
        find_device("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_device("auto", world_size=2).type == "cpu"  # the GPU is hidden
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, local_rank in (("cuda:1", 0), ("cuda", 2), ("auto", 2)):
        with pytest.raises(
            UserError, match="finds 2; use --device cuda with at most --nproc_per_node=2$"
        ):
            find_device(name, local_rank, world_size=3)


def test_compile_says_what_it_needs_and_that_it_takes_long(monkeypatch, capsys):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not choose_compile(None, cpu) and not choose_compile(False, cuda)
    assert choose_compile(None, cuda) and choose_compile(True, cpu)
    assert capsys.readouterr().out.count("take a minute or more") == 2  # once per returned True
    monkeypatch.setenv("CC", "missing")
    with pytest.raises(UserError, match="needs g.. and .* or pass --no-compile$"):
        choose_compile(None, cuda)
    monkeypatch.setattr(sys, "platform", "win32")  # on Windows, torch has no Triton
    assert not choose_compile(None, cuda)


def test_out_of_memory_gives_a_one_sentence_error():
    def on_cuda():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nMore lines.")

    def on_mps():
        raise RuntimeError("MPS backend out of memory (MPS allocated: 5.50 GB). Tried to allocate")

    def in_triton():
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    for error in (lambda: torch.empty(2**50), on_cuda, on_mps, in_triton):
        with pytest.raises(UserError, match="^too large; choose a smaller one$"):
            with memory_advice("too large; choose a smaller one"):
                error()


@pytest.fixture
def small_gpu(monkeypatch):
    """Makes the CPU act as a GPU that has memory for most[0] sequences. Returns (most, tried).

    A test can change most[0]. The list `tried` contains the micro-batch sizes that the search has
    tried.
    """
    most, tried, forward = [4], [], GPT.forward
    has_memory, fit = batch_size.has_memory, train_gpt2.Training.fit_batch_size

    def limited(model, idx, targets=None):
        torch.rand(1)
        # Memory runs out only in the second forward pass, when gradients exist.
        if len(idx) > most[0] and model.lm_head.weight.grad is not None:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        return forward(model, idx, targets)

    monkeypatch.setattr(GPT, "forward", limited)

    def fit_on_a_gpu(training, T):
        training.process = replace(ALONE, device=torch.device("cuda"))
        return fit(training, T)

    def has_memory_on_the_cpu(training, B, T):
        tried.append(B)
        training.process = ALONE
        return has_memory(training, B, T)

    monkeypatch.setattr(train_gpt2.Training, "fit_batch_size", fit_on_a_gpu)
    monkeypatch.setattr(batch_size, "has_memory", has_memory_on_the_cpu)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    return most, tried


@pytest.mark.parametrize(
    "n, B, first, most, tried",
    [
        # The search tries eager mode first. In compiled mode, the search begins with the last size
        # that did not fit in eager mode.
        (64, 16, 0, 4, [16, 8, 4, 8, 4]),
        (45, 15, 0, 8, [15, 5, 15, 5]),  # 7 and 6 do not divide 45
        (16, 16, 6, 3, [16, 8, 4, 2, 4, 2]),  # the first step of the ramp-up has 6 sequences
        (2, 2, 0, 0, [2, 1, 1]),
    ],
)
def test_a_gpu_gets_the_largest_micro_batches_that_fit(small_gpu, n, B, first, most, tried):
    small_gpu[0][0] = most
    config = train_gpt2.TrainConfig(total_batch_size=32 * n, batch_size=B)
    if first:
        config = replace(config, rampup_steps=4, rampup_batch_size=32 * first)
    training, state = train_gpt2.Training(MODEL, config, ALONE), torch.get_rng_state()
    training.config = replace(config, compile=True)
    if most:
        training.fit_batch_size(32)
        assert training.config.batch_size == tried[-1]
    else:
        with pytest.raises(UserError, match="^no sequence fits .* train_large.py on more GPUs$"):
            training.fit_batch_size(32)
    assert small_gpu[1] == tried and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in training.raw_model.parameters())


class Counting(GPT):
    """A GPT with three buffers: a counter, a growing cache, and a cache that is created later."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("lengths", torch.zeros(0))
        self.register_buffer("table", None)

    def forward(self, idx, targets=None):
        self.calls += 1
        self.lengths = torch.cat([self.lengths, torch.ones(1)])
        self.table = torch.ones(idx.size(1))
        return super().forward(idx, targets)


def test_the_search_leaves_the_buffers_as_they_are(monkeypatch):
    monkeypatch.setattr(train_gpt2, "GPT", Counting)
    training = train_gpt2.Training(MODEL, train_gpt2.TrainConfig(), ALONE)
    calls = training.raw_model.calls
    assert batch_size.has_memory(training, 2, 32)
    assert training.raw_model.calls is calls and calls == 0
    assert len(training.raw_model.lengths) == 0 and training.raw_model.table is None


@pytest.mark.slow
def test_a_batch_size_that_was_found_gives_the_same_log(small_gpu, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    i, ramp = TINY.index("--batch_size"), ["--rampup_steps", "4", "--rampup_batch_size", "256"]
    flags = [*TINY[:i], *TINY[i + 2 :], *ramp, "--dropout", "0.1"]
    train_gpt2.main([*flags, "--batch_size", "4", "--log_dir", "given"])
    assert not small_gpu[1]
    train_gpt2.main([*flags, "--log_dir", "found"])
    assert small_gpu[1] == [16, 8, 4] and read_log("found") == read_log("given")
    assert json.loads(Path("found/run.json").read_text())["train_config"]["batch_size"] == 4


def test_sums_of_one_process_stay_where_they_are():
    """Benchmarks compute float64 sums, which MPS does not support.

    Therefore, a single process must not move these sums to its device.
    """
    sums = torch.ones(3, dtype=torch.float64)
    assert Process(0, 1, torch.device("mps"), torch.float32).sum(sums) is sums


def test_prefetch_gives_the_same_batches_and_the_same_errors():
    def batches():
        yield from range(5)
        raise UserError("a shard broke off")

    taken = []
    stop = StopRequest()
    with pytest.raises(UserError, match="broke off"):
        for batch in prefetch(batches(), replace(ALONE, stop=stop)):
            taken.append(batch)
            # In the last batch, the run already knows that reading the next batch has failed.
            assert stop.requested == (batch == 4)
    assert taken == [0, 1, 2, 3, 4] and str(stop.error) == "a shard broke off"


def test_on_mps_only_the_main_thread_makes_batches():
    """On MPS, two threads that use the GPU at the same time may crash the process."""
    batches = (threading.current_thread() for _ in range(2))
    process = Process(0, 1, torch.device("mps"), torch.float32)
    assert [*prefetch(batches, process)] == [threading.main_thread()] * 2


@pytest.mark.parametrize(
    "variables, sentence",
    [
        ("RANK=1", "RANK is 1, but WORLD_SIZE is 1; use torchrun, or unset RANK"),
        ("RANK=2 WORLD_SIZE=2", "RANK is 2, but WORLD_SIZE is 2; use torchrun, or unset RANK"),
        ("RANK=-1", "RANK is -1, but WORLD_SIZE is 1; use torchrun, or unset RANK"),
        ("LOCAL_RANK=1", "LOCAL_RANK is 1, but WORLD_SIZE is 1; use torchrun, or unset LOCAL_RANK"),
        ("WORLD_SIZE=2", "WORLD_SIZE is 2, but RANK is missing; use torchrun, or unset WORLD_SIZE"),
        ("WORLD_SIZE=0", "WORLD_SIZE is 0; use torchrun, or unset WORLD_SIZE"),
        ("RANK=x", "RANK is 'x', not an integer; use torchrun, or unset RANK"),
        ("RANK=", "RANK is '', not an integer; use torchrun, or unset RANK"),
        ("RANK=0 WORLD_SIZE=2", "the processes cannot join (Error initializing "),
    ],
)
def test_ranks_that_do_not_fit_are_refused(monkeypatch, variables, sentence):
    """Only rank 0 prints and saves. A single process with rank 1 would train, but save nothing."""
    for name in ("MASTER_ADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        setup("cpu", "float32")


def test_a_restart_of_torchrun_sees_no_address_of_a_dead_process(monkeypatch):
    """On one machine, all restarts of torchrun --max_restarts share one store.

    A restarted process must not find the addresses that dead processes have stored there.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 GROUP_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1"
    for variable in f"{variables} MASTER_PORT={server.port}".split():
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stores = []

    def join(*_, store, **options):
        stores.append(store)
        raise ValueError("this is enough")

    monkeypatch.setattr(dist, "init_process_group", join)
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        with pytest.raises(UserError, match="this is enough"):
            setup("cpu", "float32")
    first, second = stores
    first.set("address", "dead")
    assert first.check(["address"]) and not second.check(["address"])


def test_a_lone_rank(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="^RANK is 1, but WORLD_SIZE is 1; use torchrun, or unset"):
        setup("cpu", "float32")


def test_a_program_of_one_process_reads_no_ranks(monkeypatch):
    """Some clusters set WORLD_SIZE in every shell. plot.py must ignore this variable."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="nowhere"):
        plot.main(["nowhere"])


@pytest.mark.parametrize("tp, pp, n", [(1, 1, 2), (2, 3, 6)])
def test_a_model_that_needs_more_processes(tp, pp, n):
    with pytest.raises(
        UserError,
        match=f"--tp {tp} --pp {pp}: needs a multiple of {n} processes, but there is 1; use",
    ):
        ShardedTraining.setup(LargeConfig(device="cpu", tp=tp, pp=pp))


def test_ranks_that_fit(monkeypatch):
    """Kubeflow runs one process on each machine, and does not set LOCAL_RANK."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert read_ranks() == (0, 0, 1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    assert read_ranks() == (2, 0, 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_ranks() == (2, 1, 3)


# This code imports a program. When the program imports torch, the code prints whether numpy is
# already imported, and exits.
UNTIL_TORCH = """
import os, sys
class Finder:
    def find_spec(name, *args):
        if name == "torch":
            os.write(1, str("numpy" in sys.modules).encode())
            os._exit(0)
sys.meta_path.insert(0, Finder)
__import__(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_gpt2", "generate", "core"])
def test_every_program_imports_numpy_before_torch(name):
    """If torch imported numpy itself, Ctrl-C would have no effect during the import of numpy."""
    done = subprocess.run(
        [sys.executable, "-c", UNTIL_TORCH, name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "True", done.stderr


@pytest.mark.slow
def test_deterministic_runs_use_strict_algorithms(tmp_path):
    """On a CPU, --deterministic changes no loss."""
    (tmp_path / "run.py").write_text(
        "import os, sys, torch\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from train_gpt2 import main\n"
        "main(sys.argv[1:])\n"
        "is_strict = torch.are_deterministic_algorithms_enabled()\n"
        "print(is_strict, os.environ['CUBLAS_WORKSPACE_CONFIG'])\n"
    )
    flags = [*TINY, "--max_steps", 3]
    out, _ = program(
        *flags, "--log_dir", "a", "--deterministic", cwd=tmp_path, program=tmp_path / "run.py"
    )
    assert out.splitlines()[-1] == "True :4096:8"
    program(*flags, "--log_dir", "b", cwd=tmp_path)
    assert read_log(tmp_path / "a") == read_log(tmp_path / "b")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GB200", None),
    ],
)
def test_peak_flops_of_gpus_with_similar_names(monkeypatch, name, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    process = Process(0, 1, torch.device("cuda"), torch.bfloat16)
    assert peak_flops(process) == expected
