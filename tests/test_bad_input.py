"""A table of what people get wrong, in flags and in files: each is answered by one sentence, and nothing on disk changes."""

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
    """What a pickle with evil intent holds: to load it is to leave a mark."""

    def __init__(self, directory):
        self.path = str(directory / "MARK")

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A directory with a good run, log/baby, and every kind of file that is not what it should be."""
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

    texts = dict(empty="", text="A boat came. " * 999, no_json="nothing\n", columns='{"body": "a boat"}\n', blank="a\n\nb\n",
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
    (d / "no_val").mkdir()
    np.save(d / "no_val/x_train_000000.npy", tokens)

    models = dict(evil={}, bert=dict(model_type="bert"), shape={}, empty={})
    for name, settings in models.items():
        GPT(GPTConfig(n_layer=1, n_head=1, n_embd=4, block_size=16)).to_hf(d / f"hf_{name}")
        path = d / f"hf_{name}/config.json"
        config = {**json.loads(path.read_text()), **settings, **(dict(n_embd=8) if name == "shape" else {})}
        path.write_text(json.dumps(config) if name != "empty" else "")
    (d / "hf_evil/model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Mark(d)}, d / "hf_evil/pytorch_model.bin")
    return d


NONE_OF = "is none of"
CASES = {
    # program: [(flags, what is wrong, what to do about it)]
    "train_gpt2.py": [
        ("--max_step 5", "unknown flag --max_step", "did you mean --max_steps?"),
        ("--frobnicate", "unknown flag --frobnicate", "--help lists them all"),
        ("extra", "unknown flag extra", "--help lists them all"),
        ("--max_steps", "--max_steps: expected one argument", "--help says what it takes"),
        ("--max_steps many", "--max_steps: invalid int value: 'many'", "--help says what it takes"),
        ("--max_steps 1e4", "--max_steps: invalid int value: '1e4'", "--help says what it takes"),
        ("--resume=yes", "--resume/--no-resume: ignored explicit argument 'yes'", "--help says what it takes"),
        ("--max_steps 0", "--max_steps 0 cannot be", "a number above 0"),
        ("--batch_size -4", "--batch_size -4 cannot be", "a number above 0"),
        ("--grad_clip -1", "--grad_clip -1.0 cannot be", "a number from 0 up"),
        ("--max_lr nan", "--max_lr nan cannot be", "a number above 0"),
        ("--max_lr inf", "--max_lr inf cannot be", "a number above 0"),
        ("--seed -1", "--seed -1 cannot be", "a number from 0 up"),
        ("--seed 4294967296", "--seed 4294967296 cannot be", "below 2^32"),
        ("--min_lr 1", "--min_lr 1.0 is above --max_lr", "leave it out"),
        ("--muon_lr 1 --optimizer adamw", "--muon_lr 1.0 is for --optimizer muon alone", "--max_lr is that of adamw"),
        ("--optimizer sgd", f"--optimizer sgd {NONE_OF}", "adamw, muon"),
        ("--preset gpt5", f"--preset gpt5 {NONE_OF}", "gpt2-medium"),
        ("--n_layer 1000000000", "--n_layer 1000000000 of --n_embd 128: the weights alone take 786,432 GB", "take fewer"),
        ("--dtype int8", f"--dtype int8 {NONE_OF}", "bfloat16"),
        ("--evals arc", f"--evals arc {NONE_OF}", "hellaswag"),
        ("--parallel zero", f"--parallel zero {NONE_OF}", "fsdp"),
        ("--device toaster", "--device toaster cannot be used", "--device cpu can"),
        ("--device cuda:99", "--device cuda:99 cannot be used", "--device cpu can"),
        ("--n_head 3", "--n_head 3 does not divide --n_embd 128", "--n_head 2 would"),
        ("--n_head 999", "--n_head 999 does not divide --n_embd 128", "--n_head 128 would"),
        ("--vocab_size 50304", "--vocab_size 50304 is more than the 50257 ids", "leave the flag out"),
        ("--vocab_size 100", "token id 1", "--vocab_size is wrong"),
        ("--total_batch_size 1000", "--total_batch_size 1000 is no multiple of block_size 64", "960 would do"),
        ("--total_batch_size 9999999936", "--total_batch_size 9999999936 is more than the 348544 tokens", "348544 would do"),
        ("--batch_size 3", "--batch_size 3 does not divide the 16 sequences", "--batch_size 2 would"),
        ("--rampup_steps 3 --rampup_batch_size 768", "--rampup_batch_size 768 does not divide", "512 would do"),
        ("--block_size 500000", "too few for one sequence", "a smaller --block_size"),
        ("--tp 3", "--tp 3 does not divide the 2 heads", "1, 2 do"),
        ("--pp 3", "--pp 3 is more than the 2 blocks", "which is the most"),
        ("--tp 2", "--tp 2 x --pp 1 takes a multiple of 2 processes", "torchrun --nproc_per_node=2"),
        ("--data missing.txt", "--data missing.txt: no such file", "a text or fineweb.py's directory"),
        ("--data empty.txt", "--data empty.txt: the 0 tokens", "give more"),
        ("--data binary.txt", "--data binary.txt: is no text", "give one in UTF-8"),
        ("--data float.npy/x_val_000000.npy", "x_val_000000.npy: is no text", "the directory of shards"),
        ("--data closed.txt", "--data closed.txt: cannot be read", "give a text"),
        ("--data /dev/null", "--data /dev/null: not a file or directory", "a text or fineweb.py's directory"),
        ("--data nowhere", "--data nowhere: no train shards in it", "fineweb.py makes them"),
        ("--data no_val", "--data no_val: no val shards in it", "fineweb.py makes them"),
        ("--data pickled.npy --vocab_size 256", "pickled.npy/x_train_000000.npy: not a readable shard", "fetch or make it again"),
        ("--data float.npy --vocab_size 256", "x_train_000000.npy: float64 of shape", "a shard is one-dimensional uint16"),
        ("--data text.npy --vocab_size 256", "x_train_000000.npy: not a readable shard", "fetch or make it again"),
        ("--data cut.npy --vocab_size 256", "x_train_000000.npy: not a readable shard", "fetch or make it again"),
        ("--data large.npy --vocab_size 256", "token id 256 is outside the vocabulary of 256", "--vocab_size is wrong"),
        ("--data few.npy --vocab_size 256", "the 9 tokens of its train split", "give more"),
        ("--data magic.bin --vocab_size 256", "x_train_000000.bin: not a shard as llm.c writes them", "beginning with 20240520"),
        ("--data count.bin --vocab_size 256", "the 1000000 tokens that its header promises", "fetch or make it again"),
        ("--log_dir text.txt", "--log_dir text.txt: cannot be written", "give another place"),
        ("--log_dir text.txt/deeper", "--log_dir text.txt/deeper: cannot be written", "give another place"),
        ("--init_from missing.pt", "missing.pt: no such checkpoint", "give another file"),
        ("--init_from no/where", "no/where: neither a checkpoint nor a GPT-2", "give"),
        ("--init_from evil.pt", "evil.pt: not a readable checkpoint", "give another"),
        ("--init_from empty.pt", "empty.pt: not a readable checkpoint", "give another"),
        ("--init_from text.pt", "text.pt: not a readable checkpoint", "give another"),
        ("--init_from cut.pt", "cut.pt: not a readable checkpoint", "give another"),
        ("--init_from list.pt", "list.pt: not a checkpoint of this program", "give another"),
        ("--init_from tensor.pt", "tensor.pt: not a checkpoint of this program", "give another"),
        ("--init_from foreign.pt", "foreign.pt: not a checkpoint of this program, it lacks model", "give another"),
        ("--init_from shape.pt", "shape.pt: its model cannot be built", "give another checkpoint"),
        ("--init_from setting.pt", "setting.pt: its model cannot be built", "give another checkpoint"),
        ("--init_from tokenizer.pt", "tokenizer.pt: its model cannot be built (unknown tokenizer", "give another checkpoint"),
        ("--init_from log/baby --n_layer 3", "log/baby holds another model: n_layer is 2, not 3", "leave the flags out"),
        ("--resume --n_embd 64 --n_layer 1", "log/baby holds another model: n_layer is 2, not 1, n_embd is 32, not 64", "give the same"),
        ("TINY --resume --data text.txt --val_tokens 64", "is not what the run in log/baby was trained on", "--init_from log/baby takes"),
        ("TINY --resume --optimizer muon", "is one of --optimizer adamw, not muon", "--optimizer adamw"),
        ("TINY --resume --max_steps 1", "at step 2 already, past --max_steps 1", "give more"),
        ("--evals hellaswag=missing.jsonl", "missing.jsonl: cannot be read", "give a .jsonl"),
        ("--evals hellaswag=columns.jsonl", "columns.jsonl, line 1: no 'endings'", "but body"),
        ("--evals hellaswag=choice.jsonl", "choice.jsonl, line 1: the label 4", "is none of 0, 1, 2, 3"),
    ],
    "generate.py": [
        ("--prompt ", "--prompt '': there is nothing to go on from", "leave it out"),
        ("--prompt <|endoftext|> --checkpoint gpt2.pt", "--prompt '<|endoftext|>': there is nothing to go on from", "leave it out"),
        ("--prompt \udcff", "--prompt: is not UTF-8", "write it in UTF-8"),
        (f"--prompt {'a' * 32}", "--prompt: has 32 tokens, and this model reads 31", "give less"),
        ("--prompts long.txt --checkpoint gpt2.pt", "--prompts long.txt, line 1: has 51 tokens", "give less"),
        ("--prompts missing.txt", "--prompts missing.txt: cannot be read", "give a text file"),
        ("--prompts empty.txt", "--prompts empty.txt: is empty", "write one prompt a line"),
        ("--prompts blank.txt", "--prompts blank.txt, line 2 '': there is nothing", "leave it out"),
        ("--prompts latin.txt", "--prompts latin.txt: is not UTF-8", "give a text"),
        ("--prompts nowhere", "--prompts nowhere: cannot be read", "give a text file"),
        ("--prompts closed.txt", "--prompts closed.txt: cannot be read", "give a text file"),
        ("--prompts a --prompt b", "--prompt and --prompts exclude each other", "give one"),
        ("--model a --checkpoint b", "--model and --checkpoint exclude each other", "give one"),
        ("--temperature -1", "--temperature -1.0 cannot be", "a number from 0 up"),
        ("--temperature 1e-300", "--temperature 1e-300 cannot be", "from 0.001 up"),
        ("--top_p 2", "--top_p 2.0 cannot be", "say 0.9"),
        ("--num_samples 0", "--num_samples 0 cannot be", "a number from 1 up"),
        ("--json nowhere", "--json nowhere: that is a directory", "give a file"),
        ("--json no/where.json", "--json no/where.json: there is no directory no", "make it first"),
        ("--checkpoint missing.pt", "no checkpoint in missing.pt", "give --checkpoint FILE"),
        ("--checkpoint nowhere", "no checkpoint in nowhere", "give --checkpoint FILE"),
        ("--checkpoint evil.pt", "evil.pt: not a readable checkpoint", "give another"),
        ("--checkpoint shape.pt", "shape.pt: its model cannot be built", "give another checkpoint"),
        ("--model hf_evil", "hf_evil: neither a checkpoint nor a GPT-2 that transformers can load", "give"),
        ("--model hf_bert", "hf_bert: neither a checkpoint nor a GPT-2 that transformers can load", "model_type is 'bert'"),
        ("--model hf_shape", "hf_shape: neither a checkpoint nor a GPT-2 that transformers can load", "give"),
        ("--model hf_empty", "hf_empty: neither a checkpoint nor a GPT-2 that transformers can load", "give"),
        ("--model no/where", "no/where: neither a checkpoint nor a GPT-2 that transformers can load", "give"),
    ],
    "fineweb.py": [
        ("--input missing.txt", "missing.txt: no such file", "a quoted glob"),
        ("--input nowhere", "nowhere: a directory", "give the files in it"),
        ("--input evil.pt", "evil.pt: not a .jsonl, .json or .txt file", ".parquet"),
        ("--input closed.txt", "closed.txt: not a file that can be read", "give"),
        ("--input empty.txt", "no text in empty.txt", "which is empty"),
        ("--input columns.jsonl", "columns.jsonl, line 1: no key 'text', but body", "--text_key"),
        ("--input no_json.jsonl", "no_json.jsonl, line 1: not JSON", "records skipped"),
        ("--input latin.jsonl --strict", "latin.jsonl, line 1: not UTF-8", "--strict"),
        ("--input no.parquet", "no.parquet: cannot be read", "fetch or make it again"),
        ("--input numbers.parquet", "numbers.parquet: the column 'text' is no text, but int64", "--text_key"),
        ("--input cut.jsonl.gz", "cut.jsonl.gz: cannot be read", "fetch or make it again"),
        ("--input text.txt --shard_size 0", "--shard_size 0", "at least 1"),
        ("--input text.txt --num_proc -1", "--num_proc -1", "at least 1"),
        ("--input text.txt --backend fast", f"--backend fast {NONE_OF}", "tiktoken, gigatoken"),
        ("--input text.txt --dataset x", "--dataset and --name are the hub's", "give one or the other"),
        ("--input text.txt --output_dir text.txt", "--output_dir text.txt: ", "not a directory that can be written to"),
        ("--input text.txt --output_dir good.npy", "--output_dir good.npy: holds shards, but no meta.json", "choose another directory"),
    ],
    "hellaswag.py": [
        ("--data missing.jsonl", "missing.jsonl: cannot be read", "give a .jsonl"),
        ("--data columns.jsonl", "columns.jsonl, line 1: no 'endings'", "--help shows"),
        ("--data choice.jsonl", "choice.jsonl, line 1: the label 4", "is none of 0, 1, 2, 3"),
        ("--data no.parquet", "no.parquet, start: ", "Parquet"),
        ("--data empty.jsonl", "there is no example in it", "empty.jsonl"),
        ("--data choice.jsonl --style quiz", f"--style quiz {NONE_OF}", "completion, harness"),
        ("--data choice.jsonl --limit -1", "--limit -1 cannot be", "a number from 0 up"),
        ("--data good.jsonl --checkpoint foreign.pt", "foreign.pt: not a checkpoint of this program", "give another"),
    ],
    "lambada.py": [("--data latin.txt", "latin.txt, line 1: not UTF-8", "line 1"),
                   ("--data columns.jsonl", "columns.jsonl, line 1: no 'text'", "but body"),
                   ("--batch_size 0", "--batch_size 0 cannot be", "a number from 1 up")],
    "storycloze.py": [("", "the Story Cloze data come from their owners alone", "--data FILE.csv"),
                      ("--data story.jsonl", "story.jsonl, line 1: the label 3", "is none of 1, 2")],
    "wikitext.py": [("--data text.txt --stride 64", "--stride 64 is more than the 32 tokens", "context"),
                    ("--data empty.txt", "there is no example in it", "empty.txt")],
    "bench.py": [("--preset gpt5", f"--preset gpt5 {NONE_OF}", "gpt2-medium"), ("--peer megatron", f"--peer megatron {NONE_OF}", "plain"),
                 ("--steps 0", "--steps 0 cannot be", "a number above 0"), ("--batch_size 4 -1", "--batch_size -1 cannot be", "above 0"),
                 ("--tp 2", "--tp 2 x --pp 1 takes a multiple of 2 processes", "torchrun --nproc_per_node=2"),
                 ("--dtype fp8", f"--dtype fp8 {NONE_OF}", "bfloat16")],
}
TINY = ("--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --total_batch_size 512 --batch_size 4 --optimizer adamw "
        "--max_lr 4e-3")


def everything(directory):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in directory.rglob("*")}


@pytest.mark.parametrize("name, flags, wrong, remedy", [(name, *case) for name, cases in CASES.items() for case in cases],
                         ids=[f"{name} {case[0][:60]!a}" for name, cases in CASES.items() for case in cases])
def test_a_mistake_is_answered_by_one_sentence(world, name, flags, wrong, remedy):
    before, flags = everything(world), flags.replace("TINY", TINY).split(" ") if flags else []
    if name == "train_gpt2.py":
        flags = ["--preset", "baby", "--device", "cpu", *flags] if "--preset" not in flags else flags
    out, err = program(*flags, cwd=world, program=name, status=2, root=False)
    if name == "fineweb.py":  # has a progress bar, and shows the first few records that it skips
        err = "".join(line for line in err.splitlines(keepends=True) if line.strip() and not re.search("tok/s]|^skipped ", line))
    assert err.startswith("error: ") and err.count("\n") == 1 and wrong in err and remedy in err, err
    assert "Traceback" not in out and everything(world) == before and len(err) < 500


@pytest.mark.parametrize("env, sentence", [
    (dict(RANK="x"), "RANK=x is no number; unset RANK, torchrun sets it itself"),
    (dict(WORLD_SIZE="2"), "WORLD_SIZE=2 asks for other processes .*RANK expected.*; start them with torchrun, or unset WORLD_SIZE"),
    (dict(WORLD_SIZE="2", RANK="0"), "WORLD_SIZE=2 asks for other processes .*MASTER_ADDR expected.*; start them with torchrun")])
def test_an_environment_from_elsewhere(world, env, sentence):
    before = everything(world)
    _, err = program("--preset", "baby", "--device", "cpu", cwd=world, status=2, env=env)
    assert re.match(f"error: {sentence}", err) and err.count("\n") == 1 and everything(world) == before, err


def test_what_a_person_reads_need_not_be_ascii(world, tmp_path):
    """Nor need --json be a file of its own: a link stays a link, and a device a device."""
    flags = ["--checkpoint", world / "log/baby", "--max_new_tokens", 20]
    out, _ = program(*flags, "--prompt", "caf\xe9", "--json", "/dev/stdout", cwd=tmp_path, program="generate.py", fresh=True,
                     env=dict(PYTHONIOENCODING="ascii"))
    assert "caf\\xe9" in out and json.loads(out[out.rindex("\n[\n"):])[0]["prompt"] == "caf\xe9"
    (tmp_path / "link.json").symlink_to("target.json")
    program(*flags, "--json", "link.json", cwd=tmp_path, program="generate.py")
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "target.json").read_text())


def test_no_file_can_run_code_and_no_shell_is_asked():
    """Looks at every call in every program: what loads a file must be told not to run what it finds there."""
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


def test_a_path_in_a_checkpoint_is_not_followed(world, tmp_path):
    """What train_config says of files is for people to read."""
    saved = torch.load(world / "log/baby/model_000002.pt", weights_only=True)
    for name in ("data", "log_dir", "init_from", "evals"):
        saved["train_config"][name] = "/proc/self/mem" if name != "evals" else "lambada=/proc/self/mem"
    (tmp_path / "run").mkdir()
    torch.save(saved, tmp_path / "run/model_000002.pt")
    train("--log_dir", "run", "--resume", "--max_steps", 3, cwd=tmp_path)
    out, _ = program("--checkpoint", "run", "--max_new_tokens", 3, cwd=tmp_path, program="generate.py")
    assert out.startswith("run/model_000003.pt, 34,688 parameters")
