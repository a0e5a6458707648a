"""Starts programs fast, by forking a process that has already imported torch.

In all other respects, a program runs as from a shell: its file runs as __main__, in a process with
its own directory, environment, output and exit status. A Program is used like a subprocess.Popen.
A program may itself start programs with sys.executable. forking_python provides an executable that
starts these programs by forking.
"""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import resource
import runpy
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # torch reads this variable when it is imported
os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads this variable when it is imported
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2  # numbers of Linux capabilities
COMPILED = Path(__file__).parent.parent / ".pytest_cache" / "compiled"
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
        "scipy.stats",
    ]
)


class Program:
    """A program in a forked process, used like a subprocess.Popen.

    limits: {resource of setrlimit: bytes}. root: if False, file modes apply even if the tests run
    as root. executable: the value of sys.executable in the program.
    """

    def __init__(self, path, flags, cwd, env, limits=None, root=True, executable=sys.executable):
        self.args = [str(path), *flags]
        readers, writers = zip(*(CONTEXT.Pipe(duplex=False) for _ in range(2)))
        self.process = CONTEXT.Process(
            target=start, args=(self.args, str(cwd), env, writers, limits or {}, root, executable)
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
        """Waits until the program ends. Returns (stdout, stderr).

        On a timeout, kills the process and raises TimeoutExpired.
        """
        pool = ThreadPoolExecutor(2)
        texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
        self.process.join(timeout)
        if self.returncode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self.args, timeout, texts[0].result(10))
        return tuple(text.result() for text in texts)


def start(argv, cwd, env, outputs, limits, root, executable):
    """Sets up the forked process as a shell does, then runs the program."""
    for number, end in enumerate(outputs, start=1):
        os.dup2(end.fileno(), number)
        end.close()
    for name, size in limits.items():
        resource.setrlimit(name, (size, size))
    if not root and os.geteuid() == 0:
        drop_override()
    sys.executable = str(executable)
    become(argv, cwd, env)


def become(argv, cwd, env):
    """Sets up the imported modules as in a new Python process, then runs the program."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    encoding = env.get("PYTHONIOENCODING", "utf-8")
    sys.stdin = open(0, encoding=encoding, closefd=False)
    sys.stdout = open(1, "w", encoding=encoding, buffering=1, closefd=False)
    sys.stderr = open(
        2, "w", encoding="utf-8", buffering=1, errors="backslashreplace", closefd=False
    )
    gc.freeze()  # Python then never searches the objects of the imported modules for garbage
    # Many containers set PYTHONDONTWRITEBYTECODE. Each program would then compile all our files.
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(COMPILED)
    if env.get("HF_HUB_OFFLINE") == "0":  # huggingface_hub reads this variable in its import
        for name in [name for name in sys.modules if name.startswith("huggingface_hub")]:
            del sys.modules[name]
    rest = [place for place in sys.path if "tests" not in place]
    sys.argv, sys.path = argv, [str(Path(argv[0]).parent), *rest]
    runpy.run_path(argv[0], run_name="__main__")


@contextlib.contextmanager
def forking_python():
    """Starts a server. Yields the path of an executable that can be used like Python.

    The executable asks the server to fork a process, which runs the program.
    """
    with tempfile.TemporaryDirectory() as directory:  # the path of a Unix socket must be short
        path, address = Path(directory, "python"), f"{directory}/socket"
        client = Path(__file__).with_name("fork_client.py")
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{client}" {address} "$@"\n')
        path.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            server = CONTEXT.Process(target=serve, args=(listener, str(path)))
            server.start()
        try:
            yield path
        finally:
            server.kill()


def serve(listener, executable):
    """Forks a process for each connection. Ends ten minutes after the last connection."""
    sys.executable = executable
    listener.settimeout(600)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            run_for_client(connection)
            os._exit(0)
        connection.close()


def run_for_client(connection):
    """Runs the program that a client requests, and sends the exit status.

    The program uses the client's stdin, stdout and stderr.
    """
    request, files, *_ = socket.recv_fds(connection, 2**20, 3)
    while more := connection.recv(2**20):
        request += more
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    process = multiprocessing.get_context("fork").Process(target=become, kwargs=json.loads(request))
    process.start()
    connection.sendall(f"{process.pid}\n".encode())  # the client forwards signals to this process
    for number in range(3):
        os.close(number)  # so that a reader sees the end of the output when the program exits
    process.join()
    connection.sendall(str(process.exitcode).encode())


def drop_override():
    """Makes file modes apply to this process, even if it runs as root."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    for i in (0, 1):  # the effective capabilities, then the permitted capabilities
        data[i] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())
