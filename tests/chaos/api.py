"""`batchwright api` with a tether, like workers: `python -m tests.chaos.api --config FILE --tether N`.

It reports when it is ready, and exits when the harness does, so that a killed harness leaves no process behind.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

from batchwright.commands import main
from batchwright.settings import load_settings

_POLL_SECONDS = 0.05


def _hold(tether: socket.socket, port: int) -> None:
    while not _answers(port):
        time.sleep(_POLL_SECONDS)
    tether.send(b"r")
    tether.recv(1)
    os._exit(3)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    config, descriptor = sys.argv[2], int(sys.argv[4])
    port = load_settings({}, file=Path(config)).api.port
    threading.Thread(target=_hold, args=(socket.socket(fileno=descriptor), port), daemon=True).start()
    sys.argv = ["batchwright", "api", "--config", config]
    main()
