"""Does a change still help when the model grows? Plans a ladder of sizes, judges and draws it.

A difference in loss cannot be compared over sizes: a larger model is at a flatter place of its
curve, where the same difference costs more compute. So each size has a compute multiplier m: base
needs m times the compute of the changed model for the same loss. It is a distance between curves:

    loss |  b
         |     b             b, c: the mean losses of base and of the changed model at each size
         |  c     b
         |     c--m--b       ln(m) is the horizontal distance: the loss is equal at both ends
         |        c     b
         +------------------ ln(compute)

All logarithms here are natural. x is the logarithm of the compute, and 0 at the largest size.

A curve is read only if it falls from each size to the next. A change that harms the largest model,
such as by a rate that does not transfer, may give it a higher loss than a smaller one. No distance
says what that is worth, so the difference of the losses decides.
"""

import math
import re
from typing import NamedTuple

from plaingpt.base.errors import UserError, require
from plaingpt.lab.intervals import compare_losses, p_value, welch_half

import numpy as np

HEAD_SIZE = 32  # channels of a head, at every size: other heads would be another change
RATE = 1.5  # --max_lr x channels; measured for Muon: twice the width has about half the best rate
WARMUP_SHARE = 0.1  # of the steps
MIN_STEPS = 300  # with 165 steps, a change that helps larger models did nothing
NO_GAIN = math.log(1.1)  # a smaller |ln(m)| does not matter
GRID = 10_001  # points of a curve
MARGIN = math.log(1.5)  # how far a curve may be read beyond the ends of the ladder
MOST_RUNS = 1000  # at each size; nobody trains more


class Size(NamedTuple):
    """How one size of the ladder is trained. The names with an underscore are flags."""

    n_embd: int
    n_head: int
    weights: int  # those of the matrix products, with the head
    max_steps: int
    warmup_steps: int
    max_lr: float
    tokens: int  # read in training
    flops: int  # of training


class Estimate(NamedTuple):
    """A logarithm with its 95 % interval, value ± half. m, low and high are its exponentials."""

    value: float
    half: float
    # (sizes,) How much the value changes with the difference in mean loss at each size.
    weights: np.ndarray

    @property
    def m(self):
        return math.exp(self.value)

    @property
    def low(self):
        return math.exp(self.value - self.half)

    @property
    def high(self):
        return math.exp(self.value + self.half)


class Comparison(NamedTuple):
    """What compare_curves has found."""

    sizes: list[Estimate]  # ln(m) at each size, the smallest first
    trend: Estimate  # the change of ln(m) per decade (factor of ten) of compute
    x: np.ndarray  # (sizes,) the compute of the changed model where ln(m) was read
    falls: np.ndarray  # (sizes,) by how much the loss falls there when x grows by 1
    variances: np.ndarray  # (2, sizes) of the losses of base and of the changed model over seeds
    counts: np.ndarray  # (2, sizes) their numbers of runs


class Distance(NamedTuple):
    """The horizontal distance between the two curves at one loss."""

    log_m: float
    x: float  # on the curve of the changed model
    fall: float
    outside: float  # how far beyond the ends of the ladder a curve was read; 0: inside


def plan_size(n_embd, n_layer, block_size, total_batch_size, vocab_size, tokens_per_weight=5):
    """Plans the training of one size -> Size.

    n_embd: the size, a multiple of 32. The others are the same at all sizes. total_batch_size: in
    tokens. A model with twice the weights reads twice the tokens, so compute grows by four.
    """
    block_weights = 12 * n_layer * n_embd**2
    weights = block_weights + vocab_size * n_embd
    max_steps = round(tokens_per_weight * weights / total_batch_size)
    tokens = max_steps * total_batch_size
    # These are the FLOPs that GPT.flops_per_token counts. A weight needs 6 for each token, forward
    # and backward, and the scores of attention need the rest. The loss pads the head to 128 rows.
    padded_vocab_size = math.ceil(vocab_size / 128) * 128
    flops_per_weights = 6 * (block_weights + padded_vocab_size * n_embd)
    flops_of_scores = 12 * n_layer * n_embd * block_size
    return Size(
        n_embd=n_embd,
        n_head=n_embd // HEAD_SIZE,
        weights=weights,
        max_steps=max_steps,
        warmup_steps=round(WARMUP_SHARE * max_steps),
        max_lr=RATE / n_embd,
        tokens=tokens,
        flops=tokens * (flops_per_weights + flops_of_scores),
    )


def check_ladder(sizes):
    """Raises UserError if these sizes, in channels, make no ladder."""
    given = f"--sizes {' '.join(map(str, sizes))}"
    if len(sizes) < 4:
        raise UserError(
            f"{given}: a parabola meets any three points, so only a fourth can show a trend; "
            "give at least four sizes"
        )
    for size, next_size in zip(sizes, sizes[1:]):
        if next_size <= size:
            raise UserError(f"{given}: {next_size} comes after {size}; begin with the smallest")
    for size in sizes:
        if size % HEAD_SIZE:
            raise UserError(
                f"{given}: {size} channels do not make heads of {HEAD_SIZE}; "
                f"give multiples of {HEAD_SIZE}"
            )


def check_plan(sizes, tokens_per_weight, n_train_tokens):
    """Raises UserError if the smallest size has too few steps, or the largest too little data.

    sizes: the plans, the smallest first. tokens_per_weight: as for `plan_size`. n_train_tokens: how
    many tokens the training data have.
    """
    smallest = sizes[0]
    largest = sizes[-1]
    if smallest.max_steps < MIN_STEPS:
        needed = tokens_per_weight * MIN_STEPS / smallest.max_steps
        raise UserError(
            f"the smallest size would train for {smallest.max_steps} steps, and below {MIN_STEPS} "
            f"a change may act in another way; give --tokens_per_weight {math.ceil(needed)}"
        )
    if largest.tokens > n_train_tokens:
        raise UserError(
            f"the largest size would read {largest.tokens} tokens, but the training data have "
            f"{n_train_tokens}, and what is read twice is learned in another way; give a larger "
            "--data, such as the text that experiments/write_torch_text.py writes"
        )


def find_rise(base, changed, sizes, flops):
    """Returns a sentence if a curve does not fall all the way from one size to the next, or None.

    base, changed: for each size, the smallest first, a list of final losses, one a run. sizes: in
    channels. flops: those of a run of base at each size.
    """
    x = np.log(np.divide(flops, flops[-1]))
    for name, losses in (("of the base", base), ("with the change", changed)):
        means = [float(np.mean(each)) for each in losses]
        grid, curve = make_curve(x, means)
        for k in range(len(x) - 1):
            between = (grid > x[k]) & (grid < x[k + 1])
            part = [means[k], *curve[between], means[k + 1]]
            if not (np.diff(part) < 0).all():
                return (
                    f"the loss {name} does not fall steadily from {sizes[k]} to {sizes[k + 1]} "
                    f"channels ({means[k]:.4f}, {means[k + 1]:.4f})"
                )
    return None


def compare_curves(base, changed, flops):
    """Computes what the change is worth in compute, at each size -> Comparison.

    base, changed: for each size, the smallest first, a list of final losses, one a run, at least
    two. Their means fall. flops: those of a run of base at each size. Returns None if the losses
    are too far apart.

    Straight lines between the mean losses would run above a curve that is bent, and more so where
    the sizes are far apart, which makes a trend. So `make_curve` bends them.
    """
    x = np.log(np.divide(flops, flops[-1]))
    means = [[float(np.mean(losses)) for losses in group] for group in (base, changed)]
    curves = [make_curve(x, group) for group in means]
    distances = []
    for i in range(len(x)):
        distance = measure_distance([group[i] for group in means], curves, x[i], x)
        if distance is None:
            return None
        distances.append(distance)
    log_m, x_changed, falls, _ = np.transpose(distances)  # (sizes,) each
    variances = np.array(
        [[np.var(losses, ddof=1) for losses in group] for group in (base, changed)]
    )
    counts = np.array([[len(losses) for losses in group] for group in (base, changed)])

    def estimate(weights):
        """The sum of weights x log_m. An error in the loss moves x by the error / fall."""
        half = half_width(weights / falls, variances, counts)
        return Estimate(float(weights @ log_m), half, weights / falls)

    return Comparison(
        sizes=[estimate(weights) for weights in np.eye(len(x))],  # one size each
        trend=estimate(weigh_sizes(x_changed, falls) * math.log(10)),  # a decade is ln(10) of x
        x=x_changed,
        falls=falls,
        variances=variances,
        counts=counts,
    )


def make_curve(x, losses):
    """Makes the curve of a program through its mean losses -> (x, loss) of GRID points.

    The logarithm of the loss is about a parabola. Straight lines through what it misses correct it,
    so the curve meets each mean. x, losses: (sizes,).
    """
    logs = np.log(losses)
    parabola = np.polyfit(x, logs, 2)
    missed = logs - np.polyval(parabola, x)
    grid = np.linspace(x[0] - MARGIN, x[-1] + MARGIN, GRID)
    return grid, np.exp(np.polyval(parabola, grid) + np.interp(grid, x, missed))


def find_compute(loss, curve):
    """Finds where a curve reaches a loss -> (x, fall of the loss there when x grows by 1).

    curve: as from make_curve. Returns (inf, 0) if it does not reach the loss, or does not fall.
    """
    grid, losses = curve
    lowest = np.minimum.accumulate(losses)  # so far; it falls also where the curve does not
    if not lowest[-1] < loss <= lowest[0]:
        return math.inf, 0.0
    x = np.interp(-loss, -lowest, grid)  # minus, because interp wants a rise
    fall = -np.interp(x, grid, np.gradient(losses, grid))
    return (x, fall) if fall > 0 else (math.inf, 0.0)


def measure_distance(means, curves, own_x, ladder):
    """Measures the distance between the curves at one size -> Distance, or None.

    means: the mean losses of base and of the changed model. curves: theirs. own_x: the x of this
    size. ladder: the x of all sizes. Returns None if neither curve can be read inside the ladder.

    There are two ways: where the change reaches the loss of base, and where base reaches the loss
    of the change. At the smallest and at the largest size, only one of them is inside the ladder.
    The other one would be a guess, because no model there was trained.
    """
    base_mean, changed_mean = means
    base_curve, changed_curve = curves
    # Both ends are read from curves, so equal curves have the distance 0, exactly.
    base_x, _ = find_compute(base_mean, base_curve)
    changed_x, fall = find_compute(base_mean, changed_curve)
    log_m = base_x - changed_x
    outside = measure_outside(own_x - log_m, ladder)
    at_base_loss = Distance(log_m, changed_x, fall, outside)

    base_x, fall = find_compute(changed_mean, base_curve)
    changed_x, _ = find_compute(changed_mean, changed_curve)
    log_m = base_x - changed_x
    outside = measure_outside(own_x + log_m, ladder)
    at_changed_loss = Distance(log_m, changed_x, fall, outside)

    ways = [at_base_loss, at_changed_loss]
    least = min(way.outside for way in ways)
    if least > MARGIN:
        return None
    best = [way for way in ways if way.outside == least]  # both, if both are inside
    return Distance(*np.mean(best, axis=0))


def measure_outside(x, ladder):
    """Returns how far x is beyond the ends of the ladder: 0 if it is inside, inf without an x."""
    if not math.isfinite(x):
        return math.inf
    return max(ladder[0] - x, x - ladder[-1], 0.0)


def weigh_sizes(x, falls):
    """Returns the weights of the sizes in the slope: their sum with ln(m) is that of a line.

    x must be the compute of the changed model, because the distance was read there. The compute of
    base is m times that, so with it the line would have another slope.
    """
    # ln(m) is as uncertain as 1 / fall. A straight line is best with weights of 1 / uncertainty².
    trust = falls**2 / np.sum(falls**2)
    center = trust @ x
    return trust * (x - center) / (trust @ (x - center) ** 2)


def half_width(weights, variances, counts):
    """Half the width of the 95 % interval of a weighted sum of differences between mean losses.

    weights: (sizes,). variances, counts: (2, sizes). It is Welch's for one size. For more, it has
    the degrees of freedom of Satterthwaite (1946). Each size keeps its own variance: one variance
    for all would be too small where the runs differ most.
    """
    return welch_half((weights**2 * variances).ravel(), counts.ravel())


def judge_ladder(base, changed, sizes, flops, delta):
    """Judges the losses of a ladder -> the facts of the verdict.

    base, changed, sizes, flops: as in find_rise. delta: where no curve is read, a smaller
    difference in loss does not matter.
    """
    obstacle = find_rise(base, changed, sizes, flops)
    comparison = None
    if obstacle is None:
        comparison = compare_curves(base, changed, flops)
        obstacle = "the losses of both programs are too far apart for these sizes"
    p = p_value(base[-1], changed[-1])
    if comparison is None:
        found = compare_losses(base[-1], changed[-1], delta)
        words = dict(better="helps", equal="no gain")
        difference, half = found["difference"], found["half"]
        reason = (
            f"{obstacle}, so no curve is read; at {sizes[-1]} channels, the loss differs by "
            f"{difference:+.4f} ± {half:.4f}"
        )
        if found["verdict"] == "undecided":
            reason += f"; {found['reason']}"
        verdict = words.get(found["verdict"], found["verdict"])
        return dict(verdict=verdict, trend="open", reason=reason, p_value=p)
    verdict, reason = judge(comparison)
    return dict(
        verdict=verdict,
        trend=describe_trend(comparison.trend),
        reason=reason,
        p_value=p,
        multipliers=[[size.m, size.low, size.high] for size in comparison.sizes],
        slope=comparison.trend.value,
        slope_half=comparison.trend.half,
    )


def judge(comparison):
    """Returns (verdict, reason) of a Comparison."""
    verdict, reason = decide(comparison)
    if verdict == "undecided":
        reason = f"{reason}; {describe_runs_needed(comparison)}"
    return verdict, reason


def decide(comparison):
    """Returns (verdict, reason) from the interval at the largest size alone."""
    largest = comparison.sizes[-1]
    if abs(largest.value) + largest.half <= NO_GAIN:
        return "no gain", "at the largest size, the interval is between x1/1.1 and x1.1"
    if sign_of(largest) > 0:
        return "helps", "at the largest size, the interval is above x1"
    if sign_of(largest) < 0:
        return "worse", "at the largest size, the interval is below x1"
    return "undecided", "at the largest size, the interval contains x1"


def describe_trend(trend):
    """Returns one word for a trend: grows, fades, steady, or open, which is none of these."""
    if sign_of(trend) > 0:
        return "grows"
    if sign_of(trend) < 0:
        return "fades"
    return "steady" if abs(trend.value) + trend.half <= NO_GAIN else "open"


def sign_of(estimate):
    """Returns 1 if the interval is above 0, -1 if it is below, 0 if it contains 0."""
    if abs(estimate.value) <= estimate.half:
        return 0
    return 1 if estimate.value > 0 else -1


def describe_runs_needed(comparison):
    """Says how many runs would give a verdict, if values and variances stay as they are."""
    n_changed = MOST_RUNS + 1
    n_both = MOST_RUNS + 1
    for n in range(MOST_RUNS, 1, -1):  # the last n that decides is the smallest one
        if decide(with_runs(comparison, 0, n))[0] != "undecided":
            n_changed = n
        if decide(with_runs(comparison, n, n))[0] != "undecided":
            n_both = n
    if n_both > MOST_RUNS:
        return f"even {MOST_RUNS} runs of both programs at each size do not decide"
    # The error of base stays, however many runs the change has. Then runs of both are cheaper.
    if n_changed > 2 * n_both:
        return f"--seeds {n_both} --base_seeds {n_both} may decide"
    return f"--seeds {n_changed} may decide"


def with_runs(comparison, n_base, n_changed):
    """Returns the comparison with the interval that at least so many runs at each size give."""
    counts = np.maximum(comparison.counts, [[n_base], [n_changed]])  # (2, sizes)
    largest = comparison.sizes[-1]
    half = half_width(largest.weights, comparison.variances, counts)
    sizes = [*comparison.sizes[:-1], largest._replace(half=half)]
    return comparison._replace(sizes=sizes, counts=counts)


def legend_label(name):
    """Returns a name as matplotlib's legend shows it.

    A legend leaves out names that begin with "_", and reads "$" as the start of a formula.
    """
    return re.sub("^_", "./_", name).replace("$", r"\$")


def draw_ladder(entry, place):
    """Draws the JSON of experiment.py --sizes -> a matplotlib Figure.

    On the left, the loss of each run over the compute of the base, and the curve of each program.
    On the right, the compute multiplier of each size with its 95 % interval. place: the file, for
    messages. Raises UserError if the JSON has no ladder with curves.
    """
    if "multipliers" not in entry:
        raise UserError(
            f"{place}: has no curves, as its verdict is not that of a finished ladder; "
            "give the --json of experiment.py --sizes"
        )
    figure = require("matplotlib.figure").Figure((10, 4), dpi=120, layout="constrained")
    losses, multipliers = figure.subplots(1, 2)
    x = np.log(entry["flops"])
    groups = (("base", entry["base_losses"]), (entry["change"], entry["losses"]))
    for i, (name, values_of_sizes) in enumerate(groups):
        for flops, values in zip(entry["flops"], values_of_sizes):
            losses.plot([flops] * len(values), values, ".", color=f"C{i}", alpha=0.5)
        grid, curve = make_curve(x, [np.mean(values) for values in values_of_sizes])
        losses.plot(np.exp(grid), curve, color=f"C{i}", label=legend_label(name))
    losses.set(xscale="log", xlabel="FLOPs of the training", ylabel="loss (nats per token)")
    losses.legend()
    m, low, high = np.transpose(entry["multipliers"])
    multipliers.errorbar(entry["sizes"], m, (m - low, high - m), fmt="o", capsize=4, color="C1")
    multipliers.axhline(1, color="black", linestyle=":", linewidth=1)
    title = f"{entry['verdict']}, {entry['trend']}"
    multipliers.set(xlabel="channels", ylabel="compute multiplier", title=title)
    multipliers.set_xticks(entry["sizes"])
    for panel in (losses, multipliers):
        panel.grid(alpha=0.25)
    return figure
