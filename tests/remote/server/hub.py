"""A stand-in for the model hub: folders, served the way huggingface_hub asks for them.

    python hub.py PORT ORG/NAME=FOLDER...

Clients set HF_ENDPOINT=http://127.0.0.1:PORT. Every revision is the same folder. Prints its port once it listens.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Repo:
    """One folder as a repository. Its commit is made of what is in it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        self.commit = hashlib.sha1("".join(map(self.etag, sorted(self.files))).encode()).hexdigest()

    def etag(self, file: str) -> str:
        return hashlib.sha256(self.files[file].read_bytes()).hexdigest()

    def parameters(self) -> int:
        """How many weights the safetensors files hold, from their headers."""
        total = 0
        for path in self.files.values():
            if path.suffix == ".safetensors":
                with path.open("rb") as file:
                    head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                total += sum(math.prod(entry["shape"]) for key, entry in head.items() if key != "__metadata__")
        return total

    def info(self) -> dict:
        total = self.parameters()
        return {
            "id": self.name,
            "modelId": self.name,
            "sha": self.commit,
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "pipeline_tag": "text-generation",
            "library_name": "transformers",
            "siblings": [{"rfilename": file} for file in sorted(self.files)],
            "safetensors": {"parameters": {"F32": total}, "total": total},
        }

    def tree(self) -> list[dict]:
        return [
            {"type": "file", "path": file, "size": path.stat().st_size, "oid": self.etag(file)}
            for file, path in sorted(self.files.items())
        ]


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repos: dict[str, Repo]

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        for pattern, answer in (
            (r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", self.model),
            (r"/api/models/([^/]+/[^/]+)/tree/[^/]+", self.tree),
            (r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.file),
        ):
            if match := re.fullmatch(pattern, path):
                repo = self.repos.get(match[1])
                if repo is None:
                    return self.missing("RepoNotFound", "Repository not found")
                return answer(repo, *match.groups()[1:])
        return self.missing("EntryNotFound", "Entry not found")

    do_HEAD = do_GET

    def model(self, repo: Repo) -> None:
        self.answer(200, json.dumps(repo.info()).encode(), {"Content-Type": "application/json"})

    def tree(self, repo: Repo) -> None:
        self.answer(200, json.dumps(repo.tree()).encode(), {"Content-Type": "application/json"})

    def file(self, repo: Repo, name: str) -> None:
        if name not in repo.files:
            return self.missing("EntryNotFound", "Entry not found", {"X-Repo-Commit": repo.commit})
        headers = {"ETag": f'"{repo.etag(name)}"', "X-Repo-Commit": repo.commit, "Accept-Ranges": "none"}
        self.answer(200, repo.files[name].read_bytes(), headers)

    def missing(self, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"error": message}).encode()
        self.answer(404, body, {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def main(port: str, *repos: str) -> None:
    pairs = [repo.split("=", 1) for repo in repos]
    Hub.repos = {name: Repo(name, Path(folder)) for name, folder in pairs}
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Hub)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
