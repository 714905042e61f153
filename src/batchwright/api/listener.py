"""What the HTTP server listens on: a port, or a unix socket to which only its own user can connect.

A unix socket gets its name only when it is private and listening. If the name is taken, we try to connect: a socket on
which nobody listens was left by a process that died, and we replace it. A lock on the folder admits one process at a
time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchwright.access.settings import ApiSettings
from batchwright.errors import ConfigurationError
from batchwright.private import FILE_MODE, make_folders

_UNREAD_SECONDS_MAX = 60
"""The kernel closes a connection whose peer has acknowledged nothing for this long."""
_PATH_BYTES_MAX = 103
"""Maximum length of a socket's path: macOS allows 104 bytes, Linux 108, both including a final NUL."""
_CONNECT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket."""

    socket: socket.socket
    path: Path | None = None
    """Of a unix socket."""
    inode: int | None = None
    """Identifies the file at the path while it is ours."""

    @property
    def url(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Also removes the name of a unix socket, unless another server has it by now."""
        if self.path is not None:
            with contextlib.suppress(OSError), _one_at_a_time(self.path.parent):
                if self.path.lstat().st_ino == self.inode:
                    self.path.unlink()
        self.socket.close()


def listen(settings: ApiSettings, backlog: int = socket.SOMAXCONN) -> Listener:
    """Bind the socket here, so that an unavailable address is an error with a remedy."""
    if settings.socket is None:
        return _listen_on_port(settings, backlog)
    return _listen_on_socket(settings.socket, backlog)


def _listen_on_port(settings: ApiSettings, backlog: int) -> Listener:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=backlog)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            "choose another address with --host and --port"
        ) from error
    # Accepted sockets inherit these. Without the first one, an answer on a kept-alive connection is delayed by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_SECONDS_MAX * 1000)
    return Listener(listener)


def _listen_on_socket(given: Path, backlog: int) -> Listener:
    path = given.expanduser().absolute()
    draft = path.with_name(f".{secrets.token_hex(4)}")
    longest = max(len(os.fsencode(one)) for one in (path, draft))
    if longest > _PATH_BYTES_MAX:
        raise ConfigurationError(f"api.socket {path} is too long for a socket; it may have {_PATH_BYTES_MAX} bytes")
    try:
        make_folders(path.parent)
        with _one_at_a_time(path.parent):
            _refuse_live(path)
            listener = _bind_privately(draft, backlog)
            draft.replace(path)
            return Listener(listener, path, path.lstat().st_ino)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on api.socket {path}: {error.strerror or error}; choose another file"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _bind_privately(draft: Path, backlog: int) -> socket.socket:
    """Make the socket private before it listens: until then, no client can connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(draft))
        draft.chmod(FILE_MODE)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def _refuse_live(path: Path) -> None:
    """Refuse a socket on which a server listens, and any other kind of file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"api.socket {path} is not a socket but another file; choose another name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_CONNECT_SECONDS)
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:  # a backlog that is full, or a socket of another user
            reason = error.strerror or "it does not answer"
        else:
            reason = "it answers"
    raise ConfigurationError(
        f"another server listens on api.socket {path} ({reason}); stop that one, or choose another socket"
    )


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
