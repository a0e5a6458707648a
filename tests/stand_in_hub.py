"""A local stand-in for the Hugging Face hub.

Serves the part of its HTTP interface that `datasets` and `huggingface_hub` use to download Parquet files, shards and tokenizers.
"""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "c0ffee" + "0" * 34


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        state = self.server.state
        state["requests"].append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        if file := re.match(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/[^/]+/([^?]+)", self.path):
            return self.send_file(*file.groups())
        repo, rest = re.match(r"/api/(?:datasets|models)/([^/]+/[^/?]+)(.*)|", self.path).groups()
        if repo not in state["repos"]:
            return self.reply(404, b"{}", X_Error_Code="RepoNotFound")
        if tree := re.match(r"/tree/[^/?]+/?([^?]*)", rest):
            return self.send_tree(state["repos"][repo], unquote(tree[1]))
        self.reply(200, json.dumps(dict(id=repo, sha=COMMIT, private=False, gated=False, disabled=False, downloads=0, likes=0,
                                        tags=[], siblings=[dict(rfilename=f) for f in state["repos"][repo]])).encode())

    do_HEAD = do_GET

    def send_tree(self, files, folder):
        """The files and folders directly in a folder."""
        folder += "/" * bool(folder)
        entries = {}
        for path, data in files.items():
            if path.startswith(folder):
                name, *deeper = path[len(folder):].split("/")
                digest = hashlib.sha256(data).hexdigest()
                entries[name] = dict(type="directory", path=folder + name, oid="0" * 40, size=0) if deeper else \
                    dict(type="file", path=path, size=len(data), oid=digest[:40], lfs=dict(oid=digest, size=len(data), pointerSize=1))
        if not entries:
            return self.reply(404, b"{}", X_Error_Code="EntryNotFound")
        self.reply(200, json.dumps(list(entries.values())).encode(), Content_Type="application/json")

    def send_file(self, repo, path):
        state = self.server.state
        data = state["repos"].get(repo, {}).get(unquote(path))
        if data is None:
            return self.reply(404, X_Error_Code="EntryNotFound")
        start = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        headers = dict(ETag=etag, X_Repo_Commit=COMMIT, X_Linked_ETag=etag, X_Linked_Size=len(data), Accept_Ranges="bytes")
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET" and path.endswith((".parquet", ".bin")):
            if state["fail"]:
                state["fail"] -= 1
                return self.reply(500)
            if state["cut"]:  # announce the full length, send half, close the connection
                state["cut"] -= 1
                self.reply(206 if start else 200, b"", **headers, **{"Content-Length": len(data) - start})
                self.wfile.write(data[start:start + (len(data) - start) // 2])
                self.close_connection = True
                return
        self.reply(206 if start else 200, data[start:], **headers)


@contextmanager
def stand_in_hub(repos, cut=0, fail=0):
    """Runs a hub with repos {"owner/name": {path: bytes}} -> (URL, list of requests so far).

    The first `fail` requests for a Parquet file or a shard get status 500. The next `cut` requests get half.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.state = dict(repos=repos, cut=cut, fail=fail, requests=[])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.state["requests"]
    finally:
        server.shutdown()
        server.server_close()
