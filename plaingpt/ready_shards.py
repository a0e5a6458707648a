"""Downloads shards of FineWeb-Edu that somebody else has tokenized, for fineweb.py --ready.

The shards are Andrej Karpathy's data set for llm.c: .bin files of 100 million tokens each, with the
ids of GPT-2. An unfinished file has the name of the shard and the suffix .incomplete, so no program
reads the file as a shard. This file does not use huggingface_hub.hf_hub_download, because that
function would start an interrupted download again from the first byte.
"""

import contextlib
import os
import re
from pathlib import Path

from plaingpt.errors import UserError, explaining, require
from plaingpt.files import lock, writing
from plaingpt.shards import BIN_HEADER, find_meta, find_shards, read_bin_header
from plaingpt.terminal import print0

from tqdm import tqdm

REPO = "karpathy/fineweb-edu-100B-gpt2-token-shards"
NAME = re.compile(r"edu_fineweb_(train|val)_\d{6}\.bin")
STEP = 2**19  # tokens per step, the default of train_gpt2.py
BLOCK = 2**16  # bytes to read at a time; an interruption loses less than a block
NETWORK = "check the network, HF_ENDPOINT and HF_TOKEN, then run the same command again"


def count_tokens(path):
    """Returns the number of tokens in a shard, or 0 if the shard is missing or incomplete."""
    if not path.exists() or path.stat().st_size < BIN_HEADER:
        return 0
    dtype, n = read_bin_header(path)
    return n if dtype == "<u2" and path.stat().st_size == BIN_HEADER + 2 * n else 0


def unfinished(path):
    """Returns the path of the unfinished file that becomes the shard `path`."""
    return path.with_name(f"{path.name}.incomplete")


def check_directory(directory):
    """Raises UserError if a directory contains shards of different data."""
    paths = [*find_shards(directory, "train"), *find_shards(directory, "val")]
    others = [path for path in paths if not NAME.fullmatch(path.name)]
    if find_meta(directory).exists():  # fineweb.py wrote it
        others.append(find_meta(directory))
    if others:
        raise UserError(f"{others[0]}: belongs to different data; use a new directory")


def list_sizes(names):
    """Returns the sizes of some shards on the Hugging Face Hub: {name: number of bytes}."""
    api = require("huggingface_hub").HfApi()
    with explaining(f"{REPO}: cannot be listed", NETWORK):
        files = api.dataset_info(REPO, files_metadata=True, timeout=30).siblings
    sizes = {file.rfilename: file.size for file in files if NAME.fullmatch(file.rfilename)}
    if not sizes.keys() >= set(names):
        n = sum("train" in name for name in sizes)
        raise UserError(f"--ready: {REPO} contains {n:,} training shards; give at most {n}")
    return {name: sizes[name] for name in names}


def read_blocks(name, start):
    """Yields the bytes of a file on the Hugging Face Hub from position `start` on, in blocks."""
    import requests

    hub = require("huggingface_hub")
    url = hub.hf_hub_url(REPO, name, repo_type="dataset")
    headers = {**hub.utils.build_hf_headers(), "Range": f"bytes={start}-"}
    with explaining(f"{name}: the download stopped", NETWORK):
        with requests.get(url, headers=headers, stream=True, timeout=30) as response:
            response.raise_for_status()
            yield from response.iter_content(BLOCK)


def download(path, size, bar):
    """Downloads a shard, or continues an interrupted download of the shard.

    path: the path of the shard. size: the number of bytes of the whole file. bar: the progress bar.
    """
    remedy = "free some space, then run the same command again"
    with writing(path, remedy), open(unfinished(path), "ab") as file:
        if file.tell() < size:
            for block in read_blocks(path.name, file.tell()):
                file.write(block)
                bar.update(len(block))
        file.flush()
        os.fsync(file.fileno())
    if not count_tokens(unfinished(path)):
        unfinished(path).unlink()
        raise UserError(f"{path}: the download is not a whole shard; run the same command again")
    os.replace(unfinished(path), path)


def download_ready(n, directory, flags):
    """Downloads the validation shard and the first n training shards into a directory.

    flags: {name: value} of all flags that the user gave.
    """
    for name in flags:
        if name not in ("ready", "output_dir"):
            raise UserError(f"--{name}: has no effect with --ready; remove one of the two")
    directory = Path(directory)
    check_directory(directory)
    train = [directory / f"edu_fineweb_train_{i:06d}.bin" for i in range(1, n + 1)]
    paths = [directory / "edu_fineweb_val_000000.bin", *train]
    missing = [path for path in paths if not count_tokens(path)]
    if missing:
        sizes = list_sizes([path.name for path in missing])
        with writing(f"--output_dir {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, lock(directory, "--output_dir"))
            begun = [path for path in map(unfinished, missing) if path.exists()]
            n_bytes = sum(path.stat().st_size for path in begun)
            options = dict(unit="B", unit_scale=True, mininterval=1)
            bar = stack.enter_context(tqdm(total=sum(sizes.values()), initial=n_bytes, **options))
            for path in missing:
                download(path, sizes[path.name], bar)
    shards = find_shards(directory, "train")
    n_tokens = sum(map(count_tokens, shards))
    print0(f"{directory} contains {len(shards)} training shards of {REPO}, {n_tokens:,} tokens")
    flags = f"--preset gpt2 --data {directory} --max_steps {n_tokens // STEP}"
    print0(f"to train on it: python train_gpt2.py {flags}")
