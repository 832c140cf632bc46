"""A served model of our own, which speaks as much of OpenAI's API as is used here."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Answers with the prompt's ids, one by one, or as it is told; `answers` are given first, as (status, object), or
    with headers as a third. `keeps_open`: connections stay open for further requests."""

    def __init__(self, usual=None, *, keeps_open=False):
        self.usual = usual or echo
        self.requests, self.keys, self.hosts, self.answers = [], [], [], []
        self.connections = []
        self.instead = (503, {})
        """What is answered where `usual` returns None."""
        self.hold = threading.Event()
        self.hold.set()
        handler = type(
            "Handler", (_Handler,), {"owner": self, "protocol_version": "HTTP/1.1" if keeps_open else "HTTP/1.0"}
        )
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def cut(self):
        """Close all connections, as a server does with those that have been idle for long."""
        while self.connections:
            with contextlib.suppress(OSError):
                self.connections.pop().shutdown(socket.SHUT_RDWR)

    def close(self):
        self.hold.set()
        self.cut()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    def setup(self):
        super().setup()
        self.owner.connections.append(self.connection)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.owner.requests.append((self.path, body))
        self.owner.keys.append(self.headers.get("Authorization"))
        self.owner.hosts.append(self.headers.get("Host"))
        self.owner.hold.wait(120)
        if self.owner.answers:
            told = self.owner.answers.pop(0)
        else:
            told = self.owner.instead if (answer := self.owner.usual(body)) is None else (200, answer)
        status, answer, headers = (*told, {})[:3]
        if status is None:
            self.close_connection = True  # without a word
            return
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # aborted

    def log_message(self, *arguments):
        pass


def echo(body, *, ids=True):
    tokens = body["prompt"][: body["max_tokens"]]
    choice = {
        "finish_reason": "length" if len(tokens) == body["max_tokens"] else "stop", "text": "",
        "logprobs": {"tokens": [f"token_id:{one}" for one in tokens], "token_logprobs": [-one / 10 for one in tokens]},
    }  # fmt: skip
    return {"choices": [choice | ({"token_ids": tokens} if ids else {})]}
