"""A small Hub on the loopback: the protocol for pushing and loading, with fault injection.

In: requests of huggingface_hub, datasets and transformers (`Hub.environment` directs them here). Out: repositories
whose bytes a test can inspect, and the requests. A fault replaces an answer: a status, "cut" for a closed connection,
or "silent" for no answer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import ModelCard

WRITER, READER = "w-4711", "r-4711"
TOKENS = {WRITER: "write", READER: "read"}  # token -> its role, both of the account `user`
LFS = (".safetensors", ".bin", ".parquet", ".arrow")


@dataclass
class Repository:
    """Files at each commit; a revision is a branch, a tag or a commit."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # branch or tag -> commit
    titles: dict[str, str] = field(default_factory=dict)  # file -> title of its last commit

    def commit(self, files: dict[str, bytes], branch: str = "main", title: str = "By hand") -> str:
        before = self.commits.get(self.names.get(branch, ""), {})
        self.titles |= {name: title for name, content in files.items() if before.get(name) != content}
        sha = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[sha], self.names[branch] = files, sha
        return sha

    def at(self, revision: str) -> str | None:
        return self.names.get(revision, revision if revision in self.commits else None)


class Hub:
    """The server, as a context; its state is plain attributes."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.objects: dict[str, bytes] = {}  # sha256 -> content, as in LFS
        self.faults: dict[str, list[int | str]] = {}  # request -> faults, one per request
        self.asked: list[str] = []
        self.received = 0  # bytes of files
        self.quiet = threading.Event()  # set at the end: "silent" answers wait for it
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.quiet.set()
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: object, token: str | None = WRITER) -> dict[str, str]:
        """Variables that direct the libraries here, with a separate cache."""
        found = {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        found |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_DATASETS_CACHE": f"{home}/datasets", "NO_PROXY": "*"}
        return found | ({"HF_TOKEN": token} if token is not None else {})

    def put(self, kind: str, name: str, files: dict[str, bytes], branch: str = "main", **about: bool) -> str:
        """Add a commit to a repository. `kind`: models or datasets."""
        return self.repositories.setdefault((kind, name), Repository(**about)).commit(files, branch)

    def files(self, name: str, kind: str = "models") -> dict[str, bytes]:
        """Files as seen by a reader of the repository."""
        found = self.repositories[kind, name]
        return found.commits[found.names["main"]] if found.names else {}

    def count(self, what: str) -> int:
        return sum(line.startswith(what) for line in self.asked)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def _any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        size = int(self.headers.get("Content-Length") or 0)
        what = "batch" if path.endswith("/objects/batch") else self._what(path)
        fault = next((faults.pop(0) for key, faults in self.hub.faults.items() if key == what and faults), None)
        self.hub.asked.append(f"{what} {self.command} {path}")
        if fault == "silent":
            self.hub.quiet.wait()
        if fault == "cut":  # in the middle of the body
            self.rfile.read(size // 2)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return None
        body = self.rfile.read(size) if size else self._chunks()
        if isinstance(fault, int):
            return self._answer(fault, {"error": f"injected {fault}"})
        return self._route(what, path, body)

    do_GET = do_HEAD = do_POST = do_PUT = _any

    @staticmethod
    def _what(path: str) -> str:
        if found := re.search(r"/(resolve|preupload|commit|tree|paths-info|revision)/", path):
            return found[1]
        return path.strip("/").split("/")[1 if path.startswith("/api/") else 0]

    def _chunks(self) -> bytes:
        """A body without a length, sent in pieces."""
        found = b""
        while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
            found += self.rfile.read(size)
            self.rfile.readline()
        return found

    def _route(self, what: str, path: str, body: bytes) -> None:
        hub, role = self.hub, TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if "Authorization" in self.headers and role is None and what != "lfs":
            return self._answer(401, {"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials"})
        if what == "whoami-v2":
            return self._answer(
                200, {"name": "user", "orgs": [{"name": "team"}], "auth": {"accessToken": {"role": role}}}
            )
        if what == "validate-yaml":
            ModelCard(json.loads(body)["content"])
            return self._answer(200, {"errors": [], "warnings": []})
        if what == "lfs":  # a signed address: no token
            hub.objects[path.rpartition("/")[2]] = body
            hub.received += len(body)
            return self._answer(200, {})
        if what == "verify":
            return self._answer(200, {})
        if self.command in ("POST", "PUT") and what != "paths-info" and role != "write":
            return self._answer(403, {"error": "no"}, {"X-Error-Message": "You have no write permission"})
        if what == "repos":
            return self._create(json.loads(body))
        if what == "batch":
            return self._batch(json.loads(body))
        return self._repository(what, path, body, role)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization'] or 'user'}/{asked['name']}"
        if name.split("/")[0] not in ("user", "team"):
            return self._answer(403, {"error": "no"}, {"X-Error-Message": "not your namespace"})
        private = asked.get("visibility") == "private" or asked.get("private") is True
        there = ("models", name) in self.hub.repositories
        self.hub.repositories.setdefault(("models", name), Repository(private=private))
        return self._answer(409 if there else 200, {"url": f"{self.hub.address}/{name}", "name": name})

    def _batch(self, asked: dict[str, Any]) -> None:
        def action(each: dict[str, Any]) -> dict[str, Any]:
            if each["oid"] in self.hub.objects:
                return each
            return each | {"actions": {"upload": {"href": f"{self.hub.address}/lfs/{each['oid']}"}}}

        return self._answer(200, {"transfer": "basic", "objects": [action(each) for each in asked["objects"]]})

    def _repository(self, what: str, path: str, body: bytes, role: str | None) -> None:
        pattern = r"/api/(models|datasets)/([^/]+/[^/]+)(?:/\w[\w-]*/([^/]+)/?(.*))?"
        if what == "resolve":
            pattern = r"/(datasets(?=/)|)/?([^/]+/[^/]+)/resolve/([^/]+)/(.*)"
        found = re.fullmatch(pattern, path)
        kind, name = (found[1] or "models", found[2]) if found else ("", "")
        there = self.hub.repositories.get((kind, name))
        if found is None or there is None or (there.private and role is None):
            return self._answer(404 if role else 401, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
        if there.gated and what == "resolve":
            return self._answer(403 if role else 401, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        revision = found[3] or "main"
        sha, rest = there.at(revision), found[4] or ""
        if what == "preupload":
            files = self.hub.files(name) if there.names else {}
            return self._answer(200, {"files": [_mode(each, files) for each in json.loads(body)["files"]]})
        if what == "commit":
            return self._commit(name, there, [json.loads(line) for line in body.splitlines()])
        if sha is None and there.names:
            return self._answer(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
        files = there.commits.get(sha or "", {})
        if what == "resolve":
            return self._file(files.get(rest), sha or "")
        if what in ("tree", "paths-info"):
            asked = (
                parse_qs(body.decode()).get("paths", []) if body[:1] != b"{" else json.loads(body or b"{}").get("paths")
            )
            wanted = [f for f in files if (f in asked if what == "paths-info" else f.startswith(rest))]
            found = [_entry(f, files[f]) for f in wanted]
            if b"expand=true" in body.lower():
                last = {"id": sha, "date": "2026-01-01T00:00:00.000Z"}
                found = [each | {"lastCommit": last | {"title": there.titles[each["path"]]}} for each in found]
            if what == "tree" and "recursive=true" not in self.path.lower():  # for nested files, the folder's name
                start = f"{rest}/" if rest else ""
                inner = {f: f.removeprefix(start).partition("/") for f in wanted}
                found = [each for each in found if not inner[each["path"]][1]]
                folders = dict.fromkeys(start + name for name, deeper, _ in inner.values() if deeper)
                found += [{"type": "directory", "path": f, "size": 0, "oid": _git(f.encode())} for f in folders]
            return self._answer(200, found)
        about = {"id": name, "sha": sha, "private": there.private, "gated": there.gated, "tags": [], "downloads": 0}
        return self._answer(200, about | {"siblings": [{"rfilename": f} for f in files]})

    def _commit(self, name: str, there: Repository, lines: list[dict[str, Any]]) -> None:
        files = dict(self.hub.files(name))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                self.hub.received += len(files[value["path"]])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        title = next((line["value"]["summary"] for line in lines if line["key"] == "header"), "")
        sha = there.commit(files, title=title)
        return self._answer(200, {"commitUrl": f"{self.hub.address}/{name}/commit/{sha}", "commitOid": sha})

    def _file(self, content: bytes | None, sha: str) -> None:
        if content is None:
            return self._answer(404, {"error": "no file"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        headers = {"ETag": f'"{_git(content)}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        return self._answer(200, content, headers)

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        if (wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) and status == 200:
            first, last = int(wanted[1]), min(int(wanted[2] or len(body)), len(body) - 1)
            headers = (headers or {}) | {"Content-Range": f"bytes {first}-{last}/{len(body)}"}
            status, body = 206, body[first : last + 1]
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _git(content: bytes) -> str:
    """Git's hash of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _mode(asked: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    path = asked["path"]
    large = path.endswith(LFS)
    found: dict[str, Any] = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
    if path in files:
        found["oid"] = hashlib.sha256(files[path]).hexdigest() if large else _git(files[path])
    return found


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": _git(content)}
