"""Controls Chromium through two pipes, with its DevTools protocol."""

import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """A window of Chromium without a network. `console`: the errors and messages of its pages."""

    def __init__(self, directory):
        read_end, its_output = os.pipe()
        its_input, write_end = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",  # Chromium's sandbox does not work for root
            "--disable-gpu",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={directory}",
            # Chromium reads commands from file descriptor 3, and writes answers to descriptor 4.
            "--remote-debugging-pipe",
        ]
        redirect = f'exec "$0" "$@" 3<&{its_input} 4>&{its_output}'
        self.process = subprocess.Popen(
            ["bash", "-c", redirect, CHROMIUM, *flags],
            pass_fds=(its_input, its_output),
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        self.commands = os.fdopen(write_end, "wb", buffering=0)
        self.answers = read_end
        self.received = b""  # the beginning of the next message
        self.n = 0  # number of commands that were sent
        self.console = []
        self.session = {}
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = dict(sessionId=session["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Sends a command. Returns its result."""
        self.n += 1
        command = dict(id=self.n, method=method, params=params, **self.session)
        self.commands.write(json.dumps(command).encode() + b"\0")
        while True:
            message = json.loads(self.read_message())
            if message.get("id") == self.n:
                assert "error" not in message, message
                return message["result"]
            if message["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.console.append(message["params"])
            if message["method"] == "Log.entryAdded":
                self.console.append(message["params"]["entry"])

    def read_message(self):
        while b"\0" not in self.received:
            data = os.read(self.answers, 2**16)
            assert data, "chromium has ended"
            self.received += data
        message, _, self.received = self.received.partition(b"\0")
        return message

    def open(self, path, fragment=""):
        """Opens a page, and waits until its script has run."""
        # If only the fragment changed, Chromium would not load the page again.
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=f"{path.as_uri()}#{fragment}")
        while not self.run("location.href !== 'about:blank' && document.readyState === 'complete'"):
            time.sleep(0.02)

    def run(self, script):
        """Runs a script in the page. Returns the script's value."""
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def close(self):
        command = dict(id=self.n + 1, method="Browser.close")
        # `send` would wait for an answer, but Chromium may exit before it answers.
        self.commands.write(json.dumps(command).encode() + b"\0")
        self.process.wait(timeout=60)
