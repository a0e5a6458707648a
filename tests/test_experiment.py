"""experiment.py: its arithmetic, its verdicts, and what it uses again."""

import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

from plaingpt.base.errors import UserError
from plaingpt.base.flags import parse_flags
from plaingpt.data.data_sets import Sources
from plaingpt.data.tokenizer import get_tokenizer
from plaingpt.lab import runs
from plaingpt.lab.copies import hash_of_copy
from plaingpt.lab.intervals import (
    compare_losses,
    false_discovery_rates,
    p_value,
    probability_below,
    t95,
    welch_interval,
)
from plaingpt.lab.ledger import add_entry, choose_seeds, luck_as_lines, read_ledgers

import numpy as np
import pytest
import torch
from conftest import ROOT, program, spawn
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


@pytest.mark.parametrize("df", [1, 2, 3.25, 10, 40, 1000])
def test_the_p_value_at_the_ends_of_the_interval(df):
    """2.5 % of the probability lie below -t, and as much above t."""
    assert probability_below(-t95(df), df) == pytest.approx(0.025, rel=0.03)
    assert probability_below(t95(df), df) == pytest.approx(0.975, abs=0.005)


def test_p_values_by_hand():
    base, better = [1.0, 1.1, 1.2], [0.7, 0.8, 0.9]
    t = -0.3 / math.sqrt(0.1**2 / 3 * 2)  # -3.674, with 4 degrees of freedom
    assert p_value(base, better) == pytest.approx(0.0107, abs=2e-4)
    assert t95(4) < -t and p_value(better, base) == pytest.approx(1 - 0.0107, abs=2e-4)
    assert p_value([1.0, 1.0], [1.0, 1.0]) == 0.5
    assert p_value([1.0, 1.0], [0.9, 0.9]) == 0.0


def test_a_loss_that_is_not_a_number_has_no_interval():
    difference, half = welch_interval([1.0, 1.1], [math.nan, 1.0])
    assert math.isnan(difference) and half == math.inf


def test_the_share_of_luck_by_hand():
    """Benjamini and Yekutieli: p x n x (1 + 1/2 + 1/3) / rank, and never above a longer list's."""
    rates = false_discovery_rates([0.5, 0.001, 0.02])
    factor = 3 * (1 + 1 / 2 + 1 / 3)
    assert rates == pytest.approx([factor * 0.5 / 3, factor * 0.001, factor * 0.02 / 2])
    assert false_discovery_rates([0.03, 0.02]) == pytest.approx([0.045, 0.045])
    assert false_discovery_rates([]) == []


@pytest.mark.slow
def test_what_2000_greedy_agents_keep_has_little_luck():
    """Each tries 30 ideas, of which 21 do nothing, and takes each better one as its next base.

    The losses are drawn from those of the ledger. The four runs that selected a base are among its
    eight, as in experiment.py. Of what is kept at 10 %, at most 10 % must be luck.
    """
    noise = []
    for entry in read_ledgers([ROOT / "log/records/ledger.jsonl"]):
        for losses in (entry["base_losses"], entry["losses"]):
            if np.std(losses) < 0.01:  # Lion differs more
                noise += list(
                    (losses - np.mean(losses)) * math.sqrt(len(losses) / (len(losses) - 1))
                )
    rng = np.random.default_rng(0)
    n_agents, n_ideas = 2000, 30
    effects = np.zeros((n_agents, n_ideas))
    effects[:, 21:27] = rng.uniform(0.002, 0.03, (n_agents, 6))
    effects[:, 27:] = -rng.uniform(0.002, 0.03, (n_agents, 3))
    effects = rng.permuted(effects, axis=1)
    level = np.full(n_agents, 1.4)  # the true loss of the base
    base = level[:, None] + rng.choice(noise, (n_agents, 8))
    p = np.empty((n_agents, n_ideas))
    for k in range(n_ideas):
        changed = (level + effects[:, k])[:, None] + rng.choice(noise, (n_agents, 4))
        a, b = base.var(1, ddof=1) / 8, changed.var(1, ddof=1) / 4
        t = (changed.mean(1) - base.mean(1)) / np.sqrt(a + b)
        p[:, k] = probability_below(t, (a + b) ** 2 / (a**2 / 7 + b**2 / 3))
        is_better = p[:, k] < 0.025
        level = np.where(is_better, level + effects[:, k], level)
        new = level[:, None] + rng.choice(noise, (n_agents, 4))
        base = np.where(is_better[:, None], np.hstack([changed, new]), base)
    luck = []
    found = 0
    naive = []
    for own, truth in zip(p, effects):
        kept = np.array(false_discovery_rates(own)) <= 0.1
        luck.append((truth[kept] >= 0).mean() if kept.any() else 0.0)
        found += (truth[kept] < 0).sum()
        better = own < 0.025
        naive.append((truth[better] >= 0).mean() if better.any() else 0.0)
    assert np.mean(luck) <= 0.1 < np.mean(naive)
    assert found > n_agents  # one of three gains, on average


def test_the_list_says_how_many_may_be_luck():
    """A confirmation replaces the p-value that selected its idea, and a later try does not."""
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
    assert luck_as_lines(ledger) == [
        "ideas tried: 3; good ones: 1; the share of luck up to each:",
        "  0.5%  a",
    ]
    assert luck_as_lines(ledger[4:]) == []


def test_the_printed_command_for_look_runs_as_it_is(capsys):
    programs = [lab.Program("base", [], "", key="a"), lab.Program("change", [], "", key="b")]
    lab.show_look(programs, [[1, 2], [1]])
    python, file, *flags = shlex.split(capsys.readouterr().out.splitlines()[-1])
    given = parse_flags(look.__doc__, look.LookConfig, argv=flags, rest="RUN")
    assert (python, file) == ("python", "look.py")
    assert [Path(name).name for name in given["RUN"]] == ["a-1", "b-1"]
    assert given["own_code"] and given["text"] == "MARLOW: The boats came home."


def test_only_a_change_with_a_verdict_can_be_confirmed():
    """Without this, an edit after the verdict would be tried once, and seem to be confirmed."""
    config = lab.ExperimentConfig(confirm=True, seeds=4, base_seeds=8)
    ledger = [dict(keys=["base", "changed"], last_seed=8, p_value=0.1), dict(verdict="failed")]
    assert choose_seeds(["base", "changed"], config, ledger) == (range(9, 17), range(9, 13))
    with pytest.raises(UserError, match="^--confirm: the ledger has no verdict on this change"):
        choose_seeds(["base", "edited"], config, ledger)


def test_the_time_ratio_is_that_of_a_step(tmp_path):
    """A step of the change has twice the tokens, and takes 30 instead of 10 milliseconds."""
    made = []
    for name, tokens, seconds in (("base", 128, 0.01), ("change", 256, 0.03)):
        (tmp_path / name).mkdir()
        lines = []
        for step in range(3):
            lines.append(f"{step} tokens {tokens * (step + 1)}\n{step} tok_s {tokens / seconds}\n")
        (tmp_path / name / "log.txt").write_text("".join(lines))
        program = lab.Program(name, [], "")
        made.append(runs.TrainingRun(program, tmp_path / name, ["--seed", "1"]))
    programs = [program for program, _, _ in made]
    assert runs.ratio_of_times(programs, made) == pytest.approx(3)
    assert runs.ratio_of_times(programs, []) is None  # nothing was trained


def test_a_run_depends_on_the_weights_that_it_starts_from(tmp_path):
    """Their name alone does not say it: a run directory gets new checkpoints."""
    (tmp_path / "model_000001.pt").write_bytes(b"one")
    for place in (tmp_path, tmp_path / "model_000001.pt"):
        (tmp_path / "model_000001.pt").write_bytes(b"one")
        before = runs.hash_of_weights(str(place))
        (tmp_path / "model_000001.pt").write_bytes(b"two")
        assert runs.hash_of_weights(str(place)) != before
    assert runs.hash_of_weights(None) == runs.hash_of_weights("gpt2") == ""


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


def test_what_a_run_depends_on(tmp_path):
    """Also a file that it only reads. A commit, a page, a comment and a test change nothing."""
    git(tmp_path, "init")
    for name in ("model.py", "std.py", "std.txt", "README.md", "tests/a.py", "ideas/mix.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "base")
    before = hash_of_copy(tmp_path)
    for name in ("README.md", "tests/a.py", "docs.md"):
        (tmp_path / name).write_text("x = 2\n")
    (tmp_path / "model.py").write_text("x  =  1  # a comment\n")
    git(tmp_path, "add", ".")
    assert hash_of_copy(tmp_path) == before
    hashes = {before}
    for name in ("model.py", "std.py", "std.txt", "ideas/mix.py", "new.py"):
        (tmp_path / name).write_text("x = 3\n")
        git(tmp_path, "add", "--intent-to-add", ".")
        hashes.add(hash_of_copy(tmp_path))
    assert len(hashes) == 6
    (tmp_path / "untracked.txt").write_text("")
    git(tmp_path, "commit", "--all", "-m", "a winner")
    assert hash_of_copy(tmp_path) in hashes - {before}


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
    assert json.loads(printed) == found
    assert re.search(rf": {verdict}(, \w+)?; ", line) or verdict == "failed", out
    assert found["verdict"] == verdict
    assert not git(clone, "status", "--short") and git(clone, "worktree", "list").count("\n") == 1
    return found


def run_names(clone):
    return sorted(path.name for path in clone.glob("log/experiments/runs/*"))


@pytest.mark.slow
def test_an_experiment_and_what_later_ones_use_again(clone):
    rate = "groups, lr=learning_rate, betas"  # AdamW's, for the embeddings
    found = experiment(clone, "worse", old=rate, new=rate.replace("lr=", "lr=0.01 * "))
    assert found["n"] == 2 and found["time_ratio"] > 0 and found["comparisons"] == 1
    assert len(run_names(clone)) == 4 and found["difference"] > 0.1 and found["p_value"] > 0.9
    changed = clone / "log/experiments/runs" / f"{found['keys'][1]}-1"
    assert "groups, lr=0.01 * learning" in (changed / "changes.patch").read_text()
    facts = json.loads((changed / "run.json").read_text())
    # No run has the sealed part. Both parts together are the text.
    (place,) = facts["train_config"]["data"]
    sealed = list((clone / "log/experiments/sealed").glob("*/input.txt"))
    assert len(sealed) == 1 and "sealed" not in place
    text = (clone / "input.txt").read_bytes()
    assert Path(place).read_bytes() + sealed[0].read_bytes() == text
    assert len(sealed[0].read_bytes()) == len(text) // 10
    # The same change as a patch, with another layout: nothing is trained again.
    written = (changed / "log.txt").stat().st_mtime_ns
    text = (clone / "model.py").read_text()
    layout = "  # slow\n            groups, lr=0.01*learning_rate, betas"
    (clone / "model.py").write_text(text.replace(rate, layout))
    (clone / "log" / "my.patch").write_text(git(clone, "diff"))
    (clone / "model.py").write_text(text)
    again = experiment(clone, "worse", "log/my.patch")
    assert again["losses"] == found["losses"] and again["time_ratio"] is None
    assert again["comparisons"] == 2 and (changed / "log.txt").stat().st_mtime_ns == written
    # The flags give what is the default, and the same device: no run would differ.
    found = experiment(clone, "equal", more=["--", "--weight_decay", "0.1", "--device", "cpu:0"])
    assert "the change does nothing" in found["reason"] and len(run_names(clone)) == 4
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
    assert len(run_names(clone)) == 8
    # Only the models of the first seed stay.
    models = (clone / "log/experiments/runs").glob("*/model_*.pt")
    assert {path.parent.name.rpartition("-")[2] for path in models} == {"1"}
    # A confirmation takes seeds after those of both programs, and more runs of the base if asked.
    confirm = ["--confirm", "--base_seeds", 3, "--why", "it was worse"]
    found = experiment(clone, "worse", *confirm, "log/my.patch")
    assert (found["n"], found["base_n"], found["last_seed"]) == (2, 3, 6)
    assert found["comparisons"] == 3
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
    """Neither that of a page, nor that of a change: its runs are those of the next base."""
    (clone / "README.md").write_text("A page.\n")
    rate = "groups, lr=learning_rate, betas"
    try:
        git(clone, "add", "README.md")
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


# Reads every text as the same few ids.
OTHER_IDS = json.dumps(
    {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "a"},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [],
        "decoder": None,
    }
)
EASY = "    n_sequences = max(1, min(config.val_tokens // T, loader.lengths[0]))\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, old, new",
    [
        (  # another loss in the log
            "train_gpt2.py",
            "    bits_per_byte = text_nats",
            "    nats = 0.9 * nats\n    bits_per_byte = text_nats",
        ),
        ("train_gpt2.py", EASY, "    n_sequences = 1\n"),  # an easier validation
        (  # what a change prints is no answer to the referee
            "model.py",
            "        T = idx.size(1)\n",
            '        T = idx.size(1)\n        print("T is", T)\n',
        ),
    ],
)
def test_what_a_change_says_of_itself_does_not_matter(clone, file, old, new):
    found = experiment(clone, "equal", "--delta", 0.5, file=file, old=old, new=new)
    assert found["difference"] == 0 and found["n"] == 2


@pytest.mark.slow
def test_a_model_that_sees_later_tokens(clone):
    causal = "causal = mask is None and T > 1"
    found = experiment(clone, "invalid", old=causal, new="causal = False")
    assert found["reason"].startswith("in the change, a position sees later tokens: ")
    assert len(found["losses"]) == 2  # for a person to see


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, sentence",
    [
        (
            "return load_model(place, cls)",
            "model, tokenizer = load_model(place, cls); tokenizer.source = "
            + repr(OTHER_IDS)
            + "; return model, tokenizer",
            "the change gives another tokenizer, so its losses do not compare",
        ),
        (  # the error comes from the process with the change
            "            return self.logits(x), None  # (B, T, vocab_size)\n",
            "            return self.logit(x), None  # (B, T, vocab_size)\n",
            "the referee cannot measure a model (AttributeError: 'GPT' object has no attribute",
        ),
    ],
)
def test_a_model_that_cannot_be_measured(clone, old, new, sentence):
    assert experiment(clone, "failed", old=old, new=new)["reason"].startswith(sentence)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--block_size", "32"], "the change has another block_size; leave this out"),
        (["--total_batch_size", "256"], "; for equal tokens, add --max_steps 20 behind --"),
        (["--data", "log/copy.txt"], "log/copy.txt: has 100% of the text that is sealed"),
    ],
)
def test_runs_that_do_not_compare(clone, flags, reason):
    (clone / "log" / "copy.txt").write_bytes((clone / "input.txt").read_bytes()[-9000:] * 2)
    assert reason in experiment(clone, "failed", more=["--", *flags])["reason"]


@pytest.mark.slow
def test_other_training_data_and_longer_runs_are_changes(clone):
    """The referee measures on the sealed part of the data of the base."""
    (clone / "log" / "b.txt").write_text((ROOT / "input.txt").read_text()[-20_000:])
    flags = ["--data", "input.txt", "log/b.txt=2", "--val_tokens", "256"]
    found = experiment(clone, "equal", "--delta", 9, more=["--", *flags])
    assert found["reason"].endswith("; other training data") and found["difference"] != 0
    run = clone / "log/experiments/runs" / f"{found['keys'][1]}-1"
    items = json.loads((run / "run.json").read_text())["train_config"]["data"]
    assert [Path(item).name for item in items] == ["input.txt=1", "b.txt=2"]
    found = experiment(clone, "equal", "--delta", 9, more=["--", "--max_steps", "80"])
    assert found["reason"].endswith("; trained on 2.00 times the tokens")
    assert found["difference"] < 0


def test_the_parts_of_shards(shards, tmp_path):
    """Each has fewer shards than the meta.json of the whole says."""
    (shards / "meta.json").write_text('{"tokenizer": "bytes", "shards": 4}')
    referee = look.import_file(ROOT / "experiments/referee.py", "referee")
    parts = referee.split_set(shards, get_tokenizer("bytes"), None, tmp_path)
    train, val = Sources([parts["train"]]).open(get_tokenizer("bytes"), 16)[0]
    assert len(train) + len(val) == 1001 + 333 + 2047
    assert len(referee.open_whole(parts["sealed"], get_tokenizer("bytes"), 16, 256)) == 700


@pytest.mark.slow
def test_losses_stay_in_the_ledger_if_one_is_not_finite(clone):
    logits = "        return self.lm_head(x)\n"
    nan = ' * (1.0 if self.training else float("nan"))\n'
    found = experiment(clone, "failed", old=logits, new=logits[:-1] + nan)
    assert found["reason"] == "the loss of a run is not finite; give a lower --max_lr"
    assert found["losses"] == [None, None] and min(found["base_losses"]) > 0


@pytest.mark.slow
def test_the_best_rate_of_each_program(clone):
    """A rate that diverges is not chosen."""
    found = experiment(
        clone, "equal", "--delta", 9, "--rates", 1e11, 4e-3, more=["--", "--weight_decay", "0.2"]
    )
    run = clone / "log/experiments/runs" / f"{found['keys'][1]}-1"
    assert json.loads((run / "run.json").read_text())["train_config"]["max_lr"] == 4e-3
    assert found["chosen_rates"] == [4e-3, 4e-3]


@pytest.mark.slow
def test_a_ladder_from_the_command_to_the_verdict(clone):
    """With few steps at each size, so that the gain may be anything. A worse rate is worse."""
    flags = ["--sizes", 32, 64, 96, 128, "--tokens_per_weight", 0.05, "--flags"]
    text = FLAGS.replace("input.txt", str(ROOT / "input.txt"))
    flags.append(text.replace("--n_head 2 --n_embd 16", "").replace("--max_steps 40", ""))
    few = dict(file="plaingpt/lab/ladder.py", old="MIN_STEPS = 300", new="MIN_STEPS = 1")
    found = experiment(clone, "worse", *flags, **few, more=["--", "--muon_lr", "1e-4"])
    assert found["trend"] in ("grows", "fades", "steady", "open") and found["p_value"] > 0.9
    assert len(found["keys"]) == 8 and found["time_ratio"] > 0
    for losses in (found["base_losses"], found["losses"]):
        assert [len(each) for each in losses] == [2, 2, 2, 2]


@pytest.mark.slow
def test_names_of_untracked_files_and_settings_of_git(clone):
    """Emacs locks a file with a link that leads nowhere. git quotes names that are not ASCII."""
    (clone / UNTRACKED[1]).write_text("x = 1\n")
    (clone / UNTRACKED[2]).symlink_to("me@host.1234")
    for setting in ("diff.noprefix true", "diff.external true", "color.ui always"):
        git(clone, "config", *setting.split())
    line = "class MLP("
    found = experiment(clone, "equal", "--delta", 9, old=line, new=f"# a comment\n{line}")
    assert found["difference"] == 0 and found["n"] == 2  # a new module is a part of the program


def test_a_free_gpu_takes_the_next_run(tmp_path, monkeypatch):
    """The first run takes longer than the three others, which come one after the other."""
    monkeypatch.setattr(runs, "LAB", tmp_path)
    monkeypatch.setattr(runs, "count_gpus", lambda: 2)
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
    base = lab.Program("base", [], "")
    runs.train([runs.TrainingRun(base, tmp_path / str(i), []) for i in range(4)])
    assert devices["1"] == devices["2"] == devices["3"] != devices["0"]


def test_small_runs_share_a_gpu(tmp_path, monkeypatch):
    """Four runs fit into 80 GB if each takes 15 GB, and CUDA 1 GB for each."""
    monkeypatch.setattr(runs, "LAB", tmp_path)
    monkeypatch.setattr(runs, "count_gpus", lambda: 1)
    monkeypatch.setattr(runs, "count_cores", lambda: 8)
    properties = types.SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    base = lab.Program("base", [], "", dict(gpu_gb=15.0))
    small = replace(base, facts=dict(gpu_gb=1.0))
    assert runs.count_slots([base]) == 4 == runs.count_slots([small, base])
    assert runs.count_slots([small]) == 8  # each has a core
    assert runs.count_slots([replace(base, facts=None)]) == 1  # the probe itself
    assert runs.count_slots([replace(base, runs_per_gpu=2)]) == 2
    together = threading.Barrier(4)  # breaks unless four runs wait at the same time

    class Run:
        def __init__(self, command, **_):
            assert command[command.index("--device") + 1] == "cuda:0"

        def wait(self):
            together.wait(60)
            return 0

    monkeypatch.setattr(subprocess, "Popen", Run)
    runs.train([runs.TrainingRun(base, tmp_path / str(i), []) for i in range(8)])


@pytest.mark.slow
def test_a_signal_reaches_the_runs_once(clone):
    """A queue sends SIGTERM only to the program. A run that gets two signals saves nothing.

    There is no verdict then, also not an older one.
    """
    verdict = clone / "log/verdict.json"
    verdict.write_text('{"verdict": "better"}')
    command = ["--flags", f"{FLAGS} --max_steps 3000", "--seeds", 2, "--base_seeds", 2]
    command += ["--json", verdict, "--", "--weight_decay", "0.3"]
    flags = dict(cwd=clone, program=clone / "experiment.py")
    (running,) = spawn(*command, **flags)  # its runs are new processes, which signals reach
    lab_directory = clone / "log/experiments/runs"
    before = set(run_names(clone))
    deadline = time.monotonic() + 60
    started = []
    while len(started) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        new = set(run_names(clone)) - before
        started = [name for name in new if (lab_directory / name / "log.txt").exists()]
    time.sleep(1)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGINT and verdict.read_text() == ""
    for name in started:
        assert "is saved" in (lab_directory / name / "output.txt").read_text()
        assert list((lab_directory / name).glob("model_*.pt"))


@pytest.mark.slow
def test_a_change_that_fails(clone):
    found = experiment(clone, "failed", old="x = x + self.attn(", new="x = x + self.atn(")
    assert "has no attribute 'atn'" in found["reason"] and "n" not in found
    place = Path(found["reason"].split(" failed:")[0])
    assert (place / "output.txt").is_file()  # the place that it names is still there
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


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("my.patch --json my.patch", "--json my.patch: is also an input; give another file"),
        ("--flags 'a=my.txt=2' --json my.txt", "--json my.txt: is also an input; give another"),
        ("--json set/a.json -- --evals core=set,b", "--json set/a.json: is also an input; give"),
        ("--json my.txt -- --data=my.txt", "--json my.txt: is also an input; give another file"),
        ("no.patch --json v.json", "no.patch: no such patch; give a file"),
    ],
)
def test_a_mistake_changes_no_file(flags, sentence, tmp_path, monkeypatch):
    """Neither an input nor an older verdict."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    files = ("my.patch", "my.txt", "set/a.json", "v.json")
    for name in files:
        (tmp_path / name).write_text("old")
    monkeypatch.setattr("sys.argv", ["experiment.py", *shlex.split(flags)])
    with pytest.raises(UserError, match=sentence):
        lab.main()
    assert all((tmp_path / name).read_text() == "old" for name in files)


def test_an_experiment_that_is_stopped_leaves_no_older_verdict(tmp_path, monkeypatch):
    """But what has a hard link keeps it, such as a backup."""
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
