"""Mistakes in flags and files: each gives a one-sentence error, and no file changes."""

import ast
import gzip
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, program, train, write_bin

from model import GPT, GPTConfig

STORY = {**{f"InputSentence{i}": "A boat came." for i in (1, 2, 3, 4)}, "RandomFifthSentenceQuiz1": "It left.",
         "RandomFifthSentenceQuiz2": "It sank.", "AnswerRightEnding": 3}
CHOICE = dict(ctx="A boat", endings=["came", "went", "sank", "sang"], label=4)


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
    checkpoints = {
        "evil": {**good, "model": Mark(d)}, "foreign": {"state_dict": {}}, "list": [1, 2], "tensor": torch.zeros(3),
        "shape": {**good, "model_config": {**good["model_config"], "n_embd": 64}},
        "setting": {**good, "model_config": {**good["model_config"], "rotary": True}},
        "tokenizer": {**good, "tokenizer": "../../etc/passwd"},
        "gpt2": {**good, "model_config": dict(n_layer=1, n_head=1, n_embd=4, block_size=16, vocab_size=50257), "tokenizer": "gpt2"}}
    torch.manual_seed(0)
    checkpoints["gpt2"]["model"] = GPT(GPTConfig(**checkpoints["gpt2"]["model_config"])).state_dict()
    for name, value in checkpoints.items():
        torch.save(value, d / f"{name}.pt")
    (d / "empty.pt").touch()
    (d / "text.pt").write_text("no checkpoint at all")
    (d / "cut.pt").write_bytes((d / "log/baby/model_000002.pt").read_bytes()[:9000])

    texts = dict(empty="", text="A boat came. " * 999, no_json="nothing\n", columns='{"body": "a boat"}\n',
                 choice=json.dumps(CHOICE), good=json.dumps({**CHOICE, "label": 1}), story=json.dumps(STORY), long="word " * 50)
    for name, text in texts.items():
        (d / f"{name}.txt").write_text(text)
        (d / f"{name}.jsonl").write_text(text)
    (d / "binary.txt").write_bytes(bytes(range(256)) * 9)
    (d / "latin.txt").write_bytes(b"caf\xe9\n")
    (d / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    (d / "no.parquet").write_text("no parquet")
    (d / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a boat"}\n' * 9)[:-9])
    pq.write_table(pa.table({"text": [1, 2]}), d / "numbers.parquet")
    (d / "closed.txt").write_text("closed")
    (d / "closed.txt").chmod(0)
    (d / "nowhere").mkdir()

    tokens = np.arange(9999, dtype=np.uint16) % 256
    shards = {
        "pickled.npy": lambda path: np.save(path, np.array([Mark(d)] * 999, object), allow_pickle=True),
        "float.npy": lambda path: np.save(path, tokens.astype(float)), "text.npy": lambda path: path.write_text("hello"),
        "cut.npy": lambda path: (np.save(path, tokens), path.write_bytes(path.read_bytes()[:-9])),
        "large.npy": lambda path: np.save(path, tokens + np.uint16(1)), "few.npy": lambda path: np.save(path, tokens[:9]),
        "magic.bin": lambda path: write_bin(path, tokens, magic=1), "count.bin": lambda path: write_bin(path, tokens, count=10**6),
        "good.npy": lambda path: np.save(path, tokens)}
    for name, write in shards.items():
        kind = f"000000{name[name.index('.'):]}"
        (d / name).mkdir()
        write(d / name / f"x_train_{kind}")
        np.save(d / name / "x_val_000000.npy", tokens[:999])
        (d / name / "meta.json").write_text('{"tokenizer": "bytes"}')

    models = dict(evil={}, bert=dict(model_type="bert"), shape={}, empty={})
    for name, settings in models.items():
        GPT(GPTConfig(n_layer=1, n_head=1, n_embd=4, block_size=16)).to_hf(d / f"hf_{name}")
        path = d / f"hf_{name}/config.json"
        config = {**json.loads(path.read_text()), **settings, **(dict(n_embd=8) if name == "shape" else {})}
        path.write_text(json.dumps(config) if name != "empty" else "")
    (d / "hf_evil/model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Mark(d)}, d / "hf_evil/pytorch_model.bin")
    return d


CASES = {
    # program: [(flags, what is wrong, what to do about it)]
    "train_gpt2.py": [
        ("--max_step 5", "unknown flag --max_step", "did you mean --max_steps?"),
        ("--frobnicate", "unknown flag --frobnicate", "--help lists all flags"),
        ("extra", "unexpected extra", "quote a value with spaces"),
        ("--max_steps", "--max_steps: expected one argument", "see --help"),
        ("--max_steps many", "--max_steps: invalid int value: 'many'", "see --help"),
        ("--max_steps 1e4", "--max_steps: invalid int value: '1e4'", "see --help"),
        ("--resume=yes", "--resume/--no-resume: ignored explicit argument 'yes'", "see --help"),
        ("--max_steps 0", "--max_steps 0: must be", "above 0"),
        ("--batch_size -4", "--batch_size -4: must be", "above 0"),
        ("--grad_clip -1", "--grad_clip -1.0: must be", "at least 0"),
        ("--max_lr nan", "--max_lr nan: must be", "above 0"),
        ("--max_lr inf", "--max_lr inf: must be", "above 0"),
        ("--seed -1", "--seed -1: must be", "at least 0"),
        ("--seed 4294967296", "--seed 4294967296: must be", "at most 4294967295"),
        ("--min_lr 1", "--min_lr 1.0 is above --max_lr", "leave it out"),
        ("--muon_lr 1 --optimizer adamw", "--muon_lr needs --optimizer muon", "--max_lr sets the rate of AdamW"),
        ("--optimizer sgd", "--optimizer sgd: must be one of", "adamw, muon"),
        ("--preset gpt5", "--preset gpt5: must be one of", "gpt2-medium"),
        ("--n_layer 1000000000", "--n_layer 1000000000: must be", "at most 1000"),
        ("--dtype int8", "--dtype int8: must be one of", "bfloat16"),
        ("--evals arc", "--evals arc: must be one of", "hellaswag"),
        ("--evals lambada.py", "--evals lambada.py: must be one of hellaswag, lambada", "or a module"),
        ("--parallel zero", "--parallel zero: must be one of", "fsdp"),
        ("--device toaster", "--device toaster: cannot be used", "try --device cpu"),
        ("--device cuda:99", "--device cuda:99: cannot be used", "try --device cpu"),
        ("--n_head 3", "--n_head 3 does not divide --n_embd 128", "give a divisor"),
        ("--n_head 999", "--n_head 999 does not divide --n_embd 128", "give a divisor"),
        ("--vocab_size 50304", "--vocab_size 50304 is more than the data's 256 ids", "leave it out"),
        ("--vocab_size 100", "token id 1", "leave out --vocab_size, or give the right --tokenizer"),
        ("--n_embd 100000000 --n_head 1", "the model does not fit into memory", "choose a smaller one"),
        ("--total_batch_size 1000", "--total_batch_size 1000: must be a multiple of 64 (block_size 64 x 1 processes)", "from 64 to the 348544 tokens"),
        ("--total_batch_size 9999999936", "--total_batch_size 9999999936: must be a multiple of 64", "from 64 to the 348544 tokens"),
        ("--batch_size 3", "--batch_size 3: each process has 16 sequences in a step; give a divisor of 16", "give a divisor"),
        ("--rampup_steps 3 --rampup_batch_size 100", "--rampup_batch_size 100: must be a multiple of 64", "from 64 to"),
        ("--block_size 500000", "too few for one sequence", "a smaller --block_size"),
        ("--tp 3", "--tp 3 x --pp 1: needs a multiple of 3 processes", "torchrun --nproc_per_node=3"),
        ("--pp 3", "--tp 1 x --pp 3: needs a multiple of 3 processes", "torchrun --nproc_per_node=3"),
        ("--tp 2", "--tp 2 x --pp 1: needs a multiple of 2 processes, not 1", "torchrun --nproc_per_node=2"),
        ("--data missing.txt", "--data missing.txt: not found", "give a text file or a directory of shards"),
        ("--data empty.txt", "0 tokens are too few", "give more data"),
        ("--data binary.txt", "--data binary.txt: not a text", "give one in UTF-8"),
        ("--data float.npy/x_val_000000.npy", "x_val_000000.npy: not a text", "or a directory of shards"),
        ("--data closed.txt", "--data closed.txt: cannot be read", "give a readable file"),
        ("--data /dev/null", "--data /dev/null: not found", "give a text file or a directory of shards"),
        ("--data nowhere", "--data nowhere: no train shards in it", "make them with fineweb.py"),
        ("--data pickled.npy", "pickled.npy/x_train_000000.npy: not a readable shard", "make it again"),
        ("--data float.npy", "x_train_000000.npy: not a readable shard (float64 of shape (9999,) is not one-dimensional uint16)", "make it again"),
        ("--data text.npy", "x_train_000000.npy: not a readable shard", "make it again"),
        ("--data cut.npy", "x_train_000000.npy: not a readable shard", "make it again"),
        ("--data large.npy", "x_train_000000.npy: token id 256 is outside the vocabulary of 256", "leave out --vocab_size, or give the right --tokenizer"),
        ("--data few.npy", "9 tokens are too few", "give more data"),
        ("--data magic.bin", "x_train_000000.bin: not a readable shard (its header does not begin with 20240520 and 1", "make it again"),
        ("--data count.bin", "21022 bytes, but its header says 1000000 tokens", "make it again"),
        ("--log_dir text.txt", "--log_dir text.txt: cannot write", "choose another place"),
        ("--log_dir text.txt/deeper", "--log_dir text.txt/deeper: cannot write", "choose another place"),
        ("--init_from missing.pt", "missing.pt: no such checkpoint", "give another file"),
        ("--init_from no/where", "no/where: transformers cannot load a GPT-2 from it", "give a checkpoint"),
        ("--init_from evil.pt", "evil.pt: not a readable checkpoint", "give another"),
        ("--init_from empty.pt", "empty.pt: not a readable checkpoint", "give another"),
        ("--init_from text.pt", "text.pt: not a readable checkpoint", "give another"),
        ("--init_from cut.pt", "cut.pt: not a readable checkpoint", "give another"),
        ("--init_from list.pt", "list.pt: not a readable checkpoint (not from plainGPT: no model of type dict", "give another"),
        ("--init_from tensor.pt", "tensor.pt: not a readable checkpoint (not from plainGPT: no model of type dict", "give another"),
        ("--init_from foreign.pt", "foreign.pt: not a readable checkpoint (not from plainGPT: no model of type dict", "give another"),
        ("--init_from shape.pt", "shape.pt: not a readable checkpoint (transformer.wte.weight: is [256, 32], not [256, 64]", "give another checkpoint"),
        ("--init_from setting.pt", "setting.pt: not a readable checkpoint (GPTConfig", "give another checkpoint"),
        ("--init_from tokenizer.pt", "tokenizer.pt: not a readable checkpoint (unknown tokenizer", "give another checkpoint"),
        ("--init_from log/baby --n_layer 3", "log/baby has another model: n_layer is 2, not 3", "leave out these flags or --preset"),
        ("--resume --n_embd 64 --n_layer 1", "log/baby has another model: n_layer is 2, not 1, n_embd is 32, not 64", "leave out these flags or --preset"),
        ("TINY --resume --data text.txt --val_tokens 64", "is not the data of the run in log/baby: the training split was ", "for a new run: --init_from log/baby, not --resume"),
        ("TINY --resume --optimizer muon", "and --optimizer adamw, not muon", "give its flags again"),
        ("TINY --resume --max_steps 1", "at step 2, beyond --max_steps 1", "give more steps"),
        ("--evals hellaswag=missing.jsonl", "missing.jsonl: cannot be read", "give a .jsonl"),
        ("--evals hellaswag=columns.jsonl", "columns.jsonl, line 1: field 'endings' is missing", "the program's --help"),
        ("--evals hellaswag=choice.jsonl", "choice.jsonl, line 1: label 4: must be one of 0, 1, 2, 3", "the program's --help"),
    ],
    "generate.py": [
        (f"--prompt {'a' * 32}", "--prompt: has 32 tokens", "give at most 31"),
        ("--prompts long.txt --checkpoint gpt2.pt", "--prompts long.txt, line 1: has 51 tokens", "give at most 15"),
        ("--prompts missing.txt", "--prompts missing.txt: cannot be read", "give a text file"),
        ("--prompts empty.txt", "--prompts empty.txt: is empty", "write one prompt a line"),
        ("--prompts nowhere", "--prompts nowhere: cannot be read", "give a text file"),
        ("--prompts closed.txt", "--prompts closed.txt: cannot be read", "give a text file"),
        ("--prompts a --prompt b", "--prompt and --prompts exclude each other", "give one"),
        ("--model a --checkpoint b", "--model and --checkpoint exclude each other", "give one"),
        ("--temperature -1", "--temperature -1.0", "must be at least 0"),
        ("--top_p 2", "--top_p 2.0", "must be above 0 and at most 1"),
        ("--num_samples 0", "--num_samples 0", "must be at least 1"),
        ("--json nowhere", "--json nowhere: cannot write there", "give a file"),
        ("--json no/where.json", "--json no/where.json: cannot write there", "give a file"),
        ("--checkpoint missing.pt", "no checkpoint in missing.pt", "give --checkpoint FILE"),
        ("--checkpoint nowhere", "no checkpoint in nowhere", "give --checkpoint FILE"),
        ("--checkpoint evil.pt", "evil.pt: not a readable checkpoint", "give another"),
        ("--checkpoint shape.pt", "shape.pt: not a readable checkpoint (transformer.wte.weight: is [256, 32], not [256, 64]", "give another checkpoint"),
        ("--model hf_evil", "hf_evil: transformers cannot load a GPT-2", "give"),
        ("--model hf_bert", "hf_bert: model_type is 'bert'", "give a GPT-2"),
        ("--model hf_shape", "hf_shape: transformers cannot load a GPT-2", "give"),
        ("--model hf_empty", "hf_empty: transformers cannot load a GPT-2", "give"),
        ("--model no/where", "no/where: transformers cannot load a GPT-2", "give"),
    ],
    "fineweb.py": [
        ("--input missing.txt", "missing.txt: no such file, or not readable", "give files or a quoted glob"),
        ("--input nowhere", "nowhere: no such file, or not readable", "give files or a quoted glob"),
        ("--input evil.pt", "evil.pt: unknown format", "give a .jsonl, .json or .txt file"),
        ("--input closed.txt", "closed.txt: no such file, or not readable", "give files or a quoted glob"),
        ("--input empty.txt", "empty.txt: no text in it, 0 records were skipped", "choose another file"),
        ("--input columns.jsonl", "columns.jsonl: no text in it, 1 records were skipped", "or --text_key"),
        ("--input no_json.jsonl", "no_json.jsonl: no text in it, 1 records were skipped", "choose another file"),
        ("--input latin.jsonl --strict", "latin.jsonl, line 1: not UTF-8", "correct it, or leave out --strict"),
        ("--input no.parquet", "no.parquet: cannot be read", "repair it"),
        ("--input numbers.parquet", "numbers.parquet: cannot be read (Unsupported cast from int64", "or --text_key"),
        ("--input cut.jsonl.gz", "cut.jsonl.gz: cannot be read", "repair it"),
        ("--input text.txt --shard_size 0", "--shard_size 0", "must be at least 1"),
        ("--input text.txt --num_proc -1", "--num_proc -1", "must be at least 1"),
        ("--input text.txt --backend fast", "--backend fast: must be one of auto, tiktoken, gigatoken", ""),
        ("--input text.txt --dataset x", "leave out --dataset and --name", "they choose data of the hub"),
        ("--input text.txt --output_dir text.txt", "--output_dir text.txt: cannot write (File exists)", "free some space"),
        ("--input text.txt --output_dir good.npy", "--output_dir good.npy: holds other shards (", "choose another directory"),
    ],
    "hellaswag.py": [
        ("--data missing.jsonl", "missing.jsonl: cannot be read", "give a .jsonl"),
        ("--data columns.jsonl", "columns.jsonl, line 1: field 'endings' is missing or has a wrong type", "the program's --help"),
        ("--data choice.jsonl", "choice.jsonl, line 1: label 4: must be one of 0, 1, 2, 3", "the program's --help"),
        ("--data no.parquet", "no.parquet, row 1: Parquet magic bytes not found", "correct the file"),
        ("--data empty.jsonl", "empty.jsonl: has no example", "the program's --help"),
        ("--data choice.jsonl --style quiz", "--style quiz", "must be one of completion, harness"),
        ("--data choice.jsonl --limit -1", "--limit -1", "must be at least 0"),
        ("--data good.jsonl --checkpoint foreign.pt", "foreign.pt: not a readable checkpoint (not from plainGPT: no model of type dict", "give another"),
    ],
    "lambada.py": [("--data latin.txt", "latin.txt, line 1: not UTF-8", "line 1"),
                   ("--data columns.jsonl", "columns.jsonl, line 1: field 'text' is missing", "the program's --help"),
                   ("--tokens_per_forward 0", "--tokens_per_forward 0", "must be at least 1")],
    "storycloze.py": [("", "the Story Cloze data are not on the hub", "--data FILE.csv"),
                      ("--data story.jsonl", "story.jsonl, line 1: label 3: must be one of 1, 2", "the program's --help")],
    "wikitext.py": [("--data text.txt --stride 64", "--stride 64: must be at most 32", "context"),
                    ("--data empty.txt", "empty.txt: has no example", "the program's --help")],
    "bench.py": [
        ("--preset gpt5", "--preset gpt5: must be one of gpt2, gpt2-medium", "baby"),
        ("--peer megatron", "--peer megatron: must be one of", "plain, transformers"),
        ("--dtype fp8", "--dtype fp8: must be one of auto, bfloat16", "float32"),
        ("--optimizer sgd", "--optimizer sgd: must be one of", "adamw, muon"),
        ("--steps 0", "--steps 0: must be", "above 0"),
        ("--batch_size 4 -1", "--batch_size -1: must be", "above 0"),
        ("--batch_size many", "--batch_size: invalid int value: 'many'", "see --help"),
        ("--device toaster", "--device toaster: cannot be used", "try --device cpu"),
        ("--pp 2", "--tp 1 x --pp 2: needs a multiple of 2 processes, not 1", "--nproc_per_node=2"),
        ("--tp 2", "--tp 2 x --pp 1: needs a multiple of 2 processes, not 1", "--nproc_per_node=2"),
    ],
}
TINY = ("--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --total_batch_size 512 --batch_size 4 --optimizer adamw "
        "--max_lr 4e-3")


def everything(directory):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in directory.rglob("*")}


@pytest.mark.parametrize("name, flags, wrong, remedy", [(name, *case) for name, cases in CASES.items() for case in cases],
                         ids=[f"{name} {case[0][:60]!a}" for name, cases in CASES.items() for case in cases])
def test_each_mistake_gives_a_one_sentence_error(world, name, flags, wrong, remedy):
    before, flags = everything(world), flags.replace("TINY", TINY).split(" ") if flags else []
    if name == "train_gpt2.py":
        flags = ["--preset", "baby", "--device", "cpu", *flags] if "--preset" not in flags else flags
    out, err = program(*flags, cwd=world, program=name, status=2, root=False)
    if name == "fineweb.py":  # removes the progress bar and the notes on skipped records
        err = "".join(line for line in err.splitlines(keepends=True) if line.strip() and not re.search("B/s]|^skipped ", line))
    assert err.startswith("error: ") and err.count("\n") == 1 and wrong in err and remedy in err, err
    assert "Traceback" not in out and everything(world) == before and len(err) < 500


@pytest.mark.parametrize("env, sentence", [
    (dict(RANK="x"), "RANK, LOCAL_RANK and WORLD_SIZE: must all be numbers"),
    (dict(RANK="1"), "RANK, LOCAL_RANK and WORLD_SIZE: must all be numbers"),
    (dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0"), "no process group .*MASTER_ADDR expected.*; use torchrun")])
def test_invalid_torchrun_environment(world, env, sentence):
    before = everything(world)
    _, err = program("--preset", "baby", "--device", "cpu", cwd=world, status=2, env=env)
    assert re.match(f"error: {sentence}", err) and err.count("\n") == 1 and everything(world) == before, err


def test_output_may_contain_non_ascii_text(world, tmp_path):
    """On an ASCII terminal, too. --json may be a device, or a link, which stays a link."""
    flags = ["--checkpoint", world / "log/baby", "--max_new_tokens", 20]
    out, _ = program(*flags, "--prompt", "caf\xe9", "--json", "/dev/stdout", cwd=tmp_path, program="generate.py", fresh=True,
                     env=dict(PYTHONIOENCODING="ascii"))
    assert "caf\\xe9" in out and json.loads(out[out.rindex("\n[\n"):])[0]["prompt"] == "caf\xe9"
    (tmp_path / "link.json").symlink_to("target.json")
    program(*flags, "--json", "link.json", cwd=tmp_path, program="generate.py")
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "target.json").read_text())


def test_programs_load_files_safely_and_never_call_a_shell():
    """Checks every call in every program: a call that loads a file must not run code from it."""
    found = set()
    for path in (*ROOT.glob("*.py"), *ROOT.glob("plaingpt/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name, options = ast.unparse(node.func), {o.arg: ast.unparse(o.value) for o in node.keywords}
                where = f"{path.name}:{node.lineno}"
                assert name not in ("eval", "exec", "compile", "os.system", "os.popen", "__import__"), where
                assert not re.match(r"(pickle|marshal|shelve|dill|joblib)\.", name) and "shell" not in options, where
                if name in ("torch.load", "np.load"):
                    found.add(name)
                    assert options["weights_only" if name == "torch.load" else "allow_pickle"] == str(name == "torch.load"), where
                assert options.get("trust_remote_code", "False") == "False", where
    assert found == {"torch.load", "np.load"}


def test_paths_in_a_checkpoint_are_not_opened(world, tmp_path):
    """The file names in train_config are only information for the reader."""
    saved = torch.load(world / "log/baby/model_000002.pt", weights_only=True)
    for name in ("data", "log_dir", "init_from", "evals"):
        saved["train_config"][name] = "/proc/self/mem" if name != "evals" else "lambada=/proc/self/mem"
    (tmp_path / "run").mkdir()
    torch.save(saved, tmp_path / "run/model_000002.pt")
    train("--log_dir", "run", "--resume", "--max_steps", 3, cwd=tmp_path)
    out, _ = program("--checkpoint", "run", "--max_new_tokens", 3, cwd=tmp_path, program="generate.py")
    assert out.startswith("run/model_000003.pt, 34,688 parameters")
