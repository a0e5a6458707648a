"""Shows what your own model does with a text, in one HTML file.

  python look.py log/baby                             the model generates a text
  python look.py log/baby --text "MARLOW: The boats came home."
  python look.py log/baby log/wide --text held.txt    two runs, the same text
  python look.py log/sums --text pairs.jsonl          prompts and responses
  python look.py --model gpt2 --text "Hello, I'm a language model,"

The page opens in any browser, without a network. The page shows the loss of
each token, the likeliest tokens, the attention weights of each head, what each
block adds to the prediction, and a slider over the checkpoints of the run. (To
keep all checkpoints, start the run with --keep 0.) For two runs, the slider
contains the steps at which both runs saved a checkpoint, and the page shows the
tokens whose losses differ most between the runs.

For a small model with byte tokens, such as --preset baby, the page also
contains the weights, and runs the model on a text that you type. --no-live
omits the weights.

--text is the text itself, or a file: a UTF-8 text file, or .jsonl, .json or
.csv with pairs of prompt and response.
"""

import contextlib
import importlib.util
import io
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from plaingpt.checkpoint import (
    find_checkpoints,
    find_newest_model,
    list_model_files,
    step_of,
)
from plaingpt.documents import RECORDS, kind_of, read_records, split_text
from plaingpt.errors import UserError, explaining, run_program
from plaingpt.files import check_output, open_output, read_facts, writing
from plaingpt.flags import flag, parse_flags
from plaingpt.lab.copies import make_copy, remove_copies
from plaingpt.look.live import find_reason, pack_model
from plaingpt.look.page import Look, Snapshot, Text, build_page
from plaingpt.look.record import record_text
from plaingpt.pairs import count_tokens, encode_pair, join_pairs
from plaingpt.pretrained import load_model
from plaingpt.process import setup
from plaingpt.sampling import attention_for_many_shapes
from plaingpt.terminal import print0, show_progress
from plaingpt.tokenizer import clean_text, note_unknown

import torch

from generate import GenerateConfig, decode_new
from model import GPT

N_OWN_TEXT = 40  # without --text, the model generates this many tokens


@dataclass
class LookConfig:
    text: str | None = flag(
        None, "text, text file or file with pairs [the model generates a text]", path=False
    )
    model: str | None = flag(None, "GPT-2 from Hugging Face: name or directory")
    output: str | None = flag(None, "file to write [look.html in the directory of the first run]")
    max_tokens: int = flag(256, "show at most this many tokens of the text", at_least=1)
    max_checkpoints: int = flag(12, "show at most this many checkpoints in the slider", at_least=1)
    sample_tokens: int = flag(200, "number of tokens to generate from each checkpoint", at_least=0)
    live: bool = flag(
        True, "let the page run a small model with byte tokens on a text that you type"
    )
    own_code: bool = flag(False, "load each run with the model.py that it was trained with")
    device: str = flag("auto", "cuda, mps or cpu")


@dataclass
class Run:
    """A run, a single checkpoint, or a GPT-2 from Hugging Face."""

    name: str
    checkpoints: (
        dict  # {name of the snapshot, such as "step 300": argument of load_model}, oldest first
    )
    directory: Path | None  # the run directory; None for a GPT-2 from Hugging Face
    GPT: type = GPT  # the class of the run's model


def find_run(place):
    """Returns the Run for a run directory, a checkpoint file or an export."""
    path = Path(place)
    found = find_checkpoints(path)
    if found:
        steps = {f"step {step_of(each)}": each for each in found}
        return Run(str(path), steps, path)
    if path.is_file():
        return Run(str(path), {path.stem: path}, path.parent)
    if (path / "config.json").is_file():
        return Run(str(path), {"exported": path}, path)
    raise UserError(
        f"{place}: contains no checkpoint; give a run, such as log/baby, or a file model_*.pt"
    )


def find_runs(places, model):
    """Returns the one or two Runs that the command line names.

    places: the positional arguments. model: the value of --model, or None. If both are missing,
    returns the run with the newest checkpoint in log/.
    """
    runs = [find_run(place) for place in places]
    if model:
        runs.append(Run(model, {"published": model}, None))
    if not runs:
        runs.append(find_run(find_newest_model().parent))
    if len(runs) > 2:
        raise UserError(f"{len(runs)} runs are too many; give one or two")
    return runs


def choose_snapshots(runs, n):
    """Returns the names of at most n evenly spaced snapshots, including the last snapshot.

    For two runs, chooses among the steps at which both runs have a snapshot. If there are no such
    steps, returns [None], which means the last snapshot of each run.
    """
    names = [name for name in runs[0].checkpoints if name in runs[-1].checkpoints]
    if not names:
        return [None]
    if len(names) <= n:
        return names
    last = len(names) - 1
    return [names[last - last * i // max(1, n - 1)] for i in reversed(range(n))]


@contextlib.contextmanager
def own_class(run):
    """Context manager that sets run.GPT to the class GPT with which the run was trained.

    This class is from the model.py at the commit of the run, with the run's changes.patch. All
    other code is from this clone.
    """
    facts = read_facts(run.directory / "run.json")
    if not facts.get("git_commit"):
        raise UserError(f"--own_code: {run.name}/run.json names no commit; remove --own_code")
    patch = run.directory / "changes.patch"
    changes = patch.read_bytes() if patch.is_file() else b""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "copy")
        try:
            make_copy(copy, facts["git_commit"].removesuffix("-dirty"), changes)
            run.GPT = import_file(copy / "model.py", f"model_of_{id(run)}").GPT
            yield
        finally:
            remove_copies([copy])


def changes_model(run):
    """Returns whether the run has a changes.patch that changes model.py."""
    if run.directory is None:
        return False
    patch = run.directory / "changes.patch"
    return patch.is_file() and b"\n+++ b/model.py" in patch.read_bytes()


def import_file(path, name):
    """Imports a Python file as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and inspect need this entry
    spec.loader.exec_module(module)
    return module


def read_text(given, tokenizer, n):
    """Returns the Text for the value of --text, a text or the path of a file.

    The Text has at most n + 1 ids. The first id is end_of_text. given: the value of --text.
    """
    is_file = os.path.isfile(given)
    if is_file and kind_of(Path(given)) in RECORDS:
        return read_pairs_of_page(given, tokenizer, n)
    documents = [given]
    if is_file:
        with explaining(
            f"--text {given}: cannot be read", "give a UTF-8 text file", (OSError, ValueError)
        ):
            data = Path(given).read_bytes()
            documents = [data.decode("utf-8-sig")]
        if tokenizer.name != "bytes":  # splits the file into documents, as training does
            documents = [document.decode() for _, document, _ in split_text(io.BytesIO(data))]
    elif kind_of(Path(given)) in (".txt", *RECORDS) and not any(map(str.isspace, given)):
        raise UserError(f"--text {given}: no such file; give an existing file, or a text")
    ids = tokenizer.encode_documents([clean_text(document) for document in documents]).tolist()
    note_unknown(tokenizer, [ids], "the text")
    if len(ids) < 2:
        raise UserError("--text: contains no tokens; give a longer text")
    return Text(ids[: n + 1], None, note_cut(len(ids) - 1, n))


def note_cut(n_tokens, n):
    """Prints and returns a note if a text is longer than n tokens. Otherwise, returns ""."""
    if n_tokens <= n:
        return ""
    note = f"The text has {n_tokens:,} tokens. The page shows the first {n:,}."
    print0(f"note: {note}")
    return note


def read_pairs_of_page(path, tokenizer, n):
    """Returns the first pairs of a file, up to n tokens, as a Text. Training uses the same ids."""
    pairs = []
    size = 0
    for record in read_records([path], columns=("prompt", "response")):
        pair = encode_pair(record, tokenizer)
        size += count_tokens(*pair)
        if size > n:
            break
        pairs.append(pair)
    if not pairs:
        raise UserError(
            f"--text {path}: does not begin with a pair of at most {n} tokens; give shorter pairs"
        )
    ids, counted = join_pairs(pairs, tokenizer, n)
    end = int(counted.nonzero()[0][-1]) + 1  # the ids after the last response are padding
    note = "" if size <= n else f"The page shows the first {len(pairs):,} pairs."
    return Text(ids[:end].tolist(), counted[:end].tolist(), note)


def write_sample(model, tokenizer, text, n):
    """Generates n tokens. Returns the prompt and the generated text, as one string.

    text: the Text of the page. If the text contains pairs, the prompt is the first prompt.
    Otherwise, the prompt is empty. The sampling options are the defaults of generate.py.
    """
    options = GenerateConfig()
    n_prompt = text.counted.index(True) if text.counted else 1
    idx = torch.tensor([text.ids[:n_prompt]], device=model.lm_head.weight.device)  # (1, n_prompt)
    with attention_for_many_shapes():
        ids = model.generate(
            idx, n, seed=options.seed, temperature=options.temperature, top_k=options.top_k
        )[0].tolist()
    sample, _ = decode_new(ids, n_prompt, tokenizer, options)
    return tokenizer.decode(ids[1:n_prompt]) + sample


def find_own_snapshot(run, snapshot):
    """Returns `snapshot` if the run contains it. Otherwise, returns the run's last snapshot.

    A snapshot is the name of a checkpoint, a key of run.checkpoints.
    """
    return snapshot if snapshot in run.checkpoints else list(run.checkpoints)[-1]


def load(run, snapshot, process):
    """Loads a checkpoint of a run. Returns (GPT on the device, Tokenizer).

    snapshot: the name of the checkpoint. If the run contains no checkpoint with this name, loads
    the last checkpoint of the run.
    """
    model, tokenizer = load_model(str(run.checkpoints[find_own_snapshot(run, snapshot)]), run.GPT)
    return model.to(process.device), tokenizer


def describe(run, snapshot, model):
    """Returns a text that describes a run's model on the page. snapshot: as in `load`."""
    c = model.config
    n_parameters = sum(p.numel() for p in model.parameters())
    size = f"{n_parameters:,} parameters, {c.n_layer} blocks of {c.n_head} heads"
    change = ", trained with a changed model.py" if changes_model(run) else ""
    return f"{find_own_snapshot(run, snapshot)}, {size}{change}"


def look_at_all(runs, config, process):
    """Records what the models of all snapshots do with the text.

    Returns (Text, list of Snapshots, newest). newest: a list with (GPT, Tokenizer) of the last
    checkpoint of each run.
    """
    newest = [load(run, None, process) for run in runs]
    tokenizer = newest[0][1]
    if newest[-1][1].name != tokenizer.name:
        names = " and ".join(run.name for run in runs)
        raise UserError(f"{names}: have different tokenizers; give runs with the same tokenizer")
    contexts = [model.config.block_size for model, _ in newest]
    nothing = Text([tokenizer.end_of_text], None)
    given = config.text or write_sample(newest[0][0], tokenizer, nothing, N_OWN_TEXT)
    if not given:  # the first token that the model generates ends the text
        raise UserError(f"{runs[0].name}: the model generates no text; give --text")
    text = read_text(given, tokenizer, min(config.max_tokens, *contexts))
    names = choose_snapshots(runs, config.max_checkpoints)
    snapshots = []
    for i, name in enumerate(names, start=1):
        looks = []
        for run, (model, own_tokenizer) in zip(runs, newest):
            if find_own_snapshot(run, name) != find_own_snapshot(run, None):
                model, own_tokenizer = load(run, name, process)
            record = record_text(model, text.ids)
            # own_tokenizer knows whether a line break ends the sample, as after training on pairs.
            sample = write_sample(model, own_tokenizer, text, config.sample_tokens)
            looks.append(Look(record, describe(run, name, model), sample))
        title = name or "the last checkpoints"
        snapshots.append(Snapshot(title, looks))
        means = [f"{text.mean_of(look.record.prediction.losses):.4f}" for look in looks]
        of_what = " of the responses" if text.counted else ""
        print0(f"{title}: mean loss {', '.join(means)} nats per token{of_what}")
        show_progress(i, len(names), "checkpoints")
    return text, snapshots, newest


def describe_live(config, newest, text):
    """Returns the argument `live` of build_page. newest: from look_at_all. text: the Text."""
    model, tokenizer = newest[0]
    why = find_reason(model, tokenizer, len(newest)) if config.live else "--no-live was given"
    if why:
        return dict(why=why)
    return pack_model(model.cpu(), text.ids)


def default_output(runs):
    """Returns the path of the page in the directory of the first run: look.html, or look-RUN.html.

    RUN is the name of the second run.
    """
    name = f"look-{Path(runs[1].name).name}.html" if len(runs) > 1 else "look.html"
    return (runs[0].directory or Path()) / name


def main(argv=None):
    given = parse_flags(__doc__, LookConfig, argv=argv, rest="RUN")
    places = given.pop("RUN")
    config = LookConfig(**given)
    runs = find_runs(places, config.model)
    output = config.output or default_output(runs)
    inputs = [config.text]
    for run in runs:
        source, *_ = run.checkpoints.values()  # all checkpoints of a run are in one directory
        inputs += list_model_files(source)
    check_output("--output", output, inputs)
    process = setup(config.device, "float32")
    with contextlib.ExitStack() as copies:
        for run in runs:
            if config.own_code and run.directory:
                copies.enter_context(own_class(run))
            elif changes_model(run):
                print0(f"note: {run.name} has its own model.py, which only --own_code uses")
        text, snapshots, newest = look_at_all(runs, config, process)
        live = describe_live(config, newest, text)
    tokenizer = newest[0][1]
    page = build_page(text, snapshots, [run.name for run in runs], tokenizer, live)
    with writing(output), open_output(output) as file:
        file.write(page)
    print0(f"{output}: {len(page) / 1e6:.1f} MB; open it in a browser")


if __name__ == "__main__":
    run_program(main)
