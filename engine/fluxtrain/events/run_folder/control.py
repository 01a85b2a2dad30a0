"""Commands to a running trainer: a line of JSON each way over a socket that only its user can open.

Request `{"command": "pause", "arguments": {}}`, answer `{"ok": true, "message": "..."}`. Each
client has a thread and a time limit, so one that is slow, silent or sends garbage delays no other.
Pauses between reads and answers bound the time that they take from the training: all threads need
the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.files.opening import kind_of

REQUEST_LIMIT_BYTES = 1 << 16
ANSWER_LIMIT_BYTES = 1 << 20
CLIENT_IDLE_S = 30.0
CLOSE_S = 1.0
CLIENTS_LIMIT = 16
BACKLOG = 128  # clients that wait to be let in
CLIENT_PAUSE_S, ACCEPT_PAUSE_S = 0.1, 0.02  # all clients together take about 1 % of a core
POLL_S = 0.1
ADDRESS_LIMIT_BYTES = 100  # sun_path holds 108 with its NUL

CommandHandler = Callable[[str, dict[str, Any]], tuple[bool, str]]


class NotReachable(BadInput):
    """No trainer serves the socket, or it does not answer."""


class CommandRequest(msgspec.Struct, frozen=True):
    """A client's request."""

    command: str
    arguments: dict[str, Any] = {}


class CommandAnswer(msgspec.Struct, frozen=True):
    """The trainer's answer to a command."""

    ok: bool
    message: str


class ControlServer:
    """Serves `path` from its own threads until `close`.

    `answer_command(command, arguments)` is called by one thread at a time and should only set
    flags that the training loop reads between steps; its `FluxTrainError`s become refusals.
    """

    def __init__(self, path: Path, answer_command: CommandHandler) -> None:
        self.path = path
        self._answer_command = answer_command
        self._answering = threading.Lock()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._bound: os.stat_result | None = None

    def start(self) -> None:
        """Bind with mode 0600, replacing a dead trainer's socket, and begin to serve.

        Raises `BadInput` if another trainer serves this path or the folder cannot hold a socket.
        """
        self._server = _Server(_listen(self.path), self.answer)
        self._bound = os.lstat(self.path)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="control", daemon=True
        )
        self._thread.start()

    def abandon(self) -> None:
        """Remove the socket without waiting, in a process that ends at once."""
        with contextlib.suppress(OSError):  # of another trainer, where the folder was swapped
            if self._bound is not None and os.path.samestat(os.lstat(self.path), self._bound):
                self.path.unlink()

    def close(self) -> None:
        """Stop serving and remove the socket; waits for a command under way."""
        if self._server is None:
            return
        if self._thread is not None and self._thread.ident is not None:  # no thread if refused
            self._server.shutdown()
            self._thread.join()
        with self._answering:
            self._server.close()
        self._server.wait_for_clients()  # one may wait to be answered: not under its lock
        self._server = None
        self.abandon()

    def answer(self, line: bytes) -> CommandAnswer:
        """Return the answer to one line of a client."""
        if len(line) > REQUEST_LIMIT_BYTES:
            limit = f"a request is one line of at most {REQUEST_LIMIT_BYTES} bytes"
            return CommandAnswer(False, limit)
        try:
            request = msgspec.json.decode(line, type=CommandRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return CommandAnswer(False, f'not a request like {{"command": "pause"}}: {error}')
        try:
            with self._answering:
                return CommandAnswer(*self._answer_command(request.command, request.arguments))
        except FluxTrainError as error:
            return CommandAnswer(False, str(error))
        except Exception as error:  # noqa: BLE001 - a bug in one command must not end all control
            traceback.print_exc(file=sys.stderr)
            return CommandAnswer(False, f"a bug of FluxTrain, see engine.log: {error!r}")


class _Client(socketserver.BaseRequestHandler):
    """Serves one client; the socket's timeout ends waits in both directions."""

    request: socket.socket
    server: _Server

    def handle(self) -> None:
        received = b""
        with contextlib.suppress(OSError):  # it left, was silent too long, or has to make room
            self.request.settimeout(CLIENT_IDLE_S)
            while True:
                line, newline, rest = received.partition(b"\n")
                is_too_long = len(line) > REQUEST_LIMIT_BYTES
                if newline or is_too_long:
                    answer = self.server.answer(line)
                    self.request.sendall(msgspec.json.encode(answer) + b"\n")
                    received = rest
                    if is_too_long:
                        return
                    time.sleep(CLIENT_PAUSE_S)
                    continue
                data = self.request.recv(REQUEST_LIMIT_BYTES)
                if not data:
                    return
                received += data
                if b"\n" not in data:
                    time.sleep(CLIENT_PAUSE_S)  # bytes that trickle in are read together


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Lets clients in. Where all places are taken, the one that came first leaves."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, answer: Callable[[bytes], CommandAnswer]) -> None:
        super().__init__("", _Client, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.answer = answer
        self._places = threading.Condition()
        self._clients: dict[int, socket.socket] = {}  # in the order in which they came

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a client its thread."""
        with self._places:
            if len(self._clients) >= CLIENTS_LIMIT:
                _hang_up(self._clients.pop(next(iter(self._clients))))
            self._clients[id(request)] = request
        super().process_request(request, client_address)
        time.sleep(ACCEPT_PAUSE_S)

    def shutdown_request(self, request: Any) -> None:
        """Close a client's connection."""
        super().shutdown_request(request)
        with self._places:
            self._clients.pop(id(request), None)
            self._places.notify_all()

    def close(self) -> None:
        """Close the listener and hang up on all clients."""
        self.server_close()
        with self._places:
            for client in self._clients.values():
                _hang_up(client)

    def wait_for_clients(self) -> None:
        """Wait until all clients' threads have closed their connections; `CLOSE_S` at most."""
        with self._places:
            self._places.wait_for(lambda: not self._clients, timeout=CLOSE_S)


def _hang_up(client: socket.socket) -> None:
    """End a connection whose thread may be reading; the thread closes it."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def send_command(
    path: Path, command: str, arguments: dict[str, Any] | None = None, timeout_s: float = 5.0
) -> CommandAnswer:
    """Ask the trainer whose control socket is `path`; raises `NotReachable` with the reason."""
    request = msgspec.json.encode(CommandRequest(command, arguments or {})) + b"\n"
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            with _address_of_socket(path) as address:
                connection.connect(address)
            connection.sendall(request)
            line = _receive_line(connection, deadline_s)
            return msgspec.json.decode(line, type=CommandAnswer)
        except FileNotFoundError as error:
            raise NotReachable(_absence(path)) from error
        except ConnectionRefusedError as error:
            raise NotReachable(
                f"the trainer of {path.parent} is dead (its socket is left, nobody answers): "
                f"go on with --resume auto --run-dir {path.parent}"
            ) from error
        except TimeoutError as error:
            raise NotReachable(
                f"the trainer of {path.parent} did not answer {command!r} in {timeout_s:g} s: "
                "it may be stopped or swapping; try again, or look at engine.log"
            ) from error
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise NotReachable(f"cannot talk to the trainer of {path.parent}: {error}") from error


def _receive_line(connection: socket.socket, deadline_s: float) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        data = connection.recv(REQUEST_LIMIT_BYTES)
        if not data:
            raise ConnectionResetError("it ended before it answered")
        received += data
        if len(received) > ANSWER_LIMIT_BYTES:
            raise OSError("its answer has no end")
    return bytes(received)


def _absence(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no run at {path.parent}: `fluxtrain runs` lists them"
    return f"no trainer runs in {path.parent}: it has ended, or has not started yet"


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_dead_socket(path)
        # Linux gives the file the mode of the socket: there is no moment when others can connect.
        os.fchmod(listener.fileno(), 0o600)
        with _short_address(path) as address:
            listener.bind(address)
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BadInput(
            f"cannot make the control socket {path}: {error.strerror}: "
            "choose a run directory on a local disk that you can write"
        ) from error
    except BadInput:
        listener.close()
        raise
    return listener


def _remove_dead_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise BadInput(f"{path} is in the way and is not a socket: move it away")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            with _short_address(path) as address:
                probe.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:  # as many clients wait for it as may
            pass
    raise BadInput(f"another trainer answers at {path}: attach to it, or stop it first")


@contextlib.contextmanager
def _address_of_socket(path: Path) -> Iterator[str]:
    """Return an address of the socket at `path` itself: through a link a command could reach the
    trainer of another run.

    Raises `NotReachable` for anything else. Source: open(2), O_PATH.
    """
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            kind = kind_of(path) or "a file"
            raise NotReachable(f"{path} is {kind} and not the socket of a trainer: remove it")
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _short_address(path: Path) -> Iterator[str]:
    """Return an address for `path` that fits in `sun_path`, by an open descriptor of its folder."""
    if len(os.fsencode(path)) <= ADDRESS_LIMIT_BYTES:
        yield os.fspath(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
