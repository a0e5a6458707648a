"""fineweb.py --ready: shards from a local hub, and every way in which a download can stop."""

import resource
import time

from plaingpt.errors import UserError
from plaingpt.files import lock
from plaingpt.ready_shards import BLOCK, REPO, count_tokens, download_ready
from plaingpt.shards import find_shards

import numpy as np
import pytest
from conftest import everything_in, names, program, spawn, train, write_bin
from stand_in_hub import Hub, stand_in_hub

import fineweb

N = 2**19 + 100  # number of tokens in a shard
VAL = "edu_fineweb_val_000000.bin"
TRAIN = ["edu_fineweb_train_000001.bin", "edu_fineweb_train_000002.bin"]
HALF = 400_001  # bytes; this number is odd, so the download stops within an id
OTHERS = ["a_train_000001.npy", "edufineweb_val_000000.npy", "train.bin", "meta.json", "x.idx"]


class Broken(Hub):
    """Sends only HALF bytes of a file, then closes the connection."""

    patience = 0  # seconds until the hub closes the connection

    def reply(self, status, body=b"", **headers):
        if len(body) <= HALF or self.command == "HEAD":
            return super().reply(status, body, **headers)
        self.send_response(status)
        for name, value in dict(headers, Content_Length=len(body)).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body[:HALF])
        time.sleep(self.patience)
        self.close_connection = True


class Stalled(Broken):
    patience = 60


class WithoutRanges(Hub):
    def send_file(self, data):
        del self.headers["Range"]
        super().send_file(data)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of the data set: {name: bytes}."""
    directory = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for name in (VAL, *TRAIN):
        write_bin(directory / name, rng.integers(0, 50257, N).astype(np.uint16))
    return everything_in(directory)


def start(url, n, directory, run=program, **options):
    """Runs fineweb.py --ready n. Returns the result of `run`, which is (stdout, stderr) by default.

    run: a function such as `program` or `spawn`.
    """
    env = dict(HF_ENDPOINT=url, HF_HOME=str(directory / "home"), HF_TOKEN="hf_secret")
    options = dict(cwd=directory, program="fineweb.py", online=True, env=env) | options
    return run("--ready", n, **options)


def ranges(requests):
    """Returns the requests for bytes of files: [(file name, value of the header Range)]."""
    found = [(path, headers) for _, path, headers in requests if "/resolve/" in path]
    assert all(headers["authorization"] == "Bearer hf_secret" for _, headers in found)
    return [(path.split("/")[-1], headers["range"]) for path, headers in found]


@pytest.mark.slow
def test_downloads_shards_that_train(files, tmp_path):
    out = tmp_path / "edu_fineweb10B"
    with stand_in_hub({REPO: files | {"README.md": b"-"}}) as (url, requests):
        printed, err = start(url, 1, tmp_path)
        assert everything_in(out) == {name: files[name] for name in (VAL, TRAIN[0])}
        assert "max_steps 1\n" in printed
        assert "2.10M/2.10M [" in err
        del requests[:]
        printed, _ = start(url, 2, tmp_path)
        assert everything_in(out) == files
        assert ranges(requests) == [(TRAIN[1], "bytes=0-")]
    assert not (tmp_path / "home").exists()
    # The directory is complete, so fineweb.py does not need the hub.
    assert start(url, 2, tmp_path) == (printed, "")
    assert f"edu_fineweb10B contains 2 training shards of {REPO}, 1,048,776 tokens\n" in printed
    command = printed.splitlines()[-1]
    assert " train_gpt2.py --preset gpt2 --data edu_fineweb10B --max_steps 2" in command
    flags = command.split()[8:]  # without --preset gpt2
    log, _ = train(*flags, "--warmup_steps", 1, "--n_embd", 8, cwd=tmp_path)
    assert "preset baby on edu_fineweb10B (vocabulary size 50,257), 2 steps; " in log
    assert "1,048,776 training tokens" in log and "step 2 | val loss 10.8" in log


@pytest.mark.slow
def test_a_full_disk(files, tmp_path):
    with stand_in_hub({REPO: files}) as (url, requests):
        _, err = start(url, 1, tmp_path, status=2, limits={resource.RLIMIT_FSIZE: HALF})
        assert err.splitlines()[-1] == (
            f"error: edu_fineweb10B/{VAL}: cannot write (File too large); free some space, then "
            "run the same command again"
        )
        start(url, 1, tmp_path)
        assert ranges(requests)[1] == (VAL, f"bytes={HALF}-")
    assert everything_in(tmp_path / "edu_fineweb10B") == {x: files[x] for x in (VAL, TRAIN[0])}


@pytest.mark.slow
def test_goes_on_after_a_broken_connection(files, tmp_path):
    out = tmp_path / "edu_fineweb10B"
    with stand_in_hub({REPO: files}, Broken) as (url, requests):
        _, err = start(url, 1, tmp_path, status=2)
        message = err.splitlines()[-1]
        assert message.startswith(f"error: {VAL}: the download stopped (")
        assert message.endswith("HF_ENDPOINT and HF_TOKEN, then run the same command again")
        assert names(out) == [f"{VAL}.incomplete"]
        assert not find_shards(out, "train") and not find_shards(out, "val")
        unfinished = out / f"{VAL}.incomplete"
        n = unfinished.stat().st_size
        assert HALF - BLOCK < n <= HALF
        _, err = start(url, 1, tmp_path, status=2)
        assert ranges(requests) == [(VAL, "bytes=0-"), (VAL, f"bytes={n}-")]
        n = unfinished.stat().st_size
        assert 2 * (HALF - BLOCK) < n <= 2 * HALF
    with stand_in_hub({REPO: files}) as (url, requests):
        _, err = start(url, 1, tmp_path)
        assert ranges(requests) == [(VAL, f"bytes={n}-"), (TRAIN[0], "bytes=0-")]
        assert f"| {n / 1e3:.0f}k/2.10M [" in err  # the progress bar begins at n bytes
    assert everything_in(out) == {name: files[name] for name in (VAL, TRAIN[0])}


@pytest.mark.slow
@pytest.mark.parametrize("signal", [2, 9])
def test_goes_on_after_a_kill(files, tmp_path, signal):
    unfinished = tmp_path / f"edu_fineweb10B/{VAL}.incomplete"
    with stand_in_hub({REPO: files}, Stalled) as (url, _):
        (running,) = start(url, 1, tmp_path, run=spawn)
        until = time.monotonic() + 60
        while not (unfinished.exists() and unfinished.stat().st_size):
            assert time.monotonic() < until and running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal)
        running.communicate(timeout=60)
        assert running.returncode == -signal
    n = unfinished.stat().st_size
    with stand_in_hub({REPO: files}) as (url, requests):
        start(url, 1, tmp_path)
        assert ranges(requests)[0] == (VAL, f"bytes={n}-")
    assert everything_in(unfinished.parent) == {name: files[name] for name in (VAL, TRAIN[0])}


@pytest.mark.slow
def test_a_file_counts_only_when_it_is_whole(files, tmp_path):
    out = tmp_path / "edu_fineweb10B"
    out.mkdir()
    (out / TRAIN[0]).write_bytes(files[TRAIN[0]][:HALF])  # an incomplete file of another program
    (out / f"{VAL}.incomplete").write_bytes(files[VAL])  # complete, but not yet renamed
    (out / f"{TRAIN[1]}.incomplete").write_bytes(files[TRAIN[1]][:HALF])
    with stand_in_hub({REPO: files}, WithoutRanges) as (url, _):
        _, err = start(url, 2, tmp_path, status=2)
        assert err.splitlines()[-1] == (
            f"error: edu_fineweb10B/{TRAIN[1]}: the download is not a whole shard; run the same "
            "command again"
        )
        assert names(out) == [TRAIN[0], VAL]
        start(url, 2, tmp_path)
        assert everything_in(out) == files


@pytest.mark.slow
def test_mistakes_are_one_sentence(files, tmp_path):
    with stand_in_hub({REPO: files}) as (url, _):
        _, err = start(url, 2000, tmp_path, status=2)
        assert err == f"error: --ready: {REPO} contains 2 training shards; give at most 2\n"
    for url in ("http://127.0.0.1:9", "http://nosuch.invalid", "no address"):
        _, err = start(url, 1, tmp_path, status=2)
        assert err.startswith(f"error: {REPO}: cannot be listed (") and err.count("\n") == 1
    _, err = start(url, 1, tmp_path, status=2, online=False)
    assert "offline mode is enabled" in err and err.count("\n") == 1
    with stand_in_hub({}) as (url, _):
        _, err = start(url, 1, tmp_path, status=2)
        assert err.startswith(f"error: {REPO}: cannot be listed (") and err.count("\n") == 1
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", OTHERS)
def test_a_directory_with_other_shards_is_refused(tmp_path, name):
    (tmp_path / VAL).write_bytes(b"")
    (tmp_path / name).write_bytes(b"")
    before = everything_in(tmp_path)
    with pytest.raises(UserError, match=f"/{name}: belongs to different data; use a new dir"):
        download_ready(1, tmp_path, {})
    assert everything_in(tmp_path) == before


def test_fineweb_does_not_add_to_ready_shards(files, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / VAL).write_bytes(files[VAL])
    with pytest.raises(
        UserError, match="its files were written with a different .*; use a new directory"
    ):
        fineweb.main(["--input", str(tmp_path / "a.txt"), "--output_dir", str(tmp_path / "out")])
    assert names(tmp_path / "out") == [VAL]


def test_flags_without_effect(tmp_path, capsys):
    for flags in (
        "--input a.txt",
        "--dataset a/b",
        "--name c",
        "--text_key body",
        "--tokenizer bytes",
        "--end_of_text x",
        "--shard_size 1000",
        "--val_shards 1",
        "--max_shards 3",
        "--num_proc 1",
        "--strict",
    ):
        name = flags.split()[0]
        with pytest.raises(UserError, match=f"^{name}: has no effect with --ready; remove one"):
            fineweb.main(["--ready", "1", *flags.split()])
    for n in ("0", "-1", "1.5"):
        with pytest.raises(SystemExit, match="2"):
            fineweb.main(["--ready", n])
    assert "--ready: must be at least 1, not 0" in capsys.readouterr().err


def test_the_directory_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("plaingpt.ready_shards.list_sizes", lambda names: dict.fromkeys(names, 0))
    descriptor = lock(tmp_path, "--output_dir")
    with pytest.raises(UserError, match="another process uses this directory; wait until it ends"):
        download_ready(1, tmp_path, {})
    assert descriptor and names(tmp_path) == []


def test_count_tokens(tmp_path):
    path = tmp_path / "a.bin"
    assert count_tokens(path) == 0
    write_bin(path, np.arange(1000, dtype=np.uint16))
    assert count_tokens(path) == 1000
    data = path.read_bytes()
    for damaged in (data[:-1], data[:-2], data + b"\0", data[:1024], data[:10], b"", b"x" * 3024):
        path.write_bytes(damaged)
        assert count_tokens(path) == 0
    write_bin(path, np.arange(1000, dtype=np.uint32))  # tokens of Llama 3
    assert count_tokens(path) == 0
