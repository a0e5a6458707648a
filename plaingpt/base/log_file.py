"""Reads the files of a run: log.txt and run.json.

log.txt has a line "{step} {stream} {value}" for each number.
"""

import re

from plaingpt.base.files import read_json, reading

# A line of log.txt: step, stream, value.
LINE = re.compile(r"^(\d{1,15}) (\S+) ([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan))\n", re.M)


def read_log(path):
    """Reads log.txt -> [(step, stream, value as text)], or []. Ignores an incomplete last line."""
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    return [(int(step), stream, value) for step, stream, value in LINE.findall(text)]


def read_streams(path):
    """Reads log.txt -> {stream: {step: number}}; {} without the file."""
    streams = {}
    for step, stream, value in read_log(path):
        streams.setdefault(stream, {})[step] = float(value)
    return streams


def read_facts(path):
    """Reads run.json -> dict, in which train_config and model_config are dicts. Raises UserError.

    Without the file, they are empty: build-nanogpt writes none.
    """
    facts = read_json(path)
    with reading(path, "restore it"):
        for name in ("train_config", "model_config"):
            facts[name] = dict(facts.get(name, {}))
    return facts
