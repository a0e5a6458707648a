"""What a program does when it is told to stop: it ends in good order, or at once."""

import contextlib
import os
import signal


@contextlib.contextmanager
def catch_stop_signals(message):
    """In the block, SIGTERM, SIGINT and SIGHUP only append their number to the yielded list.

    The first signal prints the message, which says what the program does before it ends. The second
    signal ends the program at once.
    """
    received = []

    def handle(number, frame):
        if any(received):  # train_gpt2.py appends 0, which is no signal, after --max_minutes
            os._exit(128 + number)
        received.append(number)
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                # os.write is used because print is not reentrant.
                os.write(1, f"{message}; Ctrl-C again to quit now\n".encode())

    with contextlib.ExitStack() as restore:
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            if not hasattr(signal, name):  # Windows has no SIGHUP
                continue
            number = getattr(signal, name)
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                old_handler = signal.signal(number, handle)
                restore.callback(signal.signal, number, old_handler)
        yield received


def end_at_once_on_ctrl_c():
    """Lets Ctrl-C end the program at once, for programs that need not end in good order.

    Otherwise, a library answers Ctrl-C only when it returns, perhaps after minutes.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
