"""Tests experiment.py: its statistics, its verdicts, and which finished runs it reuses."""

import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from plaingpt.errors import UserError
from plaingpt.lab import runs
from plaingpt.lab.verdict import (
    add_entry,
    choose_seeds,
    compare_losses,
    discoveries_as_lines,
    read_ledgers,
    welch,
    worth,
    worth_as_text,
)

import numpy as np
import pytest
import torch
from conftest import ROOT, program, spawn
from edited import copy_program
from forked import forking_python
from scipy import stats

import experiment as lab
import plot

FLAGS = (
    "--preset baby --n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --max_steps 6 "
    "--total_batch_size 128 --batch_size 8 --val_tokens 128 --dtype float32 --device cpu "
    "--data input.txt"
)
UNTRACKED = ["idea.py", "\u60f3\u6cd5.py", ".#model.py"]
STATUS = dict(better=0, equal=3, worse=4, undecided=5, invalid=6, failed=7)


def test_a_noisy_change_has_an_honest_interval():
    """Draws 8 losses of the baseline, and 4 of a change with four times the standard deviation.

    About 95% of the confidence intervals contain the true difference. With a pooled standard
    deviation, fewer than 85% of the intervals would contain the true difference.
    """
    rng = np.random.default_rng(0)
    right = student = 0
    n = 400
    for _ in range(n):
        base, changed = rng.normal(0, 1, 8), rng.normal(0, 4, 4)
        difference, half, _ = welch(base, changed)
        right += abs(difference) <= half
        pooled = (base.var(ddof=1) * 7 + changed.var(ddof=1) * 3) / 10
        student += abs(difference) <= 2.228 * math.sqrt(pooled * (1 / 8 + 1 / 4))
    assert 0.93 < right / n < 0.97 and student / n < 0.85


@pytest.mark.parametrize(
    "differences, verdict",
    [
        ([-0.05, -0.06, -0.04], "better"),
        ([0.05, 0.06, 0.04], "worse"),
        ([0.0, 0.0], "equal"),
        ([0.004, 0.005], "equal"),  # all differences are above 0, but too small to matter
        ([0.05, -0.05, 0.01], "undecided"),
        ([-0.02, -0.019, -0.021], "better"),
    ],
)
def test_verdict(differences, verdict):
    base = np.array([1.499, 1.5, 1.501])[: len(differences)]
    found = compare_losses(base, 1.5 + np.array(differences), delta=0.02)
    assert found["verdict"] == verdict, found
    json.dumps(found, allow_nan=False)


@pytest.mark.slow
def test_what_2000_greedy_agents_keep_has_little_luck():
    """Simulates agents. Each agent tries 30 ideas, of which 21 have no effect.

    If an idea is better, the next base contains the idea. As in experiment.py, the eight runs of
    the next base include the four runs that selected the idea. The noise of the losses is drawn
    from the ledger. If an agent keeps the ideas with a false discovery rate of at most 10%, then on
    average at most 10% of the kept ideas may be false discoveries.
    """
    noise = []
    for entry in read_ledgers([ROOT / "log/records/ledger.jsonl"]):
        for losses in (entry["base_losses"], entry["losses"]):
            if np.std(losses) < 0.01:  # omits Lion, whose losses vary more
                noise += list(
                    (losses - np.mean(losses)) * math.sqrt(len(losses) / (len(losses) - 1))
                )
    rng = np.random.default_rng(0)
    n_agents, n_ideas = 2000, 30
    effects = np.zeros((n_agents, n_ideas))
    effects[:, 21:27] = rng.uniform(0.002, 0.03, (n_agents, 6))
    effects[:, 27:] = -rng.uniform(0.002, 0.03, (n_agents, 3))
    effects = rng.permuted(effects, axis=1)
    level = np.full(n_agents, 1.4)  # the true loss of the baseline
    base = level[:, None] + rng.choice(noise, (n_agents, 8))
    p = np.empty((n_agents, n_ideas))
    for k in range(n_ideas):
        changed = (level + effects[:, k])[:, None] + rng.choice(noise, (n_agents, 4))
        a, b = base.var(1, ddof=1) / 8, changed.var(1, ddof=1) / 4
        t = (changed.mean(1) - base.mean(1)) / np.sqrt(a + b)
        p[:, k] = stats.t.cdf(t, (a + b) ** 2 / (a**2 / 7 + b**2 / 3))
        is_better = p[:, k] < 0.025
        level = np.where(is_better, level + effects[:, k], level)
        new = level[:, None] + rng.choice(noise, (n_agents, 4))
        base = np.where(is_better[:, None], np.hstack([changed, new]), base)
    luck = []
    found = 0
    naive = []
    for own, truth in zip(p, effects):
        kept = stats.false_discovery_control(own, method="by") <= 0.1
        luck.append((truth[kept] >= 0).mean() if kept.any() else 0.0)
        found += (truth[kept] < 0).sum()
        better = own < 0.025
        naive.append((truth[better] >= 0).mean() if better.any() else 0.0)
    assert np.mean(luck) <= 0.1 < np.mean(naive)
    assert found > n_agents  # on average, an agent finds more than one of three real improvements


def test_the_list_says_how_many_may_be_luck():
    """The p-value of a confirmation replaces the p-value that selected the change.

    A later experiment without --confirm does not replace the p-value of the confirmation.
    """
    ledger = []
    for name, p, verdict, confirm in (
        ("a", 0.001, "better", False),
        ("b", 0.01, "better", False),
        ("b", 0.4, "undecided", True),
        ("b", 0.02, "better", False),
        ("c", 0.9, "worse", False),
    ):
        ledger.append(
            dict(keys=["base", name], change=name, verdict=verdict, p_value=p, confirm=confirm)
        )
    ledger.append(dict(change="d", verdict="failed"))
    assert discoveries_as_lines(ledger) == [
        "changes tried: 3; better: 1; false discovery rate up to each:",
        "  0.5%  a",
    ]
    assert discoveries_as_lines(ledger[5:]) == []


def test_the_memory_of_a_probe_is_not_in_its_key(tmp_path, monkeypatch):
    """The GPU memory in run.json depends on the number of steps that the probe takes.

    If the key of a program contained the GPU memory, the key could change, and experiment.py would
    repeat the runs of the program.
    """
    monkeypatch.setattr(runs, "LAB", tmp_path)
    monkeypatch.setattr(runs, "VALIDATION", tmp_path / "validation.pt")
    monkeypatch.setattr(runs, "train", lambda jobs, at_once: runs.VALIDATION.touch())
    facts = dict(train_config=dict(init_from=None), max_steps=1, total_batch_size=1)
    facts.update(tokenizer="bytes", block_size=1, n_layer=1, n_embd=1, vocab_size=1)
    code = dict(hash="", change_no_loss=[])
    streams = dict(tok_s={0: 1.0})
    monkeypatch.setattr(runs, "read_json", lambda path: code)
    monkeypatch.setattr(runs, "read_streams", lambda path: streams)
    monkeypatch.setattr(runs.shutil, "copy", lambda *paths: None)
    keys = set()
    for memory in (1.2, 1.3):
        found = facts | dict(model_config={}, gpu_memory_gb=memory)
        monkeypatch.setattr(runs, "read_facts", lambda path, found=found: dict(found))
        keys.update(program.key for program in runs.probe([runs.Program("base", [])] * 2))
    assert len(keys) == 1


def jobs_in(directory, n):
    return [(runs.Program("base", []), directory / str(i), []) for i in range(n)]


def test_each_run_uses_a_free_gpu(tmp_path, monkeypatch):
    """The first run needs as much time as all other runs together.

    Therefore, one of the two GPUs does the first run, and the other GPU does all other runs.
    """
    gpus = {}
    last_is_finished = threading.Event()

    class Run:
        def __init__(self, command, **_):
            self.i = int(command[-1].name)
            gpus[self.i] = command[command.index("--device") + 1]

        def wait(self):
            if self.i == 0:
                assert last_is_finished.wait(10)
            elif self.i == 4:
                last_is_finished.set()
            return 0

    monkeypatch.setattr(runs.subprocess, "Popen", Run)
    monkeypatch.setattr(runs, "count_gpus", lambda: 2)
    runs.train(jobs_in(tmp_path, 5), 2)
    assert {*gpus.values()} == {"cuda:0", "cuda:1"}
    assert gpus[0] not in {gpus[i] for i in range(1, 5)}


def test_ctrl_c_while_a_process_is_created(tmp_path, monkeypatch):
    """experiment.py terminates the process that was just created, and starts no other process."""
    processes = []

    class Run:
        def __init__(self, *_, **__):
            processes.append(self)
            self.is_terminated = threading.Event()
            time.sleep(0.2)  # simulates the time that it takes to create a process

        def terminate(self):
            self.is_terminated.set()

        def wait(self):
            return 0 if self.is_terminated.wait(2) else 1

    def press_ctrl_c(*_):
        while not processes:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.subprocess, "Popen", Run)
    monkeypatch.setattr(runs, "tqdm", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        runs.train(jobs_in(tmp_path, 2), 1)
    assert [run.is_terminated.is_set() for run in processes] == [True]


def test_only_a_change_with_a_verdict_can_be_confirmed():
    """--confirm needs an earlier verdict about the same change.

    Without this check, an edited change would look confirmed after a single experiment.
    """
    config = lab.ExperimentConfig(confirm=True, seeds=4, base_seeds=8)
    ledger = [dict(keys=["base", "changed"], last_seed=8, p_value=0.1), dict(verdict="failed")]
    assert choose_seeds(["base", "changed"], config, ledger) == (range(9, 17), range(9, 13))
    with pytest.raises(UserError, match="^--confirm: this change has no verdict"):
        choose_seeds(["base", "edited"], config, ledger)


def test_a_ledger_with_half_a_line(tmp_path, capsys):
    """The last line is incomplete if the program was killed, or if the disk was full.

    The next entry replaces the incomplete line.
    """
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"change": "a"}\n{"chan')
    assert read_ledgers([path, tmp_path / "missing.jsonl"]) == [dict(change="a")]
    assert capsys.readouterr().out == f"note: {path}: skips an incomplete last line\n"
    add_entry(path, dict(change="b"))
    assert read_ledgers([path]) == [dict(change="a"), dict(change="b")]
    path.write_text('{"chan\n{"change": "b"}\n')
    with pytest.raises(UserError, match="ledger.jsonl: is damaged .*; remove the line"):
        read_ledgers([path])


def test_nan_is_null_in_the_ledger(tmp_path):
    """If all losses are equal, the p-value is NaN. JSON has no NaN, so the ledger contains null."""
    path = tmp_path / "ledger.jsonl"
    entry = dict(keys=["base", "a"], change="a", time_ratio=math.inf)
    add_entry(path, entry | compare_losses([1.0, 1.0], [1.0, 1.0], 0.01))
    add_entry(path, dict(keys=["base", "b"], change="b", verdict="better", p_value=0.01))
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    equal, better = read_ledgers([path])
    assert equal["verdict"] == "equal" and equal["p_value"] is equal["time_ratio"] is None
    assert discoveries_as_lines([equal, better])[1:] == ["  1.0%  b"]


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
    """Creates a git repository with a copy of the program. Returns the directory of the repository.

    The parent directory contains `python`, an executable with which experiment.py starts runs fast.
    """
    lab = tmp_path_factory.mktemp("lab")
    directory = lab / "clone"
    directory.mkdir()
    git(directory, "init")
    git(directory, "commit", "--allow-empty", "-m", "from before part 24")
    copy_program(directory)
    (directory / "input.txt").write_bytes((ROOT / "input.txt").read_bytes()[:20_000])
    (directory / "experiments").mkdir()
    for path in (*ROOT.glob("experiments/*.py"), ROOT / "plaingpt/gpt2.tiktoken"):
        shutil.copy(path, directory / path.relative_to(ROOT))
    (directory / ".gitignore").write_text("/log\n__pycache__/\n*.json\n")
    (directory / "log").symlink_to(tmp_path_factory.mktemp("larger-disk"))
    git(directory, "add", ".")
    git(directory, "commit", "-m", "base")
    with forking_python() as python:
        (lab / "python").symlink_to(python)
        yield directory


def experiment(clone, verdict, *flags, old=None, new=None, file="model.py", more=()):
    """Replaces `old` by `new` in a file, runs experiment.py, and undoes the edit.

    verdict: the expected verdict. Returns the content of the file of --json.
    """
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
            "--at_once",
            1,
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
    assert json.loads(printed) == found
    assert re.search(rf": {verdict}(, \w+)?; ", line) or verdict == "failed", out
    assert found["verdict"] == verdict
    assert not git(clone, "status", "--short") and git(clone, "worktree", "list").count("\n") == 1
    return found


def run_names(clone):
    return sorted(path.name for path in clone.glob("log/experiments/runs/*"))


@pytest.mark.slow
def test_an_experiment_and_what_later_ones_use_again(clone):
    rate = "groups, lr=learning_rate, betas"  # AdamW's learning rate, for example for embeddings
    found = experiment(clone, "worse", old=rate, new=rate.replace("lr=", "lr=0.01 * "))
    assert found["n"] == 2 and found["time_ratio"] > 0
    assert len(run_names(clone)) == 4 and found["difference"] > 0.1 and found["p_value"] > 0.9
    changed = clone / "log/experiments/runs" / f"{found['keys'][1]}-1"
    assert "groups, lr=0.01 * learning" in (changed / "changes.patch").read_text()
    # If a patch contains the same change, experiment.py uses the finished runs again.
    written = (changed / "log.txt").stat().st_mtime_ns
    text = (clone / "model.py").read_text()
    (clone / "model.py").write_text(text.replace(rate, rate.replace("lr=", "lr=0.01 * ")))
    (clone / "log" / "my.patch").write_text(git(clone, "diff"))
    (clone / "model.py").write_text(text)
    again = experiment(clone, "worse", "log/my.patch")
    assert again["losses"] == found["losses"]
    assert (changed / "log.txt").stat().st_mtime_ns == written
    # These flags repeat the default and name the same device, so the change does nothing.
    found = experiment(clone, "equal", more=["--", "--weight_decay", "0.1", "--device", "cpu:0"])
    assert "the change does nothing" in found["reason"] and len(run_names(clone)) == 4
    # With --seeds 3, only the third run of the baseline is missing. The change renames a variable.
    # The three runs of the change are new, but have the same losses as the baseline.
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
    assert found["difference"] == 0 and found["half"] > 0
    assert found["n"] == found["base_n"] == 3
    assert len(run_names(clone)) == 8
    # experiment.py keeps only the models of seed 1.
    models = (clone / "log/experiments/runs").glob("*/model_*.pt")
    assert {path.parent.name.rpartition("-")[2] for path in models} == {"1"}
    # A confirmation uses new seeds: the first one follows the last seed of both programs.
    # --base_seeds is the number of runs of the baseline.
    confirm = ["--confirm", "--base_seeds", 3, "--why", "it was worse"]
    found = experiment(clone, "worse", *confirm, "log/my.patch")
    assert (found["n"], found["base_n"], found["last_seed"]) == (2, 3, 6)
    assert {f"{found['keys'][1]}-{seed}" for seed in (4, 5)} <= {*run_names(clone)}
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


@pytest.mark.slow
def test_a_commit_trains_nothing_again(clone):
    """Committing a page, a test or a requirement does not change the keys of the programs.

    If the user commits a change, the runs of this change become the runs of the next base.
    """
    names = ["README.md", "tests/test_idea.py", "requirements.txt"]
    (clone / "tests").mkdir(exist_ok=True)
    for name in names:
        (clone / name).write_text("x = 1\n")
    rate = "groups, lr=learning_rate, betas"
    try:
        git(clone, "add", *names)
        git(clone, "commit", "-m", "write a page")
        found = experiment(clone, "worse", old=rate, new=rate.replace("lr=", "lr=0.02 * "))
        n_runs = len(run_names(clone))
        text = (clone / "model.py").read_text()
        (clone / "model.py").write_text(text.replace(rate, rate.replace("lr=", "lr=0.02 * ")))
        git(clone, "commit", "--all", "-m", "a change")
        back = experiment(clone, "better", old="lr=0.02 * ", new="lr=")
        assert back["keys"] == found["keys"][::-1] and back["base_losses"] == found["losses"]
        assert len(run_names(clone)) == n_runs
    finally:
        git(clone, "reset", "--hard", "HEAD~2")


EASY = "    n_sequences = max(1, min(config.val_tokens // T, loader.lengths[0]))\n"


@pytest.mark.slow
def test_what_a_change_says_of_itself_does_not_matter(clone):
    """A change of the validation code changes the losses in the log, but not the verdict.

    A new module is a part of the program, even if its file name is not ASCII, and git quotes the
    name. experiment.py ignores the user's git settings, and the link with which Emacs locks a file.
    """
    (clone / UNTRACKED[1]).write_text("x = 1\n")
    (clone / UNTRACKED[2]).symlink_to("me@host.1234")
    for setting in ("diff.noprefix true", "diff.external true", "color.ui always"):
        git(clone, "config", *setting.split())
    easier = dict(file="train_gpt2.py", old=EASY, new="    n_sequences = 1\n")
    found = experiment(clone, "equal", "--delta", 0.5, **easier)
    assert found["difference"] == 0 and found["n"] == 2


@pytest.mark.slow
def test_a_model_that_sees_later_tokens(clone):
    causal = "causal = mask is None and T > 1"
    found = experiment(clone, "invalid", old=causal, new="causal = False")
    assert found["reason"].startswith("in the change, later tokens change the logits ")
    assert len(found["losses"]) == 2  # the JSON still contains the losses, for people to see


@pytest.mark.slow
def test_runs_that_do_not_compare(clone):
    found = experiment(clone, "failed", more=["--", "--tokenizer", "gpt2"])
    reason = "the losses are not comparable: the change uses a different "
    assert found["reason"] == f"{reason}tokenizer"


@pytest.mark.slow
def test_other_training_data_and_longer_runs_are_changes(clone):
    """experiment.py computes the losses of both programs on the validation data of the baseline."""
    (clone / "log" / "b.txt").write_text((ROOT / "input.txt").read_text()[-20_000:])
    flags = "--data input.txt log/b.txt=2 --val_tokens 64 --max_steps 12".split()
    found = experiment(clone, "equal", "--delta", 9, more=["--", *flags])
    reason = "; trained on 2.00 times as many tokens; trained on different data"
    assert found["reason"].endswith(reason) and found["difference"] < 0


@pytest.mark.slow
def test_a_run_that_ends_early_is_named(clone):
    flags = f"{FLAGS} --max_minutes 1e-4"
    found = experiment(clone, "failed", "--flags", flags, more=["--", "--weight_decay", "0.2"])
    assert re.fullmatch(r".* ended before its last step; see output.txt", found["reason"])


@pytest.mark.slow
def test_losses_stay_in_the_ledger_if_one_is_not_finite(clone):
    logits = "        return self.lm_head(x)\n"
    nan = ' * (1.0 if self.training else float("nan"))\n'
    found = experiment(clone, "failed", old=logits, new=logits[:-1] + nan)
    assert found["reason"] == "the loss of a run is not finite; give a lower --max_lr"
    assert found["losses"] == [None, None] and min(found["base_losses"]) > 0


@pytest.mark.slow
def test_the_best_rate_of_each_program(clone):
    """experiment.py does not choose a learning rate at which training diverges."""
    found = experiment(
        clone, "equal", "--delta", 9, "--rates", 1e11, 4e-3, more=["--", "--weight_decay", "0.2"]
    )
    run = clone / "log/experiments/runs" / f"{found['keys'][1]}-1"
    assert json.loads((run / "run.json").read_text())["train_config"]["max_lr"] == 4e-3
    assert found["chosen_rates"] == [4e-3, 4e-3]


@pytest.mark.slow
def test_several_sizes_from_the_command_to_the_picture(clone, tmp_path):
    shared = FLAGS.replace("--n_head 2 --n_embd 16 ", "").replace("--max_steps 6 ", "")
    flags = ["--sizes", 32, 96, "--tokens_per_weight", 0.05]
    flags += ["--flags", f"{shared} --val_tokens 512"]
    found = experiment(clone, "worse", *flags, more=["--", "--muon_lr", "1e-4"])
    assert [each["size"] for each in found["by_size"]] == [32, 96] and len(found["keys"]) == 4
    assert found["p_value"] > 0.9 and found["by_size"][1]["worth"][0] < 1
    assert found["losses"] == found["by_size"][1]["losses"] and len(found["losses"]) == 2
    plot.main([str(clone / "o.json"), "--output", str(tmp_path / "a.png")])
    panel = plot.draw_sizes(found, "o.json").axes[0]
    base, _ = (line for container in panel.containers for line in container.lines[:1])
    assert list(base.get_ydata()) == [np.mean(own["base_losses"]) for own in found["by_size"]]
    with pytest.raises(UserError, match="o.json: is not a verdict of experiment.py --sizes"):
        plot.draw_sizes(dict(verdict="better"), "o.json")


def test_what_a_difference_is_worth():
    """If the loss is linear in the logarithm of compute, `worth` is exact at each size."""
    for i in range(3):
        assert worth(i, [1, 4, 32], [3.0, 2.0, 0.5], -0.5) == pytest.approx(2)
    assert worth(1, [1, 4], [3.0, 2.0], 0.5) == pytest.approx(0.5)
    assert worth(1, [1, 4, 16], [2.0, 2.1, 2.1], -0.1) is None
    # The loss hardly falls with compute, so the factors are huge. The second factor would be larger
    # than the largest float.
    factors = [worth(0, [1e9, 2e9, 4e9], [1.30, 1.2999, 1.2998], end) for end in (-0.05, -0.2)]
    assert factors == [pytest.approx(3.3e150, rel=0.1), None]


def test_a_large_factor_is_printed_with_three_digits():
    assert (
        worth_as_text(dict(worth=[1.437, 0.95, 3e150])) == "worth x1.44 [0.95, 3e+150] in compute"
    )


@pytest.mark.parametrize("gain", [0.8, 1.0, 1.3])
def test_what_a_known_gain_is_worth(gain):
    """To reach a loss of the baseline, the change needs 1 / gain times the baseline's compute."""
    rng = np.random.default_rng(0)
    flops = np.array([1.0, 4.0, 12.0, 28.0])
    inside, estimates = [], []
    for _ in range(100):
        base, changed = [], []
        for own in flops:
            base.append(1 + 1.5 * own**-0.15 + rng.normal(0, 0.005, 8))
            changed.append(1 + 1.5 * (own * gain) ** -0.15 + rng.normal(0, 0.005, 4))
        means = [np.mean(losses) for losses in base]
        for i in (1, 2, 3):
            difference, half, _ = welch(base[i], changed[i])
            low, high = (worth(i, flops, means, difference + end) for end in (half, -half))
            inside.append(low <= gain <= high)
            estimates.append(worth(i, flops, means, difference))
    assert np.mean(inside) > 0.9 and np.median(estimates) == pytest.approx(gain, rel=0.03)


@pytest.mark.slow
def test_a_signal_reaches_the_runs_once(clone):
    """A job queue sends SIGTERM only to experiment.py, which sends one SIGTERM to each of its runs.

    The runs then save checkpoints. The file of --json is empty: the older verdict is gone.
    """
    verdict = clone / "log/verdict.json"
    verdict.write_text('{"verdict": "better"}')
    command = [
        "--flags",
        f"{FLAGS} --max_steps 3000",
        "--seeds",
        2,
        "--base_seeds",
        2,
        "--at_once",
        1,
    ]
    command += ["--json", verdict, "--", "--weight_decay", "0.3"]
    flags = dict(cwd=clone, program=clone / "experiment.py", executable=clone.parent / "python")
    (running,) = spawn(*command, **flags)
    lab_directory = clone / "log/experiments/runs"
    before = set(run_names(clone))
    deadline = time.monotonic() + 60
    started = []
    while not started and time.monotonic() < deadline:
        time.sleep(0.1)
        new = set(run_names(clone)) - before
        logs = {name: lab_directory / name / "log.txt" for name in new}
        started = [
            name for name, log in logs.items() if log.exists() and "tok_s" in log.read_text()
        ]
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGINT and verdict.read_text() == ""
    for name in started:
        assert "--resume continues" in (lab_directory / name / "output.txt").read_text()
        assert list((lab_directory / name).glob("model_*.pt"))


@pytest.mark.slow
def test_a_change_that_fails(clone):
    found = experiment(clone, "failed", old="class MLP(", new="class MLP((")
    assert "SyntaxError" in found["reason"] and "n" not in found
    (clone / "idea.py").write_text("def mix(x):\n    1 / 0\n")  # git does not know this file yet
    attention = "        x = x + self.attn("
    mixed = f"        import idea\n{attention.replace('x +', 'idea.mix(x) +')}"
    found = experiment(clone, "failed", old=attention, new=mixed)
    assert "division by zero" in found["reason"]
    place = Path(found["reason"].split(" failed:")[0])
    assert (place / "output.txt").is_file()  # the directory that the reason names still exists
    (clone / "log" / "old.patch").write_text(
        "--- a/model.py\n+++ b/model.py\n@@ -1 +1 @@\n-no such line\n+x\n"
    )
    found = experiment(clone, "failed", "log/old.patch")
    assert "patch failed: model.py:1" in found["reason"]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("my.patch --json my.patch", "--json my.patch: is also an input; give another file"),
        ("--flags 'a=my.txt=2' --json my.txt", "--json my.txt: is also an input; give another"),
        ("--json set/a.json -- --evals core=set,b", "--json set/a.json: is also an input; give"),
        ("--json my.txt -- --data=my.txt", "--json my.txt: is also an input; give another file"),
        ("no.patch --json v.json", "PATCH .No such file or directory.; give a file"),
    ],
)
def test_a_mistake_changes_no_file(flags, sentence, tmp_path, monkeypatch):
    """If a flag is wrong, experiment.py overwrites neither an input nor an older verdict."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    files = ("my.patch", "my.txt", "set/a.json", "v.json")
    for name in files:
        (tmp_path / name).write_text("old")
    monkeypatch.setattr("sys.argv", ["experiment.py", *shlex.split(flags)])
    with pytest.raises(UserError, match=sentence):
        lab.main()
    assert all((tmp_path / name).read_text() == "old" for name in files)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--sizes 64 100", "--sizes: give two or more numbers of channels, each a multiple of 32"),
        ("--sizes 64 96 -- --n_embd 64", "--n_embd: --sizes already sets this value; remove"),
        ("--sizes 64 96 --flags '--max_steps 9'", "--max_steps: --sizes already sets this value"),
        ("--rates 1e-3 -- --max_lr=4e-3", "--max_lr: --rates already sets this value; remove"),
        ("--rates 1e-3 --flags '--max_lr 4e-3'", "--max_lr: --rates already sets this value"),
        ("--sizes 64 96 --rates 1e-3", "git rev-parse"),  # the default --flags
        ("--rates 1e-3 --flags '--max_steps 9' -- --min_lr 1e-4", "git rev-parse"),
    ],
)
def test_a_flag_whose_value_the_program_sets(flags, sentence, monkeypatch):
    """--sizes and --rates replace these values, so the baseline and the change could be the same.

    If experiment.py accepts the flags, its next error message is about the commit "nowhere".
    """
    argv = ["experiment.py", "--base", "nowhere", *shlex.split(flags)]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(UserError, match=f"^{sentence}"):
        lab.main()


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    monkeypatch.setattr("sys.argv", ["experiment.py", "--list"])
    with pytest.raises(UserError, match="^the package scipy is missing: pip install scipy$"):
        lab.main()


def test_an_experiment_that_is_stopped_leaves_no_older_verdict(tmp_path, monkeypatch):
    """At its start, experiment.py replaces the file of --json with an empty file.

    A symbolic link to this file stays a link. A hard link, such as a backup, still contains the
    older verdict.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.json").write_text("old")
    (tmp_path / "backup.json").hardlink_to(tmp_path / "v.json")
    (tmp_path / "link.json").symlink_to("v.json")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "LAB", tmp_path / "lab")
    monkeypatch.setattr(lab, "make_copy", stop)
    monkeypatch.setattr(lab, "remove_copies", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("sys.argv", ["experiment.py", *"--json link.json -- --seed 3".split()])
    with pytest.raises(KeyboardInterrupt):
        lab.main()
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "v.json").read_text() == ""
    assert (tmp_path / "backup.json").read_text() == "old"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, sentence",
    [
        ([], "nothing has changed; edit model.py, give a patch, or give flags after --"),
        (
            ["--base", "nowhere", "--", "--seed", "3"],
            "git rev-parse (fatal: Needed a single revision)",
        ),
        (
            ["--json", "no/v.json", "--", "--seed", "3"],
            "--json no/v.json: cannot write there; give",
        ),
        (["no.patch"], "PATCH (No such file or directory); give a file"),
        (
            ["--flags", "--data 'a", "--", "--seed", "3"],
            "--flags --data 'a (No closing quotation);",
        ),
    ],
)
def test_each_mistake_gives_a_one_sentence_error(clone, flags, sentence):
    _, err = program(*flags, cwd=clone, program=clone / "experiment.py", status=2)
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1


@pytest.mark.slow
def test_the_text_that_everybody_has(tmp_path):
    """write_torch_text.py writes each Python file of torch once, in a shuffled order."""
    path = tmp_path / "torch_py.txt"
    program(path, cwd=tmp_path, program="experiments/write_torch_text.py")
    files = [file.read_bytes() for file in Path(torch.__file__).parent.rglob("*.py")]
    text = path.read_bytes()
    assert len(text) == sum(map(len, files)) > 10**7
    places = [text.find(file) for file in files[:50] if file]
    assert min(places) >= 0 and places != sorted(places)
