"""Attacks on what a run keeps: checkpoints, shards, logs, and the words with which programs end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, names, program, read_log, spawn, train

import fineweb
import plot
from plaingpt import checkpoint, corpus, runlog
from plaingpt.cli import UserError
from plaingpt.evaluation import perplexity
from plaingpt.shards import Shard
from tokenizer import get_tokenizer

TEXT = "".join(f"Sentence {i} of a text that is long enough.\n" for i in range(4000))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with checkpoints of steps 5 and 10."""
    cwd = tmp_path_factory.mktemp("run")
    train("--log_dir", "run", "--save_every", 5, "--keep", 0, "--max_steps", 10, cwd=cwd)
    return cwd / "run"


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def rewrite(path, change):
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


def damage(path):
    path.write_bytes(path.read_bytes()[:-1000])


def test_keep_does_not_count_a_damaged_checkpoint(copy, tmp_path):
    damage(copy / "model_000010.pt")
    flags = ["--log_dir", "run", "--resume", "--keep", 1, "--save_every", 2, "--max_steps", 9]
    out, _ = train(*flags, cwd=tmp_path)
    assert "skipped run/model_000010.pt: not a readable checkpoint" in out
    assert names(copy, "model_*") == ["model_000009.pt", "model_000010.pt.damaged"]
    assert "resumed from step 9" in train(*flags[:-1], 11, cwd=tmp_path)[0]


def test_checkpoints_that_do_not_read_never_restart_the_run(copy, tmp_path):
    flags = ["--log_dir", "run", "--resume", "--max_steps", 11]
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    for path in copy.glob("model_*"):
        damage(path)
    _, err = train(*flags, cwd=tmp_path, status=2)
    assert err == ("error: all checkpoints in run are damaged; restore one, or choose another --log_dir "
                   "to start a new run\n")
    assert {path.name for path in copy.iterdir()} == set(before) and not list(tmp_path.glob("run.*"))
    (copy / "model_000005.pt").write_bytes(before["model_000005.pt"])
    (copy / "model_000010.pt").unlink()
    (copy / "model_000010.pt").mkdir()  # opening it fails, as without permission
    _, err = train(*flags, cwd=tmp_path, status=2)
    assert "model_000010.pt: cannot be read (Is a directory)" in err and "damaged" not in err
    assert names(copy, "model_*") == ["model_000005.pt", "model_000010.pt"]


def test_a_run_with_infinite_parameters_saves_nothing(copy, tmp_path):
    flags = ["--resume", "--max_lr", "1e42", "--min_lr", "1e42", "--grad_clip", 0, "--save_every", 1,
             "--max_steps", 20, "--keep", 0]
    _, err = train("--log_dir", "run", *flags, cwd=tmp_path, status=2)
    assert re.fullmatch(r"error: the parameters are not finite at step 11: .*; continue from "
                        r"run/model_000010.pt with --resume --max_lr 5e\+41 --min_lr 5e\+40\n", err), err
    assert names(copy, "model_*") == ["model_000005.pt", "model_000010.pt"]
    _, err = train("--log_dir", "new", *flags[1:], cwd=tmp_path, status=2)
    assert "; there is no checkpoint: start again with --max_lr 5e+41" in err


def test_a_model_that_is_not_a_number_is_one_sentence(copy, tmp_path):
    rewrite(copy / "model_000010.pt", lambda s: s["model"]["transformer.wpe.weight"].fill_(torch.nan))
    (tmp_path / "words.jsonl").write_text('{"text": "a b c"}\n')
    for name, flags in (("generate.py", []), ("lambada.py", ["--data", "words.jsonl"])):
        _, err = program("--checkpoint", "run/model_000010.pt", *flags, cwd=tmp_path, program=name, status=2)
        assert err.startswith("error: run/model_000010.pt: not a readable checkpoint (its weights are not")


def moments(saved, name, change):
    for entry in saved["optimizer"]["adamw"]["state"].values():
        entry[name] = change(entry[name])


@pytest.mark.parametrize("change, message", [
    (lambda s: moments(s, "exp_avg", lambda t: t.flatten()[:1]), "exp_avg: is [1], not [256, 32]"),
    (lambda s: moments(s, "exp_avg_sq", lambda t: torch.zeros(())), "exp_avg_sq: is [], not [256, 32]"),
    (lambda s: moments(s, "step", lambda t: torch.zeros(3)), "step: is [3], not []"),
    (lambda s: moments(s, "exp_avg", lambda t: t.int()), "exp_avg: is not a contiguous floating-point tensor"),
    (lambda s: s["optimizer"]["adamw"]["state"].pop(3), "parameters are missing or unexpected"),
    (lambda s: s["optimizer"]["adamw"]["state"][3].pop("exp_avg"), "has other entries than the first parameter"),
    (lambda s: s["optimizer"]["adamw"].update(state=7), "'int' object has no attribute"),
    (lambda s: s["model_config"].update(n_layer=10**9), "implausible numbers"),
    (lambda s: s["model_config"].update(n_embd=2.0), "not a readable checkpoint"),
    (lambda s: s["model_config"].update(n_embd=2**40), "not a readable checkpoint"),
    (lambda s: s.update(step=-1), "implausible numbers"), (lambda s: s.update(position="far"), "no position of type int"),
    (lambda s: s["model"].update({"lm_head.bias": torch.zeros(1)}), "missing or unexpected: lm_head.bias"),
])
def test_a_hostile_checkpoint(copy, tmp_path, change, message):
    (copy / "model_000010.pt").unlink()
    rewrite(copy / "model_000005.pt", change)
    start = time.monotonic()
    out, err = train("--log_dir", "run", "--resume", cwd=tmp_path, status=2)
    assert message in out + err and err.startswith("error: ") and err.count("\n") == 1, err
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("scale", ["large", None, []])
def test_a_hostile_gradient_scale(tmp_path, scale):
    flags = ["--log_dir", "run", "--dtype", "float16", "--max_steps"]
    train(*flags, 2, cwd=tmp_path)
    rewrite(tmp_path / "run/model_000002.pt", lambda s: s["scaler"].update(scale=scale))
    _, err = train(*flags, 3, "--resume", cwd=tmp_path, status=2)
    assert err.startswith("error: the optimizer of the checkpoint in run is damaged (") and err.count("\n") == 1


def test_a_second_fineweb_in_a_directory(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    flags = ["--input", str(tmp_path / "a.txt"), "--output_dir", str(tmp_path / "out"), "--shard_size", "1000"]
    fineweb.main(flags + ["--max_shards", "2"])
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    import fcntl
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UserError, match=r"--output_dir .*out: another process is writing there"):
        fineweb.main(flags)
    os.close(descriptor)
    (tmp_path / "out/left.npy.1.tmp").write_bytes(b"of a killed process")
    fineweb.main(flags)
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_the_checksum_of_a_shard_is_verified(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    flags = ["--input", str(tmp_path / "a.txt"), "--output_dir", str(tmp_path / "out"), "--shard_size", "1000"]
    fineweb.main(flags + ["--max_shards", "2"])
    path = tmp_path / "out/out_val_000000.npy"
    data = bytearray(path.read_bytes())
    data[700:900] = bytes(200)
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"out_val_000000\.npy: its checksum is not the recorded one"):
        fineweb.main(flags)


def test_a_shard_is_read_back_before_the_set_is_complete(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setattr(Shard, "crc32", lambda self: 0)
    with pytest.raises(UserError, match="its checksum is not the recorded one"):
        fineweb.main(["--input", str(tmp_path / "a.txt"), "--output_dir", str(tmp_path / "out"), "--max_shards", "1"])
    assert not (tmp_path / "out/meta.json").exists()


def test_fineweb_does_not_read_its_own_meta_json(tmp_path, capsys):
    (tmp_path / "a.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    flags = ["--input", str(tmp_path / "*.json"), "--output_dir", str(tmp_path), "--shard_size", "9000"]
    for _ in range(2):
        fineweb.main(flags)
        assert "4,000 documents, 0 damaged records" in capsys.readouterr().out


def test_plot_by_tokens_after_a_resume_with_another_batch(copy, tmp_path):
    train("--log_dir", "run", "--resume", "--max_steps", 14, "--total_batch_size", 1024, cwd=tmp_path)
    consumed = {step: int(value) for step, stream, value in runlog.read_log(copy / "log.txt") if stream == "tokens"}
    assert consumed == {step: 512 * (min(step, 9) + 1) + 1024 * max(0, step - 9) for step in range(14)}
    streams = {"run": plot.read_run(copy)}
    line = plot.draw(streams, "tokens").axes[0].lines[1]
    assert line.get_xdata()[-1] == consumed[12] and line.get_xdata()[0] == 0


def test_plot_keeps_the_curve_after_a_loss_that_is_not_a_number():
    values = np.ones(300)
    values[[50, 60]] = np.inf, np.nan
    streams = {"train": np.array([np.arange(300), values])}
    line = plot.draw({"run": (streams, {})}, "steps").axes[0].lines[1]
    assert np.isfinite(line.get_ydata()).all()


@pytest.mark.parametrize("log, facts, message", [
    ("1 foo 2\n", "{}", "nothing to plot; give a run, such as log/baby"),
    ("1 train x\n", "{}", "no log.txt with numbers"), ("1 train 2\n", "[]", "run.json: is damaged (no object with fields); restore it"),
    ("1 train 2\n", "{", "run.json: is damaged (Expecting")])
def test_plot_of_a_strange_run(tmp_path, log, facts, message):
    (tmp_path / "log.txt").write_text(log)
    (tmp_path / "run.json").write_text(facts)
    with pytest.raises(UserError, match=re.escape(message)):
        plot.main([str(tmp_path), "--output", str(tmp_path / "a.png")])


def test_plot_of_a_run_with_a_dollar_in_its_name(tmp_path):
    (tmp_path / "$a_$b^{").mkdir()
    (tmp_path / "$a_$b^{" / "log.txt").write_text("1 train 2\n2 train 2\n")
    plot.main([str(tmp_path / "$a_$b^{"), "--output", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").exists()


def test_text_without_spaces_has_an_infinite_perplexity_per_word(copy, tmp_path):
    assert perplexity(1.0) == pytest.approx(np.e) and perplexity(10000.0) == np.inf
    (tmp_path / "zh.txt").write_text("海" * 3000)
    out, _ = program("--checkpoint", "run", "--data", "zh.txt", cwd=tmp_path, program="wikitext.py")
    assert re.search("word_perplexity +inf", out) and re.search(r"bits_per_byte +\d", out)
    train("--log_dir", "run", "--resume", "--max_steps", 12, "--evals", "wikitext=zh.txt", cwd=tmp_path)
    assert read_log(copy)[12, "wikitext"] == "inf"


def test_windows_line_ends_do_not_change_wikitext(run, tmp_path):
    text = " = Title = \n \n Some words of an article . \n = Other = \n More words . \n"
    figures = []
    for name, data in (("a.txt", text), ("b.txt", text.replace("\n", "\r\n"))):
        (tmp_path / name).write_bytes(data.encode())
        out, _ = program("--checkpoint", run, "--data", name, cwd=tmp_path, program="wikitext.py")
        figures.append(re.findall(r"(?:perplexity|per_byte) +\S+", out))
    assert figures[0] == figures[1] and len(figures[0]) == 3


def test_prompts_with_a_byte_order_mark_and_unicode_line_separators(run, tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffone\u2028still one\ntwo\n".encode())
    program("--checkpoint", run, "--prompts", "p.txt", "--max_new_tokens", 1, "--json", "o.json", cwd=tmp_path,
            program="generate.py")
    assert [r["prompt"] for r in json.loads((tmp_path / "o.json").read_text())] == ["one\u2028still one", "two"]


def test_ids_beyond_the_vocabulary_decode_to_a_replacement_character():
    assert get_tokenizer("gpt2").decode([15496, 50256, 50257, 60000]) == "Hello<|endoftext|>\ufffd\ufffd"


@pytest.mark.parametrize("redirection", [">&- 2>/dev/full", "2>&- | head -1"])
def test_a_closed_output_does_not_end_a_run(tmp_path, redirection):
    command = f"{sys.executable} {ROOT}/train_gpt2.py {' '.join(TINY)} --log_dir run {redirection}"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert names(tmp_path / "run", "model_*") == ["model_000010.pt"]


def test_fineweb_and_benchmarks_without_outputs(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n{"txt": 1}\n')
    (tmp_path / "words.jsonl").write_text('{"text": "a b c"}\n')
    for command in ("fineweb.py --input a.jsonl --output_dir out 2>&-", "fineweb.py --input a.jsonl --output_dir out2 >&-",
                    f"lambada.py --data words.jsonl --checkpoint {run} --json b.json >&- 2>&-"):
        subprocess.run(["bash", "-c", f"{sys.executable} {ROOT}/{command}"], cwd=tmp_path, check=True, timeout=120,
                       capture_output=True)
    assert all((tmp_path / name).exists() for name in ("out/meta.json", "out2/meta.json", "b.json"))


def test_main_twice_in_one_process(tmp_path):
    """As in a notebook: the lock is free again, and the signal handlers are the old ones."""
    (tmp_path / "twice.py").write_text(
        f"import signal, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train_gpt2\nfrom plaingpt.cli import UserError\n"
        f"flags = {TINY + ['--log_dir', 'run', '--max_steps', '2']!r}\n"
        "before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)\n"
        "train_gpt2.main(flags)\n"
        "try:\n    train_gpt2.main(flags + ['--resume', '--data', 'nowhere'])\nexcept UserError:\n    pass\n"
        "train_gpt2.main(flags + ['--resume', '--max_steps', '4'])\n"
        "assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))\n")
    out, _ = program(cwd=tmp_path, program=tmp_path / "twice.py")
    assert "resumed from step 2" in out


def test_names_that_are_not_utf8(run, tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text(TEXT)
    flags = [*TINY, "--data", name, "--log_dir", os.fsdecode(b"r\xe9n"), "--max_steps", "2"]
    for more in ([], ["--resume", "--max_steps", "3"]):
        _, err = program(*flags, *more, cwd=tmp_path)
        assert "Traceback" not in err
    program("--input", name, "--output_dir", os.fsdecode(b"sh\xe9"), cwd=tmp_path, program="fineweb.py", fresh=True)


def test_compile_without_a_compiler(tmp_path):
    _, err = train("--compile", cwd=tmp_path, status=2, env=dict(PATH="/nowhere"))
    assert err == "error: --compile: needs a C++ compiler on a CPU; install g++, or set CXX\n"


def test_a_million_spaces(run, tmp_path):
    (tmp_path / "gpt2").mkdir()
    gpt2 = get_tokenizer("gpt2")
    with pytest.raises(UserError, match="the text has 500,000 or more white spaces in a row; shorten them"):
        gpt2.encode("a" + " " * 1_000_000)
    with pytest.raises(ValueError, match="white spaces"):
        corpus.text_of(b" " * 1_000_000, "text", "text")


def test_a_resumed_run_keeps_the_shape_it_was_started_with(copy, tmp_path):
    """A run that began with --init_from is resumed without that flag, and without its shape."""
    flags = [f for f in TINY if f not in ("--n_layer", "--n_head", "--n_embd", "--block_size")]
    flags = [f for f in flags if f not in ("2", "32")] + ["--warmup_steps", "2"]
    small = ["--preset", "baby", "--total_batch_size", "512", "--batch_size", "4", "--val_tokens", "1024", "--device",
             "cpu", "--sample_every", "0", "--log_dir", "new", "--max_steps"]
    program(*small, 2, "--init_from", "run", cwd=tmp_path)
    out, _ = program(*small[2:], 3, "--resume", cwd=tmp_path)
    assert "resumed from step 2" in out


@pytest.mark.parametrize("flags", [["--seed", str(2**63 - 1)], ["--top_p", "1e-300"]])
def test_extreme_flags_of_generate(run, tmp_path, flags):
    program("--checkpoint", run, "--max_new_tokens", 3, *flags, cwd=tmp_path, program="generate.py")


def test_a_seed_that_is_too_large(run, tmp_path):
    _, err = program("--seed", "9" * 20, cwd=tmp_path, program="generate.py", status=2)
    assert err.startswith("error: --seed 99999999999999999999: must be at least 0 and at most")


def test_a_checkpoint_whose_number_is_no_decimal(copy):
    (copy / "model_².pt").write_text("")
    assert [p.name for p in checkpoint.checkpoints(copy)] == ["model_000005.pt", "model_000010.pt"]


def test_a_table_with_two_columns_of_the_same_name(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="not exactly one column 'text', but text, text"):
        list(corpus.read_blocks([tmp_path / "a.parquet"], "text"))


HELP = """
import runpy, sys
sys.argv[1:] = ["--help"]
for name in ("train_gpt2", "hellaswag"):
    try:
        runpy.run_path(f"{name}.py", run_name="__main__")
    except SystemExit as stop:
        print("status", stop.code)
"""


def test_help_without_docstrings():
    done = subprocess.run([sys.executable, "-OO", "-c", HELP], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.count("status 0") == 2


def test_help_without_columns(tmp_path):
    for name in ("train_gpt2.py", "hellaswag.py"):
        program("--help", cwd=tmp_path, program=name, env={"COLUMNS": "2"})


def processes_of(group):
    return [pid for pid in os.listdir("/proc") if pid.isdecimal() and os.path.exists(f"/proc/{pid}/stat")
            and open(f"/proc/{pid}/stat").read().split()[4] == str(group)
            and open(f"/proc/{pid}/stat").read().split()[2] != "Z"]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads the process table of Linux")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_bench_and_its_children(tmp_path, number):
    (tmp_path / "session.py").write_text(
        "import os, runpy, sys\nos.setsid()\n"
        f"sys.path[0] = {str(ROOT)!r}\nrunpy.run_path({str(ROOT / 'bench.py')!r}, run_name='__main__')\n")
    (process,) = spawn("--preset", "baby", "--steps", "100000", "--device", "cpu", cwd=tmp_path, program=tmp_path / "session.py")
    while "round 1" not in process.stdout.readline():
        assert process.poll() is None
    def ready(pid):  # the child has imported torch, and started the thread of exit_with_parent
        return int(pid) != process.pid and "Threads:\t1\n" not in Path(f"/proc/{pid}/status").read_text()

    while not any(map(ready, processes_of(process.pid))):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while processes_of(process.pid):
        assert time.monotonic() < deadline, "children still run"
        time.sleep(0.1)
    assert "Traceback" not in err, err


def test_an_optimizer_with_scalar_states_can_be_resumed():
    """torch.optim.NAdam has one number beside the moments of each parameter."""
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.NAdam([dict(params=[("w", weight)])])
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    checkpoint.check_optimizer_state(state["state"], state["param_groups"], {"w": weight})
    state["state"][0]["exp_avg"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"exp_avg: is \[2\], not \[3, 2\]"):
        checkpoint.check_optimizer_state(state["state"], state["param_groups"], {"w": weight})
