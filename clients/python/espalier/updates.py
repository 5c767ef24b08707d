"""New weights for models that serve: what a trainer needs, and what an operator does.

    from espalier import updates

    updates.create("digits/1", "digits/2", "step.espd", key="trainer.key")
    updates.push("step.espd", to="127.0.0.1:8003")

`create` runs the command line tool (`espalier delta create`), which has the codec. Everything that
talks to one server is Python and gRPC; `push` to several servers, who take it all or not at all, is
`espalier delta push`. A call that fails raises `InferenceError`, the tool's failure `DeltaError`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import pathlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Callable, Optional, Tuple, Union

import grpc

from espalier import _calls, _wire
from espalier._errors import InferenceError, from_rpc_error

Path = Union[str, "os.PathLike[str]"]
Progress = Callable[[int, int], None]  # bytes that are there, and in all

_MAGIC = b"\x93ESPD\r\n\n"
_CHUNK_BYTES = 64 << 10
# Attempts in a row that bring no byte further; a server that never answered is probably not there.
_FRUITLESS_ATTEMPTS, _FIRST_ATTEMPTS = 8, 3
_FIRST_PAUSE_SECONDS = 0.1


class DeltaError(Exception):
    """The command line tool failed, or a file is no delta; the text says why."""


@dataclasses.dataclass(frozen=True)
class Probation:
    """What is asked of a version after its activation; zero values ask nothing.

    Attributes:
      seconds: until it is confirmed by itself; 0: at once; math.inf: until `confirm`.
      canary_share: of the requests that name no version, before all of them.
      canary_seconds: how long it has only that share; both or neither.
      max_error_rate: share of failed requests beyond the old version's; 0: any.
      max_latency_ratio: of the mean compute time over the old version's; 0: any.
      golden_requests: <model>/golden/ of the repository must pass before it serves.

    Raises ValueError for what does nothing: a limit without `seconds` or a canary, half a canary.
    """

    seconds: float = 0
    canary_share: float = 0
    canary_seconds: float = 0
    max_error_rate: float = 0
    max_latency_ratio: float = 0
    golden_requests: bool = False

    def __post_init__(self) -> None:
        """Refuses what the server would pass over."""
        if bool(self.canary_share) != bool(self.canary_seconds):
            missing = "canary_seconds" if self.canary_share else "canary_share"
            raise ValueError(f"a canary needs {missing} too")
        if not self.canary_share and not self.seconds:
            for limit in ("max_error_rate", "max_latency_ratio"):
                if getattr(self, limit):
                    raise ValueError(f"{limit} needs seconds, or a canary")


@dataclasses.dataclass(frozen=True)
class StagedVersion:
    """A version that the server has checked and keeps ready, or that serves already."""

    version: int
    state: str


@dataclasses.dataclass(frozen=True)
class Version:
    """One version of a model; `state` is LIVE, STAGED, SUPERSEDED, ROLLED_BACK, …"""

    version: int
    state: str
    weights: bytes
    base: int
    sequence: int
    delta_sha256: bytes
    signers: tuple[bytes, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class ModelVersions:
    """The versions of a model; `serving` answers requests that name none, `staged` waits (or 0).

    `probation_ends`, in seconds since 1970, is 0 when only `confirm` ends it.
    """

    model: str
    serving: int
    staged: int
    on_probation: bool
    accepted_sequence: int
    versions: tuple[Version, ...]
    probation_ends: int


@dataclasses.dataclass(frozen=True)
class VersionEvent:
    """One change of a version's state."""

    serial: int
    seconds: int
    model: str
    version: int
    state: str
    reason: str


@dataclasses.dataclass(frozen=True)
class AuditRecord:
    """What happened to a model's weights, and which digests served before and after."""

    sequence: int
    seconds: int
    action: str
    version: int
    weights_before: bytes
    weights_after: bytes
    signers: tuple[bytes, ...]
    reason: str


def create(
    old: Path,
    new: Path,
    output: Path,
    *,
    key: Union[Path, Sequence[Path]] = (),
    model: Optional[str] = None,
    base_version: Optional[int] = None,
    version: Optional[int] = None,
    sequence: Optional[int] = None,
    expires: Optional[str] = None,
) -> pathlib.Path:
    """Writes what changed between two checkpoints (.onnx, .safetensors, or their folders).

    Args:
      old: the checkpoint that serves.
      new: the next one.
      output: the .espd file to make, in place of one that is there.
      key: private keys that sign it (espalier keygen).
      model: that it is for; from the path of `old` by default.
      base_version: number of `old`; its version directory by default.
      version: number of `new`; one more by default.
      sequence: rises with every delta; the version by default.
      expires: refused by servers after so long, "36h".

    Returns:
      The path of the delta.
    """
    keys = [key] if isinstance(key, (str, os.PathLike)) else list(key)
    command = ["delta", "create", os.fspath(old), os.fspath(new), "-o", os.fspath(output)]
    command += [f"--key={os.fspath(each)}" for each in keys]
    for flag, value in {
        "model": model,
        "base_version": base_version,
        "version": version,
        "sequence": sequence,
        "expires": expires,
    }.items():
        if value is not None:
            command.append(f"--{flag}={value}")
    _run_tool(command)
    return pathlib.Path(output)


def push(
    delta: Path,
    to: str = "127.0.0.1:8003",
    *,
    token: Optional[str] = None,
    token_file: Optional[Path] = None,
    activate: bool = True,
    probation: Optional[Probation] = None,
    progress: Optional[Progress] = None,
) -> None:
    """Sends a delta to one server, or to all of a fleet, and has it serve.

    Args:
      delta: the .espd file.
      to: "host:port", or several with commas; a name with several addresses means all of them.
      token: that the servers ask for.
      token_file: the file that it stands in.
      activate: False only stages it.
      probation: what is asked of it then; of several servers each judges it for itself, and goes
        back alone. Without, one server asks its default, several ask nothing.
      progress: called with the bytes that are there, and with all (of one server only).
    """
    servers = _resolve(to)
    if len(servers) == 1:
        with Client(servers[0], token=token, token_file=token_file) as client:
            staged = client.push(delta, progress=progress)
            if activate and staged.state != "LIVE":
                client.activate(_model_of(delta), staged.version, probation)
        return
    if token is not None:
        raise ValueError("several servers need token_file, not token: the tool reads the file")
    command = ["delta", "push", os.fspath(delta), "--to", ",".join(servers)]
    if token_file is not None:
        command.append(f"--token_file={os.fspath(token_file)}")
    if not activate:
        command.append("--no_activate")
    elif probation is not None:
        command += _probation_flags(probation)
    _run_tool(command)


def _probation_flags(probation: Probation) -> list[str]:
    def duration(seconds: float) -> str:
        return "forever" if math.isinf(seconds) else f"{seconds:.6f}s"

    flags = [
        f"--probation={duration(probation.seconds)}",
        f"--canary={probation.canary_share}",
        f"--canary_duration={duration(probation.canary_seconds)}",
        f"--max_error_rate={probation.max_error_rate}",
        f"--max_latency_ratio={probation.max_latency_ratio}",
    ]
    return [*flags, "--golden"] if probation.golden_requests else flags


class Client:
    """A connection to the update service of one server (espalierd --update_address).

    with updates.Client("127.0.0.1:8003", token_file="token") as client:
        staged = client.push("step.espd")
        client.activate("digits", staged.version)
    """

    def __init__(
        self,
        url: str = "127.0.0.1:8003",
        *,
        token: Optional[str] = None,
        token_file: Optional[Path] = None,
        timeout: Optional[float] = 60.0,
    ) -> None:
        if token is not None and token_file is not None:
            raise ValueError("give token or token_file, not both")
        if token_file is not None:
            token = pathlib.Path(token_file).read_text(encoding="ascii").strip()
        options = [
            *_calls.CHANNEL_OPTIONS,
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._channel = grpc.insecure_channel(_calls.check_url(url), options)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._timeout = timeout

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls in flight are cancelled."""
        self._channel.close()

    def push(
        self,
        delta: Path,
        *,
        model: Optional[str] = None,
        progress: Optional[Progress] = None,
    ) -> StagedVersion:
        """Sends a delta and has the server check and stage it; nothing that serves changes.

        A broken connection goes on where the server got to. What it has already is not sent again.
        """
        model = _model_of(delta) if model is None else model
        with open(delta, "rb") as file:
            digest = _sha256(file)
            reached, fruitless = -1, 0
            while True:
                attempt = _Push(self, model, digest, file, progress)
                try:
                    return attempt.run()
                except InferenceError as error:
                    if error.code != grpc.StatusCode.UNAVAILABLE:
                        raise
                    fruitless = 0 if attempt.offset > reached else fruitless + 1
                    reached = max(reached, attempt.offset)
                    if fruitless + 1 >= (_FRUITLESS_ATTEMPTS if reached >= 0 else _FIRST_ATTEMPTS):
                        raise
                    time.sleep(_FIRST_PAUSE_SECONDS * 2**fruitless)

    def activate(self, model: str, version: int, probation: Optional[Probation] = None) -> None:
        """Has a staged version answer all requests that name no version."""
        request = _wire.new_update("ActivateVersionRequest", model=model, version=version)
        if probation is not None:
            request.probation.CopyFrom(
                _wire.new_update("Probation", **dataclasses.asdict(probation))
            )
        # The answer comes when the canary is over.
        self._call("ActivateVersion", request, probation.canary_seconds if probation else 0)

    def rollback(self, model: str, to: int = 0, reason: str = "") -> int:
        """Goes back to `to`, or to what the active version replaced; returns what serves now."""
        request = _wire.new_update("RollbackRequest", model=model, version=to, reason=reason)
        return self._call("Rollback", request).version

    def confirm(self, model: str, version: int) -> None:
        """Ends the probation of the version that serves."""
        request = _wire.new_update("ConfirmVersionRequest", model=model, version=version)
        self._call("ConfirmVersion", request)

    def versions(self, model: str = "") -> list[ModelVersions]:
        """The versions of a model, or of all that take updates."""
        response = self._call("ListVersions", _wire.new_update("ListVersionsRequest", model=model))
        return [
            ModelVersions(
                each.model,
                each.serving,
                each.staged,
                each.on_probation,
                each.accepted_sequence,
                tuple(_version(version) for version in each.versions),
                each.probation_ends,
            )
            for each in response.models
        ]

    def log(self, model: str, most: int = 100) -> list[AuditRecord]:
        """The newest records of the audit log, oldest first."""
        request = _wire.new_update("ReadAuditRequest", model=model, most=most)
        return [
            AuditRecord(
                each.sequence,
                each.seconds,
                each.action,
                each.version,
                each.weights_before,
                each.weights_after,
                tuple(each.signers),
                each.reason,
            )
            for each in self._call("ReadAudit", request).records
        ]

    def watch(
        self, model: str = "", after_serial: int = 0, timeout: Optional[float] = None
    ) -> Iterator[VersionEvent]:
        """Changes of versions as they happen, after those that the server still knows of.

        Without end, unless there is a timeout (seconds): then it ends with DEADLINE_EXCEEDED.
        """
        request = _wire.new_update("WatchVersionsRequest", model=model, after_serial=after_serial)
        method = self._channel.unary_stream(
            f"/{_wire.UPDATE_SERVICE}/WatchVersions",
            request_serializer=type(request).SerializeToString,
            response_deserializer=_update_class("WatchVersionsResponse").FromString,
        )
        stream = method(request, timeout=timeout, metadata=self._metadata)
        try:
            for event in stream:
                state = _wire.enum_name("VersionState", event.state)
                yield VersionEvent(
                    event.serial, event.seconds, event.model, event.version, state, event.reason
                )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            stream.cancel()

    def _call(self, method: str, request: Any, extra: float = 0) -> Any:
        call = self._channel.unary_unary(
            f"/{_wire.UPDATE_SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=_update_class(f"{method}Response").FromString,
        )
        try:
            timeout = None if self._timeout is None else self._timeout + extra
            return call(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


class _Push:
    """One attempt to send a delta; `offset` is what the server had at its start, -1: it never said."""

    def __init__(
        self,
        client: Client,
        model: str,
        digest: bytes,
        file: BinaryIO,
        progress: Optional[Progress],
    ) -> None:
        self._client, self._file, self._progress = client, file, progress
        self._bytes = os.fstat(file.fileno()).st_size
        header = _wire.new_update("PushHeader", model=model, sha256=digest, bytes=self._bytes)
        self._header = _wire.new_update("PushDeltaRequest", header=header)
        self._answered = threading.Event()
        self.offset = -1

    def run(self) -> StagedVersion:
        method = self._client._channel.stream_stream(
            f"/{_wire.UPDATE_SERVICE}/PushDelta",
            request_serializer=_update_class("PushDeltaRequest").SerializeToString,
            response_deserializer=_update_class("PushDeltaResponse").FromString,
        )
        stream = method(self._requests(), metadata=self._client._metadata)
        try:
            for response in stream:
                if response.HasField("staged"):
                    state = _wire.enum_name("VersionState", response.staged.state)
                    return StagedVersion(response.staged.version, state)
                self.offset = response.offset
                self._answered.set()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            self._answered.set()
            stream.cancel()
        raise InferenceError(grpc.StatusCode.INTERNAL, "the push ended without an answer")

    def _requests(self) -> Iterator[Any]:
        yield self._header
        self._answered.wait()  # gRPC asks for the next request in a thread of its own
        if self.offset < 0:
            return  # it ended without
        self._file.seek(self.offset)
        while chunk := self._file.read(_CHUNK_BYTES):
            yield _wire.new_update("PushDeltaRequest", chunk=chunk)
            if self._progress is not None:
                self._progress(self._file.tell(), self._bytes)


def _update_class(message: str) -> Any:
    return _wire.message_class(message, _wire.UPDATE_PACKAGE)


def _version(message: Any) -> Version:
    return Version(
        message.version,
        _wire.enum_name("VersionState", message.state),
        message.weights,
        message.base,
        message.sequence,
        message.delta_sha256,
        tuple(message.signers),
        message.reason,
    )


def _sha256(file: BinaryIO) -> bytes:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.digest()


def _model_of(delta: Path) -> str:
    """The model that a delta is made for: the first field of its manifest."""
    with open(delta, "rb") as file:
        head = file.read(len(_MAGIC) + 2 + 10 + 2 + 256)
    at = len(_MAGIC) + 2
    if not head.startswith(_MAGIC) or len(head) < at + 16:
        raise DeltaError(f"{os.fspath(delta)} is no delta (espalier delta create makes them)")

    def varint(at: int) -> Tuple[int, int]:
        """The number there, and where it ends."""
        value = shift = 0
        while at < len(head):
            value |= (head[at] & 0x7F) << shift
            shift += 7
            at += 1
            if not head[at - 1] & 0x80:
                break
        return value, at

    # The size of the manifest: four bytes in format 1, later a varint.
    format_version = int.from_bytes(head[len(_MAGIC) : at], "little")
    at = at + 4 if format_version == 1 else varint(at)[1]
    size, at = varint(at)
    return head[at : at + size].decode("utf-8", errors="replace")


def _resolve(servers: str) -> list[str]:
    """The addresses of "host:port,…"; a name with several stands for all, by IPv4 if it has any."""
    found: list[str] = []
    for server in servers.split(","):
        host, separator, port = server.strip().rpartition(":")
        if not separator or not host or not port.isdigit():
            raise ValueError(f"expected host:port, like 127.0.0.1:8003, got {server!r}")
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family = min((each[0] for each in addresses), key=lambda f: f != socket.AF_INET)
        for each in addresses:
            name = each[4][0] if family == socket.AF_INET else f"[{each[4][0]}]"
            if each[0] == family and f"{name}:{port}" not in found:
                found.append(f"{name}:{port}")
    return found


def _tool() -> str:
    """The command line tool: in the directory ESPALIER_BIN, else on the PATH."""
    folder = os.environ.get("ESPALIER_BIN")
    found = shutil.which("espalier", path=folder) if folder else shutil.which("espalier")
    if found is None:
        where = f"in ESPALIER_BIN ({folder})" if folder else "on the PATH"
        raise DeltaError(
            f"the program espalier is not {where}: put it there, or say in ESPALIER_BIN which "
            "directory it is in"
        )
    return found


def _run_tool(arguments: list[str]) -> None:
    done = subprocess.run(
        [_tool(), *arguments], capture_output=True, text=True, check=False, errors="replace"
    )
    if done.returncode != 0:
        raise DeltaError(done.stderr.strip() or f"espalier ended with {done.returncode}")
