"""An OpenAI-compatible server for tests, which answers by rule and fails on demand."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    """Answers "Answer to <last message>." on 127.0.0.1.

    faults: what goes wrong, by the text of the last message: a list that is used up, one entry a request, then the
    answer comes. Entries: an HTTP status ("429"), "drop" (the connection is cut), "garbage", "empty", "slow", "abort".
    replies: whole choices by that text, in place of the rule. delay: seconds before each answer.
    """

    def __init__(self, port: int = 0) -> None:
        self.faults: dict[str, list[str]] = {}
        self.replies: dict[str, dict[str, Any]] = {}
        self.delay = 0.0
        self.models = ["tiny"]
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.asked: Counter[str] = Counter()
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self.released = threading.Event()  # ends slow answers
        owner = self

        class Handler(_Handler):
            server_state = owner

        self._server = _Quiet(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def enter(self, body: dict[str, Any]) -> tuple[str, str | None]:
        """Notes a request; returns its last message's text and the fault it meets."""
        text = str(body["messages"][-1]["content"])
        with self._lock:
            self.bodies.append(body)
            self.asked[text] += 1
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            left = self.faults.get(text, [])
            return text, left.pop(0) if left else None

    def leave(self) -> None:
        with self._lock:
            self._at_once -= 1

    def choice(self, text: str) -> dict[str, Any]:
        rule = {"message": {"role": "assistant", "content": f"Answer to {text}."}, "finish_reason": "stop"}
        return {"index": 0, **rule, **self.replies.get(text, {})}


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up or are killed are what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: ChatServer

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": name} for name in self.server_state.models]})

    def do_POST(self) -> None:
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        state.keys.add(self.headers.get("authorization"))
        text, fault = state.enter(body)
        try:
            time.sleep(state.delay)
            self._answer(text, fault)
        finally:
            state.leave()

    def _answer(self, text: str, fault: str | None) -> None:
        usage = {"completion_tokens": 5}
        choice = self.server_state.choice(text)
        if fault == "drop":
            self.close_connection = True
            self.connection.close()
        elif fault == "garbage":
            self._send(200, b'{"choices": [{"mess')
        elif fault == "empty":
            self._send(200, {"choices": []})
        elif fault == "abort":
            self._send(200, {"choices": [choice | {"finish_reason": "abort"}]})
        elif fault is not None and fault.isdigit():
            self._send(int(fault), {"error": {"message": f"told to say {fault}"}}, {"Retry-After": "0"})
        else:
            if fault == "slow":
                self.server_state.released.wait(60)
            self._send(200, {"choices": [choice], "usage": usage})

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
