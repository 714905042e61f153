"""Where results are written: to a file, which gets its name when it is complete, or to a stream.

    a file, or a name that is free       a draft beside it, renamed when all of it is on the disk
    standard output, a device, a pipe    opened and written to; never replaced
    a folder, a socket, a disk           refused

A draft is locked while it is written. A process that dies leaves its draft behind, and the kernel frees the lock: the
next one that writes to the same file removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import os
import re
import stat
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import typer

from batchwright.errors import InvalidInput

STANDARD_OUTPUT = Path("-")
_HEAD_BYTES = 256
_DESCRIPTORS = re.compile(r"/proc/[^/]+/fd")
_REFUSED = {stat.S_IFDIR: "a folder; name a file in it", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a disk"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where lines go."""

    name: str
    """The absolute path, with symbolic links followed if it is a file; `-` for standard output."""
    path: Path | None = None
    """Of a file."""
    descriptor: int | None = None
    """Of a device or a pipe: it is opened before there is anything to write, so that an error costs nothing."""
    stream: BinaryIO | None = None
    """Standard output."""

    def __str__(self) -> str:
        return self.name if self.stream is None else "standard output"

    @property
    def is_there(self) -> bool:
        """Whether it is a file that exists."""
        return self.path is not None and self.path.exists()

    def head(self) -> bytes:
        """The first bytes of a file; empty if it cannot be read or is not a file."""
        try:
            with self.path.open("rb") if self.path is not None else io.BytesIO() as stream:
                return stream.read(_HEAD_BYTES)
        except OSError:
            return b""

    def refuse_to_overwrite(self, flag: str) -> None:
        if self.path is not None and self.is_there and self.path.stat().st_size:
            raise InvalidInput(f"{flag} {self} exists already: write --force to overwrite it, or name another file")

    @contextlib.contextmanager
    def replace(self) -> Iterator[BinaryIO]:
        """Write everything at once: the file gets its name, and replaces an older one, at the end of the block."""
        with self._explain_errors(), self._write_through() if self.path is None else _replace_file(self.path) as stream:
            yield stream

    @contextlib.contextmanager
    def grow(self) -> Iterator[BinaryIO]:
        """Write piece by piece: the file has its name from the beginning."""
        with self._explain_errors(), self._write_through() if self.path is None else self.path.open("wb") as stream:
            yield stream

    @contextlib.contextmanager
    def _write_through(self) -> Iterator[BinaryIO]:
        if self.stream is not None:
            yield self.stream
            self.stream.flush()
        else:
            assert self.descriptor is not None, "a target that is not a file was opened"
            with os.fdopen(self.descriptor, "wb") as stream:
                yield stream

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.stream is not None and isinstance(error, BrokenPipeError):
                raise  # the reader of our output has stopped, which is not an error
            raise _unwritable_error(str(self), error) from error


def open_target(flag: str, path: Path) -> Target:
    """Find out what `path` is and whether it can be written; raises InvalidInput."""
    if path == STANDARD_OUTPUT:
        return _open_standard_output()
    try:
        if (mode := _find_mode(path)) is None:
            return _open_file(flag, path.resolve())
        if why := _REFUSED.get(stat.S_IFMT(mode)):
            raise InvalidInput(f"{flag} {path} is {why}")
        if _is_standard_output(path):
            return _open_standard_output()
        if not stat.S_ISREG(mode) or _is_descriptor(path):
            return Target(name=str(path.absolute()), descriptor=_open_device(path))
        return _open_file(flag, path.resolve())
    except OSError as error:
        raise _unwritable_error(f"{flag} {path}", error) from error


def refuse_same(output: Target, errors: Target) -> None:
    """Refuse one file for both: the second writer would overwrite it, or wait for a reader of a pipe that is gone."""
    if output.stream is None and output.name == errors.name and not _is_device(output):
        raise InvalidInput(f"--output and --errors are the same file, {output}; give each its own")


# Files ------------------------------------------------------------------------------------------------------------


def _open_file(flag: str, path: Path) -> Target:
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidInput(
            f"{flag} {path} cannot be written: there is no folder {path.parent}, or you may not write to it"
        )
    with _open_draft(path):  # checked before anything costs money
        pass
    return Target(name=str(path), path=path)


@contextlib.contextmanager
def _replace_file(path: Path) -> Iterator[BinaryIO]:
    """Write a draft, then rename it: a file that exists is complete."""
    with _open_draft(path) as (draft, stream):
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
        if (mode := _find_mode(path)) is not None and not stat.S_ISREG(mode):
            raise OSError(errno.EEXIST, "it is no longer a file")
        draft.replace(path)


@contextlib.contextmanager
def _open_draft(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file beside `path`, locked; removed at the end unless it was renamed.

    It is as private as the file that it replaces. A new name follows the umask, as with any file that a user names.
    """
    _remove_abandoned(path)
    mode = stat.S_IMODE(_find_mode(path) or 0o666)
    while True:
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            with open(draft, "xb", opener=functools.partial(os.open, mode=mode)) as stream:
                if _lock_draft(draft, stream):
                    yield draft, stream
                    return
        finally:
            with contextlib.suppress(OSError):  # an earlier error is more useful
                draft.unlink(missing_ok=True)


def _lock_draft(draft: Path, stream: BinaryIO) -> bool:
    """False if another process removed it as abandoned before it was locked, which needs a file system with locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX)
    try:
        return os.path.samestat(draft.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


def _remove_abandoned(path: Path) -> None:
    """Remove drafts of the same file whose process has ended."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        found = [entry for entry in entries if ours.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]
        for entry in found:
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                _remove_unless_locked(Path(entry.path))


def _remove_unless_locked(draft: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(draft, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()
        finally:
            os.close(descriptor)


# Streams and devices ----------------------------------------------------------------------------------------------


def _open_standard_output() -> Target:
    return Target(name=str(STANDARD_OUTPUT), stream=sys.stdout.buffer)


def _is_standard_output(path: Path) -> bool:
    """Also `/dev/stdout`, if that is a pipe or a file; a terminal is a device like others."""
    try:
        ours = os.fstat(1)
    except OSError:
        return False
    return not stat.S_ISCHR(ours.st_mode) and os.path.samestat(path.stat(), ours)


def _is_descriptor(path: Path) -> bool:
    """Whether it is a file that the shell has opened for us, such as `/dev/fd/3`, and whose name we do not know."""
    steps = [path, path.parent / path.readlink()] if path.is_symlink() else [path]
    return any(_DESCRIPTORS.fullmatch(str(step.parent.resolve())) for step in steps)


def _open_device(path: Path) -> int:
    """Open it for appending, because a file that the shell opened may have content. Waits for a pipe's reader."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        typer.echo(f"waiting for a reader of {path}", err=True)
        return os.open(path, flags)
    os.set_blocking(descriptor, True)
    return descriptor


def _is_device(target: Target) -> bool:
    return target.descriptor is not None and stat.S_ISCHR(os.fstat(target.descriptor).st_mode)


def _find_mode(path: Path) -> int | None:
    """The mode of a file, with symbolic links followed; None if it does not exist."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _unwritable_error(name: str, error: OSError) -> InvalidInput:
    return InvalidInput(f"{name} cannot be written: {error.strerror or error}")
