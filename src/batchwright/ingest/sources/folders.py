"""Documents in folders of this machine. Reading blocks, so threads do it, a page at a time."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

from batchwright.errors import InvalidInput, OperationError
from batchwright.ingest.sources.listing import Listed, Listing, Reason, Skipped, shown_name
from batchwright.ingest.sources.parse import uri_of
from batchwright.ingest.sources.roots import Roots
from batchwright.ingest.sources.settings import Rules
from batchwright.ingest.sources.sink import PIECE_BYTES, About, NotModified, Sink, changed, gone, refused, unavailable

Arguments = ParamSpec("Arguments")
T = TypeVar("T")

DEPTH_MAX = 100
PAGE = 1_000
THREADS = 8
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_TICK_NS, _COARSE_TICK_NS = 100_000_000, 2_000_000_000
_ONE_SECOND_NS = 1_000_000_000


class Files:
    """Reads files and folders in a separate pool of threads.

    A mount that hangs blocks these threads forever. Then only files wait, and the rest of the process continues.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "batchwright-files")

    async def list(self, path: Path, rules: Rules, listing: Listing) -> AsyncIterator[Listed]:
        """The file itself, or all documents in the folder and below it."""
        entries = await self._run(_entries, str(path), rules)
        while page := await self._run(lambda: list(islice(entries, PAGE))):
            for entry in page:
                if isinstance(entry, Skipped):
                    listing.skip(entry.name, entry.reason, entry.message)
                else:
                    yield entry

    async def fetch(self, path: Path, roots: Roots, sink: Sink, etag: str | None) -> About | NotModified:
        return await self._run(_copy, path, roots, sink, etag)

    async def read(self, path: Path, roots: Roots, bytes_max: int) -> bytes:
        """Read a file that is not a document, such as a list of URLs, under the same rules."""
        return await self._run(_read, path, roots, bytes_max)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: Callable[Arguments, T], *arguments: Arguments.args, **options: Arguments.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *arguments, **options))


def _read(path: Path, roots: Roots, bytes_max: int) -> bytes:
    shown = shown_name(str(path))
    try:
        with os.fdopen(_open(os.path.realpath(path), shown, roots), "rb") as file:
            data = file.read(bytes_max + 1)
    except (OperationError, OSError) as error:
        raise InvalidInput(f"the list {shown} cannot be read: {_words(error)}", param="sources") from None
    if len(data) > bytes_max:
        raise InvalidInput(f"the list {shown} has more than {bytes_max:,} bytes; split it", param="sources")
    return data


def _entries(path: str, rules: Rules) -> Iterator[Listed | Skipped]:
    shown = shown_name(path)
    try:
        found = os.stat(path)  # noqa: PTH116 - names may not be valid UTF-8, and os accepts them as they are
    except OSError as error:
        raise InvalidInput(f"{shown} cannot be listed: {_words(error)}", param="sources") from None
    if stat.S_ISDIR(found.st_mode):
        return _Walk(path, rules).folder(path, "", ((found.st_dev, found.st_ino),))
    if stat.S_ISREG(found.st_mode):
        return iter([_listed(path, os.path.basename(path), found, rules)])  # noqa: PTH119 - as above
    raise InvalidInput(f"{shown} is neither a file nor a folder", param="sources")


class _Walk:
    """Walks one folder and everything below it, in the order of names."""

    def __init__(self, base: str, rules: Rules) -> None:
        self._real_base = os.path.realpath(base)
        self._rules = rules
        self._settings = rules.settings

    def folder(self, path: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Listed | Skipped]:
        """`above` holds the parent folders, to detect a link that leads back up."""
        try:
            if len(above) > DEPTH_MAX:
                raise OSError(errno.ELOOP, f"it is nested deeper than {DEPTH_MAX} folders")
            with os.scandir(path) as found:
                entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            yield _skipped(prefix or ".", Reason.UNREADABLE, f"the folder cannot be listed: {_words(error)}")
            return
        for entry in entries:
            name = prefix + entry.name
            try:
                yield from self._entry(entry, name, above)
            except OSError as error:
                yield _skipped(name, Reason.UNREADABLE, f"it cannot be examined: {_words(error)}")

    def _entry(
        self, entry: os.DirEntry[str], name: str, above: tuple[tuple[int, int], ...]
    ) -> Iterator[Listed | Skipped]:
        if entry.name.startswith(".") and not self._settings.hidden:
            yield _skipped(name, Reason.HIDDEN, "its name begins with a dot")
            return
        if entry.is_symlink() and (why := self._refuse_link(entry.path)):
            yield _skipped(name, Reason.LINK, why)
            return
        found = entry.stat()
        if stat.S_ISDIR(found.st_mode):
            yield from self._folder_inside(entry.path, name, found, above)
        elif stat.S_ISREG(found.st_mode):
            yield self._file(entry.path, name, found)
        else:
            yield _skipped(name, Reason.SPECIAL, "it is a pipe, a socket or a device")

    def _folder_inside(
        self, path: str, name: str, found: os.stat_result, above: tuple[tuple[int, int], ...]
    ) -> Iterator[Listed | Skipped]:
        itself = (found.st_dev, found.st_ino)
        if self._rules.patterns.is_excluded(name):
            yield _skipped(name, Reason.EXCLUDED, "it is excluded")
        elif itself in above:
            yield _skipped(name, Reason.LINK, "it is a link to a folder that it is in")
        else:
            yield from self.folder(path, f"{name}/", (*above, itself))

    def _file(self, path: str, name: str, found: os.stat_result) -> Listed | Skipped:
        if refusal := self._rules.patterns.refusal(name):
            return _skipped(name, *refusal)
        return _listed(path, name, found, self._rules)

    def _refuse_link(self, path: str) -> str | None:
        real = os.path.realpath(path)
        if not self._settings.follow_links:
            is_inside = real.startswith(self._real_base.rstrip("/") + "/")
            where = "to something in the same folder" if is_inside else "that leads out of the folder"
            return f"it is a link {where}; to follow links, set ingest.follow_links = true"
        return None if self._rules.roots.holds_file(real) else "it is a link that leads out of the roots"


def _listed(path: str, name: str, found: os.stat_result, rules: Rules) -> Listed | Skipped:
    if found.st_size > rules.settings.bytes_max:
        message = f"it has {found.st_size:,} bytes; the limit is {rules.settings.bytes_max:,} (bytes_max)"
        return _skipped(name, Reason.TOO_LARGE, message)
    shown = shown_name(name)
    folder = shown.rpartition("/")[0]
    return Listed(
        uri=uri_of(path),
        name=shown,
        etag=_etag(found),
        size=found.st_size,
        metadata={"folder": folder} if folder else {},
    )


def _copy(path: Path, roots: Roots, sink: Sink, etag: str | None) -> About | NotModified:
    """Copy the file as it was when it was opened. If it changes meanwhile, raise, so that it is read again later."""
    shown = shown_name(str(path))
    began_ns = time.time_ns()
    file = _open(os.path.realpath(path), shown, roots)
    try:
        before = os.fstat(file)
        if etag == _etag(before):
            return NotModified(etag=etag)
        sink.check_size(before.st_size)
        while sink.size <= before.st_size and (data := os.read(file, PIECE_BYTES)):
            sink.write(data)  # the size check also stops at a file that grows as fast as it is read
        if _etag(os.fstat(file)) != _etag(before) or sink.size != before.st_size:
            raise changed(shown)
    except OSError as error:  # a problem of the disk or the network
        raise unavailable(f"{shown} cannot be read: {_words(error)}") from None
    finally:
        os.close(file)
    # A file that was written in the current tick of the clock may change again with the same time: give it no etag.
    tick = _TICK_NS if before.st_mtime_ns % _ONE_SECOND_NS else _COARSE_TICK_NS
    is_settled = before.st_mtime_ns + tick < began_ns
    return About(etag=_etag(before) if is_settled else None, media_type=None, name=shown_name(path.name))


def _open(real: str, shown: str, roots: Roots) -> int:
    """Open a path that has no links, folder by folder, so that nobody can add a link after the check."""
    if not roots.holds_file(real):
        raise refused(f"{shown} may not be read: it is outside the roots of its run")
    *folders, name = real.split("/")[1:]
    above = os.open("/", _FOLDER)
    try:
        for folder in folders:
            below = os.open(folder, _FOLDER, dir_fd=above)
            os.close(above)
            above = below
        if not stat.S_ISREG(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise refused(f"{shown} is not a file")
        file = os.open(name, _FILE, dir_fd=above)
    except (FileNotFoundError, NotADirectoryError):
        raise gone(shown) from None
    except PermissionError:
        raise refused(f"Batchwright's user may not read {shown}; give it the right to read the file") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise refused(f"{shown}: {_words(error)}") from None
        raise unavailable(f"{shown} cannot be opened: {_words(error)}") from None
    finally:
        os.close(above)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise changed(shown)
    return file


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns:x}-{found.st_size:x}-{found.st_ino:x}"


def _skipped(name: str, reason: Reason, message: str) -> Skipped:
    return Skipped(name=shown_name(name), reason=reason, message=message)


def _words(error: Exception) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
