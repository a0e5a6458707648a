"""plaingpt/device.py: devices and their errors, and the thread that prepares batches."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import CPU, ROOT

from plaingpt.cli import UserError
from plaingpt.device import Process, choose_compile, find_device, memory_advice, prefetch


def test_a_gpu_that_cannot_be_used_is_an_error(monkeypatch):
    """A driver too old for torch: is_available() only warns. A hidden GPU is no error."""
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
    assert find_device("auto", world_size=2).type == "cpu"  # hidden
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, local_rank in (("cuda:1", 0), ("cuda", 2), ("auto", 2)):
        with pytest.raises(UserError, match="use cuda with at most --nproc_per_node=2$"):
            find_device(name, local_rank, world_size=3)


def test_compile_says_what_it_needs_and_that_it_takes_long(monkeypatch, capsys):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not choose_compile(None, cpu) and not choose_compile(False, cuda)
    assert choose_compile(None, cuda) and choose_compile(True, cpu)
    assert capsys.readouterr().out.count("take a minute or more") == 2  # once for each True
    monkeypatch.setenv("CC", "missing")
    with pytest.raises(UserError, match="needs g.. and .* or --no-compile$"):
        choose_compile(None, cuda)
    monkeypatch.setattr(sys, "platform", "win32")  # torch has no Triton there
    assert not choose_compile(None, cuda)


def test_out_of_memory_gives_a_one_sentence_error():
    def on_cuda():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nMore lines.")

    def on_mps():
        raise RuntimeError("MPS backend out of memory (MPS allocated: 5.50 GB). Tried to allocate")

    for error in (lambda: torch.empty(2**50), on_cuda, on_mps):
        with pytest.raises(UserError, match="^too large; choose a smaller one$"):
            with memory_advice("too large; choose a smaller one"):
                error()


def test_sums_of_one_process_stay_where_they_are():
    """Benchmarks sum in float64, which MPS does not have."""
    sums = torch.ones(3, dtype=torch.float64)
    assert Process(0, 1, 0, 1, torch.device("mps"), torch.float32).sum(sums) is sums


def test_prefetch_gives_the_same_batches_and_the_same_errors():
    def batches():
        yield from range(5)
        raise UserError("a shard broke off")

    taken = []
    with pytest.raises(UserError, match="broke off"):
        for batch in prefetch(batches(), CPU):
            taken.append(batch)
    assert taken == [0, 1, 2, 3, 4]


def test_the_prefetch_thread_uses_the_gpu_of_its_process(monkeypatch):
    """Otherwise pinned memory would also start CUDA on GPU 0 for every process."""
    used, device = [], torch.device("cuda:3")
    monkeypatch.setattr(torch.cuda, "set_device",
                        lambda device: used.append((device, threading.current_thread())))
    assert list(prefetch(iter([1, 2]), device)) == [1, 2]
    assert [place for place, _ in used] == [device]
    assert used[0][1] is not threading.main_thread()


# Imports a program until it imports torch, and prints what torch would find.
UNTIL_TORCH = """
import os, sys
class Finder:
    def find_spec(name, *args):
        if name == "torch":
            os.write(1, f"{os.environ.get('GOMP_SPINCOUNT')} {'numpy' in sys.modules}".encode())
            os._exit(0)
sys.meta_path.insert(0, Finder)
__import__(sys.argv[1])
"""


@pytest.mark.parametrize("name", ["train_gpt2", "bench", "generate", "hellaswag", "lambada",
                                  "storycloze", "wikitext", "core"])
def test_every_program_prepares_the_import_of_torch(name):
    """It sets how threads wait, and imports numpy, so that torch does not ignore Ctrl-C."""
    env = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    for given in ("10000", "7"):  # the second time, the user sets it
        done = subprocess.run([sys.executable, "-c", UNTIL_TORCH, name], cwd=ROOT, env=env,
                              capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{given} True", done.stderr
        env["GOMP_SPINCOUNT"] = "7"
