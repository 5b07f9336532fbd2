"""The part of the Hub's API that a push and a download use, on loopback, in memory."""

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from loopback import Answers, Loopback

TOKEN = "hf_loopbackloopbackloopback"


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


class HubServer(Loopback):
    """Context manager; `url` is what HF_ENDPOINT must hold.

    Attributes:
        repos: by id.
        writable: namespaces that TOKEN may write to; anything else is answered 403.
        objects: contents of large files (LFS), by sha256.
        received: bytes of large files that came in, by sha256, those of broken uploads too.
        refuse_after: bytes after which the next larger upload is refused; None for never.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.writable = {"me"}
        self.objects: dict[str, bytes] = {}
        self.received: Counter[str] = Counter()
        self.refuse_after: int | None = None
        super().__init__(_Handler)
        self.url = self.root


class _Handler(Answers, BaseHTTPRequestHandler):
    owner: HubServer

    def do_POST(self) -> None:
        body = self.read_body()
        path = unquote(urlsplit(self.path).path)
        if path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.send_json({"error": "Invalid username or password."}, 401)
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
            self.send_json({"error": "Not found"}, 404)

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
            self.send_json({"error": "Not found"}, 404)

    def _create(self, wanted: dict) -> None:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = f"{self.owner.url}/{name}"
        if wanted.get("organization") not in self.owner.writable:
            self.send_json({"error": "You don't have the rights to create a model here"}, 403)
        elif name in self.owner.repos:
            self.send_json({"error": "You already created this model repo", "url": url}, 409)
        else:
            repo = Repo(
                private=wanted.get("visibility") == "private" or bool(wanted.get("private"))
            )
            repo.commit({".gitattributes": b""})
            self.owner.repos[name] = repo
            self.send_json({"url": url, "name": name})

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
        self.send_json({"files": files})

    def _batch(self, wanted: list[dict]) -> None:
        objects = []
        for file in wanted:
            found = {"oid": file["oid"], "size": file["size"]}
            if file["oid"] not in self.owner.objects:
                url = f"{self.owner.url}/storage/{file['oid']}?signature=secret"
                found["actions"] = {"upload": {"href": url}}
            objects.append(found)
        self.send_json({"transfer": "basic", "objects": objects})

    def do_PUT(self) -> None:
        oid, size = urlsplit(self.path).path.split("/")[-1], int(self.headers["Content-Length"])
        wanted = size
        if self.owner.refuse_after is not None and self.owner.refuse_after < size:
            wanted, self.owner.refuse_after = self.owner.refuse_after, None
        data = self.rfile.read(wanted)
        self.owner.received[oid] += len(data)
        if wanted < size:
            self.rfile.read(size - wanted)
            self.send_json({"error": "no room"}, 403)
            return
        assert hashlib.sha256(data).hexdigest() == oid
        self.owner.objects[oid] = data
        self.send_bytes(b"", 200, {})

    def _commit(self, name: str, repo: Repo, lines: list[dict]) -> None:
        files = dict(repo.files("main") or {})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.owner.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"])
        sha = repo.commit(files)
        self.send_json(
            {
                "success": True,
                "commitOid": sha,
                "commitUrl": f"{self.owner.url}/{name}/commit/{sha}",
            }
        )

    def _info(self, name: str, revision: str) -> None:
        repo, files = self._files(name, revision)
        if repo is not None and files is not None:
            sha = repo.sha if revision == "main" else revision
            siblings = [{"rfilename": path} for path in sorted(files)]
            self.send_json(
                {
                    "id": name, "sha": sha, "private": repo.private, "gated": repo.gated,
                    "cardData": repo.card, "siblings": siblings,
                }
            )  # fmt: skip

    def _tree(self, name: str, revision: str) -> None:
        _, files = self._files(name, revision)
        if files is not None:
            self.send_json(
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
            self.send_json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        sha = repo.sha if revision == "main" else revision
        data = files[path]
        self.send_bytes(data, 200, {"ETag": f'"{_oid(path, data)}"', "X-Repo-Commit": sha})

    def _files(self, name: str, revision: str) -> tuple[Repo | None, dict[str, bytes] | None]:
        repo = self._repo(name)
        files = repo.files(revision) if repo is not None else None
        if repo is not None and files is None:
            self.send_json({"error": "Revision"}, 404, {"X-Error-Code": "RevisionNotFound"})
        return repo, files

    def _repo(self, name: str) -> Repo | None:
        repo = self.owner.repos.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not allowed):
            self.send_json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return None
        return repo


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".png"))


def _oid(path: str, data: bytes) -> str:
    if _is_large(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
