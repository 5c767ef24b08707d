"""Callers and messages of the update service that are not what they should be: refused with a reason
of their own, while what serves, here and in other models, stays as it is to the bit."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time

import espalier
import grpc
import pytest
import updating
from attack_stage import refuses, stage  # noqa: F401  (fixtures)
from espalier import _wire, updates

Code = grpc.StatusCode


# --- who asks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "text"),
    [
        (None, "no token"),
        ("another-token-0123456789abcd", "not this server's"),
        (updating.TOKEN[:-1], "not this server's"),
        (updating.TOKEN + "x", "not this server's"),
        (updating.TOKEN.upper(), "not this server's"),
    ],
)
def test_without_the_token_nothing_is_done(stage, refuses, token, text):
    content = stage.third()
    refuses(
        Code.UNAUTHENTICATED,
        text,
        lambda: updating.send(stage.url, content, model="digits", token=token),
    )
    with updates.Client(stage.url, token=token) as client:
        for call in (
            lambda: client.activate("digits", 1),
            lambda: client.rollback("digits"),
            lambda: client.confirm("digits", 2),
            lambda: client.versions(),
            lambda: client.log("digits"),
            lambda: list(client.watch(timeout=5)),
        ):
            refuses(Code.UNAUTHENTICATED, text, call)


def roll_back_raw(stage, authorization: str, **options) -> None:
    """A rollback over a channel of its own, with this metadata and these options."""
    with grpc.insecure_channel(stage.url, **options) as channel:
        method = channel.unary_unary(
            f"/{_wire.UPDATE_SERVICE}/Rollback",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        method(
            updating.new("RollbackRequest", model="digits").SerializeToString(),
            metadata=(("authorization", authorization),),
            timeout=60,
        )


def test_a_token_of_another_scheme_is_none(stage, refuses):
    basic = f"Basic {updating.TOKEN}"
    refuses(Code.UNAUTHENTICATED, "not this server's", lambda: roll_back_raw(stage, basic))


# --- messages that are not what they say ----------------------------------------------------------


@pytest.mark.parametrize("size", [0, 16, 31, 33, 64])
def test_digests_of_another_size(stage, refuses, size):
    refuses(
        Code.INVALID_ARGUMENT,
        f"sha256 has {size} bytes, expected 32",
        lambda: updating.send(stage.url, b"x", model="digits", sha256=b"\1" * size),
    )


@pytest.mark.parametrize("size", [0, 1 << 33, 1 << 60, (1 << 64) - 1])
def test_sizes_that_are_none(stage, refuses, size):
    memory = resident(stage.server)
    refuses(
        (Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT),
        "expected 1 to",
        lambda: updating.send(stage.url, b"x", model="digits", size=size),
    )
    assert resident(stage.server) < memory + (64 << 20)


def resident(server) -> int:
    with open(f"/proc/{server.process.pid}/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_more_bytes_than_the_header_says(stage, refuses):
    good = stage.third()
    refuses(
        Code.INVALID_ARGUMENT,
        "more of them came",
        lambda: updating.send(stage.url, good, model="digits", size=len(good) - 1),
    )


def test_fewer_bytes_than_the_header_says(stage, refuses):
    good = stage.third()
    refuses(
        Code.INVALID_ARGUMENT,
        f"after {len(good)} of {len(good) + 1} bytes",
        lambda: updating.send(
            stage.url, good, model="digits", size=len(good) + 1, sha256=b"\2" * 32
        ),
    )


def test_chunks_above_the_limit(stage, refuses):
    content = b"x" * ((1 << 20) + 1)
    refuses(
        Code.INVALID_ARGUMENT,
        "expected 1 to 1048576",
        lambda: updating.send(stage.url, content, model="digits", chunk=len(content)),
    )
    content = b"x" * (8 << 20)
    refuses(
        Code.RESOURCE_EXHAUSTED,
        "",
        lambda: updating.send(stage.url, content, model="digits", chunk=len(content)),
    )


def test_streams_that_break_the_rules(stage, refuses):
    header = updating.new(
        "PushDeltaRequest",
        header=updating.new("PushHeader", model="digits", sha256=b"\3" * 32, bytes=10),
    )
    chunk = updating.new("PushDeltaRequest", chunk=b"12345")
    for requests, text in (
        ([], "header first"),
        ([chunk], "header first"),
        ([updating.new("PushDeltaRequest")], "header first"),
        ([header, header], "expected a chunk"),
        ([header, updating.new("PushDeltaRequest", chunk=b"")], "a chunk of 0 bytes"),
        ([b"\xff\xff\xff\xff"], "malformed"),
        ([header, b"\x0a\xff\xff\xff\xff\x7f"], "malformed"),
    ):
        refuses(Code.INVALID_ARGUMENT, text, lambda: updating.stream(stage.url, requests))


@pytest.mark.parametrize(
    "model",
    [
        "",
        "..",
        "../digits",
        "digits/../other",
        "/etc/passwd",
        "a/b",
        ".hidden",
        "a\\b",
        "x" * 256,
        "digits\n",
        "dïgits",
        'a"b',
        "digits\0",
    ],
)
def test_names_that_are_paths_or_worse(stage, refuses, model):
    refuses(
        Code.INVALID_ARGUMENT, "model is '", lambda: updating.send(stage.url, b"x", model=model)
    )
    with stage.client() as client:
        refuses(Code.INVALID_ARGUMENT, "model is '", lambda: client.activate(model, 1))
        refuses(Code.INVALID_ARGUMENT, "model is '", lambda: client.rollback(model))
        refuses(Code.INVALID_ARGUMENT, "model is '", lambda: client.log(model))
    assert not (stage.folder / "state" / "digits").exists()


def test_a_model_that_is_not_served(stage, refuses):
    with stage.client() as client:
        for call in (
            lambda: updating.send(stage.url, b"x", model="nobody"),
            lambda: client.activate("nobody", 1),
            lambda: client.rollback("nobody"),
            lambda: client.confirm("nobody", 1),
            lambda: client.versions("nobody"),
            lambda: client.log("nobody"),
        ):
            refuses(Code.NOT_FOUND, "nobody", call)
    assert not any("nobody" in str(path) for path in (stage.folder / "state").rglob("*"))


def test_versions_that_cannot_serve(stage, refuses):
    with stage.client() as client:
        for version in (0, -1, -(1 << 63)):
            refuses(Code.INVALID_ARGUMENT, "above zero", lambda: client.activate("digits", version))
        refuses(
            (Code.NOT_FOUND, Code.FAILED_PRECONDITION), "99", lambda: client.activate("digits", 99)
        )
        refuses(
            (Code.NOT_FOUND, Code.FAILED_PRECONDITION),
            "99",
            lambda: client.rollback("digits", to=99),
        )
        refuses(Code.INVALID_ARGUMENT, "above zero", lambda: client.rollback("digits", to=-1))
        refuses(Code.FAILED_PRECONDITION, "", lambda: client.rollback("other"))
        refuses((Code.FAILED_PRECONDITION, Code.NOT_FOUND), "", lambda: client.confirm("digits", 1))
        refuses(
            Code.INVALID_ARGUMENT,
            "reason has 513 bytes",
            lambda: client.rollback("digits", reason="r" * 513),
        )
        refuses(Code.INVALID_ARGUMENT, "most is", lambda: client.log("digits", most=1001))
        refuses(Code.INVALID_ARGUMENT, "most is", lambda: client.log("digits", most=-1))


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds": -1},
        {"seconds": float("nan")},
        {"canary_share": 1.5, "canary_seconds": 1},
        {"canary_seconds": 1e9, "canary_share": 0.5},
        {"max_error_rate": -0.1, "seconds": 1},
        {"max_latency_ratio": float("inf"), "seconds": 1},
    ],
)
def test_probations_that_make_no_sense(stage, refuses, fields):
    with stage.client() as client:
        refuses(
            Code.INVALID_ARGUMENT,
            f"probation.{next(iter(fields))}",
            lambda: client.activate("digits", 2, updates.Probation(**fields)),
        )


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"canary_share": 0.5}, "canary_seconds"),
        ({"canary_seconds": 1}, "canary_share"),
        ({"max_error_rate": 0.1, "golden_requests": True}, "max_error_rate needs seconds"),
        ({"max_latency_ratio": 2}, "max_latency_ratio needs seconds"),
    ],
)
def test_probations_that_would_do_nothing(fields, missing):
    with pytest.raises(ValueError, match=missing):
        updates.Probation(**fields)


def test_deltas_from_versions_that_are_not_here(stage, refuses):
    def fetch(version):
        with grpc.insecure_channel(stage.url) as channel:
            method = channel.unary_stream(
                f"/{_wire.UPDATE_SERVICE}/FetchDeltas",
                request_serializer=bytes,
                response_deserializer=bytes,
            )
            request = updating.new("FetchDeltasRequest", model="digits", from_version=version)
            metadata = (("authorization", f"Bearer {updating.TOKEN}"),)
            list(method(request.SerializeToString(), metadata=metadata, timeout=60))

    refuses(Code.INVALID_ARGUMENT, "above zero", lambda: fetch(0))
    refuses(Code.NOT_FOUND, "77", lambda: fetch(77))


def test_packed_messages_are_not_unpacked(stage, refuses):
    bearer, gzip = f"Bearer {updating.TOKEN}", grpc.Compression.Gzip
    refuses(Code.UNIMPLEMENTED, "", lambda: roll_back_raw(stage, bearer, compression=gzip))


# --- too much at once -----------------------------------------------------------------------------


def held(stage, sha256: bytes, release: threading.Event, started: threading.Event):
    """A push that sends its header, which the server has then, and waits."""

    def requests():
        yield updating.new(
            "PushDeltaRequest",
            header=updating.new("PushHeader", model="other", sha256=sha256, bytes=100),
        )
        release.wait(110)

    errors = []

    def run():
        try:
            updating.stream(stage.url, requests(), on_answer=started.set)
        except grpc.RpcError as error:
            errors.append((error.code(), error.details()))

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    return thread, errors


def test_more_pushes_at_once_than_may_be(stage, refuses):
    release = threading.Event()
    pushes = [held(stage, bytes([i]) * 32, release, threading.Event()) for i in range(8)]
    refuses(
        Code.RESOURCE_EXHAUSTED,
        "at most 8",
        lambda: updating.send(stage.url, stage.third(), model="digits"),
    )
    release.set()
    for thread, _ in pushes:
        thread.join()
    with stage.client() as client:
        assert client.versions(), "and then it is open again"


def test_a_second_push_of_a_file_takes_over_and_the_first_is_told(stage):
    release, started = threading.Event(), threading.Event()
    sha256 = hashlib.sha256(b"both").digest()
    thread, errors = held(stage, sha256, release, started)
    again, more = held(stage, sha256, release, threading.Event())
    thread.join(60)
    assert not thread.is_alive()
    assert errors == [(Code.ABORTED, "another push of the same file took over")]
    release.set()
    again.join(60)
    assert more[0][0] == Code.INVALID_ARGUMENT and "after 0 of 100 bytes" in more[0][1]
    assert stage.facts() == stage.before


def test_clients_that_push_one_file_at_once_stage_it_once(stage, tmp_path):
    path = tmp_path / "delta.espd"
    path.write_bytes(stage.third(sequence=20, version=20))
    staged, refused = [], []

    def push():
        with stage.client() as client:
            try:
                staged.append(client.push(path))
            except espalier.InferenceError as error:
                refused.append(error)

    threads = [threading.Thread(target=push) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert staged and all(each == updates.StagedVersion(20, "STAGED") for each in staged)
    assert all(error.code == Code.ABORTED for error in refused), refused
    assert stage.facts() == stage.before


def test_idle_connections_keep_nobody_out(stage):
    host, port = stage.url.rsplit(":", 1)
    idle = [socket.create_connection((host, int(port))) for _ in range(200)]
    try:
        with stage.client() as client:
            assert client.versions("digits")
    finally:
        for connection in idle:
            connection.close()
    assert stage.facts() == stage.before
