"""Starts programs fast: forks each from a process that has already imported torch.

Otherwise a program runs as from a shell: the file runs as __main__, in a process with its own
directory, environment, output and exit status. A Program is used like a subprocess.Popen.
"""

import ctypes
import gc
import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2  # Linux capabilities
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "torch.profiler",
        "tiktoken",
        "pyarrow.parquet",
        "tqdm",
        "transformers.models.gpt2.modeling_gpt2",
        "tokenizers",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
    ]
)


class Program:
    """limits: {resource of setrlimit: bytes}. root: if False, file modes also apply to root."""

    def __init__(self, path, flags, cwd, env, limits=None, root=True):
        self.args = [str(path), *flags]
        readers, writers = zip(*(CONTEXT.Pipe(duplex=False) for _ in range(2)))
        self.process = CONTEXT.Process(
            target=become, args=(self.args, str(cwd), env, writers, limits or {}, root)
        )
        self.process.start()
        self.pid = self.process.pid
        self.stdout, self.stderr = (
            open(os.dup(reader.fileno()), encoding="utf-8", errors="replace") for reader in readers
        )
        for end in (*readers, *writers):
            end.close()

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.returncode

    def kill(self):
        self.process.kill()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout=None):
        """-> (stdout, stderr). On a timeout, kills the process and raises TimeoutExpired."""
        pool = ThreadPoolExecutor(2)
        texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
        self.process.join(timeout)
        if self.returncode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self.args, timeout, texts[0].result(10))
        return tuple(text.result() for text in texts)


def become(argv, cwd, env, outputs, limits, root):
    """Sets up the new process as a shell and Python do, then runs the program."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, end in enumerate(outputs, start=1):
        os.dup2(end.fileno(), number)
        end.close()
    encoding = env.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = open(1, "w", encoding=encoding, buffering=1, closefd=False)
    sys.stderr = open(
        2, "w", encoding="utf-8", buffering=1, errors="backslashreplace", closefd=False
    )
    for name, size in limits.items():
        resource.setrlimit(name, (size, size))
    if not root and os.geteuid() == 0:
        drop_override()
    gc.freeze()  # the program's own gc.collect() need not search what the parent process imported
    rest = [place for place in sys.path if "tests" not in place]
    sys.argv, sys.path = argv, [str(Path(argv[0]).parent), *rest]
    runpy.run_path(argv[0], run_name="__main__")


def drop_override():
    """Makes file modes apply to this process although it runs as root."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    for i in (0, 1):  # effective, permitted
        data[i] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())
