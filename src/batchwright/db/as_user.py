"""Runs programs as another user, and creates folders that only that user can enter: root needs it for PostgreSQL."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from batchwright import private
from batchwright.errors import ConfigurationError, DatabaseUnavailable

if sys.platform != "win32":
    import pwd

USER = "batchwright"
SYSTEM_ROOT = Path("/var/lib/batchwright")
LOG_LINES = 12

Owner = tuple[int, int]


def system_user() -> Owner:
    try:
        entry = pwd.getpwnam(USER)
    except KeyError:
        shell = shutil.which("nologin") or shutil.which("false") or ""
        command = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", str(SYSTEM_ROOT)]
        refusal = ""
        try:
            run([*command, "--shell", shell, USER], None, seconds=60)
        except (DatabaseUnavailable, OSError) as error:
            refusal = str(error)
        try:
            entry = pwd.getpwnam(USER)  # another process may have created it in the meantime
        except KeyError:
            raise ConfigurationError(
                f"PostgreSQL does not run as root, and the system user {USER!r} cannot be created ({refusal}); "
                "create it yourself, run Batchwright as another user, or set BATCHWRIGHT_DATABASE_URL"
            ) from None
    return entry.pw_uid, entry.pw_gid


def make_folders(folder: Path, owner: Owner | None) -> None:
    """Create missing folders, private; existing ones stay as they are."""
    for path in private.make_folders(folder):
        give(path, owner)


def give(path: Path, owner: Owner | None) -> None:
    if owner is not None:
        os.chown(path, *owner, follow_symlinks=False)


def open_private(path: Path, owner: Owner | None) -> int:
    """Change the owner only of a file that we created: a link must not lead root to another file."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, flags)
    if owner is not None:
        os.fchown(descriptor, *owner)
    return descriptor


def is_private(folder: Path, owner: Owner | None, *, make: bool) -> bool:
    try:
        if make:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                give(folder, owner)
        info = folder.lstat()
    except (FileNotFoundError, PermissionError):
        return False
    uid = os.geteuid() if owner is None else owner[0]
    return stat.S_ISDIR(info.st_mode) and stat.S_IMODE(info.st_mode) == 0o700 and info.st_uid == uid


def check_reach(folders: Sequence[Path], owner: Owner) -> None:
    """Test access as that user, because access control lists and similar rules apply too."""
    for folder in dict.fromkeys(path for last in folders for path in (*reversed(last.parents), last)):
        if not can_run("test", owner, "-x", folder):
            name = pwd.getpwuid(owner[0]).pw_name
            raise ConfigurationError(
                f"PostgreSQL does not run as root but as the user {name!r}, which cannot enter {folder}; "
                f"allow it (setfacl -m u:{name}:x {folder}), or choose another place, such as {SYSTEM_ROOT}"
            )


def can_run(program: str | Path, owner: Owner, *arguments: str | Path) -> bool:
    try:
        run([program, *(arguments or ["--version"])], owner, seconds=10)
    except (DatabaseUnavailable, PermissionError):
        return False
    return True


def run(command: Sequence[str | Path], owner: Owner | None, *, seconds: float, inherited: Sequence[int] = ()) -> str:
    """The output of the command; raises DatabaseUnavailable with the end of the output.

    The output goes to a file, since a pipe would stay open for as long as a server started by the command.
    The environment is empty: PG* variables would change the server, and it must not see the user's keys.
    """
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in os.environ}
    uid, gid = owner or (None, None)
    with tempfile.TemporaryFile() as output:
        try:
            result = subprocess.run(  # noqa: S603 - no shell, and every program is ours or the system's
                command,
                check=False,
                cwd=os.sep,
                env=environment | {"LC_ALL": "C", "TZ": "UTC"},
                extra_groups=None if owner is None else [],
                group=gid,
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                umask=0o077,
                user=uid,
            )
            failure = f"exit status {result.returncode}" if result.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"not finished after {seconds:g} s"
        output.seek(0)
        text = output.read()
    if failure:
        raise DatabaseUnavailable(f"{Path(command[0]).name}: {failure}\n{tail(text)}")
    return text.decode(errors="replace")


def command_line(pid: int) -> str:
    """As one line; empty for a process that does not exist or is a zombie."""
    if Path("/proc/self/cmdline").exists():
        try:
            return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "))
        except (FileNotFoundError, ProcessLookupError):
            return ""
    try:
        return run(["ps", "-ww", "-o", "command=", "-p", str(pid)], None, seconds=10).strip()
    except DatabaseUnavailable:
        return ""


def tail(text: bytes) -> str:
    return "\n".join(text.decode(errors="replace").splitlines()[-LOG_LINES:])
