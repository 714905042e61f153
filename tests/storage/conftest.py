"""One store per implementation: a folder, obstore's memory, and S3 with moto."""

import json
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from batchwright.storage import OPERATIONS, StorageSettings, Store
from batchwright.storage.local import Local
from batchwright.storage.remote import Remote
from batchwright.storage.settings import MIB
from batchwright.telemetry.metrics import Counts, series
from tests.conftest import skip


class S3:
    """A running S3 server, with a bucket of this test's own."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self.endpoint = f"http://{address}:{port}"
        self.bucket = f"test-{uuid.uuid4().hex[:12]}"
        self._call("PUT", f"/{self.bucket}")
        self.fail()  # no faults that an earlier test has left

    def fail(self, *faults: int | str) -> None:
        self._call("PUT", "/_faults", json.dumps(faults).encode())

    def asked(self) -> list[str]:
        return json.loads(self._call("GET", "/_asked"))

    def open_uploads(self) -> int:
        return self._call("GET", f"/{self.bucket}?uploads").count(b"<Upload>")

    def _call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.endpoint + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read()


@pytest.fixture(scope="session")
def s3_port():
    program = Path(__file__).with_name("s3_server.py")
    with subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        port = server.stdout.readline()
        yield int(port) if port.strip() else None
        server.stdin.close()


@pytest.fixture
def s3(s3_port, monkeypatch):
    if s3_port is None:
        skip("moto does not run here")
    s3 = S3(s3_port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return s3


@pytest.fixture
def counts():
    return Counts([OPERATIONS])


@pytest.fixture
def attempts(counts):
    """How attempts ended, as {(operation, status): n}."""
    return lambda: {
        (operation, status): n for (operation, _, status), n in series(counts.flat()).get(OPERATIONS.name, {}).items()
    }


async def no_pause(seconds: float) -> None:
    assert 0 <= seconds <= 10


SETTINGS = StorageSettings(part_bytes=5 * MIB, attempts=4)


@pytest.fixture
def folder(tmp_path, counts):
    return Store(Local(tmp_path / "files"), SETTINGS, counts=counts, pause=no_pause)


@pytest.fixture
def bucket(s3, counts):
    settings = StorageSettings(url=f"s3://{s3.bucket}/pre/fix", part_bytes=5 * MIB, attempts=4)
    return Store(Remote.at(settings.url, settings), settings, counts=counts, pause=no_pause)


@pytest.fixture
def memory(counts):
    return Store(Remote(MemoryStore(), part_bytes=MIB, name="memory"), SETTINGS, counts=counts, pause=no_pause)


@pytest.fixture(params=["folder", "memory", "bucket"])
def store(request):
    return request.getfixturevalue(request.param)
