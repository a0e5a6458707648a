"""Lets the server of forked.py run a program, as if this process ran the program.

Usage: fork_client.py ADDRESS PROGRAM FLAGS
"""

import json
import os
import signal
import socket
import sys

address, *argv = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as server:
    server.connect(address)
    request = json.dumps(dict(argv=argv, cwd=os.getcwd(), env=dict(os.environ)))
    # The program uses these three files as stdin, stdout and stderr.
    socket.send_fds(server, [request.encode()], [0, 1, 2])
    server.shutdown(socket.SHUT_WR)
    answer = server.makefile()
    pid = int(answer.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(answer.readline())
sys.exit(status if status >= 0 else 128 - status)
