"""experiment.py: its arithmetic, its verdicts, and what it uses again."""

import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from plaingpt.base.errors import UserError
from plaingpt.base.flags import parse_flags
from plaingpt.base.log_file import read_streams
from plaingpt.run import sides
from plaingpt.run.intervals import compare_losses, t95, welch_interval
from plaingpt.run.ledger import add_entry, choose_seeds, read_ledgers

import numpy as np
import pytest
from conftest import ROOT, program
from forked import forking_python
from test_experiments import copy_program

import experiment as lab
import look

FLAGS = (
    "--preset baby --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --max_steps 40 "
    "--total_batch_size 128 --batch_size 8 --val_tokens 512 --dtype float32 --device cpu "
    "--data input.txt"
)
UNTRACKED = ["idea.py", "\u60f3\u6cd5.py", ".#model.py"]
STATUS = dict(better=0, equal=3, worse=4, undecided=5, invalid=6, failed=7)


@pytest.mark.parametrize("df", [*range(1, 31), 31, 40, 100, 1000])
def test_t_is_the_quantile_of_students_distribution(df):
    """Half the probability lies between 0 and t, minus 0.025: integrates the density."""
    x = np.linspace(0, t95(df), 200_001)
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    density = np.exp(log_scale - (df + 1) / 2 * np.log1p(x**2 / df))
    integral = (density[1:] + density[:-1]).sum() / 2 * x[1]
    assert integral == pytest.approx(0.475, abs=0.0005 * density[-1] + 1e-9)  # three digits of t


def test_t_between_two_whole_numbers_of_degrees_of_freedom():
    assert t95(3.25) == pytest.approx(0.75 * 3.182 + 0.25 * 2.776)


def test_intervals_by_hand():
    """Groups of 3 and 2 values, with the variances 1 and 4."""
    base, changed = [1.0, 2.0, 3.0], [2.0 - 2**0.5, 2.0 + 2**0.5]
    total = 1 / 3 + 4 / 2
    df = total**2 / ((1 / 3) ** 2 / 2 + (4 / 2) ** 2 / 1)  # 1.3427
    half = ((2 - df) * 12.706 + (df - 1) * 4.303) * total**0.5
    assert welch_interval(base, changed) == pytest.approx((0.0, half))
    assert welch_interval(base, [1.0]) == (-1.0, math.inf)
    # Pairs: the differences are 0.1, 0.2, 0.3, with sd 0.1, and t(2) is 4.303.
    base, changed = [1.0, 2.0, 3.0, 9.0], [1.1, 2.2, 3.3]
    found = compare_losses(base, changed, delta=0.01)
    assert (found["n"], found["base_n"], found["verdict"]) == (3, 4, "undecided")
    assert found["difference"] == pytest.approx(2.2 - 15 / 4)
    assert found["paired_half"] == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert found["correlation"] == pytest.approx(1.0)


def test_the_number_of_runs_that_decide():
    """With as many more runs of the same mean and variance, the verdict is no longer open."""
    base, changed = [1.0, 1.1, 0.9, 1.05], [1.1, 1.25, 0.95, 1.0]
    found = compare_losses(base, changed, delta=0.01)
    n = found["runs_needed"]
    assert found["verdict"] == "undecided" and f"--seeds {n} may decide" in found["reason"]

    def repeat(losses, n):
        """n values whose mean and unbiased variance are those of the losses."""
        values = np.resize([-1.0, 1.0], n) - (0 if n % 2 == 0 else -1 / n)
        return np.mean(losses) + values / values.std(ddof=1) * np.std(losses, ddof=1)

    for size, decided in ((n, True), (n - 1, False)):
        more = compare_losses(repeat(base, max(size, 4)), repeat(changed, size), delta=0.01)
        assert (more["verdict"] != "undecided") == decided


def test_a_noisy_change_has_an_honest_interval():
    """4 runs against 8, whose changed side is four times as noisy: 95 of 100 intervals are right.

    With one standard deviation for both sides, only some 80 would be.
    """
    rng = np.random.default_rng(0)
    welch = student = 0
    for _ in range(4000):
        base, changed = rng.normal(0, 1, 8), rng.normal(0, 4, 4)
        difference, half = welch_interval(base, changed)
        welch += abs(difference) <= half
        pooled = (base.var(ddof=1) * 7 + changed.var(ddof=1) * 3) / 10
        student += abs(difference) <= t95(10) * math.sqrt(pooled * (1 / 8 + 1 / 4))
    assert 0.93 < welch / 4000 < 0.97 and student / 4000 < 0.85


@pytest.mark.parametrize(
    "differences, verdict",
    [
        ([-0.05, -0.06, -0.04], "better"),
        ([0.05, 0.06, 0.04], "worse"),
        ([0.0, 0.0], "equal"),
        ([0.004, 0.005], "equal"),  # all above 0, but too small to matter
        ([0.05, -0.05, 0.01], "undecided"),
        ([-0.02, -0.019, -0.021], "better"),
    ],
)
def test_verdict(differences, verdict):
    base = np.array([1.499, 1.5, 1.501])[: len(differences)]
    found = compare_losses(base, 1.5 + np.array(differences), delta=0.02)
    assert found["verdict"] == verdict, found
    json.dumps(found, allow_nan=False)


def test_the_printed_command_for_look_runs_as_it_is(capsys):
    found = [
        SimpleNamespace(directory=lambda seed: Path(f"log/a-{seed}")),
        SimpleNamespace(directory=lambda seed: Path(f"log/b-{seed}")),
    ]
    lab.show_look(found, [[1, 2], [1]])
    python, file, *flags = shlex.split(capsys.readouterr().out.splitlines()[-1])
    given = parse_flags(look.__doc__, look.LookConfig, argv=flags, rest="RUN")
    assert (python, file, given["RUN"]) == ("python", "look.py", ["log/a-1", "log/b-1"])
    assert given["own_code"] and given["text"] == "MARLOW: The boats came home."


def test_only_a_change_with_a_verdict_can_be_confirmed():
    """Without this, an edit after the verdict would be tried once, and seem to be confirmed."""
    config = lab.ExperimentConfig(confirm=True, seeds=4, base_seeds=8)
    ledger = [dict(keys=["base", "changed"], last_seed=8), dict(verdict="failed")]
    assert choose_seeds(["base", "changed"], config, ledger) == (range(9, 17), range(9, 13))
    with pytest.raises(UserError, match="^--confirm: the ledger has no verdict on this change"):
        choose_seeds(["base", "edited"], config, ledger)


def test_the_time_of_a_step_where_the_base_is_known(monkeypatch):
    """Runs that went side by side are compared. If there are none, two short ones are trained."""
    speeds = {("base", 1): 100, ("changed", 1): 50, ("base", "timed"): 90, ("changed", "timed"): 60}
    base, changed = [
        SimpleNamespace(name=name, directory=lambda run: Path("nothing", str(run)))
        for name in ("base", "changed")
    ]
    trained = []
    monkeypatch.setattr(sides, "median_tok_s", lambda side, run: speeds[side.name, run])
    monkeypatch.setattr(sides, "train", lambda runs, title: trained.extend(runs))
    both = [base, changed]
    assert sides.ratio_of_times(both, []) is None
    assert sides.ratio_of_times(both, [(base, 1, []), (changed, 1, [])]) == 2 and not trained
    assert sides.ratio_of_times(both, [(changed, 1, [])]) == 1.5 and len(trained) == 2


def test_a_ledger_survives_half_a_line(tmp_path, capsys):
    """A program was killed, or the disk was full."""
    path = tmp_path / "ledger.jsonl"
    entries = []
    for name in "abc":
        entries.append(dict(date="today", change=name, verdict="failed", reason="none"))
    add_entry(path, entries[0])
    with open(path, "ab") as file:
        file.write(json.dumps(entries[1]).encode()[:-9])
    assert read_ledgers([path]) == entries[:1]
    add_entry(path, entries[2])
    assert read_ledgers([path, tmp_path / "missing.jsonl"]) == [entries[0], entries[2]]
    note = f"note: {path}, line 2: is no experiment, and is left out\n"
    assert capsys.readouterr().out == note * 2
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    assert read_ledgers([tmp_path / "deep.jsonl"]) == []
    assert "deep.jsonl, line 1: is no experiment" in capsys.readouterr().out


def git(directory, *command):
    return subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a", *command],
        cwd=directory,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone, beside a program that acts as Python in which experiment.py starts its runs."""
    lab = tmp_path_factory.mktemp("lab")
    directory = lab / "clone"
    directory.mkdir()
    git(directory, "init")
    git(directory, "commit", "--allow-empty", "-m", "from before part 24")
    copy_program(directory)
    (directory / "experiments").mkdir()
    for path in (*ROOT.glob("experiments/*.py"), ROOT / "plaingpt/data/gpt2.tiktoken"):
        shutil.copy(path, directory / path.relative_to(ROOT))
    (directory / ".gitignore").write_text("/log\n__pycache__/\n*.json\n")
    (directory / "log").symlink_to(tmp_path_factory.mktemp("larger-disk"))
    git(directory, "add", ".")
    git(directory, "commit", "-m", "base")
    with forking_python() as python:
        (lab / "python").symlink_to(python)
        yield directory


def experiment(clone, verdict, *flags, old=None, new=None, file="model.py", more=()):
    """Runs experiment.py, with `new` instead of `old` in a file -> its JSON. Undoes the edit."""
    text = (clone / file).read_text()
    if old:
        assert text.count(old) == 1
        (clone / file).write_text(text.replace(old, new))
    try:
        out, _ = program(
            "--flags",
            FLAGS,
            "--seeds",
            2,
            "--base_seeds",
            2,
            "--json",
            "o.json",
            *flags,
            *more,
            cwd=clone,
            program=clone / "experiment.py",
            executable=clone.parent / "python",
            status=STATUS[verdict],
        )
    finally:
        (clone / file).write_text(text)
        for name in UNTRACKED:
            (clone / name).unlink(missing_ok=True)
    found = json.loads((clone / "o.json").read_text())
    *_, line, printed = out.splitlines()
    assert json.loads(printed) == found and f": {verdict}; " in line or verdict == "failed", out
    assert found["verdict"] == verdict
    assert not git(clone, "status", "--short") and git(clone, "worktree", "list").count("\n") == 1
    return found


def runs(clone):
    return sorted(path.name for path in (clone / "log/experiments/runs").iterdir())


@pytest.mark.slow
def test_an_experiment_and_what_later_ones_use_again(clone):
    rate = "groups, lr=learning_rate, betas"  # AdamW's, for the embeddings
    found = experiment(clone, "worse", old=rate, new=rate.replace("lr=", "lr=0.01 * "))
    assert found["n"] == 2 and found["time_ratio"] > 0 and found["looks"] == 1
    assert len(runs(clone)) == 4 and found["difference"] > 0.1
    changed = clone / "log/experiments/runs" / f"{found['keys'][1]}-1"
    assert "groups, lr=0.01 * learning" in (changed / "changes.patch").read_text()
    assert json.loads((changed / "run.json").read_text())["untracked_files"] == []
    # The same change as a patch, with another layout: nothing is trained again.
    written = (changed / "log.txt").stat().st_mtime_ns
    text = (clone / "model.py").read_text()
    layout = "  # slow\n            groups, lr=1e-2 * learning_rate, betas"
    (clone / "model.py").write_text(text.replace(rate, layout))
    (clone / "log" / "my.patch").write_text(git(clone, "diff"))
    (clone / "model.py").write_text(text)
    again = experiment(clone, "worse", "log/my.patch")
    assert again["losses"] == found["losses"] and again["time_ratio"] is None
    assert again["looks"] == 2 and (changed / "log.txt").stat().st_mtime_ns == written
    # The flags give what is the default, and the same device: no run would differ.
    found = experiment(clone, "equal", more=["--", "--weight_decay", "0.1", "--device", "cpu:0"])
    assert found["n"] == 0 and "docstrings" in found["reason"] and len(runs(clone)) == 4
    # More runs continue the experiment. Another name of a variable changes nothing.
    rename = "        y = y.transpose(1, 2).flatten(2)  # (B, T, C)\n"
    found = experiment(
        clone,
        "equal",
        "--seeds",
        3,
        "--delta",
        0.5,
        old=rename,
        new="        z = y.transpose(1, 2).flatten(2)\n        y = z\n",
    )
    assert found["difference"] == 0 and found["paired_half"] == 0 and found["half"] > 0
    assert found["n"] == found["base_n"] == 3
    assert len(runs(clone)) == 8
    # Only the models of the first seed stay.
    models = (clone / "log/experiments/runs").glob("*/model_*.pt")
    assert {path.parent.name.rpartition("-")[2] for path in models} == {"1"}
    # A confirmation takes seeds after those of both programs, and more runs of the base if asked.
    confirm = ["--confirm", "--base_seeds", 3, "--why", "it was worse"]
    found = experiment(clone, "worse", *confirm, "log/my.patch")
    assert (found["n"], found["base_n"], found["last_seed"]) == (2, 3, 6)
    assert found["looks"] == 3 and {f"{found['keys'][1]}-{seed}" for seed in (4, 5)} <= {
        *runs(clone)
    }
    out, _ = program("--list", cwd=clone, program=clone / "experiment.py")
    assert [line.split("; ")[0].rpartition(": ")[2] for line in out.splitlines()] == [
        "worse",
        "worse",
        "equal",
        "equal",
        "worse",
    ]
    assert "; confirmation with new seeds; +" in out and " in 2 runs against 3; " in out
    assert out.endswith(" (tried because: it was worse)\n")


# Reads every text as the same few ids.
OTHER_IDS = json.dumps(
    {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "a"},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [],
        "decoder": None,
    }
)
CHEATS = [
    ("model.py", "causal = mask is None and T > 1", "causal = False", "later tokens"),
    (
        "model.py",
        "return self.loss_fn(x, self.lm_head.weight, targets, reduction)",
        "return self.loss_fn(x, self.lm_head.weight, targets, reduction) + 0.1",
        "the logits",
    ),
    (
        "train_gpt2.py",
        "    n_sequences = max(1, min(config.val_tokens // T, loader.lengths[0]))\n",
        "    n_sequences = 1\n",
        "the logits give",
    ),
    (
        "train_gpt2.py",
        "    loader = DataLoaderLite(data.train, ",
        "    loader = DataLoaderLite(data.val, ",
        "the change trains on 100% of the validation sequences",
    ),
    (
        "model.py",
        "return load_model(place, cls)",
        "model, tokenizer = load_model(place, cls); tokenizer.source = " + repr(OTHER_IDS) + "; "
        "return model, tokenizer",
        "the change gives another tokenizer",
    ),
]


@pytest.mark.slow
def test_nothing_cheats_the_score(clone):
    for file, old, new, reason in CHEATS:
        found = experiment(clone, "invalid", file=file, old=old, new=new)
        assert reason in found["reason"]
        # The models stay: their losses are computed again when another base validates like them.
        for seed in (1, 2):
            run = clone / "log/experiments/runs" / f"{found['keys'][1]}-{seed}"
            assert (run / "model_000040.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--val_tokens", "256"], "another val_tokens"),
        (["--block_size", "32"], "another block_size"),
        (["--val_fraction", "0.2"], "another validation split"),
    ],
)
def test_losses_of_other_data_do_not_compare(clone, flags, reason):
    assert reason in experiment(clone, "failed", more=["--", *flags])["reason"]


@pytest.mark.slow
def test_other_training_data_with_the_same_validation(clone):
    """A mixture logs the loss of each set, so that of the base's data."""
    (clone / "log" / "b.txt").write_text((ROOT / "input.txt").read_text()[-20_000:])
    flags = ["--data", "input.txt", "log/b.txt"]
    found = experiment(clone, "equal", "--delta", 9, more=["--", *flags])
    assert found["reason"].endswith("; other training data") and found["difference"] != 0
    seed_1 = clone / "log/experiments/runs" / f"{found['keys'][1]}-1"
    assert found["losses"][0] == read_streams(seed_1 / "log.txt")["val_input.txt"][40]


@pytest.mark.slow
def test_a_file_that_the_program_reads_is_a_part_of_it(clone):
    """It is tracked by git, but is no Python. Another file of git changes no key."""
    (clone / "std.txt").write_text("0.02")
    old = "return values.normal_(std=0.02)\n"
    new = "return values.normal_(std=float(open(__file__[:-8] + 'std.txt').read()))\n"
    text = (clone / "model.py").read_text()
    (clone / "model.py").write_text(text.replace(old, new))
    git(clone, "add", ".")
    git(clone, "commit", "-m", "read a file")
    try:
        found = experiment(clone, "equal", "--delta", 9, file="std.txt", old="0.02", new="0.2")
        assert found["n"] == 2 and abs(found["difference"]) > 0.001
        found = experiment(clone, "equal", file="words.txt", old="The end", new="An end")
        assert "docstrings" in found["reason"]
    finally:
        git(clone, "reset", "--hard", "HEAD~1")


@pytest.mark.slow
def test_a_longer_run_is_a_change(clone):
    found = experiment(clone, "equal", "--delta", 9, more=["--", "--max_steps", "80"])
    assert found["n"] == 2 and found["difference"] < 0


@pytest.mark.slow
def test_names_of_untracked_files_and_settings_of_git(clone):
    """Emacs locks a file with a link that leads nowhere. git quotes names that are not ASCII."""
    (clone / UNTRACKED[1]).write_text("x = 1\n")
    (clone / UNTRACKED[2]).symlink_to("me@host.1234")
    for setting in ("diff.noprefix true", "diff.external true", "color.ui always"):
        git(clone, "config", *setting.split())
    line = "class MLP("
    found = experiment(clone, "equal", old=line, new=f"# a comment\n{line}")
    assert "docstrings" in found["reason"]


@pytest.mark.slow
def test_a_module_in_a_directory_belongs_to_the_program(tmp_path):
    """But Python itself, which may be in the clone, does not."""
    copy_program(tmp_path)
    code = (
        "import os, sys; sys.path[:0] = '.', 'ideas/lib'; import abc_of, ideas.mix; "
        "from plaingpt.base.source_hash import hash_of_program; os.__file__ = abc_of.__file__; "
        "print(hash_of_program())"
    )
    (tmp_path / "ideas" / "lib").mkdir(parents=True)
    hashes = []
    for text in ("x = 1", "x = 1  # a comment", "x = 2"):
        (tmp_path / "ideas" / "lib" / "abc_of.py").write_text(f"y = {len(hashes)}")
        (tmp_path / "ideas" / "mix.py").write_text(text)
        hashes.append(subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path))
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_diverged_rate_is_not_the_best(tmp_path, monkeypatch):
    monkeypatch.setattr(sides, "LAB", tmp_path)
    monkeypatch.setattr(lab, "ask", lambda sides: None)
    for rate, loss in ((1.0, "nan"), (0.5, "2.0")):
        (tmp_path / "runs" / f"key-rate{rate}").mkdir(parents=True)
        (tmp_path / "runs" / f"key-rate{rate}" / "log.txt").write_text(f"8 val {loss}\n")
    side = lab.Side("base", [], dict(max_steps=8), "key")
    lab.choose_rates([side], [1.0, 0.5])
    assert side.flags == ["--max_lr", "0.5"]


def test_a_free_gpu_takes_the_next_run(tmp_path, monkeypatch):
    """The first run takes longer than the three others, which come one after the other."""
    monkeypatch.setattr(sides, "LAB", tmp_path)
    monkeypatch.setattr(sides, "count_gpus", lambda: 2)
    others_are_done = threading.Event()
    devices = {}

    class Run:
        def __init__(self, command, **_):
            self.name = Path(command[-1]).name
            devices[self.name] = command[command.index("--device") + 1]

        def wait(self):
            if self.name == "0":
                assert others_are_done.wait(60)
            elif self.name == "3":
                others_are_done.set()
            else:
                time.sleep(0.1)
            return 0

    monkeypatch.setattr(subprocess, "Popen", Run)
    side = lab.Side("base", [])
    lab.train([(side, str(i), []) for i in range(4)])
    assert devices["1"] == devices["2"] == devices["3"] != devices["0"]


def test_a_signal_to_the_program_reaches_its_runs_once(tmp_path, monkeypatch):
    """A queue sends SIGTERM only to the program. A run that gets two signals saves nothing."""
    monkeypatch.setattr(sides, "LAB", tmp_path)
    monkeypatch.setattr(sides, "count_slots", lambda: 2)
    signals = []
    started = threading.Semaphore(0)

    class Run:
        def __init__(self, command, start_new_session, **_):
            assert start_new_session
            self.has_ended = threading.Event()
            started.release()

        def wait(self):
            return 0 if self.has_ended.wait(60) else 1

        def send_signal(self, number):
            signals.append(number)
            self.has_ended.set()

    monkeypatch.setattr(subprocess, "Popen", Run)
    side = lab.Side("base", [])

    def interrupted(results, *_):
        """Ctrl-C comes while the progress bar waits for both runs."""
        assert started.acquire(timeout=60) and started.acquire(timeout=60)
        time.sleep(0.1)  # both are in the list of processes
        raise KeyboardInterrupt

    monkeypatch.setattr(sides, "tqdm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.train([(side, str(i), []) for i in range(2)])
    assert signals == [signal.SIGINT, signal.SIGINT]


@pytest.mark.slow
def test_what_a_change_prints_is_no_answer(clone):
    """audit_logits.py writes logits to its standard output, to which model.py may print, too."""
    found = experiment(
        clone,
        "equal",
        "--delta",
        0.5,
        old="        T = idx.size(1)\n",
        new='        T = idx.size(1)\n        print("T is", T)\n',
    )
    assert found["difference"] == 0


@pytest.mark.slow
def test_an_error_of_the_model_is_told(clone):
    """It comes from the copy with the change, through the program in the copy of the base."""
    found = experiment(
        clone,
        "invalid",
        old="            return self.logits(x), None  # (B, T, vocab_size)\n",
        new="            return self.logit(x), None  # (B, T, vocab_size)\n",
    )
    reason = "the base cannot score a model (AttributeError: 'GPT' object has no attribute 'logit'"
    assert found["reason"].startswith(reason)


@pytest.mark.slow
def test_a_change_that_fails(clone):
    found = experiment(clone, "failed", old="x = x + self.attn(", new="x = x + self.atn(")
    assert "has no attribute 'atn'" in found["reason"] and "n" not in found
    found = experiment(clone, "failed", old="class MLP(", new="class MLP((")
    assert "SyntaxError" in found["reason"]
    (clone / "idea.py").write_text("def mix(x):\n    1 / 0\n")  # git does not know this file yet
    found = experiment(
        clone,
        "failed",
        old="        x = x + self.attn(",
        new="        import idea\n        x = idea.mix(x) + self.attn(",
    )
    assert "division by zero" in found["reason"]
    (clone / "log" / "old.patch").write_text(
        "--- a/model.py\n+++ b/model.py\n@@ -1 +1 @@\n-no such line\n+x\n"
    )
    found = experiment(clone, "failed", "log/old.patch")
    assert "patch failed: model.py:1" in found["reason"]


@pytest.mark.slow
def test_a_patch_changes_what_is_committed(clone):
    """Without this error, an edit in the clone would be left out."""
    path = clone / "model.py"
    text = path.read_text()
    path.write_text(text.replace("class MLP(", "# an idea\nclass MLP("))
    (clone / "log" / "edit.patch").write_text(
        "--- a/model.py\n+++ b/model.py\n@@ -1 +1 @@\n-x\n+y\n"
    )
    try:
        flags = dict(cwd=clone, program=clone / "experiment.py", status=2)
        _, err = program("log/edit.patch", **flags)
    finally:
        path.write_text(text)
    assert err.startswith("error: model.py: has changes that are not committed, and the patch")


@pytest.mark.slow
def test_a_mistake_leaves_no_older_verdict(clone):
    path = clone / "log" / "verdict.json"
    path.write_text("{}")
    program("--json", path, cwd=clone, program=clone / "experiment.py", status=2)
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, sentence",
    [
        ([], "nothing is changed; edit model.py, give a patch, or give flags behind --"),
        (
            ["--base", "nowhere", "--", "--seed", "3"],
            "git rev-parse (fatal: Needed a single revision)",
        ),
        (
            ["--base", "HEAD~1", "--", "--seed", "3"],
            "--base HEAD~1: is from before plaingpt/base/; give a later commit",
        ),
        (
            ["--json", "no/v.json", "--", "--seed", "3"],
            "--json no/v.json: cannot write there; give",
        ),
        (["no.patch"], "no.patch: no such patch; give a file"),
        (["--seeds", "1"], "--seeds 1: must be at least 2"),
        (
            ["--flags", "--data 'a", "--", "--seed", "3"],
            "--flags --data 'a (No closing quotation);",
        ),
        (["--sizes", "64", "96", "--", "--seed", "3"], "give at least four sizes"),
        (
            ["--sizes", "64", "96", "128", "160", "--flags", "--n_embd 64", "--", "--seed", "3"],
            "--n_embd: follows from --sizes; leave it out",
        ),
    ],
)
def test_each_mistake_gives_a_one_sentence_error(clone, flags, sentence):
    _, err = program(*flags, cwd=clone, program=clone / "experiment.py", status=2)
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1
