"""Measures tables of docs/measurements.md. docs/measure.py calls these functions.

Each function returns the rows of a table: (what, figure, command).
"""

import re
import shutil
import statistics
import subprocess
import sys

from measuring import made_up
from measuring.commands import (
    FOLDER,
    ROOT,
    in_turn,
    median_and_range,
    read_bench,
    read_nanogpt,
    run,
    seconds_to,
    show,
    train,
)

TRAIN = "python train_gpt2.py"
HF = f"{FOLDER}/gpt2-hf"  # GPT-2 124M after one step, as export.py writes it
ROUNDS = 3


def baby():
    """Measures the losses and the times of the baby's recipe with both optimizers."""
    commands = {
        "the baby, Muon": f"{TRAIN} --log_dir {FOLDER}/muon",
        "the same with AdamW": f"{TRAIN} --optimizer adamw --log_dir {FOLDER}/adamw",
    }
    return rows_of_runs(commands, in_turn(commands, train, 2))


def rows_of_runs(commands, results):
    """Makes the rows of training runs. results: {name: RunFigures of each round}."""
    rows = []
    for name, runs in results.items():
        seconds = median_and_range([each.seconds for each in runs], "s")
        ms = median_and_range([each.ms for each in runs], "ms")
        figure = f"loss {runs[0].loss:.3f}; all steps {seconds}; a step {ms}"
        rows.append((name, figure, commands[name]))
    return rows


def pairs():
    """Measures how many answers are right after training on pairs."""
    made_up.write_pairs(ROOT / FOLDER, "sums", made_up.sums())
    made_up.write_pairs(ROOT / FOLDER, "reversed", made_up.reversed_words())
    train(f"{TRAIN} --max_steps 1000 --log_dir {FOLDER}/base")
    long = "--max_steps 1200"
    fine_tuned = f"--init_from {FOLDER}/base/model_001000.pt"
    rows = [
        answers("sums", "sums", f"{long} --seed 1337"),
        answers("sums, another seed", "sums", f"{long} --seed 1"),
        answers("reversed words", "reversed", long),
        answers("reversed words, fine-tuned", "reversed", fine_tuned),
        answers("the same in 200 steps", "reversed", f"{fine_tuned} --max_steps 200"),
    ]
    return rows


def answers(what, data, flags):
    """Trains on pairs, and counts right answers -> row."""
    directory = f"{FOLDER}/pairs"
    command = f"{TRAIN} --data {FOLDER}/{data}-train.jsonl {flags} --log_dir {directory}"
    train(command)
    test = f"python answers.py --data {FOLDER}/{data}-test.jsonl --checkpoint {directory}"
    right, error = re.search(r"^acc +(\S+) ± (\S+)", run(test).output, re.M).groups()
    figure = f"{float(right):.1%} ± {100 * float(error):.1f}"
    return what, figure, f"{command}`, `{test}"


def step():
    """Measures a step of GPT-2 124M in bfloat16, eager and compiled."""
    eager = bench_rows("bfloat16", "--peer transformers plain", "eager")
    return eager + bench_rows("bfloat16", "--peer transformers --compile", "compiled")


def step_float32():
    """Measures a compiled step of GPT-2 124M in float32."""
    return bench_rows("float32", "--peer transformers --compile", "compiled")


def bench_rows(dtype, flags, kind):
    """Times a step of GPT-2 124M and of its peers -> rows. kind: eager or compiled."""
    command = f"python bench.py --preset gpt2 --batch_size 4 --steps 3 --dtype {dtype} {flags}"
    found = read_bench(run(command).output)
    ours = found["plaingpt"].ms
    rows = []
    for name, row in found.items():
        figure = f"{show(row.ms)} ms ({show(row.fastest)} to {show(row.slowest)})"
        if name != "plaingpt":
            figure += f", {row.ms / ours:.2f} times ours"
        figure += f"; {row.memory:.2f} GB; first step {row.first:.0f} s"
        rows.append((f"{name}, {kind}", figure, command))
    return rows


def limit():
    """Measures the share of a step in the time that its matrix products would take alone."""
    rows = []
    for preset in ("baby", "mini"):
        command = f"PYTHONPATH=. python docs/measuring/limit.py {preset}"
        rounds = [run(command).output for _ in range(ROUNDS)]
        shares = [float(re.search(r"(\d+)% of the limit", each).group(1)) for each in rounds]
        middle = sorted(zip(shares, rounds))[ROUNDS // 2][1].strip()  # the median round
        rows.append((preset, middle.partition(": ")[2], command))
    return rows


def checkpointing():
    """Measures a step of GPT-2 124M with and without activation checkpointing."""
    bench = "python bench.py --preset gpt2 --batch_size 4 --steps 3"
    commands = {
        "all activations in memory": bench,
        "activation checkpointing": f"{bench} --activation_checkpointing",
    }
    results = in_turn(commands, lambda command: read_bench(run(command).output)[""], ROUNDS)
    rows = []
    for name, rounds in results.items():
        time_of_step = median_and_range([each.ms for each in rounds], "ms")
        memory = median_and_range([each.memory for each in rounds], "GB")
        rows.append((name, f"{time_of_step}; {memory}", commands[name]))
    return rows


def make_gpt2():
    """Makes GPT-2 124M after one step, and exports it, if it is not there yet."""
    if not (ROOT / HF / "config.json").is_file():
        sizes = "--max_steps 1 --batch_size 1 --total_batch_size 1024 --val_tokens 1024"
        data = "--data input.txt --tokenizer gpt2 --sample_every 0"
        train(f"{TRAIN} --preset gpt2 {data} {sizes} --log_dir {FOLDER}/gpt2")
        run(f"python export.py --checkpoint {FOLDER}/gpt2 --output {HF}")


def generation():
    """Measures how long 128 tokens of GPT-2 124M take, here and with transformers."""
    make_gpt2()
    rows = []
    for dtype in ("float32", "bfloat16"):
        for n in (1, 8):
            flags = f"{HF} --prompt 'The boats came home' --num_samples {n} --dtype {dtype}"
            commands = {
                f"generate.py, {dtype}, texts: {n}": (
                    f"python generate.py --temperature 0 --ignore_end --model {flags}"
                ),
                "transformers": f"python docs/measuring/peers.py generate {flags}",
            }
            rows += rows_of_differences(commands, "--max_new_tokens", 129)
    return rows


def scoring():
    """Measures how long 100 examples of HellaSwag take, here and with transformers."""
    make_gpt2()
    data = f"{FOLDER}/hellaswag.jsonl"
    made_up.write_hellaswag(ROOT / data, (ROOT / "input.txt").read_text(), 101)
    flags = f"{HF} --data {data} --dtype float32"
    commands = {
        "hellaswag.py": f"python hellaswag.py --model {flags}",
        "transformers, one example at a time": f"python docs/measuring/peers.py hellaswag {flags}",
    }
    rows = rows_of_differences(commands, "--limit", 101)
    figures = []
    for name, command in commands.items():
        right = re.search(r"^acc_norm_token +(\S+)", run(command).output, re.M)[1]
        figures.append((f"acc_norm_token of {name}", right, command))
    return rows + figures


def rows_of_differences(commands, flag, n):
    """Times two programs, each without its start -> their rows.

    The time is the difference of two commands: with `flag` n, and with `flag` 1.
    """

    def difference(command):
        return run(f"{command} {flag} {n}").seconds - run(f"{command} {flag} 1").seconds

    results = in_turn(commands, difference, ROUNDS)
    ours, theirs = results.values()
    rows = []
    for name, seconds in results.items():
        figure = median_and_range(seconds, "s")
        if seconds is theirs:
            figure += f", {statistics.median(theirs) / statistics.median(ours):.2f} times ours"
        rows.append((name, figure, f"{commands[name]} {flag} {n}`, less `{flag} 1"))
    return rows


def busy():
    """Measures a step of the baby, alone and beside a process that is always busy."""
    short = f"{TRAIN} --max_steps 80 --val_tokens 1024 --sample_every 0 --log_dir {FOLDER}/busy"
    commands = {"two threads": short, "one thread": f"OMP_NUM_THREADS=1 {short}"}
    alone = in_turn(commands, train, ROUNDS)
    endless = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        beside = in_turn(commands, train, ROUNDS)
    finally:
        endless.kill()
    rows = []
    for results, where in ((alone, "alone"), (beside, "beside a busy process")):
        for name, runs in results.items():
            ms = median_and_range([each.ms for each in runs], "ms")
            rows.append((f"{name}, {where}", ms, commands[name]))
    return rows


def layouts():
    """Measures the memory of one of two processes."""
    sizes = "--n_layer 16 --n_head 6 --n_embd 384 --block_size 8 --batch_size 1"
    length = "--total_batch_size 16 --max_steps 2 --val_tokens 8 --sample_tokens 1"
    settings = "--optimizer adamw --dtype float32 --device cpu"
    commands = {}
    for name, flag in dict(DDP="ddp", FSDP="fsdp", TP="ddp --tp 2", PP="ddp --pp 2").items():
        commands[name] = (
            "PYTHONPATH=. torchrun --nproc_per_node=2 tests/memory.py --preset baby "
            f"{sizes} {length} {settings} --parallel {flag} --log_dir {FOLDER}/layout"
        )
    rows = []
    for name, command in commands.items():
        shutil.rmtree(ROOT / FOLDER / "layout", ignore_errors=True)
        found = re.findall(r"MEMORY \S+ (\S+)$", run(command).output, re.M)
        figure = f"{max(map(float, found)):.1f} bytes per parameter"
        rows.append((name, figure, command))
    return rows


def tokenizer():
    """Measures the growth of the peak from a small sample to a large one."""
    text = (ROOT / "input.txt").read_text()
    made_up.write_english(ROOT / FOLDER / "english.jsonl", text, 41 * 10**6)
    made_up.write_chinese(ROOT / FOLDER / "chinese.txt", 11 * 10**6)
    rows = []
    for name, small, large in (
        ("english.jsonl", 10 * 10**6, 40 * 10**6),
        ("chinese.txt", 2 * 10**6, 10 * 10**6),
    ):
        text = f"{FOLDER}/{name}"
        output = f"{FOLDER}/vocabulary.json"
        command = f"python tokenizer.py --input {text} --vocab_size 2000 --output {output}"
        command += " --sample_bytes"
        growth = run(f"{command} {large}").memory - run(f"{command} {small}").memory
        figure = f"{growth / (large - small):.1f} bytes of memory for a byte of text"
        rows.append((name, figure, f"{command} {large}`, less `--sample_bytes {small}"))
    return rows


def shards():
    """Measures how fast fineweb.py is, and its memory, for a small and a large file."""
    text = (ROOT / "input.txt").read_text()
    rows = []
    for size in (50, 700):  # 700 MB have more tokens than a shard
        name = f"{FOLDER}/english-{size}MB.jsonl"
        made_up.write_english(ROOT / name, text, size * 10**6)
        shutil.rmtree(ROOT / FOLDER / "shards", ignore_errors=True)
        # Shards of FineWeb-Edu have this size. One shard is in memory before it is written.
        output = f"--output_dir {FOLDER}/shards --shard_size 100000000"
        command = f"python fineweb.py --input {name} {output}"
        finished = run(command)
        n_tokens = int(re.search(r"([\d,]+) tokens", finished.output)[1].replace(",", ""))
        rate = n_tokens / finished.seconds / 1e6
        figure = f"{show(rate)} million tokens per second; {finished.memory / 1e6:.0f} MB"
        rows.append((f"{size} MB", figure, command))
    return rows


def look():
    """Measures the sizes of pages of look.py."""
    make_gpt2()
    three = f"{FOLDER}/three"
    train(f"{TRAIN} --max_steps 3 --save_every 1 --keep 0 --sample_every 0 --log_dir {three}")
    rows = []
    for what, flags in (
        ("the baby, three checkpoints", three),
        ("GPT-2 124M, 256 tokens", f"--model {HF}"),
    ):
        page = f"{FOLDER}/look.html"
        command = f"python look.py {flags} --text input.txt --output {page}"
        run(command)
        rows.append((what, f"{(ROOT / page).stat().st_size / 1e6:.2f} MB", command))
    return rows


def shakespeare(nanogpt):
    """nanoGPT's recipe for CPUs is in its README.

    Both read the first nine tenths of the text, one character or byte a token. nanoGPT measures its
    loss once, at the end, and on 200 batches, to make it exact and to lose no time. Our number of
    steps takes about as long as its iterations.
    """
    text = f"{nanogpt}/data/shakespeare_char/input.txt"
    run(f"python {nanogpt}/data/shakespeare_char/prepare.py")
    theirs = (
        f"cd {nanogpt} && python train.py config/train_shakespeare_char.py --device=cpu "
        "--compile=False --eval_iters=200 --eval_interval=2000 --log_interval=1 --block_size=64 "
        "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 "
        "--lr_decay_iters=2000 --dropout=0.0"
    )
    ours = f"{TRAIN} --preset baby --data {text} --log_dir {FOLDER}/shakespeare"
    seconds = read_nanogpt(run(theirs).output).seconds
    ms = train(f"{ours} --max_steps 300").ms
    n_steps = int(1000 * seconds / ms) // 100 * 100
    commands = {
        "plainGPT's baby": f"{ours} --max_steps {n_steps}",
        "nanoGPT's recipe for CPUs": theirs,
    }

    def measure(command):
        return read_nanogpt(run(command).output) if command == theirs else train(command)

    return rows_of_runs(commands, in_turn(commands, measure, 2))


def start(nanogpt):
    """Measures the seconds from Return to the line with a pattern."""
    text = f"{nanogpt}/data/shakespeare_char/input.txt"
    run(f"python {nanogpt}/data/shakespeare_char/prepare.py")
    sizes = "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128"
    one = "--device=cpu --compile=False --eval_iters=1 --eval_interval=1 --max_iters=1"
    one += " --always_save_checkpoint=True"  # sample.py needs it
    run_of_ours = f"{FOLDER}/start"
    ours = f"{TRAIN} --data {text} --max_steps 1 --val_tokens 1024 --log_dir {run_of_ours}"
    theirs = f"cd {nanogpt} && python train.py config/train_shakespeare_char.py {sizes} {one}"
    generate = f"python generate.py --checkpoint {run_of_ours} --prompt HAM --max_new_tokens 1"
    sample = "python sample.py --out_dir=out-shakespeare-char --device=cpu --start=HAM"
    sample = f"cd {nanogpt} && {sample} --num_samples=1 --max_new_tokens=1"
    lines = {
        "our help": (f"{TRAIN} --help", "."),
        "our first step": (ours, "^step +0/1 "),
        "nanoGPT's first step": (theirs, "^iter 0:"),
        "our text": (generate, "^HAM"),
        "nanoGPT's text": (sample, "^HAM"),
    }
    commands = {name: command for name, (command, _) in lines.items()}
    patterns = dict(lines.values())

    def measure(command):
        if command == ours:
            shutil.rmtree(ROOT / run_of_ours, ignore_errors=True)
        return seconds_to(run(command), patterns[command])

    results = in_turn(commands, measure, 5)
    return [
        (name, median_and_range(seconds, "s"), commands[name]) for name, seconds in results.items()
    ]


# {name: (function, minutes on two cores of 2026)}
USUAL = {
    "baby": (baby, 5),
    "pairs": (pairs, 6),
    "step": (step, 7),
    "step_float32": (step_float32, 6),
    "limit": (limit, 2),
    "checkpointing": (checkpointing, 5),
    "generation": (generation, 9),
    "scoring": (scoring, 4),
    "busy": (busy, 4),
    "layouts": (layouts, 2),
    "tokenizer": (tokenizer, 2),
    "shards": (shards, 1),
    "look": (look, 1),
}
BESIDE_NANOGPT = {
    "shakespeare": (shakespeare, 6),
    "start": (start, 3),
}
ALL = {**USUAL, **BESIDE_NANOGPT}
