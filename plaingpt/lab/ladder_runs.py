"""Trains and measures both programs of an experiment at each size of a ladder."""

from plaingpt.base.errors import UserError
from plaingpt.base.terminal import print0
from plaingpt.lab.ladder import check_plan, judge_ladder, plan_size
from plaingpt.lab.ledger import choose_seeds
from plaingpt.lab.referee import check_losses, find_leak, measure_runs, read_losses, try_runs
from plaingpt.lab.runs import (
    count_slots,
    is_known,
    probe,
    ratio_of_times,
    show_look,
    time_steps,
    train_missing,
)

# What a ladder sets at each size.
SET_BY_SIZE = ("n_embd", "n_head", "max_steps", "warmup_steps", "max_lr")


def compare_ladder(programs, sealed, config, ledger, entry):
    """Trains both programs at each size, and adds the facts of the verdict to the entry.

    programs: [base, change], probed. sealed: from split_data. entry: that of the ledger. It keeps
    what it has, also if this raises UserError.
    """
    check_same_shape(programs)
    sizes = plan_sizes(programs[0].facts, config)
    factors = [1.0, 1.0]
    note = ""
    if config.rate_factors:
        factors, note = choose_factors(programs, sizes[:2], config.rate_factors, sealed)
    pairs = [programs_of_size(programs, size, factors, sealed) for size in sizes]
    keys = [program.key for pair in pairs for program in pair]
    seeds = choose_seeds(keys, config, ledger)
    flops = [size.flops for size in sizes]
    entry.update(keys=keys, n=len(seeds[1]), base_n=len(seeds[0]), last_seed=seeds[0][-1])
    entry.update(flops=flops, base_losses=[], losses=[])
    show_minutes(pairs, sizes, seeds)
    runs = train_missing(pairs, seeds)
    for pair in pairs:
        measure_runs(pair, seeds, sealed)
        for name, program, own in zip(("base_losses", "losses"), pair, seeds):
            entry[name].append(read_losses(program, own))
    for losses in (*entry["base_losses"], *entry["losses"]):
        check_losses(losses)
    leaks = [find_leak(pair, seeds) for pair in pairs]
    if any(leaks):
        entry.update(verdict="invalid", reason=next(filter(None, leaks)))
        return
    entry.update(
        judge_ladder(entry["base_losses"], entry["losses"], config.sizes, flops, config.delta)
    )
    entry["reason"] += note
    largest = [run for run in runs if run.program in pairs[-1]]
    entry["time_ratio"] = ratio_of_times(pairs[-1], largest)
    show_look(pairs[-1], seeds)


def check_same_shape(programs):
    """Raises UserError if the change has another depth, width, context, vocabulary or batch."""
    shapes = []
    for program in programs:
        names = ("total_batch_size", "rampup_steps", "rampup_batch_size")
        shapes.append(program.facts["model_config"] | {name: program.facts[name] for name in names})
    base, change = shapes
    for name, value in base.items():
        if change.get(name) != value and name != "dropout":
            raise UserError(
                f"the change has another {name}, {change.get(name)} instead of {value}, so its "
                "runs are not those of the base; compare it at one size, without --sizes"
            )


def plan_sizes(facts, config):
    """Plans the training of each size -> list of Size. facts: of the base. Raises UserError."""
    shape = facts["model_config"]
    sizes = []
    for n_embd in config.sizes:
        sizes.append(
            plan_size(
                n_embd,
                shape["n_layer"],
                shape["block_size"],
                facts["total_batch_size"],
                shape["vocab_size"],
                config.tokens_per_weight,
            )
        )
    check_plan(sizes, config.tokens_per_weight, facts["train_tokens"])
    return sizes


def programs_of_size(programs, size, factors, sealed):
    """Returns both programs at one size, probed. factors: each multiplies the rate of a program."""
    found = []
    for program, factor in zip(programs, factors):
        flags = []
        for name in SET_BY_SIZE:
            value = getattr(size, name)
            flags += [f"--{name}", str(factor * value if name == "max_lr" else value)]
        found.append(program.with_flags(flags))
    return probe(found, sealed)


def choose_factors(programs, sizes, factors, sealed):
    """Chooses the best factor of the rate for each program -> (factors, a note, perhaps empty).

    The two smallest sizes decide, with the seed 0. If they disagree, or the best factor is at the
    edge, the rate may not fit the larger sizes, and the note says so.
    """
    pairs = []
    for size in sizes:
        for factor in factors:
            pairs.append(programs_of_size(programs, size, [factor, factor], sealed))
    chosen = []
    note = ""
    for program, losses in zip(programs, zip(*try_runs(pairs, sealed))):
        n = len(factors)
        own = [dict(zip(factors, losses[:n])), dict(zip(factors, losses[n:]))]  # of each size
        best = [min(each, key=each.get) for each in own]
        print0(f"{program.name}: losses of the rate factors {own}; the best ones are {best}")
        if best[0] != best[1] or best[1] in (min(factors), max(factors)):
            note = "; rate not transferred"
        chosen.append(best[1])
    return chosen, note


def show_minutes(pairs, sizes, seeds):
    """Prints how long the training takes, from the measured speed of a few steps of the base."""
    missing = []  # FLOPs of each program
    for i, own in enumerate(seeds):
        flops = 0
        for pair, size in zip(pairs, sizes):
            flops += size.flops * sum(not is_known(pair[i], seed) for seed in own)
        missing.append(flops)
    if not any(missing):
        return
    middle = len(sizes) // 2
    base, size = pairs[middle][0], sizes[middle]
    slots = count_slots([base])
    flops_per_second = size.flops / size.max_steps / max(time_steps([base] * slots))
    minutes = [flops / flops_per_second / 60 / slots for flops in missing]
    print0(f"about {minutes[0]:.0f} minutes for the base, and {minutes[1]:.0f} for the change")
