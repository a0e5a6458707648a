"""What a program does when it is told to stop: it ends in good order, or at once."""

import contextlib
import math
import os
import signal
import threading
import time


class StopRequest:
    """Whether a run is told to stop, by a signal or because its time is over.

    In its `with` block, the first SIGTERM, SIGINT or SIGHUP only prints the message, which says
    what the program does before it ends. The second one ends the program at once. max_minutes: the
    time of the run, from now on, or None. In a thread that is not the main one, Python has no
    signals, so only max_minutes counts.
    """

    def __init__(self, message, max_minutes=None):
        self.message = message
        self.deadline = time.monotonic() + 60 * (max_minutes or math.inf)
        self.has_signal = False
        self.old_handlers = {}

    @property
    def requested(self):
        """Whether the run should end after this step."""
        return self.has_signal or time.monotonic() > self.deadline

    def handle(self, number, frame):
        """Is called by Python when a signal comes."""
        if self.has_signal:
            os._exit(128 + number)
        self.has_signal = True
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                # os.write is used because print is not reentrant.
                os.write(1, f"{self.message}; Ctrl-C again to quit now\n".encode())

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            return self
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # as with nohup
                self.old_handlers[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *error):
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)


def end_at_once_on_ctrl_c():
    """Lets Ctrl-C end the program at once, for programs that need not end in good order.

    Otherwise, a library answers Ctrl-C only when it returns, perhaps after minutes.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
