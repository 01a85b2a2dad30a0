"""Commands reach the trainer, and no client can hurt it."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, BadInput
from fluxtrain.events.run_folder import control
from fluxtrain.events.run_folder.control import (
    CommandAnswer,
    ControlServer,
    NotReachable,
    send_command,
)


def answer_command(command: str, arguments: dict[str, Any]) -> tuple[bool, str]:
    if command == "refuse":
        raise BadInput("not while loading")
    if command == "break":
        raise KeyError("a bug")
    return command != "unknown", f"{command} {json.dumps(arguments)}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ctl.sock"


@pytest.fixture
def server(path: Path) -> Iterator[ControlServer]:
    server = ControlServer(path, answer_command)
    server.start()
    yield server
    server.close()


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(60)
    client.connect(str(path))
    return client


def ask(client: socket.socket, request: bytes) -> dict[str, Any]:
    client.sendall(request)
    answer = b""
    while not answer.endswith(b"\n"):
        data = client.recv(65536)
        assert data, "the server hung up"
        answer += data
    return dict(json.loads(answer))


@pytest.mark.usefixtures("server")
def test_a_command_with_arguments_is_answered(path: Path) -> None:
    assert send_command(path, "pause") == CommandAnswer(True, "pause {}")
    assert send_command(path, "apply", {"rows": 4}) == CommandAnswer(True, 'apply {"rows": 4}')
    assert send_command(path, "unknown") == CommandAnswer(False, "unknown {}")


@pytest.mark.usefixtures("server")
def test_only_its_user_can_open_the_socket(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.usefixtures("server")
def test_a_refusal_carries_its_reason_and_a_bug_does_not_end_control(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert send_command(path, "refuse") == CommandAnswer(False, "not while loading")
    broken = send_command(path, "break")
    assert not broken.ok and "KeyError" in broken.message
    assert "Traceback" in capfd.readouterr().err
    assert send_command(path, "pause").ok


@pytest.mark.parametrize(
    "garbage",
    [b"\n", b"pause\n", b"[1]\n", b'{"command":3}\n', b"\xff\x00\n", b"[" * 60_000 + b"\n"],
)
@pytest.mark.usefixtures("server")
def test_garbage_is_answered_with_an_error_and_the_line_stays_usable(
    path: Path, garbage: bytes
) -> None:
    with connected(path) as client:
        assert ask(client, garbage)["ok"] is False
        assert ask(client, b'{"command":"pause"}\n') == {"ok": True, "message": "pause {}"}


@pytest.mark.usefixtures("server")
def test_a_client_that_reads_no_answer_is_dropped_and_delays_nobody(path: Path) -> None:
    with connected(path) as deaf:
        deaf.setblocking(False)
        sent = 0
        try:
            while sent < 64 << 20:
                sent += deaf.send(b'{"command":"pause"}\n' * 500)
                time.sleep(0.001)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass  # not read any more, or hung up
        assert sent < 64 << 20
        assert send_command(path, "pause").ok


def test_a_silent_client_is_dropped_after_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CLIENT_IDLE_S", 0.2)
    server = ControlServer(path, answer_command)
    server.start()
    with connected(path) as silent:
        assert silent.recv(1) == b""  # end of stream, within the timeout of `connected`
    server.close()


@pytest.mark.usefixtures("server")
def test_silent_clients_in_every_place_leave_one_to_a_client_that_asks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CLIENTS_LIMIT", 3)
    silent = [connected(path) for _ in range(12)]
    active = connected(path)
    for _ in range(3):
        assert ask(active, b'{"command":"pause"}\n')["ok"]
        assert send_command(path, "pause").ok
    for client in (active, *silent):
        client.close()


def test_a_dead_trainers_socket_is_replaced_and_a_living_one_is_not(path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    server = ControlServer(path, answer_command)
    server.start()
    assert send_command(path, "pause").ok
    with pytest.raises(BadInput, match="another trainer answers"):
        ControlServer(path, answer_command).start()
    assert send_command(path, "pause").ok
    server.close()
    assert not path.exists()
    server.close()


@pytest.mark.usefixtures("server")
def test_a_command_does_not_follow_a_link_to_the_trainer_of_another_run(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "foreign").mkdir()
    link = tmp_path / "foreign" / path.name
    link.symlink_to(path)
    with pytest.raises(NotReachable, match="ctl.sock is a symbolic link and not the socket"):
        send_command(link, "stop")
    link.unlink()
    link.write_text("")
    with pytest.raises(NotReachable, match="ctl.sock is a file and not the socket"):
        send_command(link, "stop")
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(NotReachable, match="ctl.sock is a named pipe and not the socket"):
        send_command(link, "stop")
    assert send_command(path, "pause").ok


def test_a_file_in_the_way_is_kept_and_named(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(BadInput, match=r"ctl\.sock is in the way and is not a socket"):
        ControlServer(path, answer_command).start()
    assert path.read_text() == "precious"


def test_a_long_path_works_though_unix_addresses_are_short(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 50) / ("ü" * 60)
    folder.mkdir(parents=True)
    path = folder / "ctl.sock"
    descriptors = len(os.listdir("/proc/self/fd"))
    server = ControlServer(path, answer_command)
    server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert send_command(path, "pause").ok
    server.close()
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_no_run_no_trainer_and_a_dead_trainer_are_told_apart(tmp_path: Path, path: Path) -> None:
    with pytest.raises(NotReachable, match="there is no run at .*/nowhere") as no_run:
        send_command(tmp_path / "nowhere" / "ctl.sock", "pause")
    assert no_run.value.exit_code == EXIT_BAD_INPUT
    with pytest.raises(NotReachable, match="no trainer runs in"):
        send_command(path, "pause")
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with pytest.raises(NotReachable, match="is dead .* --resume auto"):
        send_command(path, "pause")


def test_a_trainer_that_does_not_answer_in_time_is_said_so(path: Path) -> None:
    may_answer, answered = threading.Event(), threading.Event()

    def answer(command: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        may_answer.wait(60)
        answered.set()
        return True, "at last"

    server = ControlServer(path, answer)
    server.start()
    with pytest.raises(NotReachable, match=r"did not answer 'sleep' in 0\.2 s"):
        send_command(path, "sleep", timeout_s=0.2)
    assert not answered.is_set(), "nobody waited for the answer"
    may_answer.set()
    server.close()


def test_an_answer_that_trickles_forever_ends_at_the_timeout(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        stop = threading.Event()

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                while not stop.wait(0.05):
                    connection.send(b" ")

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(NotReachable, match="did not answer"):
            send_command(path, "pause", timeout_s=0.5)
        stop.set()
        thread.join()
