"""Runs commands of git."""

import subprocess
from pathlib import Path

from plaingpt.base.errors import explaining


def run_git(*command, place=None, data=None):
    """Runs a command of git in a directory -> its output, as bytes. Raises UserError.

    place: the directory; by default this clone. data: the input of the command.
    """
    with explaining(f"git {command[0]}", "see --help", (OSError, subprocess.CalledProcessError)):
        return subprocess.run(
            ["git", *command],
            cwd=place or Path(__file__).parent,
            input=data,
            capture_output=True,
            check=True,
        ).stdout
