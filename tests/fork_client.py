"""Runs a program in the server of forked.py, as if this process ran it: ADDRESS PROGRAM FLAGS."""

import json
import os
import socket
import sys

address, *argv = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as server:
    server.connect(address)
    request = json.dumps(dict(argv=argv, cwd=os.getcwd(), env=dict(os.environ)))
    socket.send_fds(server, [request.encode()], [0, 1, 2])  # the program has these files, too
    server.shutdown(socket.SHUT_WR)
    status = int(server.recv(16))
sys.exit(status if status >= 0 else 128 - status)
