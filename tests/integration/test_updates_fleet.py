"""A version that several servers take together or not at all, with three real servers: clients and
servers die at every place where that matters."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import espalier
import grpc
import harness
import numpy as np
import pytest
import updating
from espalier import _wire, updates

Code = grpc.StatusCode


class Fleet:
    """Three servers of one repository, each with a state of its own, on ports that stay theirs."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.model = updating.train(folder, "digits", steps=3)
        self.ports = harness.free_ports(3)
        self.urls = [f"127.0.0.1:{port}" for port in self.ports]
        self.servers: dict[int, harness.Espalierd] = {}
        for i in range(3):
            self.start(i)

    def spawn(self, i: int) -> harness.Espalierd:
        server = updating.serve(
            self.folder,
            f"--update_keys={self.folder / 'trainer.pub'}",
            state=f"state-{i}",
            port=self.ports[i],
        )
        self.servers[i] = server
        return server

    def start(self, i: int) -> None:
        self.spawn(i).__enter__()

    def kill(self, i: int) -> None:
        self.servers[i].process.kill()
        self.servers[i].process.wait()
        self.servers.pop(i).__exit__(None, None, None)

    def stop(self) -> None:
        for server in self.servers.values():
            server.__exit__(None, None, None)

    def serving(self) -> list[int | None]:
        """The version that each answers with; None for one that is not there."""
        return [
            updating.Facts.of(self.servers[i], self.model).serving if i in self.servers else None
            for i in range(3)
        ]

    def await_serving(self, expected: list[int | None], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while (now := self.serving()) != expected:
            assert time.monotonic() < deadline, now
            time.sleep(0.1)

    def push(self, version: int, *flags: str, urls=None, check=True):
        return harness.espalier(
            "delta",
            "push",
            str(self.model.deltas[version]),
            "--to",
            ",".join(urls or self.urls),
            *flags,
            check=check,
        )

    def resume(self, identity: str, url: str, check=True):
        return harness.espalier("delta", "push", "--resume", identity, "--to", url, check=check)

    def push_and_kill_the_client(self, stop_at: bytes, at: int, expiry: str = "5m"):
        """A push whose client is killed when it asks server `at` for `stop_at`; the id and proxy."""
        proxy = updating.Proxy(self.urls[at])
        proxy.stop_at = stop_at
        urls = [*self.urls[:at], proxy.url, *self.urls[at + 1 :]]
        client = subprocess.Popen(
            [
                harness.BIN / "espalier",
                "delta",
                "push",
                self.model.deltas[2],
                "--to",
                ",".join(urls),
                "--expiry",
                expiry,
            ],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            line = client.stderr.readline()
            if not proxy.stopped.wait(60):
                client.kill()
                raise AssertionError(line + client.stderr.read())
        finally:
            client.send_signal(signal.SIGKILL)
            client.wait()
            client.stderr.close()
        proxy.stop_at = b""
        return re.search(r"transaction (\w{32})", line)[1], proxy


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.setenv("ESPALIER_BIN", str(harness.BIN))
    running = Fleet(tmp_path)
    try:
        yield running
    finally:
        running.stop()


def test_all_servers_take_a_version_together(fleet):
    done = fleet.push(2)
    assert fleet.serving() == [2, 2, 2]
    assert all(f"{url}: version 2 of digits serves" in done.stdout for url in fleet.urls)
    assert "serves on all 3 servers already" in fleet.push(2).stdout
    updates.push(fleet.model.deltas[3], to=",".join(fleet.urls))
    assert fleet.serving() == [3, 3, 3]
    facts = [updating.Facts.of(server, fleet.model) for server in fleet.servers.values()]
    assert facts[0] == facts[1] == facts[2]


def test_one_that_cannot_take_it_keeps_all_where_they_are(fleet):
    with updates.Client(fleet.urls[1]) as client:  # it is ahead of the others
        client.activate("digits", client.push(fleet.model.deltas[2]).version)
    done = fleet.push(3, check=False)
    assert done.returncode == 1 and "FAILED_PRECONDITION" in done.stderr
    assert fleet.serving() == [1, 2, 1]
    # With version 2 everywhere it goes, though one of them serves it already.
    fleet.push(2)
    fleet.push(3)
    assert fleet.serving() == [3, 3, 3]


def test_a_client_killed_between_the_phases_leaves_the_old_version_and_resume_finishes(fleet):
    identity, proxy = fleet.push_and_kill_the_client(b"/DecideTransaction", at=0)
    assert fleet.serving() == [1, 1, 1]
    for url in fleet.urls:
        assert state_of(url, identity) == "PREPARED"
    done = fleet.resume(identity, fleet.urls[2])
    assert done.returncode == 0
    assert fleet.serving() == [2, 2, 2]
    assert fleet.resume(identity, fleet.urls[1]).returncode == 0, "again changes nothing"
    proxy.close()


def test_a_client_killed_while_it_prepares_leaves_nothing(fleet):
    identity, proxy = fleet.push_and_kill_the_client(b"/PrepareTransaction", at=2)
    assert fleet.serving() == [1, 1, 1]
    done = fleet.resume(identity, fleet.urls[0], check=False)
    assert done.returncode == 1 and "no server has changed" in done.stderr
    assert fleet.serving() == [1, 1, 1]
    fleet.push(2)
    assert fleet.serving() == [2, 2, 2]
    proxy.close()


def test_a_client_killed_after_the_decision_changes_nothing_about_it(fleet):
    identity, proxy = fleet.push_and_kill_the_client(b"/DecideTransaction", at=1)
    proxy.close()
    # The others ask the first one by themselves.
    fleet.await_serving([2, 2, 2])
    assert state_of(fleet.urls[1], identity) == "COMMITTED"


def test_a_server_that_died_before_the_commit_is_on_the_fleets_version_before_it_is_ready(fleet):
    identity, proxy = fleet.push_and_kill_the_client(b"/DecideTransaction", at=0)
    fleet.kill(2)
    decide(fleet.urls[0], identity, commit=True)
    fleet.await_serving([2, 2, None])
    server = fleet.spawn(2)
    seen = []
    with server:
        with espalier.Client(server.url) as client:
            seen.append(client.infer("digits", fleet.model.inputs).version)
    fleet.servers.pop(2)
    assert seen == ["2"], "its first answer after it was ready"
    proxy.close()


def test_an_undecided_transaction_is_aborted_by_the_first_when_it_expires(fleet):
    identity, proxy = fleet.push_and_kill_the_client(b"/DecideTransaction", at=1, expiry="300s")
    proxy.close()
    fleet.await_serving([2, 2, 2])
    identity = os.urandom(16).hex()
    third = staged(fleet, 3)
    for i, url in enumerate(fleet.urls):
        prepare(url, identity, third, fleet.urls, i, expires=time.time() + 6)
    assert fleet.serving() == [2, 2, 2]
    deadline = time.monotonic() + 120
    while {state_of(url, identity) for url in fleet.urls} != {"ABORTED"}:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    with pytest.raises(grpc.RpcError) as error:  # too late
        decide(fleet.urls[0], identity, commit=True)
    assert error.value.code() == Code.FAILED_PRECONDITION and "ABORT" in error.value.details()
    assert fleet.serving() == [2, 2, 2]


def test_undecided_servers_survive_a_restart_and_wait(fleet):
    third = staged(fleet, 2)
    identity = os.urandom(16).hex()
    for i, url in enumerate(fleet.urls):
        prepare(url, identity, third, fleet.urls, i, expires=time.time() + 300)
    for i in range(3):
        fleet.kill(i)
    for i in range(3):
        fleet.start(i)
    assert fleet.serving() == [1, 1, 1]
    assert [state_of(url, identity) for url in fleet.urls] == ["PREPARED"] * 3
    assert decide(fleet.urls[0], identity, commit=True) == "COMMITTED"
    fleet.await_serving([2, 2, 2])


def test_a_server_that_joins_late_is_on_the_fleets_version_before_it_is_ready(fleet):
    for version in (2, 3):
        fleet.push(version)
    nobody = f"127.0.0.1:{harness.free_ports(1)[0]}"

    def late():
        return updating.serve(
            fleet.folder,
            f"--update_keys={fleet.folder / 'trainer.pub'}",
            f"--update_peers={nobody},{fleet.urls[1]}",
            state="late",
        )

    with late() as server:
        facts = updating.Facts.of(server, fleet.model)
        assert facts == updating.Facts.of(fleet.servers[0], fleet.model) and facts.serving == 3
    fleet.kill(1)
    with late() as server:  # without any peer it serves what it has
        assert updating.Facts.of(server, fleet.model) == facts


def test_a_probation_is_of_each_server_and_outlives_its_death(fleet):
    done = fleet.push(2, "--probation", "20s", "--max_error_rate", "0.1")
    began = time.monotonic()
    for url in fleet.urls:
        assert f"{url}: version 2 of digits serves, on probation\n" in done.stdout
    fleet.kill(1)
    fleet.start(1)
    assert on_probation(fleet) == [True] * 3
    refused = fleet.push(3, check=False)
    assert refused.returncode == 1 and "on probation" in refused.stderr
    while any(on_probation(fleet)):
        assert time.monotonic() < began + 60
        time.sleep(0.2)
    assert time.monotonic() > began + 19
    fleet.push(3)
    assert fleet.serving() == [3, 3, 3]


def test_a_server_where_it_fails_goes_back_alone_and_says_so(fleet):
    updates.push(
        fleet.model.deltas[2], to=",".join(fleet.urls), probation=updates.Probation(seconds=600)
    )
    assert fleet.serving() == [2, 2, 2] and on_probation(fleet) == [True] * 3
    with espalier.Client(fleet.servers[1].url) as client:  # finite inputs, infinite answers
        client.infer("digits", np.full_like(fleet.model.inputs, 3e38))
    fleet.await_serving([2, 1, 2])
    with updates.Client(fleet.urls[1]) as client:
        failed = client.log("digits", most=1)[0]
        assert failed.action == "quarantined" and failed.version == 2
        assert "a NaN or an infinity" in failed.reason
        assert re.search(r"transaction \w{32} took it to 3 servers", failed.reason)
    again = fleet.push(2, check=False)
    assert again.returncode == 1 and "QUARANTINED" in again.stderr
    assert fleet.serving() == [2, 1, 2]


def on_probation(fleet: Fleet) -> list[bool]:
    states = []
    for url in fleet.urls:
        with updates.Client(url) as client:
            states.append(client.versions("digits")[0].on_probation)
    return states


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"id": ""}, Code.INVALID_ARGUMENT, "1 to 64 letters"),
        ({"id": "../../x"}, Code.INVALID_ARGUMENT, "1 to 64 letters"),
        ({"id": "x" * 65}, Code.INVALID_ARGUMENT, "1 to 64 letters"),
        ({"model": "../digits"}, Code.INVALID_ARGUMENT, "model is '"),
        ({"model": "nobody"}, Code.NOT_FOUND, "nobody"),
        ({"version": 0}, Code.INVALID_ARGUMENT, "above zero"),
        ({"version": 99}, (Code.NOT_FOUND, Code.FAILED_PRECONDITION), "99"),
        ({"version": 1}, Code.FAILED_PRECONDITION, "other weights"),
        ({"weights": b"x"}, Code.INVALID_ARGUMENT, "weights has 1 bytes"),
        ({"weights": b"x" * 32}, Code.FAILED_PRECONDITION, "other weights"),
        ({"participants": []}, Code.INVALID_ARGUMENT, "participants"),
        ({"participants": ["127.0.0.1:1"] * 1025}, Code.INVALID_ARGUMENT, "participants"),
        ({"participants": ["127.0.0.1:1", "x" * 2000]}, Code.INVALID_ARGUMENT, "participants"),
        ({"participants": ["unix:/etc/passwd"]}, Code.INVALID_ARGUMENT, "participants"),
        ({"expires_seconds": 1}, Code.FAILED_PRECONDITION, "expired"),
        ({"expires_seconds": 1 << 50}, Code.INVALID_ARGUMENT, "expires_seconds"),
    ],
)
def test_transactions_that_make_no_sense_are_refused(fleet, change, code, text):
    third = staged(fleet, 2)
    with pytest.raises(grpc.RpcError) as error:
        prepare(fleet.urls[0], os.urandom(16).hex(), third, fleet.urls, 0, time.time() + 60, change)
    codes = code if isinstance(code, tuple) else (code,)
    assert error.value.code() in codes and text in error.value.details(), error.value.details()
    with pytest.raises(grpc.RpcError) as error:
        prepare(fleet.urls[0], os.urandom(16).hex(), third, fleet.urls, 3, time.time() + 60)
    assert error.value.code() == Code.INVALID_ARGUMENT and "participant 3" in error.value.details()
    with pytest.raises(grpc.RpcError) as error:
        decide(fleet.urls[0], os.urandom(16).hex(), commit=True)
    assert error.value.code() == Code.NOT_FOUND
    assert fleet.serving() == [1, 1, 1]


def staged(fleet: Fleet, version: int) -> updates.Version:
    """Stages a version everywhere."""
    for url in fleet.urls:
        with updates.Client(url) as client:
            client.push(fleet.model.deltas[version])
            (model,) = client.versions("digits")
    return next(each for each in model.versions if each.version == version)


def call(url: str, method: str, request):
    with grpc.insecure_channel(url) as channel:
        send = channel.unary_unary(
            f"/{_wire.UPDATE_SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=_wire.message_class(
                f"{method}Response", _wire.UPDATE_PACKAGE
            ).FromString,
        )
        return send(request, timeout=60)


def prepare(url, identity, version, participants, self, expires, change=None) -> None:
    fields = {
        "id": identity,
        "model": "digits",
        "version": version.version,
        "weights": version.weights,
        "participants": participants,
        "expires_seconds": int(expires),
        **(change or {}),
    }
    transaction = updating.new("Transaction", **fields)
    request = updating.new("PrepareTransactionRequest", transaction=transaction, self=self)
    call(url, "PrepareTransaction", request)


def decide(url: str, identity: str, commit: bool) -> str:
    request = updating.new("DecideTransactionRequest", model="digits", id=identity, commit=commit)
    return _wire.enum_name("TransactionState", call(url, "DecideTransaction", request).state)


def state_of(url: str, identity: str) -> str:
    request = updating.new("GetTransactionRequest", id=identity)
    return _wire.enum_name("TransactionState", call(url, "GetTransaction", request).state)
