"""An S3 that fails on demand, run as a program: moto behind a gate.

It listens on loopback, or on the address that it is given, prints its port and serves until its standard input ends.
`PUT /_faults` takes a JSON list of faults for the next requests: a status to answer with, "deaf" (the request is done,
the answer lost), "drop" (neither), "whole" (it is not heard that only a range was asked for), "" (none).
"""

import io
import json
import logging
import socket
import sys
import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

logging.getLogger("werkzeug").setLevel(logging.ERROR)
S3 = DomainDispatcherApplication(create_backend_app)
ONE_AT_A_TIME = threading.Lock()
FAULTS: list = []
ASKED: list[str] = []


def application(environ, start_response):
    if environ["PATH_INFO"] == "/_faults":
        FAULTS[:] = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        ASKED.clear()
        start_response("200 OK", [])
        return [b""]
    if environ["PATH_INFO"] == "/_asked":
        start_response("200 OK", [])
        return [json.dumps(ASKED).encode()]
    if environ.get("HTTP_AUTHORIZATION"):
        ASKED.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
    fault = FAULTS.pop(0) if FAULTS and environ.get("HTTP_AUTHORIZATION") else ""
    if isinstance(fault, int):
        start_response(f"{fault} Fault", [("content-type", "application/xml")])
        return [b"<Error><Code>Fault</Code><AWSAccessKeyId>the-key-id</AWSAccessKeyId></Error>"]
    if fault == "whole":
        environ.pop("HTTP_RANGE", None)
        fault = ""
    answer = serve(environ, start_response) if fault != "drop" else []
    if fault:
        list(answer)
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return answer


def serve(environ, start_response):
    """One at a time: moto closes an object that is replaced, also while another thread writes it."""
    if environ.get("CONTENT_LENGTH"):
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
    with ONE_AT_A_TIME:
        return list(S3(environ, start_response))


server = make_server(sys.argv[1] if sys.argv[1:] else "127.0.0.1", 0, application, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdout.write(f"{server.port}\n")
sys.stdout.flush()
sys.stdin.read()
