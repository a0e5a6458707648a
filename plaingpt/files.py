"""Files: atomic replacement, locks on directories, JSON, and checks of output paths.

This file also reads the files of a run. log.txt contains a line "{step} {stream} {value}" for each
logged value. The stream is the name of the value, such as train or lr.
"""

import contextlib
import json
import math
import os
import re
import uuid
import zlib
from pathlib import Path

from plaingpt.errors import UserError, explaining
from plaingpt.terminal import print0

# checksum_of_places reads at most N_PLACES places in a file. A place has PLACE bytes.
PLACE = 2**16
N_PLACES = 64
POINTER = b"version https://git-lfs.github.com/"  # the first bytes of a Git LFS pointer
# A line of log.txt: step, stream, value.
LINE = re.compile(r"^(\d{1,15}) (\S+) ([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan))\n", re.M)


def writing(path, remedy="choose another place, or free some space"):
    """Context manager that turns an OSError while writing `path` into a UserError."""
    return explaining(f"{path}: cannot write", remedy, OSError)


@contextlib.contextmanager
def reading(path, remedy="correct it", what="is damaged"):
    """Context manager that turns an exception while reading `path` into a UserError.

    The UserError contains `what` and `remedy`. But if the operating system cannot open the file,
    the file itself may be valid, so the UserError contains a different remedy. Possible causes are
    a missing permission, too many open files, or a file name that is not UTF-8, which PyTorch
    cannot encode.

    The block must contain only the code that reads the file. A user or another program may have
    written the file, and the libraries that read it raise exceptions of many kinds. All other code
    stays outside the block, so that bugs keep their traceback.
    """
    unopened = (OSError, UnicodeEncodeError)
    with (
        explaining(f"{path}: {what}", remedy),
        explaining(f"{path}: cannot be read", "remove the cause, then try again", unopened),
    ):
        yield


def check_pointer(path):
    """Raises UserError if a file is still a Git LFS pointer, a small file in place of the data."""
    path = Path(path)
    if path.stat().st_size < 1024 and path.read_bytes().startswith(POINTER):
        raise UserError(f"{path}: is a pointer of Git LFS instead of the file; run git lfs pull")


@contextlib.contextmanager
def replacing(path):
    """Context manager that yields a new binary file. After the block, this file replaces `path`.

    If the block raises an exception, the new file is deleted, and `path` stays as it is.
    """
    # This name is unique, and short even if the name of `path` is long.
    temporary = Path(path).with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def open_output(path):
    """Opens an output file for writing bytes, in a `with` block. path: the value of a flag.

    After the block, the new file replaces `path`, or the file to which the symbolic link `path`
    points. If `path` is a device, such as /dev/stdout, the bytes go directly to the device.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        return open(path, "wb")
    return replacing(path.resolve())


def lock(directory, flag, remedy="wait until it ends"):
    """Locks the file .lock in a directory until the returned file descriptor is closed.

    Raises UserError if another process holds the lock. flag, remedy: parts of the error message.
    """
    # On NFS and Lustre, other machines see the lock of a file that is open for writing, but not the
    # lock of a directory (Linux, nfs_dir_operations in fs/nfs/dir.c, has no flock). No process
    # deletes the file .lock. Otherwise, two processes could lock two different files of this name.
    descriptor = os.open(Path(directory, ".lock"), os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(
            f"{flag} {directory}: another process uses this directory; {remedy}"
        ) from error
    except (ImportError, OSError) as error:  # Windows and some network disks do not support locks
        print0(f"note: {directory} cannot be locked ({error}); start only one run in it")
    return descriptor


def delete_temporary_files(directory):
    """Deletes the temporary files of a process that was killed while it wrote in this directory."""
    for temporary in Path(directory).glob("*.tmp"):
        if re.fullmatch(r"[0-9a-f]{32}\.tmp", temporary.name):  # a name that `replacing` chose
            temporary.unlink()


def check_output(flag, path, inputs=()):
    """Raises UserError if a program cannot write an output file, or if the file is also an input.

    A program calls this function at its start. flag: the flag that names the output file. path: the
    path of the output file, or None. inputs: the paths of the input files. A directory means all
    files that it contains at this time. None and "" are ignored.
    """
    if not path:
        return
    output = Path(path).resolve()
    if output.is_file():
        for each in inputs:
            if each and Path(each).resolve() in (output, *output.parents):
                raise UserError(f"{flag} {path}: is also an input; give another file")
    is_device = os.path.exists(path) and not os.path.isfile(path)  # such as /dev/stdout
    # With a slash at its end, os.access accepts the path only if the parent is a directory.
    must_allow = path if is_device else os.path.join(output.parent, "")
    if output.is_dir() or not os.access(must_allow, os.W_OK):
        raise UserError(f"{flag} {path}: cannot write there; give a file in a writable directory")


def format_json(value, **options):
    """Returns a value as JSON, with null for NaN and infinity. options: see json.dumps."""
    return json.dumps(finite(value), allow_nan=False, **options)


def write_json(path, value):
    """Writes a value as JSON, with null for NaN and infinity.

    path: as in open_output. Raises UserError if the file cannot be written.
    """
    text = format_json(value, indent=2, ensure_ascii=False) + "\n"
    with writing(path), open_output(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))  # the value may contain invalid UTF-8


def finite(value):
    """Returns the value with None in place of each NaN or infinity, which JSON cannot express."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path):
    """Returns the object in a JSON file, as a dict, or {} if the file does not exist.

    Raises UserError if the file is damaged, or if it does not contain an object.
    """
    with reading(path, "restore it"):
        value = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value


def checksum_of_places(paths):
    """Returns one CRC-32 of 64 places in each of the files, as a hexadecimal string.

    A place is a block of 64 KiB. The places are evenly spaced from the start to the end of a file.
    In a file of up to 4 MiB, the places cover all bytes. For a larger file, the checksum takes
    almost no time, but misses an edit between two places that does not change the file's size.
    Raises OSError if a file cannot be read.
    """
    crc = 0
    for path in paths:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            n = min(N_PLACES, max(1, -(-size // PLACE)))  # rounded up
            for i in range(n):
                file.seek(max(0, size - PLACE) * i // max(1, n - 1))
                crc = zlib.crc32(file.read(PLACE), crc)
    return f"{crc:08x}"


def format_log(step, stream, text):
    """Returns a line of log.txt. text: the value, as a string."""
    return f"{step} {stream} {text}\n"


def read_log(path):
    """Returns the lines of log.txt: [(step, stream, value as a string)].

    Ignores an incomplete last line. Returns [] if the file does not exist.
    """
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    return [(int(step), stream, value) for step, stream, value in LINE.findall(text)]


def read_streams(path):
    """Returns the values in log.txt: {stream: {step: value}}, or {} if the file does not exist."""
    streams = {}
    for step, stream, value in read_log(path):
        streams.setdefault(stream, {})[step] = float(value)
    return streams


def read_facts(path):
    """Returns the contents of run.json, as a dict.

    The fields train_config, model_config and fingerprints are always dicts. These dicts are empty
    if the file does not exist, as in a run of build-nanogpt.
    """
    facts = read_json(path)
    with reading(path, "restore it"):
        for name in ("train_config", "model_config", "fingerprints"):
            facts[name] = dict(facts.get(name, {}))
    return facts
