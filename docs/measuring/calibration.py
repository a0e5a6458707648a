"""Asks this machine about the ideas of docs/calibration.md, and writes what it says into the page.

  python docs/measuring/calibration.py           runs what has no record yet; in
                                                 all, some hours on two cores
  python docs/measuring/calibration.py 4 12      runs these rows, also again
  python docs/measuring/calibration.py code-5    runs row 5 with another setting
  python docs/measuring/calibration.py ladder-5  asks larger models about row 5
  python docs/measuring/calibration.py --page    only writes the page

Each is one experiment, whose verdict is kept in log/records/calibration. Those of the rows, and of
the ideas beside the list, are also in log/records/ledger.jsonl, for experiment.py --list.
"""

import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "calibration.md"
RECORDS = ROOT / "log" / "records" / "calibration"
LEDGER = ROOT / "log" / "records" / "ledger.jsonl"
BABY = "--preset baby --max_steps 1000 --val_every 0"
# {row: arguments of experiment.py}. --rates where an idea may need another rate.
EXPERIMENTS = {
    1: "--rates 2e-3 4e-3 8e-3 1.6e-2 -- --optimizer adamw",
    2: "experiments/value-residual.patch",
    3: "experiments/x0.patch",
    4: "experiments/soft-cap.patch",
    5: "experiments/rotary.patch",
    6: "experiments/qknorm.patch",
    7: "-- --n_head 1",
    8: "experiments/attention-gate.patch",
    9: "experiments/relu2.patch --rates 2e-3 4e-3 8e-3",
    10: "experiments/swiglu.patch",
    11: "experiments/dyt.patch",
    12: "experiments/no-bias.patch",
    13: "experiments/grouped-query.patch",
    14: "experiments/sliding-window.patch",
    15: "experiments/multi-token.patch",
    16: "experiments/z-loss.patch",
    17: f'experiments/lion.patch --flags "{BABY} --optimizer adamw" '
    "--rates 5e-4 1e-3 2e-3 4e-3 8e-3 1.6e-2",
    18: "experiments/muon-joint.patch --rates 2e-3 4e-3 8e-3 1.2e-2",
    19: "-- --grad_clip 0",
    20: "-- --dropout 0.1",
    21: "--rates 2e-3 4e-3 8e-3 -- --schedule wsd",
    22: "-- --schedule cosine --min_lr 8e-4",
    23: "-- --weight_decay 0",
}
# Settings that may say more about large models than the baby. The rows with the largest published
# effects try them. A ladder sets the size of the heads, so row 8 stands for row 7 there.
SETTINGS = dict(
    code=f"{BABY} --data torch_py.txt",
    long=f"{BABY} --block_size 256 --batch_size 4",
    deep=f"{BABY} --n_layer 4",
    steps="--preset baby --max_steps 3000 --max_lr 4e-3 --val_every 0 --data torch_py.txt",
)
TRY_SETTINGS = (1, 2, 3, 5, 7, 20)
TOO_SHORT = (9, 10)  # the laptop is wrong about them; do more steps, or other text, correct it?
LADDER = "--sizes 64 96 128 160 --flags '--data torch_py.txt'"
TRY_LADDER = (1, 2, 3, 5, 8, 20)
HELD_OUT = (4, 9, 10, 11, 14, 15, 18, 23)  # to check what the ladders of the others have shown
LADDER_NAMES = [f"ladder-{row}" for row in (*TRY_LADDER, *HELD_OUT)]
CODE = ROOT / "torch_py.txt"
LARGE = 0.03  # nats for a byte
BYTES_OF_A_TOKEN = 4.5  # of GPT-2, in English text
# What the pages say beside the list: {name: (the idea, arguments of experiment.py)}.
OTHERS = {
    "heads": ("four heads of 32 channels instead of two of 64", "-- --n_head 4"),
    "rmsnorm": ("RMSNorm instead of LayerNorm", "experiments/rmsnorm.patch"),
    "scaling": (
        "`c_proj` not scaled down at the start",
        "experiments/no-residual-scaling.patch",
    ),
    "untied": ("a head with weights of its own", "experiments/untied.patch"),
    "inverse-sqrt": (
        "a rate that falls as 1 / sqrt(step)",
        "experiments/inverse-sqrt.patch --rates 2e-3 4e-3 8e-3 -- --schedule inverse-sqrt",
    ),
}
# {published: the verdicts that agree}. A ladder says "helps".
SAYS = dict(helps=("better", "helps"), harms=("worse",), neutral=("equal",))
OPPOSITES = dict(helps=SAYS["harms"], harms=SAYS["helps"])


def read_list():
    """Returns the list of the page: {row: (idea, published direction, size or None)}.

    A size is in nats for a token.
    """
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| (\d+) \| (.*?) \| .* \| (helps|harms|neutral) \|(.*)\|$", line):
            size = None
            if given := re.fullmatch(r" ([+-][\d.]+)( bpb)? ", row[4]):
                size = float(given[1]) * (BYTES_OF_A_TOKEN * math.log(2) if given[2] else 1)
            found[int(row[1])] = (row[2], row[3], size)
    return found


def arguments_of(name):
    """Returns the arguments of experiment.py. name: a row, such as "5", or "code-5", "ladder-5"."""
    if name in OTHERS:
        return OTHERS[name][1]
    setting, _, row = name.rpartition("-")
    own = EXPERIMENTS[int(row)]
    if setting == "ladder":
        own = re.sub("--rates [0-9.e -]*[0-9]", "--rate_factors 0.25 0.5 1", own)
        return f"{LADDER} {own}"
    return f"--flags '{SETTINGS[setting]}' {own}" if setting else own


def all_names():
    """Returns the names of all experiments, in their order."""
    names = [str(row) for row in EXPERIMENTS]
    names += [f"{setting}-{row}" for setting in SETTINGS for row in TRY_SETTINGS]
    names += [f"{setting}-{row}" for setting in ("code", "steps") for row in TOO_SHORT]
    return [*names, *LADDER_NAMES, *OTHERS]


def write_code():
    """Writes the text that the settings and ladders need, if it is missing."""
    if not CODE.exists():
        make = [sys.executable, "experiments/write_torch_text.py", CODE.name]
        subprocess.run(make, cwd=ROOT, check=True)


def run(name):
    """Runs an experiment, and keeps its verdict with the minutes that it took."""
    arguments = arguments_of(name)
    if CODE.name in arguments:
        write_code()
    print(f"{name}: python experiment.py {arguments}", flush=True)
    began = time.monotonic()
    # An older record stays if this experiment is stopped, or ends without a verdict.
    with tempfile.TemporaryDirectory() as place:
        verdict = Path(place, "verdict.json")
        command = ["experiment.py", "--json", str(verdict), *shlex.split(arguments)]
        subprocess.run([sys.executable, *command], cwd=ROOT)  # the status is the verdict
        if not verdict.exists():
            sys.exit("no verdict; experiment.py says why")
        record = json.loads(verdict.read_text())
    del record["json"]  # the path of that file
    record["minutes"] = round((time.monotonic() - began) / 60, 1)
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def ranks_of(values):
    """Returns the rank of each value. Equal values have their mean rank."""
    below = (values[:, None] > values).sum(1)
    return below + (values[:, None] == values).sum(1) / 2


def rank_correlation(a, b):
    """Returns Spearman's correlation of two arrays."""
    return float(np.corrcoef(ranks_of(a), ranks_of(b))[0, 1])


def interval(a, b):
    """Returns the 95 % interval of the rank correlation, from a bootstrap over the items."""
    random = np.random.default_rng(0)
    drawn = []
    while len(drawn) < 2000:
        picked = random.integers(len(a), size=len(a))
        if len(set(picked)) > 2:
            drawn.append(rank_correlation(a[picked], b[picked]))
    return np.quantile(drawn, [0.025, 0.975])


def count_agreements(published, verdicts):
    """Returns how many verdicts are what was published."""
    return sum(compare(*pair) == "yes" for pair in zip(published, verdicts))


def deal_at_random(published, verdicts, n=10_000):
    """Returns how many verdicts agree if they are dealt to the ideas at random, n times."""
    random = np.random.default_rng(0)
    return np.array([count_agreements(published, random.permutation(verdicts)) for _ in range(n)])


def summarize(rows):
    """Returns sentences about all rows. rows: [(row, published, size, record)], with verdicts."""
    published = [direction for _, direction, _, _ in rows]
    verdicts = [record["verdict"] for *_, record in rows]
    agree = count_agreements(published, verdicts)
    dealt = deal_at_random(published, verdicts)
    lines = [
        f"- It agrees with {agree} of {len(rows)} ideas. If these verdicts are dealt at random, "
        f"{dealt.mean():.1f} agree on average, and {agree} or more in "
        f"{(dealt >= agree).mean():.0%} of the cases."
    ]
    for direction, (verdict, *_) in SAYS.items():
        own = [compare(*pair) for pair in zip(published, verdicts) if pair[0] == direction]
        line = f"- Of {len(own)} ideas that are published as *{direction}*, it says *{verdict}* of "
        line += str(own.count("yes"))
        if direction in OPPOSITES:
            line += f", and the opposite of {own.count('opposite')}"
        lines.append(f"{line}.")
    signed = [
        (row, size, record["difference"]) for row, _, size, record in rows if size is not None
    ]
    if len(signed) > 3:
        named, *columns = zip(*signed)
        sizes, differences = map(np.array, columns)
        low, high = interval(sizes, differences)
        lines.append(
            f"- Of the {len(signed)} ideas with a published size (rows "
            f"{', '.join(map(str, named))}), the rank correlation with the laptop's is "
            f"{rank_correlation(sizes, differences):.2f}, with a 95 % interval of {low:.2f} to "
            f"{high:.2f} from a bootstrap over ideas."
        )
    large = []
    for direction, verdict, (*_, record) in zip(published, verdicts, rows):
        if abs(record["difference"]) > LARGE:
            large.append(compare(direction, verdict))
    lines.append(
        f"- Where its own difference is above {LARGE} nats for a byte, it agrees with "
        f"{large.count('yes')} of {len(large)} ideas."
    )
    return lines


def read_record(name):
    """Returns what was measured under a name, or None."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def compare(published, verdict):
    """Returns whether a verdict is what was published: "yes", "no" or "opposite"."""
    if verdict in SAYS[published]:
        return "yes"
    return "opposite" if verdict in OPPOSITES.get(published, ()) else "no"


def answers(ideas, prefix, rows):
    """Returns what `compare` says of the records of these rows, such as those of "ladder-"."""
    records = [(row, read_record(f"{prefix}{row}")) for row in rows]
    return [compare(ideas[row][1], record["verdict"]) for row, record in records if record]


def verdict_of(record):
    """Returns the word of a verdict, or the two words of a ladder and a note about its rate."""
    words = [record[name] for name in ("verdict", "trend") if name in record]
    words += re.findall("rate not transferred", record["reason"])
    return ", ".join(words)


def figure_of(record):
    """Returns the difference of a verdict, or the multipliers of a ladder, as a person reads it."""
    if "multipliers" in record:
        return ", ".join(f"x{m:.2f}" for m, _, _ in record["multipliers"])
    if "difference" in record:
        return f"{record['difference']:+.4f} ± {record['half']:.4f}"
    return "no curve"  # of a ladder


def wrap(item):
    """Returns an item of a list in lines of at most 100 characters."""
    return textwrap.fill(item, 100, subsequent_indent="  ")


def table_of_rows(ideas):
    """Returns the table of all ideas with the usual runs. ideas: from read_list."""
    table = "| | idea | published | laptop | difference | agrees | minutes | command |\n"
    table += "|---|---|---|---|---|---|---|---|\n"
    for number, (idea, published, _) in ideas.items():
        if record := read_record(number):
            table += f"| {number} | {idea} | {published} | {record['verdict']} "
            table += f"| {figure_of(record)} | {compare(published, record['verdict'])} "
            table += f"| {record['minutes']} | `python experiment.py {EXPERIMENTS[number]}` |\n"
    return table


def table_of_settings(ideas):
    """Returns the table of ideas with each setting, and what each is worth for the six."""
    prefixes = ["", *(f"{name}-" for name in SETTINGS)]
    table = f"| | idea | published | baby | {' | '.join(SETTINGS)} |\n"
    table += "|---|---|---|" + "---|" * len(prefixes) + "\n"
    for row in (*TRY_SETTINGS, *TOO_SHORT):
        idea, published, _ = ideas[row]
        table += f"| {row} | {idea} | {published} |"
        for prefix in prefixes:
            record = read_record(f"{prefix}{row}")
            if record is None:
                table += " |"
                continue
            table += f" {record['verdict']} {figure_of(record)} |"
        table += "\n"
    table += f"| | agrees, of {len(TRY_SETTINGS)} | |"
    for prefix in prefixes:
        own = answers(ideas, prefix, TRY_SETTINGS)
        if len(own) == len(TRY_SETTINGS):
            table += f" {own.count('yes')}, opposite {own.count('opposite')}"
        table += " |"
    return table + "\n"


def table_of_ladders(ideas):
    """Returns how often ladders agree, and the table of them."""
    lines = []
    for what, rows in (("six ideas", TRY_LADDER), ("eight other ideas", HELD_OUT)):
        single, ladder = answers(ideas, "", rows), answers(ideas, "ladder-", rows)
        if len(ladder) == len(rows):
            line = f"- Of the {what}, ladders agree with {ladder.count('yes')}, and say the "
            line += f"opposite of {ladder.count('opposite')}. For the same ideas, the baby agrees "
            line += f"with {single.count('yes')}, and says the opposite of "
            line += f"{single.count('opposite')}."
            lines.append(wrap(line))
    table = "| record | idea | published | ladder | compute at 64, 96, 128, 160 channels | agrees "
    table += "| minutes |\n|---|---|---|---|---|---|---|\n"
    for name in LADDER_NAMES:
        if record := read_record(name):
            idea, published, _ = ideas[int(name.rpartition("-")[2])]
            table += f"| {name} | {idea} | {published} | {verdict_of(record)} "
            table += f"| {figure_of(record)} | {compare(published, record['verdict'])} "
            table += f"| {record['minutes']} |\n"
    return "\n".join([*lines, "", table])


def table_of_others():
    """Returns the table of the ideas beside the list."""
    table = "| idea | laptop | difference | minutes | command |\n|---|---|---|---|---|\n"
    for name, (idea, arguments) in OTHERS.items():
        if record := read_record(name):
            table += f"| {idea} | {verdict_of(record)} | {figure_of(record)} "
            table += f"| {record['minutes']} | `python experiment.py {arguments}` |\n"
    return table


def write_ledger():
    """Writes the ledger of the rows, and of the ideas beside them."""
    lines = []
    for name in (*EXPERIMENTS, *OTHERS):
        if record := read_record(name):
            lines.append(json.dumps(record) + "\n")
    LEDGER.write_text("".join(lines), encoding="utf-8")


def write_page():
    """Writes the tables of verdicts, and what they say together, into the page."""
    ideas = read_list()
    rows = []
    for number, (_, published, size) in ideas.items():
        if record := read_record(number):
            rows.append((number, published, size, record))
    parts = dict(
        rows="\n".join([*map(wrap, summarize(rows)), "", table_of_rows(ideas)]),
        settings=table_of_settings(ideas),
        ladders=table_of_ladders(ideas),
        others=table_of_others(),
    )
    page = PAGE.read_text(encoding="utf-8")
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        assert begin in page and end in page, name
        before, _, rest = page.partition(begin)
        page = before + begin + "\n" + text + "\n" + end + rest.partition(end)[2]
    PAGE.write_text(page, encoding="utf-8")


def main():
    names = sys.argv[1:]
    if names != ["--page"]:
        if unknown := set(names) - set(all_names()):
            sys.exit(f"unknown names: {', '.join(unknown)}")
        for name in names or all_names():
            if names or not (RECORDS / f"{name}.json").exists():
                run(name)
    write_page()
    write_ledger()


if __name__ == "__main__":
    main()
