"""Trains both programs of an experiment at each size of a ladder."""

import contextlib

from plaingpt.base.errors import UserError
from plaingpt.base.terminal import print0
from plaingpt.run.ladder import check_rungs, compare_curves, judge, plan_rung
from plaingpt.run.ledger import choose_seeds
from plaingpt.run.sides import (
    UNCHANGED,
    Side,
    ask,
    check_losses,
    count_slots,
    finite_loss,
    losses_of,
    median_tok_s,
    ratio_of_times,
    show_look,
    train,
    train_missing,
)

# What a ladder sets at each size.
SET_BY_SIZE = ("n_embd", "n_head", "max_steps", "warmup_steps", "max_lr")


def compare_ladder(flags, more, config, ledger):
    """Trains both programs at each size -> the facts of the verdict. Raises UserError.

    flags: those of all runs. more: those of the changed program.
    """
    flags = ["--val_every", "0", *flags]
    sides = [Side("base", flags), Side("changed", flags + more)]
    ask(sides)
    check_same_shape(sides)
    if sides[0].key == sides[1].key:
        return dict(keys=[side.key for side in sides], verdict="no gain", reason=UNCHANGED)
    rungs = plan_rungs(sides[0].facts, config)
    factors = [1.0, 1.0]
    note = ""
    if config.rate_factors:
        factors, note = choose_factors(sides, rungs[:2], config.rate_factors)
    ladder = [sides_of_rung(sides, rung, factors) for rung in rungs]
    keys = [side.key for pair in ladder for side in pair]
    seeds = choose_seeds(keys, config, ledger)
    show_minutes(ladder, rungs, seeds)
    runs = train_missing(ladder, seeds)
    base = [losses_of(pair[0], seeds[0]) for pair in ladder]  # a list for each size
    changed = [losses_of(pair[1], seeds[1]) for pair in ladder]
    flops = [rung.flops for rung in rungs]
    facts = describe_ladder(compare_curves(base, changed, flops))
    facts["reason"] += note
    facts.update(keys=keys, n=len(seeds[1]), base_n=len(seeds[0]), last_seed=seeds[0][-1])
    facts.update(
        base_losses=base, losses=changed, time_ratio=ratio_of_times(ladder[-1], runs), flops=flops
    )
    for pair in ladder:
        if reason := check_losses(pair, seeds):
            facts.update(verdict="invalid", reason=reason)
            return facts
    show_look(ladder[-1], seeds)
    return facts


def check_same_shape(sides):
    """Raises UserError if the change has another depth, width, context or vocabulary."""
    base, changed = [side.facts["model_config"] for side in sides]
    for name, value in base.items():
        if changed.get(name) != value and name != "dropout":
            raise UserError(
                f"the change has another {name}, {changed.get(name)} instead of {value}, so its "
                "sizes are not those of the base; compare it at one size, without --sizes"
            )


def plan_rungs(facts, config):
    """Plans the training of each size -> list of Rung. facts: of the base. Raises UserError."""
    shape = facts["model_config"]
    rungs = []
    for n_embd in config.sizes:
        rungs.append(
            plan_rung(
                n_embd,
                shape["n_layer"],
                shape["block_size"],
                facts["total_batch_size"],
                shape["vocab_size"],
                config.tokens_per_weight,
            )
        )
    check_rungs(rungs, config.tokens_per_weight, facts["train_tokens"])
    return rungs


def sides_of_rung(sides, rung, factors):
    """Returns both sides at one size, asked. factors: each multiplies the rate of a side."""
    found = []
    for side, factor in zip(sides, factors):
        flags = list(side.flags)
        for name in SET_BY_SIZE:
            value = getattr(rung, name)
            flags += [f"--{name}", str(factor * value if name == "max_lr" else value)]
        found.append(Side(side.name, flags))
    ask(found)
    return found


def choose_factors(sides, rungs, factors):
    """Chooses the best factor of the rate for each side -> (factors, a note, which may be empty).

    The two smallest sizes decide, with the seed 0. If they disagree, or the best factor is at the
    edge, the rate may not fit the larger sizes, and the note says so.
    """
    losses = [[{}, {}], [{}, {}]]  # [side][size]: {factor: loss}
    for k, rung in enumerate(rungs):
        for factor in factors:
            pair = sides_of_rung(sides, rung, [factor, factor])
            with contextlib.suppress(UserError):  # a large rate may diverge
                train_missing([pair], ([0], [0]))
            for i, side in enumerate(pair):
                losses[i][k][factor] = finite_loss(side, 0)
    chosen = []
    note = ""
    for side, own in zip(sides, losses):
        best = [min(each, key=each.get) for each in own]
        print0(f"{side.name}: losses of the rate factors {own}; the best ones are {best}")
        if best[0] != best[1] or best[1] in (min(factors), max(factors)):
            note = "; rate not transferred"
        chosen.append(best[1])
    return chosen, note


def show_minutes(ladder, rungs, seeds):
    """Prints how long the training takes, from the measured speed of a few steps of the base."""
    missing = []  # FLOPs of each side
    for i, own in enumerate(seeds):
        flops = 0
        for pair, rung in zip(ladder, rungs):
            flops += rung.flops * sum(pair[i].last(seed) is None for seed in own)
        missing.append(flops)
    if not any(missing):
        return
    middle = len(rungs) // 2
    side, rung = ladder[middle][0], rungs[middle]
    train([(side, "timed", ["--max_minutes", "0.1"])], "measuring the speed")
    flops_per_second = median_tok_s(side, "timed") * rung.flops / rung.tokens
    minutes = [flops / flops_per_second / 60 / count_slots() for flops in missing]
    print0(f"about {minutes[0]:.0f} minutes for the base, and {minutes[1]:.0f} for the change")


def describe_ladder(comparison):
    """Returns the figures and the verdict of a Comparison as facts."""
    verdict, reason = judge(comparison)
    multipliers = [[size.m, size.low, size.high] for size in comparison.sizes]
    far = comparison.far
    return dict(
        verdict=verdict,
        reason=reason,
        multipliers=multipliers,
        trend=comparison.trend.value,
        trend_half=comparison.trend.half,
        ahead=comparison.ahead,
        far=[far.m, far.low, far.high],
    )
