"""Commands to a running trainer: a line of JSON each way over a socket that only its user can open.

Request `{"command": "pause", "arguments": {}}`, answer `{"ok": true, "message": "..."}`. The
training thread takes no part in it: one thread of its own serves all clients, and a client that is
slow, silent, sends garbage or never stops disturbs no other.

The thread takes its time from the training (both need the interpreter), so what it does is limited,
for each client and in all. Who sends more waits: the socket is not read, and nothing is lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.plain_files import kind_of
from fluxtrain.rundir.allowance import Allowance

REQUEST_LIMIT_BYTES = 1 << 16
ANSWER_LIMIT_BYTES = 1 << 20
CLIENT_IDLE_S = 30.0
CLIENTS_LIMIT = 32
BACKLOG = 16  # clients that wait to be let in
# A turn is a client let in, a read, or a request answered: about 50 us of the interpreter.
CLIENT_TURNS_PER_S, CLIENT_BURST = 5.0, 32
TURNS_PER_S, BURST = 20.0, 64
ADDRESS_LIMIT_BYTES = 100  # sun_path holds 108 with its NUL

CommandHandler = Callable[[str, dict[str, Any]], tuple[bool, str]]


class NotReachable(BadInput):
    """No trainer serves the socket, or it does not answer."""


class Request(msgspec.Struct, frozen=True):
    """The request of a client."""

    command: str
    arguments: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True):
    """The trainer's answer to a command."""

    ok: bool
    message: str


@dataclass
class _Client:
    connection: socket.socket
    heard_s: float  # or served
    allowance: Allowance
    received: bytearray = field(default_factory=bytearray)
    is_polled: bool = True
    is_new: bool = True  # not served yet

    @property
    def has_request(self) -> bool:
        """Return whether a whole line waits for its answer."""
        return b"\n" in self.received

    @property
    def turn(self) -> tuple[bool, float]:
        """Sort clients: new ones first, then those that have waited longest."""
        return not self.is_new, self.heard_s


class ControlServer:
    """Serves `path` from a thread of its own until `close`.

    `answer_command(command, arguments)` runs in that thread and should only set what the training
    loop looks at between steps; its `FluxTrainError`s become refusals.
    """

    def __init__(self, path: Path, answer_command: CommandHandler) -> None:
        self.path = path
        self._answer_command = answer_command
        self._clients: dict[int, _Client] = {}
        self._allowance = Allowance(TURNS_PER_S, BURST)
        self._thread: threading.Thread | None = None
        self._bound: os.stat_result | None = None

    def start(self) -> None:
        """Bind with mode 0600, replacing a dead trainer's socket, and begin to serve.

        Raises `BadInput` if another trainer serves this path or the folder cannot hold a socket.
        """
        self._listener = _listen(self.path)
        self._bound = os.lstat(self.path)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Remove the socket without waiting, in a process that ends at once."""
        with contextlib.suppress(OSError):  # of another trainer, where the folder was swapped
            if self._bound is not None and os.path.samestat(os.lstat(self.path), self._bound):
                self.path.unlink()

    def close(self) -> None:
        """Stop serving and remove the socket; waits for a command that is being answered."""
        if self._thread is None:
            return
        if self._thread.ident is not None:  # the system may have refused another thread
            os.write(self._wake_write, b".")
            self._thread.join()
        self._thread = None
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self.abandon()

    def _serve(self) -> None:
        while True:
            if (wait_s := self._allowance.wait_s()) and self._is_woken_within(wait_s):
                return
            ready = {key.fd for key, _ in self._selector.select(timeout=self._sleep_s())}
            if self._wake_read in ready:
                return
            if self._listener.fileno() in ready and self._allowance.take():
                self._accept()
            for client in sorted(self._clients.values(), key=lambda one: one.turn):
                waits = client.has_request or client.connection.fileno() in ready
                if waits and client.allowance.wait_s() == 0 and self._allowance.take():
                    client.allowance.take()
                    self._serve_one(client)
            self._drop_silent_clients()

    def _is_woken_within(self, wait_s: float) -> bool:
        """Sleep, whatever clients send; return whether the server closes."""
        woken = select.poll()
        woken.register(self._wake_read, select.POLLIN)
        return bool(woken.poll(wait_s * 1000))

    def _sleep_s(self) -> float:
        """Return how long nothing is to be done unless a client sends; read from those who may."""
        sleep_s = CLIENT_IDLE_S / 2
        for client in self._clients.values():
            wait_s = client.allowance.wait_s()
            self._poll(client, wanted=not client.has_request and wait_s == 0)
            if not client.is_polled:
                sleep_s = min(sleep_s, wait_s)
        return sleep_s

    def _poll(self, client: _Client, *, wanted: bool) -> None:
        if wanted and not client.is_polled:
            self._selector.register(client.connection, selectors.EVENT_READ)
        elif client.is_polled and not wanted:
            self._selector.unregister(client.connection)
        client.is_polled = wanted

    def _accept(self) -> None:
        """Let a client in. Where all places are taken, the one that was silent longest leaves."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client left already, or this process is out of descriptors
            return
        if len(self._clients) >= CLIENTS_LIMIT:
            self._drop(min(self._clients.values(), key=lambda one: one.heard_s))
        connection.setblocking(False)
        allowance = Allowance(CLIENT_TURNS_PER_S, CLIENT_BURST)
        self._clients[connection.fileno()] = _Client(connection, time.monotonic(), allowance)
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve_one(self, client: _Client) -> None:
        """Read what a client sent, or answer its next request where one is read already."""
        client.heard_s, client.is_new = time.monotonic(), False
        if not client.has_request and not self._read(client):
            return
        newline = client.received.find(b"\n")
        if newline >= 0:
            line = bytes(client.received[:newline])
            del client.received[: newline + 1]
            self._send(client, self._answer(line))
        elif len(client.received) > REQUEST_LIMIT_BYTES:
            limit = f"a request is one line of at most {REQUEST_LIMIT_BYTES} bytes"
            if self._send(client, Answer(False, limit)):
                self._drop(client)

    def _read(self, client: _Client) -> bool:
        """Read once; drop the client and return False if it has left."""
        try:
            data = client.connection.recv(REQUEST_LIMIT_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return False
        client.received += data
        return True

    def _answer(self, line: bytes) -> Answer:
        if len(line) > REQUEST_LIMIT_BYTES:
            return Answer(False, f"a request is at most {REQUEST_LIMIT_BYTES} bytes")
        try:
            request = msgspec.json.decode(line, type=Request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return Answer(False, f'not a request like {{"command": "pause"}}: {error}')
        try:
            return Answer(*self._answer_command(request.command, request.arguments))
        except FluxTrainError as error:
            return Answer(False, str(error))
        except Exception as error:  # noqa: BLE001 - a bug in one command must not end all control
            traceback.print_exc(file=sys.stderr)
            return Answer(False, f"a bug of FluxTrain, see engine.log: {error!r}")

    def _send(self, client: _Client, answer: Answer) -> bool:
        """Send an answer; drop the client and return False if it does not take these few bytes."""
        frame = msgspec.json.encode(answer) + b"\n"
        try:
            whole = client.connection.send(frame) == len(frame)
        except OSError:
            whole = False
        if not whole:
            self._drop(client)
        return whole

    def _drop_silent_clients(self) -> None:
        oldest_s = time.monotonic() - CLIENT_IDLE_S
        for client in list(self._clients.values()):
            if client.heard_s < oldest_s and not client.has_request:
                self._drop(client)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.connection.fileno()]
        self._poll(client, wanted=False)
        client.connection.close()


def send_command(
    path: Path, command: str, arguments: dict[str, Any] | None = None, timeout_s: float = 5.0
) -> Answer:
    """Ask the trainer whose control socket is `path`; raises `NotReachable` with the reason."""
    request = msgspec.json.encode(Request(command, arguments or {})) + b"\n"
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            with _address_of_socket(path) as address:
                _connect(connection, address, deadline_s)
            connection.sendall(request)
            line = _receive_line(connection, deadline_s)
            return msgspec.json.decode(line, type=Answer)
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


def _connect(connection: socket.socket, address: str, deadline_s: float) -> None:
    """Connect; where as many wait already as the system lets wait, try again until the deadline."""
    while True:
        try:
            connection.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise TimeoutError from None
            time.sleep(0.02)


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
        listener.setblocking(False)
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
        except BlockingIOError:
            pass  # as many clients wait for it as may
    raise BadInput(f"another trainer answers at {path}: attach to it, or stop it first")


@contextlib.contextmanager
def _address_of_socket(path: Path) -> Iterator[str]:
    """Return an address of the socket at `path` itself; a link could lead to the trainer of another
    run, which would be told what was meant for this one. Raises `NotReachable` for anything else.

    Source: open(2), O_PATH.
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
