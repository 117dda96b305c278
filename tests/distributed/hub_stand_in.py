"""A stand-in of the Hub's HTTP API on 127.0.0.1, as much as `huggingface_hub`'s own client needs.

Create a repository, preupload, LFS batch and upload, commit, revision info, tree, file download. It checks the token,
keeps every commit, and fails on request: a repository whose name ends in `-500` refuses commits with a server error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_standInTokenThatNobodyMayPrint"
FAILING = "-500"


@dataclass
class Commit:
    """One commit: its message and every file of the repository after it."""

    message: str
    files: dict[str, bytes]
    oid: str


@dataclass
class Repository:
    """The commits of one repository, oldest first; it begins with one that holds `.gitattributes`."""

    commits: list[Commit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.add("initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})

    def add(self, message: str, files: dict[str, bytes]) -> Commit:
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits.append(Commit(message, files, oid))
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit.oid == revision), None)


class StandIn:
    """The server and all it was given; a context manager."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def files(self, repo_id: str) -> dict[str, bytes]:
        """The files at the newest commit."""
        return self.repositories[repo_id].commits[-1].files

    def messages(self, repo_id: str) -> list[str]:
        """The messages of all pushes, oldest first."""
        return [commit.message for commit in self.repositories[repo_id].commits[1:]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5  # an idle kept-alive connection must not keep the server's threads
    hub: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._route(_GET)

    def do_HEAD(self) -> None:
        self._route(_GET)

    def do_POST(self) -> None:
        self._route(_POST)

    def do_PUT(self) -> None:
        self._route(_PUT)

    def _route(self, routes: dict[str, Callable[..., None]]) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        self.hub.requests.append(f"{self.command} {path}")
        for pattern, action in routes.items():
            if match := re.fullmatch(pattern, path):
                return action(self, body, **match.groupdict())
        self.answer(404, {"error": f"no such page: {path}"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def may_write(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.answer(401, {"error": "Invalid username or password."})
        return False

    def repository(self, repo: str) -> Repository | None:
        found = self.hub.repositories.get(repo)
        if found is None:
            self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return found

    # -- pages --------------------------------------------------------------------------------------------------------

    def create(self, body: bytes) -> None:
        if not self.may_write():
            return
        asked = json.loads(body)
        repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
        known = repo in self.hub.repositories
        self.hub.repositories.setdefault(repo, Repository())
        self.answer(409 if known else 200, {"url": f"{self.hub.url}/{repo}", "id": repo})

    def validate_yaml(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        self.answer(200 if content.startswith("---\n") else 400, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        if not self.may_write() or (found := self.repository(repo)) is None:
            return
        there = found.commits[-1].files
        files = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            is_lfs = path.endswith(".safetensors")
            oid = (_lfs_oid if is_lfs else _git_oid)(there[path]) if path in there else None
            mode = "lfs" if is_lfs else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": files})

    def lfs_batch(self, body: bytes, repo: str) -> None:
        if not self.may_write():
            return
        objects = []
        for item in json.loads(body)["objects"]:
            upload = {"href": f"{self.hub.url}/lfs/{item['oid']}"}
            known = item["oid"] in self.hub.blobs
            objects.append({**item, **({} if known else {"actions": {"upload": upload}})})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if _lfs_oid(body) != oid:
            return self.answer(400, {"error": "other bytes than announced"})
        self.hub.blobs[oid] = body
        self.answer(200, {})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        if not self.may_write() or (found := self.repository(repo)) is None:
            return
        if repo.endswith(FAILING):
            return self.answer(500, {"error": "Internal error"})
        files, message = dict(found.commits[-1].files), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.blobs[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        made = found.add(message, files)
        self.answer(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{made.oid}", "commitOid": made.oid})

    def info(self, body: bytes, repo: str, revision: str = "main") -> None:
        if (found := self.repository(repo)) is None:
            return
        commit = found.at(revision)
        if commit is None:
            return self.answer(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": name} for name in sorted(commit.files)]
        self.answer(200, {"id": repo, "modelId": repo, "sha": commit.oid, "tags": [], "siblings": siblings})

    def tree(self, body: bytes, repo: str, revision: str, folder: str = "") -> None:
        if (found := self.repository(repo)) is None or (commit := found.at(revision)) is None:
            return
        inside = [name for name in sorted(commit.files) if name.startswith(folder)]
        if folder and not inside:
            return self.answer(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
        rows = [{"type": "file", "path": n, "size": len(commit.files[n]), "oid": "0" * 40} for n in inside]
        self.answer(200, rows)

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        if (found := self.repository(repo)) is None:
            return
        commit = found.at(revision)
        if commit is None or name not in commit.files:
            code = "RevisionNotFound" if commit is None else "EntryNotFound"
            return self.answer(404, {"error": name}, {"X-Error-Code": code})
        data = commit.files[name]
        self.answer(200, data, {"ETag": f'"{_git_oid(data)}"', "X-Repo-Commit": commit.oid})


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
_GET: dict[str, Callable[..., None]] = {
    f"/api/models/{_REPO}": _Handler.info,
    f"/api/models/{_REPO}/revision/{_REVISION}": _Handler.info,
    f"/api/models/{_REPO}/tree/{_REVISION}(/(?P<folder>.+))?": lambda self, body, repo, revision, folder: self.tree(
        body, repo, revision, folder or ""
    ),
    f"/{_REPO}/resolve/{_REVISION}/(?P<name>.+)": _Handler.resolve,
}
_POST: dict[str, Callable[..., None]] = {
    "/api/repos/create": _Handler.create,
    "/api/validate-yaml": _Handler.validate_yaml,
    f"/api/models/{_REPO}/preupload/{_REVISION}": _Handler.preupload,
    f"/api/models/{_REPO}/commit/{_REVISION}": _Handler.commit,
    f"/{_REPO}\\.git/info/lfs/objects/batch": _Handler.lfs_batch,
}
_PUT: dict[str, Callable[..., None]] = {"/lfs/(?P<oid>[0-9a-f]{64})": _Handler.lfs_put}


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _lfs_oid(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
