"""A vLLM with its three known faults: 200 for a path that is not there, answers by an adapter that
was loaded while they were written, adapters forgotten at a restart. It answers with the name of
the adapter that it used."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WORDS = 4


class FakeVllm(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.adapters: dict[str, str] = {}
        self.newest = ""
        self.word_s = 0.05
        self.loads: list[str] = []
        self.blind = False  # it does not see the service's folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def restart(self) -> None:
        self.adapters.clear()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class _Answers(BaseHTTPRequestHandler):
    server: FakeVllm

    def do_GET(self) -> None:
        base = {"id": "base", "root": "demo", "parent": None}
        own = [{"id": one, "root": "", "parent": "base"} for one in self.server.adapters]
        self._say(200, json.dumps({"data": [base, *own]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter":
            name, path = body["lora_name"], body["lora_path"]
            self.server.loads.append(name)
            if Path(path).exists() and not self.server.blind:
                self.server.adapters[name] = path
                self.server.newest = name
            return self._say(200, "Success")
        if self.path == "/v1/unload_lora_adapter":
            self.server.adapters.pop(body["lora_name"], None)
            return self._say(200, "Success")
        if body["model"] not in {"base", *self.server.adapters}:
            return self._say(404, json.dumps({"error": {"message": "no such model"}}))
        return self._answer(body)

    def _answer(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        loaded_before = list(self.server.loads)
        for _ in range(WORDS):
            time.sleep(self.server.word_s)
            name = body["model"]
            if self.server.loads != loaded_before:  # #47724
                name = self.server.newest
            self._event({"choices": [{"delta": {"content": f"{name} "}, "finish_reason": None}]})
        self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": WORDS}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: Any) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
