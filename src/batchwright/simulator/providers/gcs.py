"""The parts of Google Cloud Storage that jobs need: its JSON API, and the XML API that obstore uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from email.utils import formatdate
from typing import Any, ClassVar
from urllib.parse import quote
from xml.sax.saxutils import escape

import orjson

from batchwright.simulator.providers.google import Google
from batchwright.simulator.providers.jobs import stamp
from batchwright.simulator.providers.wire import OCTETS, XML, Answer, Call, Refused, answer
from batchwright.simulator.providers.world import Blob, World

_O = "/storage/v1/b/{bucket}/o"


class Gcs(Google):
    """The buckets; they need not be created before use."""

    name = "gcs"
    routes: ClassVar[Sequence[tuple[str, str, str]]] = (
        ("POST", f"/upload{_O}", "upload"),
        ("PUT", f"/upload{_O}", "upload_rest"),
        ("GET", _O, "list"),
        ("GET", f"(?:/download)?{_O}/{{name:path}}", "get"),
        ("DELETE", f"{_O}/{{name:path}}", "delete"),
        ("GET", "/{bucket}/?", "list_xml"),
        ("GET", "/{bucket}/{name:path}", "get_xml"),
        ("PUT", "/{bucket}/{name:path}", "put_xml"),
        ("POST", "/{bucket}/{name:path}", "multipart_xml"),
        ("DELETE", "/{bucket}/{name:path}", "delete"),
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._uploads: dict[str, tuple[str, str, str]] = {}
        self._parts: dict[str, dict[int, bytes]] = {}

    def key_of(self, call: Call) -> str | None:
        """No credential is required: buckets may be open to everybody."""
        return call.bearer() or self.world.settings.api_key or "anonymous"

    def do_upload(self, call: Call, bucket: str) -> Answer:
        how, name = call.query.get("uploadType", "media"), call.query.get("name")
        if how == "multipart":
            head, data = call.parts()
            return self._put(call, bucket, str(name or orjson.loads(head.data)["name"]), data.data, data.type)
        if how == "resumable":
            name = str(name or call.json()["name"])
            id = self.world.next_id("upload-")
            self._uploads[id] = bucket, name, call.header("x-upload-content-type") or OCTETS
            return Answer(200, b"", headers={"location": f"{self.world.url}{call.path}?upload_id={id}"})
        if name is None:
            raise Refused(400, "Required parameter: name")
        return self._put(call, bucket, name, call.body, call.header("content-type") or OCTETS)

    def do_upload_rest(self, call: Call, bucket: str) -> Answer:
        """A resumable upload in pieces; all but the last end with `/*`."""
        id = call.query.get("upload_id", "")
        if id not in self._uploads:
            raise Refused(404, f"there is no upload {id!r}")
        parts = self._parts.setdefault(id, {})
        parts[len(parts)] = call.body
        if (call.header("content-range") or "").endswith("/*"):
            last = sum(map(len, parts.values())) - 1
            return Answer(308, b"", headers={"range": f"bytes=0-{last}"})
        bucket, name, kind = self._uploads.pop(id)
        return self._put(call, bucket, name, b"".join(self._parts.pop(id).values()), kind)

    def do_list(self, call: Call, bucket: str) -> Answer:
        found = [self._object(bucket, name, blob) for name, blob in self._named(bucket, call.query.get("prefix", ""))]
        call.query.setdefault("pageSize", call.query.get("maxResults", "1000"))
        return answer({"kind": "storage#objects", **self.page(call, found, "items")})

    def do_get(self, call: Call, bucket: str, name: str) -> Answer:
        blob = self._blob(bucket, name)
        if call.query.get("alt") == "media" or "/download/" in call.path:
            return _content(call, blob)
        return answer(self._object(bucket, name, blob))

    def do_delete(self, call: Call, bucket: str, name: str) -> Answer:
        self._blob(bucket, name)
        del self.world.blobs[bucket, name]
        return Answer(204)

    def do_list_xml(self, call: Call, bucket: str) -> Answer:
        prefix, start = (
            call.query.get("prefix", ""),
            call.query.get("continuation-token") or call.query.get("start-after"),
        )
        names = [(name, blob) for name, blob in self._named(bucket, prefix) if start is None or name > start]
        delimiter = call.query.get("delimiter")
        folders = sorted({_folder(name, prefix, delimiter) for name, _ in names} - {""}) if delimiter else []
        names = [pair for pair in names if not delimiter or not _folder(pair[0], prefix, delimiter)]
        size = min(call.number("max-keys", 1000, 1000), self.world.settings.page_max)
        more = (
            f"<NextContinuationToken>{escape(names[size - 1][0])}</NextContinuationToken>" if len(names) > size else ""
        )
        inner = "".join(_entry(name, blob) for name, blob in names[:size])
        common = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders)
        head = f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(names[:size])}</KeyCount>"
        cut = f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        return _xml(f"<ListBucketResult>{head}{cut}{more}{inner}{common}</ListBucketResult>")

    def do_get_xml(self, call: Call, bucket: str, name: str) -> Answer:
        return _content(call, self._blob(bucket, name))

    def do_put_xml(self, call: Call, bucket: str, name: str) -> Answer:
        kind = call.header("content-type") or OCTETS
        if (upload := call.query.get("uploadId")) in self._parts:
            self._parts[upload][call.number("partNumber", 1, 10_000)] = call.body
            return Answer(200, headers={"etag": f'"{len(call.body)}"'})
        data = call.body
        if (source := call.header("x-goog-copy-source")) is not None:
            from_bucket, _, from_name = source.lstrip("/").partition("/")
            data = self._blob(from_bucket, from_name).data
        self._check(call, bucket, name)
        blob = self.world.put_blob(bucket, name, data, kind)
        return Answer(200, headers={"etag": f'"{blob.md5}"', "x-goog-generation": str(blob.generation)})

    def do_multipart_xml(self, call: Call, bucket: str, name: str) -> Answer:
        if "uploads" in call.query:
            id = self.world.next_id("upload-")
            self._parts[id] = {}
            where = f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(name)}</Key><UploadId>{id}</UploadId>"
            return _xml(f"<InitiateMultipartUploadResult>{where}</InitiateMultipartUploadResult>")
        parts = self._parts.pop(call.query.get("uploadId", ""), None)
        if parts is None:
            raise Refused(404, "there is no such upload")
        self._check(call, bucket, name)
        blob = self.world.put_blob(bucket, name, b"".join(parts[n] for n in sorted(parts)))
        tag = f"<ETag>&quot;{blob.md5}&quot;</ETag>"
        return _xml(f"<CompleteMultipartUploadResult>{tag}</CompleteMultipartUploadResult>")

    def _put(self, call: Call, bucket: str, name: str, data: bytes, kind: str) -> Answer:
        self._check(call, bucket, name)
        return answer(self._object(bucket, name, self.world.put_blob(bucket, name, data, kind)))

    def _check(self, call: Call, bucket: str, name: str) -> None:
        """Refuse to overwrite an object, if the request says so."""
        wanted = call.query.get("ifGenerationMatch") or call.header("x-goog-if-generation-match")
        blob = self.world.blobs.get((bucket, name))
        if wanted is not None and int(wanted) != (0 if blob is None else blob.generation):
            raise Refused(412, "At least one of the pre-conditions you specified did not hold.")

    def _blob(self, bucket: str, name: str) -> Blob:
        blob = self.world.blobs.get((bucket, name))
        if blob is None:
            raise Refused(404, f"No such object: {bucket}/{name}")
        return blob

    def _named(self, bucket: str, prefix: str) -> list[tuple[str, Blob]]:
        found = [(name, blob) for (where, name), blob in self.world.blobs.items() if where == bucket]
        return sorted((pair for pair in found if pair[0].startswith(prefix)), key=lambda pair: pair[0])

    def _object(self, bucket: str, name: str, blob: Blob) -> dict[str, Any]:
        url = f"{self.world.url}/gcs/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{blob.generation}",
            "selfLink": url,
            "mediaLink": f"{url}?alt=media",
            "name": name,
            "bucket": bucket,
            "generation": str(blob.generation),
            "metageneration": "1",
            "contentType": blob.type,
            "size": str(len(blob.data)),
            "etag": blob.md5,
            "timeCreated": stamp(blob.at),
            "updated": stamp(blob.at),
        }


def _content(call: Call, blob: Blob) -> Answer:
    """The bytes, or the requested range of them."""
    headers = {
        "etag": f'"{blob.md5}"',
        "last-modified": formatdate(blob.at, usegmt=True),
        "x-goog-generation": str(blob.generation),
    }
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", call.header("range") or "")
    if asked is None:
        return Answer(200, blob.data, blob.type, headers)
    size = len(blob.data)
    start = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
    end = min(size, int(asked[2]) + 1) if asked[1] and asked[2] else size
    if start >= size:
        raise Refused(416, "the range cannot be satisfied")
    return Answer(206, blob.data[start:end], blob.type, {**headers, "content-range": f"bytes {start}-{end - 1}/{size}"})


def _folder(name: str, prefix: str, delimiter: str) -> str:
    head, mark, _ = name[len(prefix) :].partition(delimiter)
    return prefix + head + mark if mark else ""


def _entry(name: str, blob: Blob) -> str:
    tag = f"<ETag>&quot;{blob.md5}&quot;</ETag><Size>{len(blob.data)}</Size>"
    return f"<Contents><Key>{escape(name)}</Key><LastModified>{stamp(blob.at)}</LastModified>{tag}</Contents>"


def _xml(inner: str) -> Answer:
    return Answer(200, f'<?xml version="1.0" encoding="UTF-8"?>{inner}'.encode(), XML)
