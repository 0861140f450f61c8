"""A bucket in memory, as the two clients see it that write checkpoints to "gs://": fsspec, and tensorstore over HTTP.

No folders, no renaming: a folder is there as long as an object has its prefix.
"""

import http.server
import json
import re
import threading
import urllib.parse
from datetime import UTC, datetime
from typing import ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Bucket(MemoryFileSystem):
    """Objects by name, of fsspec; all instances share one store.

    Attributes:
        changes: how many objects were written or deleted.
        most: further ones fail, as if the process had been killed.
    """

    changes: ClassVar[int] = 0
    most: ClassVar[float] = float("inf")

    protocol = ("gs", "gcs")
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    cachable = False

    def __init__(self, *args, **options):
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path):
        path = re.sub("^(gs|gcs)://", "", str(path)).strip("/")
        return f"/{path}" if path else ""

    @classmethod
    def count(cls):
        if cls.changes >= cls.most:
            raise OSError("killed")
        cls.changes += 1

    def _open(self, path, mode="rb", **options):
        if mode != "rb":
            self.count()
        return super()._open(path, mode, **options)

    def pipe_file(self, path, value, **options):
        self.count()
        super().pipe_file(path, value, **options)

    def rm_file(self, path):
        self.count()
        del self.store[self._strip_protocol(path)]

    def rm(self, path, recursive=False, maxdepth=None):
        names = [path] if self._strip_protocol(path) in self.store else self.find(path)
        if not names:
            raise FileNotFoundError(path)
        for name in names:
            self.rm_file(name)

    def mkdir(self, path, create_parents=True, **options):
        pass

    def makedirs(self, path, exist_ok=False):
        pass

    def rmdir(self, path):
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    """The few requests of Google's JSON interface that tensorstore makes."""

    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    generations: ClassVar[dict[str, int]] = {}

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def about(self, key):
        bucket, _, name = key[1:].partition("/")
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {
            "kind": "storage#object", "bucket": bucket, "name": name, "generation": str(self.generations[key]),
            "metageneration": "1", "size": str(len(Bucket.store[key].getvalue())), "timeCreated": now, "updated": now,
        }  # fmt: skip

    def handle_request(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = re.fullmatch(r"(?:/upload)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", url.path)
        bucket, name = found[1], urllib.parse.unquote(found[2] or query.get("name", ""))
        key = f"/{bucket}/{name}"
        with self.lock:
            there = key in Bucket.store
            generation = self.generations.setdefault(key, 1) if there else 0
            if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != generation:
                self.answer(412)
            elif self.command in ("POST", "DELETE") and Bucket.changes >= Bucket.most:
                self.answer(403)
            elif self.command == "POST":
                self.generations[key] = self.generations.get(key, 0) + 1
                fsspec.filesystem("gcs").pipe_file(key, body)
                self.answer(200, json.dumps(self.about(key)).encode(), Content_Type="application/json")
            elif self.command == "GET" and not name:
                items = [k for k in sorted(Bucket.store) if k.startswith(f"/{bucket}/{query.get('prefix', '')}")]
                for k in items:
                    self.generations.setdefault(k, 1)
                body = json.dumps({"kind": "storage#objects", "items": [self.about(k) for k in items]}).encode()
                self.answer(200, body, Content_Type="application/json")
            elif not there:
                self.answer(404)
            elif self.command == "DELETE":
                fsspec.filesystem("gcs").rm_file(key)
                self.answer(204)
            elif query.get("ifGenerationNotMatch") == str(generation):
                self.answer(304, x_goog_generation=str(generation))
            else:
                whole = Bucket.store[key].getvalue()
                part = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
                about = {"x_goog_generation": str(generation), "x_goog_stored_content_length": str(len(whole))}
                if part is None:
                    self.answer(200, whole, **about)
                else:
                    first = int(part[1]) if part[1] else len(whole) - int(part[2])
                    last = min(int(part[2]), len(whole) - 1) if part[1] and part[2] else len(whole) - 1
                    place = f"bytes {first}-{last}/{len(whole)}"
                    self.answer(206, whole[first : last + 1], Content_Range=place, **about)

    do_GET = do_POST = do_DELETE = handle_request


def start():
    """Starts the server on a thread; its address, which the environment must name before tensorstore first asks."""
    fsspec.register_implementation("gcs", Bucket, clobber=True)
    fsspec.register_implementation("gs", Bucket, clobber=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"
