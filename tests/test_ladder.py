"""plaingpt/lab/ladder.py: its plan, its arithmetic on simulated ladders, and its verdicts."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

from plaingpt.base.errors import UserError
from plaingpt.lab import ladder_runs
from plaingpt.lab.intervals import t95
from plaingpt.lab.ladder import (
    Comparison,
    Estimate,
    check_ladder,
    check_plan,
    compare_curves,
    describe_trend,
    draw_ladder,
    half_width,
    judge,
    judge_ladder,
    plan_size,
    weigh_sizes,
)
from plaingpt.lab.ledger import entry_as_line
from plaingpt.lab.runs import Program

import numpy as np
import pytest
import torch
from conftest import ROOT

import experiment as lab
import plot
from model import GPT, GPTConfig

SIZES = [64, 96, 128, 160]
PLANS = [plan_size(size, 2, 64, 1024, 256) for size in SIZES]
FLOPS = [plan.flops for plan in PLANS]
X = np.log(np.divide(FLOPS, FLOPS[-1]))
SD = np.full(4, 0.0106)  # of the losses over seeds, measured
UNEVEN = SD * [0.7, 0.7, 1.2, 1.4]
DECADE = math.log(10)
LADDERS = 400

# Losses of the seeds 1 to 3, of runs with 48, 64, 96 and 128 channels.
RECORDED_FLOPS = [80971038720, 225485783040, 996566630400, 2931315179520]
RECORDED_BASE = [
    [2.5277, 2.5415, 2.5249],
    [2.2531, 2.2469, 2.2464],
    [1.8281, 1.8429, 1.8476],
    [1.6569, 1.6363, 1.6334],
]
RECORDED_ROTARY = [
    [2.2193, 2.2243, 2.2298],
    [1.9420, 1.9543, 1.9889],
    [1.6835, 1.7154, 1.7019],
    [1.5587, 1.5634, 1.5915],
]


def true_loss(x):
    """A power law with about the losses that were measured. No parabola has its shape."""
    return 0.9 + 0.75 * np.exp(-0.22 * x)


def simulate(log_m, trend, sd=SD, ratio=1, n=LADDERS):
    """Yields (base, changed) of n ladders, with 8 and 4 runs at each size.

    log_m: at the largest size; trend: its change per decade. sd: of base, at each size; that of the
    change is ratio times it.
    """
    rng = np.random.default_rng(55)
    base_means = true_loss(X)[:, None]
    changed_means = true_loss(X + log_m + trend * X / DECADE)[:, None]
    sd = np.asarray(sd)[:, None]
    for _ in range(n):
        base = base_means + sd * rng.standard_normal((4, 8))
        changed = changed_means + ratio * sd * rng.standard_normal((4, 4))
        yield base, changed


def contains(estimate, truth):
    return abs(estimate.value - truth) <= estimate.half


@pytest.mark.parametrize("n_embd, vocab_size", [(64, 256), (96, 50257)])
def test_a_size_counts_the_flops_of_the_model(n_embd, vocab_size):
    plan = plan_size(n_embd, 3, 64, 1024, vocab_size)
    config = GPTConfig(
        n_layer=3, n_head=plan.n_head, n_embd=n_embd, block_size=64, vocab_size=vocab_size
    )
    assert plan.flops == plan.tokens * GPT(config).flops_per_token()


def test_a_size_by_hand():
    plan = plan_size(128, 2, 64, 1024, 256, tokens_per_weight=2.5)
    assert plan.n_head == 4
    assert plan.weights == 12 * 2 * 128 * 128 + 256 * 128 == 425_984
    assert plan.max_steps == 1040 and plan.warmup_steps == 104
    assert plan.tokens == 1040 * 1024
    assert plan.max_lr == 1.5 / 128
    assert plan.flops == RECORDED_FLOPS[3]


@pytest.mark.parametrize(
    "sizes, sentence",
    [
        ([64, 96, 128], "--sizes 64 96 128: a parabola meets any three points.*at least four"),
        ([64, 128, 96, 160], "96 comes after 128; begin with the smallest"),
        ([64, 96, 96, 160], "96 comes after 96; begin with the smallest"),
        ([48, 64, 96, 128], "48 channels do not make heads of 32; give multiples of 32"),
    ],
)
def test_sizes_that_make_no_ladder_are_refused(sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        check_ladder(sizes)


def test_sizes_with_few_steps_or_little_data_are_refused():
    check_ladder(SIZES)
    check_plan(PLANS, 5, PLANS[-1].tokens)
    with pytest.raises(UserError, match=f"read {PLANS[-1].tokens} tokens.*give a larger --data"):
        check_plan(PLANS, 5, PLANS[-1].tokens - 1)
    short = [plan_size(size, 2, 64, 1024, 256, tokens_per_weight=2.5) for size in SIZES]
    with pytest.raises(UserError, match="280 steps.*below 300.*give --tokens_per_weight 3"):
        check_plan(short, 2.5, 10**9)
    assert plan_size(64, 2, 64, 1024, 256, tokens_per_weight=3).max_steps >= 300


def test_no_change_is_exactly_1():
    for base, _ in simulate(0, 0, n=20):
        found = compare_curves(base, base, FLOPS)
        assert [estimate.m for estimate in found.sizes] == [1, 1, 1, 1]
        assert found.trend.value == 0
        assert judge(found)[0] in ("no gain", "undecided")


def test_the_interval_of_a_size_is_welchs():
    """In units of loss. Over the fall of the curve where m was read, it is one of ln(m)."""
    base, changed = next(simulate(0.2, 0))
    found = compare_curves(base, changed, FLOPS)
    for i in range(4):
        a = np.var(base[i], ddof=1) / 8
        b = np.var(changed[i], ddof=1) / 4
        df = (a + b) ** 2 / (a**2 / 7 + b**2 / 3)
        t = np.interp(df, range(1, 12), [t95(whole) for whole in range(1, 12)])
        half = t * math.sqrt(a + b) / found.falls[i]
        assert found.sizes[i].half == pytest.approx(half)
        assert found.sizes[i].low == pytest.approx(found.sizes[i].m / math.exp(half))
        assert found.sizes[i].high == pytest.approx(found.sizes[i].m * math.exp(half))


@pytest.mark.parametrize(
    "log_m, trend, sd, ratio",
    [
        (0, 0, SD, 1),
        (0.2, 0, SD, 1),
        (0.2, -0.15, SD, 1),
        (0.2, 0.15, SD, 1),
        (0.6, -0.35, SD, 1),
        (0.2, 0, UNEVEN, 1),
        (0.2, -0.15, UNEVEN, 1),
        (0.2, 0, SD, 2),
        (0.2, -0.15, SD, 2),
    ],
)
def test_a_known_multiplier_is_found_with_its_interval(log_m, trend, sd, ratio):
    smallest = 0
    largest = 0
    slope = 0
    for base, changed in simulate(log_m, trend, sd, ratio):
        found = compare_curves(base, changed, FLOPS)
        smallest += contains(found.sizes[0], log_m + trend * found.x[0] / DECADE)
        largest += contains(found.sizes[-1], log_m + trend * found.x[-1] / DECADE)
        slope += contains(found.trend, trend)
    for count in (smallest, largest, slope):
        assert 0.93 <= count / LADDERS <= 0.99


HARM = [0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2]  # of the largest size, in loss


@pytest.mark.parametrize("harm", HARM)
def test_a_change_that_harms_only_the_largest_size_never_helps(harm):
    """The classic picture of a rate that does not transfer. The base falls by 0.09 at the end.

    Without a rule for curves that do not fall, 0.1 gave "grows, x1.22". The change helps the other
    sizes by x1.2.
    """
    verdicts = Counter()
    covered = 0
    for base, changed in simulate(0.2, 0, n=50):
        changed[-1] = base[-1].mean() + harm + 0.0106 * np.resize([-1, 1, 0.5, -0.5], 4)
        found = judge_ladder(base, changed, SIZES, FLOPS, 0.01)
        verdicts[found["verdict"]] += 1
        covered += "multipliers" not in found or found["multipliers"][-1][1] <= 1
    assert verdicts["helps"] == 0 and covered == 50
    if harm >= 0.03:
        assert verdicts["worse"] == 50


def test_the_sign_of_the_difference_where_no_curve_is_read():
    """Also the intervals of these verdicts are right in 95 of 100 ladders."""
    rng = np.random.default_rng(3)
    base_means = np.array([2.07, 1.85, 1.68, 1.60])
    for last, verdict in ((1.70, "worse"), (1.57, "helps"), (1.60, None)):
        changed_means = np.array([1.80, 1.70, 1.56, last])  # it rises from 128 to 160 channels
        verdicts = Counter()
        right = 0
        for _ in range(LADDERS):
            base = base_means[:, None] + 0.004 * rng.standard_normal((4, 8))
            changed = changed_means[:, None] + 0.004 * rng.standard_normal((4, 4))
            found = judge_ladder(base, changed, SIZES, FLOPS, 0.001)
            assert "multipliers" not in found and found["trend"] == "open"
            verdicts[found["verdict"]] += 1
            difference, half = map(
                float, found["reason"].split("differs by ")[1].split(";")[0].split(" ± ")
            )
            right += abs(difference - (last - 1.60)) <= half
        assert 0.92 <= right / LADDERS <= 0.98
        assert verdicts[verdict] == LADDERS or verdict is None and verdicts["undecided"] > 350
    assert found["reason"].startswith(
        "the loss with the change does not fall steadily from 128 to 160 channels (1.5"
    )


@pytest.mark.parametrize(
    "last, verdict", [(1.63, "worse"), (1.655, "worse"), (1.70, "worse"), (1.78, "worse")]
)
def test_the_ladders_of_an_attack(last, verdict):
    """These losses gave x1.22 [1.18, 1.26] and "grows", where the change harms the largest size."""
    base = runs_with([2.07, 1.85, 1.68, 1.60], 0.004, 8)
    found = judge_ladder(base, runs_with([2.05, 1.82, 1.66, last], 0.004, 4), SIZES, FLOPS, 0.01)
    assert found["verdict"] == verdict
    assert "multipliers" not in found or found["multipliers"][-1][2] < 1


def test_losses_that_are_too_far_apart_have_a_verdict():
    """It said "failed", and the losses of all runs were in no ledger."""
    base = runs_with([2.07, 1.85, 1.68, 1.60], 0.004, 8)
    found = judge_ladder(base, runs_with([1.2, 1.0, 0.8, 0.6], 0.004, 4), SIZES, FLOPS, 0.01)
    assert (found["verdict"], found["trend"]) == ("helps", "open")
    assert found["reason"] == (
        "the losses of both programs are too far apart for these sizes, so no curve is read; at "
        "160 channels, the loss differs by -1.0000 ± 0.0060"
    )
    line = entry_as_line(dict(found, date="today", change="mine", sizes=SIZES))
    assert line.startswith("today  mine: helps, open; the losses of both")


def compare_lines(base, changed):
    """As compare_curves, but with straight lines between the mean losses -> Comparison."""
    base_means = base.mean(1)
    changed_means = changed.mean(1)
    log_m = np.empty(4)
    x_changed = np.empty(4)
    falls = np.empty(4)
    for i in range(4):
        loss = changed_means[i]
        if changed_means[-1] <= base_means[i] <= changed_means[0]:
            loss = base_means[i]
        x_changed[i] = np.interp(-loss, -changed_means, X)  # minus, because interp wants a rise
        log_m[i] = np.interp(-loss, -base_means, X) - x_changed[i]
        section = np.clip(np.searchsorted(X, x_changed[i]), 1, 3)
        fall = changed_means[section - 1] - changed_means[section]
        falls[i] = fall / (X[section] - X[section - 1])
    variances = np.array([base.var(1, ddof=1), changed.var(1, ddof=1)])
    counts = np.array([[8] * 4, [4] * 4])
    slope = weigh_sizes(x_changed, falls)

    def estimate(weights):
        half = half_width(weights / falls, variances, counts)
        return Estimate(float(weights @ log_m), half, weights / falls)

    sizes = [estimate(weights) for weights in np.eye(4)]
    trend = estimate(slope * DECADE)
    return Comparison(sizes, trend, x_changed, falls, variances, counts)


def test_straight_lines_instead_of_parabolas_find_a_false_trend():
    """Trap 1. The curve of loss is bent, and most between the two smallest sizes."""
    fades = Counter()
    for base, changed in simulate(0.4, 0):
        curves = compare_curves(base, changed, FLOPS)
        lines = compare_lines(base, changed)
        for way, found in (("curves", curves), ("lines", lines)):
            fades[way] += describe_trend(found.trend) == "fades"
    assert fades["curves"] <= 0.05 * LADDERS
    assert fades["lines"] > 0.3 * LADDERS


def test_a_trend_over_the_compute_of_base_is_wrong():
    """Trap 2. The distance was read at the compute of the changed model, which is less."""
    right = 0
    wrong = 0
    for base, changed in simulate(0.6, -0.35):
        found = compare_curves(base, changed, FLOPS)
        right += contains(found.trend, -0.35)
        log_m = np.array([estimate.value for estimate in found.sizes])
        slope = weigh_sizes(found.x + log_m, found.falls)
        weights = slope * DECADE / found.falls
        half = half_width(weights, found.variances, found.counts)
        wrong += abs(slope @ log_m * DECADE - -0.35) <= half
    assert right >= 0.93 * LADDERS
    assert wrong < 0.75 * LADDERS


def test_one_standard_deviation_for_all_sizes_is_too_small():
    """Trap 3. The largest sizes differ most from seed to seed, and those of the change, too."""
    right = 0
    wrong = 0
    for base, changed in simulate(0.2, 0, UNEVEN, ratio=2):
        found = compare_curves(base, changed, FLOPS)
        right += contains(found.sizes[-1], 0.2)
        pooled = np.average(found.variances, weights=found.counts - 1)
        sd = math.sqrt(pooled * (1 / 8 + 1 / 4))
        half = t95(4 * 7 + 4 * 3) * sd / found.falls[-1]
        wrong += abs(found.sizes[-1].value - 0.2) <= half
    assert right >= 0.93 * LADDERS
    assert wrong < 0.88 * LADDERS


def test_one_rate_for_all_sizes_makes_a_false_trend():
    """Trap 5. A change without a gain, that only makes a model less sensitive to its rate.

    The best rate is 1.5 / channels, as measured. Away from it, the loss of base rises by 0.12 times
    the square of the logarithm of the factor (measured), that of the change by a quarter of this.
    """
    verdicts = dict(right=Counter(), wrong=Counter())
    best = np.array([1.5 / size for size in SIZES])
    rates = dict(right=np.array([plan.max_lr for plan in PLANS]), wrong=np.full(4, best[0]))
    for base, changed in simulate(0, 0):
        for way, rate in rates.items():
            penalty = 0.12 * np.log(rate / best)[:, None] ** 2
            found = compare_curves(base + penalty, changed + penalty / 4, FLOPS)
            verdicts[way][describe_trend(found.trend)] += 1
    assert verdicts["right"]["grows"] <= 0.05 * LADDERS
    assert verdicts["wrong"]["grows"] > 0.9 * LADDERS


def test_recorded_runs_of_rotary_fade():
    found = compare_curves(RECORDED_BASE, RECORDED_ROTARY, RECORDED_FLOPS)
    multipliers = [estimate.m for estimate in found.sizes]
    # Another program, with parabolas that miss the means, has found these figures.
    assert multipliers == pytest.approx([2.88, 2.75, 2.36, 1.89], rel=0.06)
    assert found.trend.low < math.exp(-0.27) < found.trend.high
    assert judge(found)[0] == "helps" and describe_trend(found.trend) == "fades"


def test_a_size_without_a_gain_does_not_change_the_others():
    """Parabolas without a correction miss the losses of all sizes then, and gave x1.17 for x1.1."""
    base = runs_with(true_loss(X), 0.005, 8)
    changed = runs_with(true_loss(X + math.log(1.1)) + [0.12, 0, 0, 0], 0.005, 4)
    found = compare_curves(base, changed, FLOPS)
    assert found.sizes[0].m < 0.9
    assert [each.m for each in found.sizes[1:]] == pytest.approx([1.1, 1.1, 1.1], abs=0.04)


WIDE = (0.3, 0.4)  # value and half: the interval contains 0
UP = (0.3, 0.1)
DOWN = (-0.3, 0.1)


@pytest.mark.parametrize(
    "largest, verdict",
    [
        (UP, "helps"),
        ((0.05, 0.04), "no gain"),  # e^0.09 is below 1.1
        ((0.05, 0.046), "helps"),  # e^0.096 is above 1.1
        (DOWN, "worse"),
        (WIDE, "undecided"),
    ],
)
def test_verdicts(largest, verdict):
    """The verdict is about the largest size, whatever the others and the trend say."""
    weights = np.full(4, 1.0)
    sizes = [Estimate(*UP, weights)] * 3 + [Estimate(*largest, weights)]
    variances = np.full((2, 4), 0.01)
    counts = np.array([[8] * 4, [4] * 4])
    trend = Estimate(*UP, weights)
    said, reason = judge(Comparison(sizes, trend, None, None, variances, counts))
    assert said == verdict and lab.STATUS[said] in (0, 3, 4, 5)
    assert reason and ("may decide" in reason) == (verdict == "undecided")


@pytest.mark.parametrize(
    "trend, word",
    [(UP, "grows"), (DOWN, "fades"), (WIDE, "open"), ((0.03, 0.05), "steady")],
)
def test_the_word_for_a_trend(trend, word):
    assert describe_trend(Estimate(*trend, None)) == word


def runs_with(means, sd, n):
    """n losses at each size that have exactly this mean and standard deviation."""
    pattern = np.arange(n) - (n - 1) / 2
    pattern = pattern / pattern.std(ddof=1)
    return [mean + sd * pattern for mean in means]


@pytest.mark.parametrize("log_m, sd, which", [(0.08, 0.0106, "the change"), (0.07, 0.02, "both")])
def test_undecided_says_how_many_runs_would_decide(log_m, sd, which):
    """So many runs with the same means and standard deviations do decide, and one less does not."""
    means = [true_loss(X), true_loss(X + log_m)]

    def verdict(n_base, n):
        base = runs_with(means[0], sd, n_base)
        changed = runs_with(means[1], sd, n)
        return judge(compare_curves(base, changed, FLOPS))

    said, reason = verdict(8, 4)
    assert said == "undecided"
    assert reason.endswith(" may decide") and ("--base_seeds" in reason) == (which == "both")
    needed = int(reason.split("--seeds ")[1].split()[0])
    n_base = 8 if which == "the change" else needed
    assert verdict(n_base, needed)[0] != "undecided"
    assert verdict(n_base - (which == "both"), needed - 1)[0] == "undecided"


def programs_with(changed_shape=(), **facts):
    """The base and the change, as `probe` leaves them."""
    shape = dict(n_layer=2, n_embd=128, n_head=2, block_size=64, vocab_size=256, dropout=0.0)
    common = dict(total_batch_size=1024, rampup_steps=0, rampup_batch_size=32768)
    base = Program("base", ["--seed", "5"], "", common | dict(model_config=shape), "a")
    changed = common | facts | dict(model_config=shape | dict(changed_shape))
    return [base, Program("change", ["--seed", "5", "--optimizer", "adamw"], "", changed, "b")]


@pytest.mark.parametrize(
    "settings, more, sentence",
    [
        (dict(rates=[1.0]), [], "--rates: are for one size; give --rate_factors"),
        (dict(flags="--n_embd=64"), [], "--n_embd: follows from --sizes; leave it out"),
        (dict(flags="--data a b --max_steps 9"), [], "--max_steps: follows from --sizes"),
        ({}, ["--max_lr", "1"], "--max_lr: follows from --sizes; leave it out"),
    ],
)
def test_flags_that_a_ladder_sets(settings, more, sentence):
    config = lab.ExperimentConfig(sizes=list(SIZES), **settings)
    with pytest.raises(UserError, match=sentence):
        lab.check_ladder_flags(config, config.flags.split(), more)
    config = lab.ExperimentConfig(sizes=list(SIZES))
    lab.check_ladder_flags(config, config.flags.split(), ["--optimizer", "lion"])


def test_a_change_of_the_shape_or_the_batch_has_no_ladder():
    """A larger batch with as many steps reads more tokens than the size has."""
    ladder_runs.check_same_shape(programs_with(dict(dropout=0.1)))
    with pytest.raises(UserError, match="another n_layer, 3 instead of 2, .* without --sizes"):
        ladder_runs.check_same_shape(programs_with(dict(n_layer=3)))
    with pytest.raises(UserError, match="another total_batch_size, 4096 instead of 1024"):
        ladder_runs.check_same_shape(programs_with(total_batch_size=4096))


def test_the_flags_of_a_size(monkeypatch):
    """Each program keeps its own flags. The rate is that of the size times a factor."""
    monkeypatch.setattr(ladder_runs, "probe", lambda programs, sealed: programs)
    base, change = ladder_runs.programs_of_size(
        programs_with(), plan_size(96, 2, 64, 1024, 256), [1.0, 2.0], []
    )
    assert " ".join(base.flags) == (
        "--seed 5 --n_embd 96 --n_head 3 --max_steps 1200 --warmup_steps 120 --max_lr 0.015625"
    )
    assert change.flags[:4] == ["--seed", "5", "--optimizer", "adamw"]
    assert change.flags[-1] == "0.03125"


@pytest.mark.parametrize(
    "best, factors, note",
    [
        ([(1, 1), (1, 1)], [1, 1], ""),
        ([(1, 1), (0.5, 1)], [1, 1], "; rate not transferred"),
        ([(1, 1), (2, 2)], [1, 2], "; rate not transferred"),  # at the edge
    ],
)
def test_the_best_rate_factor_of_each_program(monkeypatch, best, factors, note):
    """The losses are parabolas over the factor. A rate that diverges has an infinite loss."""

    def programs_of_size(programs, size, given, sealed):
        return PLANS.index(size), given[0]

    def try_runs(pairs, sealed):
        found = []
        for k, factor in pairs:
            losses = [(factor - own[k]) ** 2 for own in best]
            found.append([math.inf if factor == 2 and best[0][k] == 1 else losses[0], losses[1]])
        return found

    monkeypatch.setattr(ladder_runs, "programs_of_size", programs_of_size)
    monkeypatch.setattr(ladder_runs, "try_runs", try_runs)
    found = ladder_runs.choose_factors(programs_with(), PLANS[:2], [0.5, 1, 2], [])
    assert found == (factors, note)


def test_a_ladder_in_the_ledger():
    """The line that a person reads has the figures of the trial with rotary."""
    sizes = [48, 64, 96, 128]
    facts = judge_ladder(RECORDED_BASE, RECORDED_ROTARY, sizes, RECORDED_FLOPS, 0.01)
    entry = dict(facts, date="today", change="rotary", sizes=sizes, time_ratio=1.07)
    line = entry_as_line(entry)
    assert line.startswith("today  rotary: helps, fades; x3.01 [2.")
    assert "] in compute at 48, 64, 96, 128 channels; -0.3" in line
    assert line.endswith(" a decade; time x1.07; at the largest size, the interval is above x1")
    json.dumps(facts, allow_nan=False)


def test_the_picture_of_a_ladder(tmp_path):
    """It has each run, and each multiplier with its interval."""
    sizes = [48, 64, 96, 128]
    facts = judge_ladder(RECORDED_BASE, RECORDED_ROTARY, sizes, RECORDED_FLOPS, 0.01)
    entry = dict(facts, change="rotary", sizes=sizes, flops=RECORDED_FLOPS)
    entry.update(base_losses=RECORDED_BASE, losses=RECORDED_ROTARY)
    losses, multipliers = draw_ladder(entry, "verdict.json").axes
    drawn = sorted(y for line in losses.lines if line.get_marker() == "." for y in line.get_ydata())
    assert drawn == sorted(sum(RECORDED_BASE + RECORDED_ROTARY, []))
    points = multipliers.containers[0].lines[0].get_ydata()
    assert points.tolist() == [m for m, _, _ in facts["multipliers"]]
    place = tmp_path / "verdict.json"
    place.write_text("{}")
    for names, sentence in (
        ([place], "has no curves, .*; give the --json of experiment.py --sizes"),
        ([place, place], "is a verdict, which has a picture of its own; give it alone"),
        (["log/a", place], "is a verdict, which has a picture of its own; give it alone"),
    ):
        with pytest.raises(UserError, match=sentence):
            plot.main([*map(str, names), "--output", str(tmp_path / "a.png")])


@pytest.mark.slow
def test_the_text_that_everybody_has(tmp_path):
    """It has each Python file of torch once, and neighbours are of different directories."""
    path = tmp_path / "torch_py.txt"
    subprocess.run([sys.executable, ROOT / "experiments/write_torch_text.py", path], check=True)
    files = [file.read_bytes() for file in Path(torch.__file__).parent.rglob("*.py")]
    text = path.read_bytes()
    assert len(text) == sum(map(len, files)) > 10**7
    places = [text.find(file) for file in files[:50] if file]
    assert min(places) >= 0 and places != sorted(places)
