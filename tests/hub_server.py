"""The part of the Hub's API that a push and a download use, on loopback, in memory."""

import base64
import hashlib
import json
import re
import socket
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopbackloopbackloopback"
BLOCK = 1 << 16


@dataclass
class Repo:
    private: bool
    gated: bool | str = False
    card: dict[str, Any] = field(default_factory=dict)
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    @property
    def sha(self) -> str:
        return self.commits[-1][0]

    def files(self, revision: str) -> dict[str, bytes] | None:
        if revision == "main":
            return self.commits[-1][1]
        return dict(self.commits).get(revision)

    def commit(self, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{id(self)}:{len(self.commits)}".encode()).hexdigest()
        self.commits.append((sha, files))
        return sha


@dataclass
class Fault:
    """A fault in one upload of a large file.

    Attributes:
        after: bytes that still arrive; a smaller file passes and leaves the fault for the next.
        kind: `cut` closes the connection, `hold` reads no further, `refuse` answers 403.
    """

    after: int
    kind: str


class HubServer:
    """Context manager; `url` is what HF_ENDPOINT must hold.

    Attributes:
        repos: by id.
        writable: namespaces that TOKEN may write to; anything else is answered 403.
        objects: contents of large files (LFS), by sha256.
        received: bytes of large files that came in, by sha256, those of broken uploads too.
        part_size: large files above it come in parts of it.
        faults: what becomes of the next uploads of large files, one each; see `Fault`.
        stalled: set once an upload is held.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.writable = {"me"}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.received: Counter[str] = Counter()
        self.part_size = 1 << 30
        self.faults: list[Fault] = []
        self.stalled = threading.Event()
        self.closing = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that was killed is no error of the server's.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/storage/(\w+)/complete", path):
            self._complete(found[1], json.loads(body)["parts"])
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            if self._repo(found[1]) is not None:
                self._batch(json.loads(body)["objects"])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/]+)", path):
            repo = self._repo(found[1])
            if repo is not None and found[2] == "preupload":
                self._preupload(repo, json.loads(body))
            elif repo is not None:
                self._commit(found[1], repo, [json.loads(line) for line in body.splitlines()])
        else:
            self._json({"error": "Not found"}, 404)

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def _get(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            self._info(found[1], "main")
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path):
            self._info(found[1], found[2])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self._tree(found[1], found[2])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3])
        else:
            self._json({"error": "Not found"}, 404)

    def _create(self, wanted: dict) -> None:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = f"{self.hub.url}/{name}"
        if wanted.get("organization") not in self.hub.writable:
            self._json({"error": "You don't have the rights to create a model here"}, 403)
        elif name in self.hub.repos:
            self._json({"error": "You already created this model repo", "url": url}, 409)
        else:
            repo = Repo(
                private=wanted.get("visibility") == "private" or bool(wanted.get("private"))
            )
            repo.commit({".gitattributes": b""})
            self.hub.repos[name] = repo
            self._json({"url": url, "name": name})

    def _preupload(self, repo: Repo, wanted: dict) -> None:
        there = repo.files("main") or {}
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if _is_large(file["path"]) else "regular",
                "shouldIgnore": False,
                "oid": _oid(file["path"], there[file["path"]]) if file["path"] in there else None,
            }
            for file in wanted["files"]
        ]
        self._json({"files": files})

    def _batch(self, wanted: list[dict]) -> None:
        objects = []
        for file in wanted:
            found = {"oid": file["oid"], "size": file["size"]}
            if file["oid"] not in self.hub.objects:
                found["actions"] = {"upload": self._upload_action(file["oid"], file["size"])}
            objects.append(found)
        self._json({"transfer": "basic", "objects": objects})

    def _upload_action(self, oid: str, size: int) -> dict[str, Any]:
        url, part = f"{self.hub.url}/storage/{oid}", self.hub.part_size
        if size <= part:
            return {"href": f"{url}?signature=secret"}
        number = -(-size // part)
        parts = {str(n): f"{url}/{n}?signature=secret" for n in range(1, number + 1)}
        return {"href": f"{url}/complete", "header": {"chunk_size": str(part), **parts}}

    def do_PUT(self) -> None:
        found = re.fullmatch(r"/storage/(\w+)(?:/(\d+))?", urlsplit(self.path).path)
        assert found is not None
        data = self._body(found[1])
        if data is None:
            return
        if found[2]:
            self.hub.parts[found[1], int(found[2])] = data
        else:
            self._keep(found[1], data)
        self._send(b"", 200, {"ETag": hashlib.md5(data).hexdigest()})

    def _body(self, oid: str) -> bytes | None:
        """The body of an upload, or None if a fault struck and there is nothing to answer."""
        size = int(self.headers["Content-Length"])
        fault = next((f for f in self.hub.faults if f.after < size), None)
        if fault is not None:
            self.hub.faults.remove(fault)
        data = b""
        wanted = size if fault is None else fault.after
        while len(data) < wanted:
            block = self.rfile.read(min(BLOCK, wanted - len(data)))
            data += block
            self.hub.received[oid] += len(block)
            if not block:
                self.close_connection = True
                return None
        if fault is None:
            return data
        self.close_connection = True
        if fault.kind == "hold":
            self.hub.stalled.set()
            self.hub.closing.wait()
        if fault.kind == "refuse":
            self.rfile.read(size - len(data))
            self._json({"error": "no room"}, 403)
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        return None

    def _complete(self, oid: str, parts: list[dict]) -> None:
        found = [self.hub.parts[oid, part["partNumber"]] for part in parts]
        assert [part["etag"] for part in parts] == [hashlib.md5(d).hexdigest() for d in found]
        self._keep(oid, b"".join(found))
        self._json({})

    def _keep(self, oid: str, data: bytes) -> None:
        assert hashlib.sha256(data).hexdigest() == oid
        self.hub.objects[oid] = data

    def _commit(self, name: str, repo: Repo, lines: list[dict]) -> None:
        files = dict(repo.files("main") or {})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"])
        sha = repo.commit(files)
        self._json(
            {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"}
        )

    def _info(self, name: str, revision: str) -> None:
        repo, files = self._files(name, revision)
        if repo is not None and files is not None:
            sha = repo.sha if revision == "main" else revision
            siblings = [{"rfilename": path} for path in sorted(files)]
            self._json(
                {
                    "id": name, "sha": sha, "private": repo.private, "gated": repo.gated,
                    "cardData": repo.card, "siblings": siblings,
                }
            )  # fmt: skip

    def _tree(self, name: str, revision: str) -> None:
        _, files = self._files(name, revision)
        if files is not None:
            self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": _oid(path, data)}
                    for path, data in sorted(files.items())
                ]
            )

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo, files = self._files(name, revision)
        if repo is None or files is None:
            return
        if path not in files:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        sha = repo.sha if revision == "main" else revision
        data = files[path]
        self._send(data, 200, {"ETag": f'"{_oid(path, data)}"', "X-Repo-Commit": sha})

    def _files(self, name: str, revision: str) -> tuple[Repo | None, dict[str, bytes] | None]:
        repo = self._repo(name)
        files = repo.files(revision) if repo is not None else None
        if repo is not None and files is None:
            self._json({"error": "Revision"}, 404, {"X-Error-Code": "RevisionNotFound"})
        return repo, files

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not allowed):
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return None
        return repo

    def _json(
        self, value: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        more = {"Content-Type": "application/json", **(headers or {})}
        self._send(json.dumps(value).encode(), status, more)

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".png"))


def _oid(path: str, data: bytes) -> str:
    if _is_large(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
