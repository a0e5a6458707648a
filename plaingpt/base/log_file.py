"""Reads log.txt. It has a line "{step} {stream} {value}" for each number."""

import re

# A line of log.txt: step, stream, value.
LINE = re.compile(r"^(\d+) (\S+) ([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan))\n", re.M)


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
