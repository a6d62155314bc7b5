"""A stand-in for the object store: as much of S3 as ndif asks of it, kept in memory.

    python storage.py PORT

Buckets, whole objects, uploads in parts, and GET by presigned address. Signatures and their age are not looked at.
DELETE makes an object expire. Prints its port once it listens.
"""

from __future__ import annotations

import sys
import urllib.parse
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKETS: dict[str, dict[str, bytes]] = {}
UPLOADS: dict[str, dict[int, bytes]] = {}


class Storage(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        bucket, key, _ = self.where()
        if not bucket:
            names = "".join(f"<Bucket><Name>{name}</Name></Bucket>" for name in BUCKETS)
            return self.answer(200, _xml("ListAllMyBucketsResult", f"<Buckets>{names}</Buckets>"))
        if bucket not in BUCKETS:
            return self.missing("NoSuchBucket")
        if key and key not in BUCKETS[bucket]:
            return self.missing("NoSuchKey")
        return self.answer(200, BUCKETS[bucket][key] if key else _xml("ListBucketResult", ""))

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        bucket, key, query = self.where()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not key:
            BUCKETS.setdefault(bucket, {})
        elif "partNumber" in query:
            UPLOADS[query["uploadId"]][int(query["partNumber"])] = body
        else:
            BUCKETS[bucket][key] = body
        self.answer(200, b"", {"ETag": f'"{uuid.uuid4().hex}"'})

    def do_POST(self) -> None:
        bucket, key, query = self.where()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "uploads" in query:
            upload = uuid.uuid4().hex
            UPLOADS[upload] = {}
            return self.answer(200, _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>"))
        parts = UPLOADS.pop(query["uploadId"])
        BUCKETS[bucket][key] = b"".join(parts[number] for number in sorted(parts))
        return self.answer(200, _xml("CompleteMultipartUploadResult", f"<Key>{key}</Key>"))

    def do_DELETE(self) -> None:
        bucket, key, _ = self.where()
        BUCKETS.get(bucket, {}).pop(key, None)
        self.answer(204, b"")

    def where(self) -> tuple[str, str, dict[str, str]]:
        parts = urllib.parse.urlsplit(self.path)
        bucket, _, key = urllib.parse.unquote(parts.path).lstrip("/").partition("/")
        return bucket, key, dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))

    def missing(self, code: str) -> None:
        self.answer(404, _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>"))

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _xml(tag: str, inside: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{tag}>{inside}</{tag}>'.encode()


def main(port: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Storage)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
