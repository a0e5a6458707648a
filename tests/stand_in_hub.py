"""A local stand-in for the Hugging Face Hub.

Implements the part of the hub's HTTP interface that `datasets` and `huggingface_hub` use to
download whole files or byte ranges.
"""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

COMMIT = "c0ffee" + "0" * 34


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in dict(headers, Content_Length=len(body)).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.command, self.path, headers))
        file = re.match(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/[^/]+/([^?]+)", self.path)
        if file:
            return self.send_file(self.server.repos.get(file[1], {}).get(unquote(file[2])))
        repo, rest = re.match(r"/api/(?:datasets|models)/([^/]+/[^/?]+)(.*)|", self.path).groups()
        files = self.server.repos.get(repo)
        if files is None:
            return self.reply(404, b"{}", X_Error_Code="RepoNotFound")
        tree = re.match(r"/tree/[^/?]+/?([^?]*)", rest)
        if tree:
            return self.send_tree(files, unquote(tree[1]))
        facts = dict(
            id=repo,
            sha=COMMIT,
            private=False,
            gated=False,
            disabled=False,
            downloads=0,
            likes=0,
            tags=[],
            siblings=[dict(rfilename=name, size=len(files[name])) for name in files],
        )
        self.reply(200, json.dumps(facts).encode())

    do_HEAD = do_GET

    def send_tree(self, files, folder):
        """Sends a list of the files and folders that are directly in a folder."""
        folder, entries = folder + "/" * bool(folder), {}
        for path in (path for path in files if path.startswith(folder)):
            name, *deeper = path[len(folder) :].split("/")
            entries[name] = dict(type="file", path=path, size=len(files[path]), oid="0" * 40)
            if deeper:
                entries[name] = dict(type="directory", path=folder + name, oid="0" * 40, size=0)
        if not entries:
            return self.reply(404, b"{}", X_Error_Code="EntryNotFound")
        self.reply(200, json.dumps(list(entries.values())).encode())

    def send_file(self, data):
        if data is None:
            return self.reply(404, X_Error_Code="EntryNotFound")
        facts = dict(ETag=f'"{hashlib.sha256(data).hexdigest()}"', X_Repo_Commit=COMMIT)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.reply(200, data, **facts)
        start, stop = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
        if start >= len(data):
            return self.reply(416)
        where = f"bytes {start}-{stop - 1}/{len(data)}"
        self.reply(206, data[start:stop], Content_Range=where, **facts)


def parquet(records, **options):
    """Returns the bytes of a .parquet file that contains these records, which are dicts.

    options: passed to pyarrow's write_table.
    """
    file = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records), file, **options)
    return file.getvalue().to_pybytes()


@contextmanager
def stand_in_hub(repos, hub=Hub):
    """Runs a hub. Yields (URL, list), where the list always contains all requests so far.

    repos: {"owner/name": {path: bytes}}.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub)
    server.repos, server.requests = repos, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.requests
    finally:
        server.shutdown()
        server.server_close()
