"""What a program does when it is told to stop: it ends in good order, or at once."""

import contextlib
import math
import os
import signal
import threading
import time


class Stopped(Exception):
    """Ends a validation, a benchmark or a sample without a result, because a signal has come."""


class StopRequest:
    """Whether a run is told to stop, by a signal or because its time is over."""

    def __init__(self):
        self.has_signal = False
        self.deadline = math.inf

    @property
    def requested(self):
        """Whether the run should end after this step."""
        return self.has_signal or time.monotonic() > self.deadline

    @contextlib.contextmanager
    def listening(self, max_minutes=None):
        """In this block, a signal asks the run to save and end, and does nothing else.

        The signals are SIGTERM, SIGINT and SIGHUP. They may come several times: a terminal that is
        closed often sends SIGHUP twice, and torchrun sends its processes the signal that a service
        manager has already sent to all of them. Only a second Ctrl-C (SIGINT) ends the program at
        once. In a thread that is not the main one, Python has no signals.

        max_minutes: the time of the run, from now on, or None.
        """
        self.deadline = time.monotonic() + 60 * (max_minutes or math.inf)
        old_handlers = {}
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGINT", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP
                # nohup lets programs ignore SIGHUP.
                if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                    old_handlers[number] = signal.signal(number, self.handle)
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def handle(self, number, frame):
        """Is called by Python when a signal comes."""
        is_first = not self.has_signal
        self.has_signal = True
        how_often = "twice"
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the next one ends the program
            how_often = "again"
        if (is_first or number == signal.SIGINT) and os.environ.get("RANK", "0") == "0":
            message = f"stopping: saves the last step, then ends; Ctrl-C {how_often} to quit now\n"
            with contextlib.suppress(OSError):
                os.write(1, message.encode())  # print is not reentrant


def end_at_once_on_ctrl_c():
    """Lets Ctrl-C end the program at once, for programs that need not end in good order.

    Otherwise, a library answers Ctrl-C only when it returns, perhaps after minutes.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
