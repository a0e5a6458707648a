"""How a program stops: a run first saves a checkpoint; other programs end at once."""

import contextlib
import math
import os
import signal
import threading
import time


class Stopped(Exception):
    """Raised to end validation, a benchmark or sampling early, for example after a signal."""


class StopRequest:
    """Stores whether a run should save a checkpoint and stop.

    A run stops after a signal, at the time limit, or because this process cannot read its data. In
    the last case, `error` stores the exception until the run has saved a checkpoint.

    next_batch: the Future of the batch that a background thread reads, or None.
    """

    def __init__(self):
        self.has_signal = False
        self.deadline = math.inf
        self.error = None
        self.next_batch = None

    @property
    def requested(self):
        """Whether the run should end after the current step. Waits until the next batch is read."""
        with self.reading():
            if self.next_batch is not None:
                self.next_batch.result()
        return self.has_signal or self.error is not None or time.monotonic() > self.deadline

    @contextlib.contextmanager
    def reading(self):
        """Context manager that stores an exception in `error` instead of raising it."""
        try:
            yield
        except Exception as error:
            self.error = error

    @contextlib.contextmanager
    def listening(self, max_minutes=None):
        """Context manager in which a signal makes the run save a checkpoint and end.

        The signals are SIGTERM, SIGINT and SIGHUP. A signal may arrive several times: a closing
        terminal often sends SIGHUP twice, and torchrun forwards a signal that a service manager has
        already sent to all processes. Only a second Ctrl-C (SIGINT) ends the program at once.
        Outside the main thread, this method does not change what a signal does, because Python
        handles signals only in the main thread.

        max_minutes: the time limit, counted from the call of this method, or None.
        """
        self.deadline = time.monotonic() + 60 * (max_minutes or math.inf)
        old_handlers = {}
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGINT", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                # If the process already ignores a signal, the process continues to ignore this
                # signal. For example, nohup starts a program that ignores SIGHUP.
                if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                    old_handlers[number] = signal.signal(number, self.handle)
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def handle(self, number, frame):
        """Stores that a signal came, and prints what happens next. Python calls this method."""
        is_first = not self.has_signal
        self.has_signal = True
        how_often = "twice"
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the next Ctrl-C ends the program
            how_often = "again"
        if (is_first or number == signal.SIGINT) and os.environ.get("RANK", "0") == "0":
            message = (
                "stopping: the run saves a checkpoint, then ends; "
                f"press Ctrl-C {how_often} to quit now\n"
            )
            with contextlib.suppress(OSError):
                os.write(1, message.encode())  # print is not reentrant


def end_at_once_on_ctrl_c():
    """Makes Ctrl-C end the program at once. Programs that have nothing to save call this function.

    By default, Python handles Ctrl-C only after the current call of a C library returns, which may
    take minutes.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
