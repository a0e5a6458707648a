"""The cases of the table in docs/reliability.md, "What has been tried, and what happens".

They have the order of the table. Most tests inject a fault into the real program, which must lose
no data. Kills and a full disk while fineweb.py runs are in test_fineweb.py.
"""

import ast
import gzip
import math
import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from conftest import (
    ALONE,
    MODEL,
    ROOT,
    TEXT,
    TINY,
    checkpoint,
    names,
    program,
    read_log,
    small_disk,
    spawn,
    stopped_at,
    train,
    wait_for,
)

import fineweb
from plaingpt import cli
from plaingpt.checkpoint import load_checkpoint
from plaingpt.cli import UserError, write_json
from plaingpt.tokenizer_json import build
from train_gpt2 import TrainConfig, make_training, train_step

LONG = ["--max_steps", 100_000, "--val_every", 0]  # runs until the test stops it


def newest_step(run):
    return max(int(path.stem[6:]) for path in run.glob("model_*.pt"))


# kill -9 at random moments


@pytest.mark.slow
def test_resume_after_kills_at_random_times(tmp_path):
    """The run spends much of its time on saving, so that some kills interrupt a save."""
    flags = ["--max_steps", 100, "--save_every", 1, "--total_batch_size", 128,
             "--val_every", 100, "--val_tokens", 256]
    train(*flags, "--log_dir", "whole", cwd=tmp_path)
    rng, n_torn = random.Random(0), 0
    for _ in range(10):
        (process,) = spawn(*TINY, *flags, "--log_dir", "run", "--resume", cwd=tmp_path)
        for _ in range(rng.randrange(1, 6)):
            wait_for(process, "step ")
        in_a_save = rng.random() < 0.8
        while in_a_save and not list((tmp_path / "run").glob("model_*.tmp")):
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        n_torn += any((tmp_path / "run").glob("model_*.tmp"))
    out, _ = train(*flags, "--log_dir", "run", "--resume", cwd=tmp_path)
    assert "resumed from step" in out
    assert read_log(tmp_path / "run") == read_log(tmp_path / "whole")
    assert n_torn, "no kill interrupted a save: the test checks nothing"


# SIGTERM, Ctrl-C or a closed terminal (which test_two_runs_in_one_directory closes)


@pytest.mark.parametrize("moment, step", [("step", 3), ("evaluation", 6), ("save", 5)])
def test_a_signal_during_a_step_an_evaluation_or_a_save(tmp_path, whole, moment, step):
    """The program finishes the step 2, the validation at step 5 or the save of step 4.

    After the next complete step it saves and stops.
    """
    flags = [*TINY, "--log_dir", "run", "--save_every", 2]
    out, err = program(moment, *flags, cwd=tmp_path, program="tests/faulty.py")
    assert stopped_at(out) == newest_step(tmp_path / "run") == step and err == ""
    out, _ = program(*flags, "--resume", cwd=tmp_path)
    assert f"resumed from step {step} " in out
    assert read_log(tmp_path / "run") == read_log(whole)


@pytest.mark.parametrize("number, layout", [(signal.SIGTERM, []), (signal.SIGINT, ["--pp", 2])])
def test_after_a_signal_all_processes_finish_the_step_save_and_exit_0(tmp_path, number, layout):
    flags = ["--save_every", 0, "--log_dir", "run"]
    a, b = spawn(*TINY, *flags, *LONG, *layout, cwd=tmp_path, processes=2)
    wait_for(a, "step    10/")
    b.send_signal(number)  # only to one process: the other must stop after the same step
    (out, err), (silence, _) = (process.communicate(timeout=60) for process in (a, b))
    assert a.returncode == b.returncode == 0, err
    assert "step " not in silence
    step = stopped_at(out)
    assert checkpoint(tmp_path / "run", step)["position"] == step * 16
    assert max(s for s, _ in read_log(tmp_path / "run")) == step - 1
    out, _ = train("--resume", *flags, *layout, "--max_steps", step + 2, cwd=tmp_path,
                   processes=2)
    assert f"resumed from step {step}" in out


# One of two processes is killed


@pytest.mark.parametrize("victim, flags", [
    (0, []), (1, ["--parallel", "fsdp"]), (0, ["--pp", 2])])
def test_one_of_two_processes_is_killed(tmp_path, victim, flags):
    """The other one ends, too. The run continues from the last step that was saved."""
    flags = [*TINY, "--log_dir", "run", "--save_every", 1, "--keep", 0, *flags]
    running = spawn(*flags, *LONG, cwd=tmp_path, processes=2)
    wait_for(running[0], "step     4/")
    running[victim].send_signal(signal.SIGKILL)
    for process in running:
        process.communicate(timeout=60)  # gloo's own timeout is half an hour
        assert process.returncode
    saved = newest_step(tmp_path / "run")
    out, _ = program(*flags, "--resume", "--max_steps", saved + 2, cwd=tmp_path, processes=2)
    assert saved >= 4 and f"resumed from step {saved} " in out
    steps = {step for step, stream in read_log(tmp_path / "run") if stream == "train"}
    assert steps == set(range(saved + 2))


# Full disk


def test_a_full_disk_while_a_checkpoint_is_saved(tmp_path, whole):
    flags = ["--log_dir", "run", "--save_every", 2, "--keep", 0]
    with small_disk(tmp_path / "run", 2**20) as limits:  # a checkpoint takes 420 kB
        _, err = train(*flags, cwd=tmp_path, status=2, limits=limits)
    assert re.fullmatch(
        r"error: run/model_00000\d.pt: cannot write \(.*\); free some space, "
        r"then continue with --resume\n", err), err
    for path in (tmp_path / "run").glob("model*"):
        load_checkpoint(path)  # all are complete, and there is no temporary file
    out, _ = train(*flags, "--resume", cwd=tmp_path)
    assert read_log(tmp_path / "run") == read_log(whole) and ("resumed" in out) == (not limits)


def test_a_full_disk_while_the_log_is_written(tmp_path):
    with small_disk(tmp_path / "run", 2**14) as limits:
        _, err = train("--log_dir", "run", *LONG, cwd=tmp_path, status=2, limits=limits,
                       env=dict(GIT_DIR="none"))  # no changes.patch, which could be large
    assert re.fullmatch(r"error: run/log.txt: cannot write \(.*\); free some space, then continue "
                        r"with --resume\n", err), err
    *lines, _ = (tmp_path / "run" / "log.txt").read_text().split("\n")
    assert len(lines) > 100
    assert all(re.fullmatch(r"\d+ \w+ [-+.e\d]+", line) for line in lines)


# Newest checkpoint truncated or one bit changed


UNREADABLE = r"run/model_000010\.pt: not a readable checkpoint "


@pytest.mark.parametrize("damage, message", [
    ("truncated", UNREADABLE + r"\(.*\); delete it to resume from the one before"),
    ("flipped", UNREADABLE + r"\(the checksum of .* is wrong\);.*"),
    ("weights", UNREADABLE + r"\(its weights are not finite\);.*")])
def test_a_damaged_checkpoint_is_one_sentence(tmp_path, whole, damage, message):
    """It ends --resume and changes nothing. Without it, the run continues from step 5."""
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / "model_000010.pt"
    data, saved = bytearray(path.read_bytes()), torch.load(path, weights_only=True)
    data[200_000] ^= 1
    path.write_bytes(data[:100_000] if damage == "truncated" else data)
    if damage == "weights":
        saved["model"]["transformer.wpe.weight"][0, 0] = torch.nan
        torch.save(saved, path)
    _, err = train("--log_dir", "run", "--resume", cwd=tmp_path, status=2)
    assert re.fullmatch(f"error: {message}\n", err), err
    assert names(tmp_path / "run") == names(whole) and names(tmp_path) == ["run"]
    if damage == "truncated":
        path.unlink()
        out, _ = train("--log_dir", "run", "--resume", cwd=tmp_path)
        assert "resumed from step 5 " in out and read_log(tmp_path / "run") == read_log(whole)


# A pickle with code in a checkpoint or shard: evil.pt and evil in the CASES below


class Mark:
    """The content of a malicious pickle: loading it creates the file MARK."""

    def __init__(self, directory):
        self.path = str(directory / "MARK")

    def __reduce__(self):
        return open, (self.path, "w")


def test_programs_load_files_safely_and_never_call_a_shell():
    """Every call in every program: one that loads a file must not run code from it."""
    needed = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}
    unsafe = r"(eval|exec|compile|os.system|os.popen|(pickle|marshal|shelve|dill|joblib)\..*)"
    for path in (*ROOT.glob("*.py"), *ROOT.glob("plaingpt/*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name, call = ast.unparse(node.func), ast.unparse(node)
                assert not re.fullmatch(unsafe, name) and "shell=" not in call, call
                assert needed.get(name, "") in call and "remote_code=True" not in call, call


# Data changed between two runs


def test_resumed_with_other_data(tmp_path, shards):
    """The same tokens in another directory are the same data. Other tokens are refused."""
    flags = [*TINY, "--val_tokens", 256, "--total_batch_size", 128, "--log_dir", "run", "--resume"]
    program(*flags, "--data", "shards", "--max_steps", 2, cwd=tmp_path)
    shutil.copytree(shards, tmp_path / "other")
    out, _ = program(*flags, "--data", "other", "--max_steps", 3, cwd=tmp_path)
    assert "note: data changes from ['shards'] to ['other']" in out
    longer = tmp_path / "other" / "a_train_000001.npy"
    np.save(longer, np.append(np.load(longer), np.uint16(7)))
    _, err = program(*flags, "--data", "other", "--max_steps", 4, cwd=tmp_path, status=2)
    assert re.fullmatch(
        r"error: run had other data: the training split was 3,381 tokens with CRC-32 "
        r"[0-9a-f]{8} and is 3,382 tokens with CRC-32 [0-9a-f]{8}; use --init_from, not --resume\n",
        err), err


# Gradient not finite


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_with_a_non_finite_gradient_changes_nothing(optimizer):
    config = TrainConfig(optimizer=optimizer, max_lr=0.01)
    training = make_training(MODEL, config, ALONE)
    model = training.raw_model
    x, norms = torch.randint(256, (2, 32)), []  # (B, T)

    def step():
        """Takes a step -> copies of all parameters and moments after it."""
        norms.append(train_step(training, x.numel(), [(x, x)], 1.0, [], ALONE)[1])
        states = [state for o in training.optimizers for state in o.state.values()]
        moments = [moment for state in states for moment in state.values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]

    before = step()
    hook = model.transformer.ln_f.bias.register_hook(lambda gradient: gradient * math.nan)
    assert all(map(torch.equal, before, step()))
    hook.remove()
    assert not any(map(torch.equal, before, step()))
    assert [math.isfinite(norm) for norm in norms] == [True, False, True]


def test_ten_non_finite_gradients_in_a_row_stop_the_run(tmp_path):
    train("--log_dir", "run", "--max_steps", 2, cwd=tmp_path)
    saved = checkpoint(tmp_path / "run", 2)
    saved["model"]["transformer.ln_f.weight"].fill_(1e38)
    torch.save(saved, tmp_path / "run" / "model_000002.pt")
    out, err = train("--log_dir", "run", "--resume", "--max_steps", 50, "--val_every", 0,
                     cwd=tmp_path, status=2)
    assert err.startswith("error: no finite gradient in 10 steps; use --resume")
    assert err.count("\n") == 1 and "10 skipped" in out and "step    12/" not in out


# Two programs in one run or shard directory


def test_two_runs_in_one_directory(tmp_path):
    flags = [*TINY, "--log_dir", "run", *LONG]
    (first,) = spawn(*flags, "--save_every", 3, cwd=tmp_path)
    wait_for(first, "step     4/")
    for more in ([], ["--resume"]):
        _, err = program(*flags, *more, cwd=tmp_path, status=2)
        assert err == "error: --log_dir run: another process uses it; wait for it\n"
    first.send_signal(signal.SIGHUP)  # as when the terminal is closed
    out, _ = first.communicate(timeout=60)
    step = stopped_at(out)
    assert first.returncode == 0
    assert {step for step, _ in read_log(tmp_path / "run")} == set(range(step))
    out, _ = program(*flags, "--resume", "--max_steps", step + 1, cwd=tmp_path)
    assert f"resumed from step {step} " in out and names(tmp_path) == ["run"]


def test_a_second_fineweb_in_a_directory(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "out").mkdir()
    for name in ("left.npy.1.tmp", "notes.2024.1.tmp"):  # of a killed process; the user's own
        (tmp_path / "out" / name).write_bytes(b"")
    flags = ["--input", str(tmp_path / "a.txt"), "--output_dir", str(tmp_path / "out")]
    descriptor = cli.lock(tmp_path / "out", "--output_dir")
    with pytest.raises(UserError, match="--output_dir .*out: another process uses it"):
        fineweb.main(flags)
    os.close(descriptor)
    fineweb.main(flags)
    assert names(tmp_path / "out", "*.tmp") == ["notes.2024.1.tmp"]


# Mistakes in flags, files and prompts


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A directory with a valid run, log/baby, and many kinds of invalid files."""
    d = tmp_path_factory.mktemp("world")
    train("--max_steps", 2, cwd=d)
    good = torch.load(d / "log/baby/model_000002.pt", weights_only=True)
    torch.save({**good, "model": Mark(d)}, d / "evil.pt")
    (d / "cut.pt").write_bytes((d / "log/baby/model_000002.pt").read_bytes()[:9000])

    (d / "empty.txt").write_text("")
    (d / "text.txt").write_text("A boat came. " * 999)
    (d / "latin.txt").write_bytes(b"caf\xe9\n")
    (d / "utf16.txt").write_text("A boat came. " * 999, "utf-16")
    (d / "no.parquet").write_text("no parquet")
    (d / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a boat"}\n' * 9)[:-9])
    (d / "bert").mkdir()
    (d / "bert/config.json").write_text('{"model_type": "bert"}')

    tokens = np.arange(9999, dtype=np.uint16) % 256
    evil = np.array([Mark(d)] * 999, object)
    for name, array in dict(good=tokens, evil=evil, meta=tokens, own=tokens).items():
        (d / name).mkdir()
        (d / name / "meta.json").write_text('{"tokenizer": "bytes"}')
        np.save(d / name / "x_val_000000.npy", tokens[:999])
        np.save(d / name / "x_train_000000.npy", array, allow_pickle=True)
    (d / "meta/meta.json").write_text('{"tokenizer": [7]}')
    write_json(d / "own/tokenizer.json", build([b"a", b"b", b""], {"<|endoftext|>": 2}))
    return d


CASES = {
    # program: [(flags, parts of the message)]
    "train_gpt2.py": [
        ("--epochs 5", "unknown flags: --epochs (use --max_steps)"),
        ("--evals hellaswag=missing.jsonl", "missing.jsonl: cannot be read ( ... check it"),
        ("--device cuda:99", "--device cuda:99: torch 2 ... try --device cpu"),
        ("--n_head 3", "--n_head: must be a divisor of --n_embd, which is 128"),
        ("--vocab_size 100", " id 1 ... check --tokenizer, --vocab_size"),
        ("--n_embd 100000000 --n_head 1", "the model does not fit into memory ... smaller"),
        ("--data missing.txt", "missing.txt: not found; give a text file, or run fineweb.py"),
        ("--data empty.txt", "has 0 tokens; give more than --block_size"),
        ("--data latin.txt --tokenizer gpt2", "latin.txt: is not UTF-8 ("),
        ("--data evil", "evil/x_train_000000.npy: not a shard ... make it again"),
        ("--data own", "own: tokenizer.json is not that of the shards, bytes; move it away"),
        ("--data meta", "unknown tokenizer '[7]'; add its tokenizer.json to the shards"),
        ("--log_dir text.txt", "--log_dir text.txt: cannot write ... choose another place"),
        ("--init_from missing.pt", "missing.pt: no such checkpoint ... give another file"),
        ("--init_from scratch", "--init_from scratch: leave it out for a new run"),
        ("--init_from evil.pt", "evil.pt: not a readable checkpoint ... give another"),
        ("--init_from cut.pt", "cut.pt: not a readable checkpoint ... give another"),
        ("--init_from log/baby --n_layer 3", "log/baby has another model: n_layer is 2, not 3"),
        ("TINY --resume --optimizer muon", "has another --optimizer; give all its flags again"),
        ("TINY --resume --max_steps 1", "is at step 2; give a larger --max_steps"),
        ("TINY --resume --n_layer 3 --n_embd 64", "n_layer is 2, not 3 ... n_embd is 32, not 64"),
    ],
    "generate.py": [
        (f"--prompt {'a' * 32}", "...: has 32 tokens; give at most 31"),
        ("--json no/where.json", "--json no/where.json: cannot write there ... give a file"),
        ("--model bert", "bert: ... (model_type is 'bert', not 'gpt2'); use gpt2"),
    ],
    "fineweb.py": [
        ("--input missing.txt", "missing.txt: no such file; give files or a quoted glob"),
        ("--input evil.pt", "evil.pt: unknown format; fineweb.py --help"),
        ("--input utf16.txt", "utf16.txt: no text in it ... choose another file"),
        ("--input empty.txt", "empty.txt: no text in it ... choose another file"),
        ("--input no.parquet", "no.parquet: cannot be read ( ... check it"),
        ("--input cut.jsonl.gz", "cut.jsonl.gz: cannot be read ( ... check it"),
        ("--input text.txt --output_dir text.txt", "--output_dir text.txt: cannot write"),
        ("--input text.txt --output_dir good", "good: has files of another ... a new directory"),
    ],
    "hellaswag.py": [("--checkpoint no.pt", "no checkpoint in no.pt")],
    "storycloze.py": [("", "error: no data; give a file, as storycloze.py --help explains")],
}
SHAPE = ("--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --total_batch_size 512 --batch_size 4 "
         "--optimizer adamw --max_lr 4e-3")


def everything(directory):
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


@pytest.mark.parametrize("name, flags, message", [
    pytest.param(name, *case, id=f"{name} {case[0][:60]!a}")
    for name, cases in CASES.items() for case in cases])
def test_each_mistake_gives_a_one_sentence_error(world, name, flags, message):
    before, flags = everything(world), flags.replace("TINY", SHAPE).split()
    if name == "train_gpt2.py" and "--preset" not in flags:
        flags = ["--preset", "baby", "--device", "cpu", *flags]
    out, err = program(*flags, cwd=world, program=name, status=2, root=False)
    if name == "fineweb.py":  # removes the progress bar and the notes on skipped records
        lines = [line for line in err.splitlines() if not re.search(r"B/s]|^skipped |^\s*$", line)]
        err = "\n".join(lines) + "\n"
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 500, err
    assert all(part in err for part in message.split(" ... ")), err
    assert "Traceback" not in out and everything(world) == before
