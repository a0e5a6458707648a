"""Mistakes in flags and files: each gives a one-sentence error, and no file changes."""

import ast
import gzip
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, program, train

from plaingpt.cli import write_json
from plaingpt.tokenizer_json import byte_level_bpe


class Mark:
    """The content of a malicious pickle: loading it creates the file MARK."""

    def __init__(self, directory):
        self.path = str(directory / "MARK")

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A directory with a valid run, log/baby, and many kinds of invalid files."""
    d = tmp_path_factory.mktemp("world")
    train("--max_steps", 2, cwd=d)
    good = torch.load(d / "log/baby/model_000002.pt", weights_only=True)
    torch.save({**good, "model": Mark(d)}, d / "evil.pt")
    (d / "cut.pt").write_bytes((d / "log/baby/model_000002.pt").read_bytes()[:9000])

    for name, text in (("empty", ""), ("text", "A boat came. " * 999), ("body", '{"body": "a"}')):
        (d / f"{name}.txt").write_text(text)
        (d / f"{name}.jsonl").write_text(text)
    (d / "binary.txt").write_bytes(bytes(range(256)) * 9)
    for name in ("latin.jsonl", "latin.jsonl.txt"):
        (d / name).write_bytes(b'{"text": "caf\xe9"}\n')
    (d / "utf16.txt").write_text("A boat came. " * 999, "utf-16")
    (d / "no.parquet").write_text("no parquet")
    (d / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a boat"}\n' * 9)[:-9])
    pq.write_table(pa.table({"text": [1, 2]}), d / "numbers.parquet")
    (d / "bert").mkdir()
    (d / "bert/config.json").write_text('{"model_type": "bert"}')

    tokens = np.arange(9999, dtype=np.uint16) % 256
    evil = np.array([Mark(d)] * 999, object)
    arrays = dict(good=tokens, large=tokens + np.uint16(1), evil=evil, cut=tokens, meta=tokens,
                  own=tokens)
    for name, array in arrays.items():
        (d / name).mkdir()
        (d / name / "meta.json").write_text('{"tokenizer": "bytes"}')
        np.save(d / name / "x_val_000000.npy", tokens[:999])
        np.save(d / name / "x_train_000000.npy", array, allow_pickle=True)
    (d / "meta/meta.json").write_text('{"tokenizer": [7]}')
    write_json(d / "own/tokenizer.json", byte_level_bpe({"a": 0, "b": 1}, [], ["<|endoftext|>"]))
    path = d / "cut/x_train_000000.npy"
    path.write_bytes(path.read_bytes()[:-9])
    return d


CASES = {
    # program: [(flags, parts of the message)]
    "train_gpt2.py": [
        ("--max_step 5", "unknown flag --max_step; did you mean --max_steps?"),
        ("--epochs 5", "unknown flag --epochs; did you mean --max_steps?"),
        ("--preset gpt5", "--preset: invalid choice: 'gpt5' ... gpt2-medium"),
        ("--evals hellaswag=missing.jsonl", "missing.jsonl: [Errno 2] No such ... or leave it"),
        ("--device cuda:99", "--device cuda:99: ... (torch 2 ... or try --device cpu"),
        ("--n_head 3", "--n_head 3 does not divide --n_embd 128 ... give a divisor"),
        ("--vocab_size 100", "token id 1 ... leave out --vocab_size"),
        ("--n_embd 100000000 --n_head 1", "the model does not fit into memory ... smaller"),
        ("--total_batch_size 1000", "--total_batch_size: must be a multiple of 64 (block_size"),
        ("--batch_size 3", "--batch_size: each process has 16 sequences ... a divisor of 16"),
        ("--data missing.txt", "--data missing.txt: not found; give a text file or a directory"),
        ("--data empty.txt", "has 0 tokens, fewer than block_size ... give more data"),
        ("--data binary.txt", "--data binary.txt: is not a text; make shards: fineweb.py"),
        ("--data latin.jsonl.txt --tokenizer gpt2", "latin.jsonl.txt: is not UTF-8 (invalid"),
        ("--data evil", "evil/x_train_000000.npy: not a readable shard ... make it again"),
        ("--data cut", "x_train_000000.npy: not a readable shard ... make it again"),
        ("--data own", "own: its tokenizer.json is not of its shards, bytes; move it away"),
        ("--rampup_steps 2000000000", "--rampup_steps 2000000000: must be at least 0 and at most"),
        ("--val_fraction 5", "--val_fraction 5.0: must be above 0 and below 1"),
        ("--data meta", "unknown tokenizer '[7]'; add its tokenizer.json to the shards"),
        ("--data large", "token id 256 is outside the vocabulary of 256"),
        ("--log_dir text.txt", "--log_dir text.txt: cannot write ... choose another place"),
        ("--init_from missing.pt", "missing.pt: no such checkpoint ... give another file"),
        ("--init_from evil.pt", "evil.pt: not a readable checkpoint ... give another"),
        ("--init_from cut.pt", "cut.pt: not a readable checkpoint ... give another"),
        ("--init_from log/baby --n_layer 3", "log/baby has another model: n_layer is 2, not 3"),
        ("TINY --resume --data text.txt", "the run in log/baby had other --data: ... --init_from"),
        ("TINY --resume --optimizer muon", "has --optimizer adamw; give all its flags again"),
        ("TINY --resume --max_steps 1", "is at step 2; give a larger --max_steps"),
    ],
    "generate.py": [
        (f"--prompt {'a' * 32}", "...: has 32 tokens; give at most 31"),
        ("--prompts missing.txt", "missing.txt: [Errno 2] No such file ... or leave it out"),
        ("--json no/where.json", "--json no/where.json: cannot write there ... give a file"),
        ("--model bert", "bert: ... (model_type is 'bert', not 'gpt2'); give a name such as"),
    ],
    "fineweb.py": [
        ("--input missing.txt", "missing.txt: no such file, or not readable; give files or"),
        ("--input evil.pt", "evil.pt: unknown format; fineweb.py --help"),
        ("--input utf16.txt", "utf16.txt: no text in it ... choose another file"),
        ("--input empty.txt", "empty.txt: no text in it ... choose another file"),
        ("--input latin.jsonl --strict", "latin.jsonl, line 1: 'utf-8' ... leave out --strict"),
        ("--input no.parquet", "no.parquet: ... repair it, or leave it out"),
        ("--input numbers.parquet", "numbers.parquet: no text in it ... or --text_key"),
        ("--input cut.jsonl.gz", "cut.jsonl.gz: ... repair it, or leave it out"),
        ("--input text.txt --output_dir text.txt", "--output_dir text.txt: cannot write"),
        ("--input text.txt --output_dir good", "good: has shards of another ... another --"),
        ("--input text.txt --tokenizer text.txt", "--tokenizer text.txt: no usable tokenizer.json"),
    ],
    "hellaswag.py": [
        ("", "Rowan/hellaswag: Couldn't reach 'Rowan/hellaswag' on the Hub"),
        ("--data body.jsonl", "body.jsonl, line 1: field 'endings' is missing"),
        ("--json no/where.json", "--json no/where.json: cannot write there"),
        ("--checkpoint no.pt", "no checkpoint in no.pt"),
    ],
    "lambada.py": [("--style harness", "unknown flag --style")],
    "storycloze.py": [("", "error: no data; give a file, as storycloze.py --help explains")],
    "bench.py": [("--dtype fp8", "--dtype: invalid choice: 'fp8' ... float32")],
}
TINY = ("--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --total_batch_size 512 --batch_size 4 "
        "--optimizer adamw --max_lr 4e-3")


def everything(directory):
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


@pytest.mark.parametrize("name, flags, message", [
    pytest.param(name, *case, id=f"{name} {case[0][:60]!a}")
    for name, cases in CASES.items() for case in cases])
def test_each_mistake_gives_a_one_sentence_error(world, name, flags, message):
    before, flags = everything(world), flags.replace("TINY", TINY).split()
    if name == "train_gpt2.py" and "--preset" not in flags:
        flags = ["--preset", "baby", "--device", "cpu", *flags]
    out, err = program(*flags, cwd=world, program=name, status=2, root=False)
    if name == "fineweb.py":  # removes the progress bar and the notes on skipped records
        lines = [line for line in err.splitlines() if not re.search(r"B/s]|^skipped |^\s*$", line)]
        err = "\n".join(lines) + "\n"
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 500, err
    assert all(part in err for part in message.split(" ... ")), err
    assert "Traceback" not in out and everything(world) == before


def test_programs_load_files_safely_and_never_call_a_shell():
    """Every call in every program: one that loads a file must not run code from it."""
    needed = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}
    unsafe = r"(eval|exec|compile|os.system|os.popen|(pickle|marshal|shelve|dill|joblib)\..*)"
    for path in (*ROOT.glob("*.py"), *ROOT.glob("plaingpt/*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name, call = ast.unparse(node.func), ast.unparse(node)
                assert not re.fullmatch(unsafe, name) and "shell=" not in call, call
                assert needed.get(name, "") in call and "remote_code=True" not in call, call


def test_text_for_a_terminal_of_ascii(world):
    out, _ = program("--checkpoint", "log/baby", "--prompt", "caf\xe9", cwd=world,
                     program="generate.py", env=dict(PYTHONIOENCODING="ascii"))
    assert "caf\\xe9" in out
