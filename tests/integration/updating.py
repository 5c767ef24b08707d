"""Models in several versions, deltas between them, and servers that take them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import socket
import threading

import espalier
import grpc
import harness
import numpy as np
from espalier import _wire, updates

TOKEN = "a-token-for-tests-0123456789"


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model's checkpoints by version, and the deltas that lead to each from the one before."""

    name: str
    checkpoints: dict[int, pathlib.Path]
    deltas: dict[int, pathlib.Path]
    inputs: np.ndarray
    key: pathlib.Path

    def delta(self, **options) -> pathlib.Path:
        """Another delta from version 1 to 2, made with `options` of updates.create."""
        path = self.deltas[2].with_name(f"other-{len(list(self.deltas[2].parent.iterdir()))}.espd")
        defaults = {"model": self.name, "base_version": 1, "version": 2, "key": self.key}
        old = options.pop("old", self.checkpoints[1])
        new = options.pop("new", self.checkpoints[2])
        return updates.create(old, new, path, **{**defaults, **options})


def keygen(path: pathlib.Path) -> pathlib.Path:
    """Makes a pair of keys; returns the private one's file, beside which the public one lies."""
    harness.espalier("keygen", str(path))
    return path.with_suffix(".key")


def train(
    folder: pathlib.Path,
    name: str,
    *,
    steps: int = 3,
    sizes: tuple[int, ...] = (48, 64, 10),
    key: pathlib.Path | None = None,
    change: float = 0.05,
    density: float = 0.3,
    seed: int = 7,
) -> Trained:
    """Makes a repository <folder>/models with version 1, and deltas to the versions after it.

    Each step changes a share `change` of the non-zeros, and moves a few positions.
    """
    rng = np.random.default_rng(seed)
    weights: dict[tuple[int, int], np.ndarray] = {}

    def weight_of(out: int, size: int) -> np.ndarray:
        if (out, size) not in weights:
            weight = rng.normal(scale=size**-0.5, size=(out, size)).astype(np.float32)
            weights[out, size] = weight * (rng.random((out, size)) < density)
        return weights[out, size]

    key = keygen(folder / "trainer") if key is None else key
    write_config(folder / "models" / name)
    checkpoints, deltas = {}, {}
    for version in range(1, steps + 1):
        path = folder / "models" / name / "1" / "model.onnx"
        if version > 1:
            path = folder / "checkpoints" / name / f"{version}.onnx"
            for weight in weights.values():
                changed = (weight != 0) & (rng.random(weight.shape) < change)
                weight[changed] *= np.float32(1.25)
                weight.flat[rng.integers(weight.size, size=3)] = 0
                weight.flat[rng.integers(weight.size, size=3)] = np.float32(0.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(harness.perceptron(list(sizes), weight_of))
        checkpoints[version] = path
        if version > 1:
            deltas[version] = updates.create(
                checkpoints[version - 1],
                path,
                path.with_suffix(".espd"),
                key=key,
                model=name,
                base_version=version - 1,
                version=version,
            )
    inputs = rng.normal(size=(4, sizes[0])).astype(np.float32)
    return Trained(name, checkpoints, deltas, inputs, key)


def write_config(model: pathlib.Path) -> None:
    """Answers are compared bit for bit, and kernels that were measured may differ from server to server."""
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.pbtxt").write_text(
        'parameters { key: "deterministic" value { string_value: "true" } }\n'
    )


def write_token(folder: pathlib.Path) -> pathlib.Path:
    """Writes the token of the tests into a file."""
    path = folder / "token"
    path.write_text(TOKEN + "\n")
    return path


def serve(folder: pathlib.Path, *flags: str, state: str = "state", port: int = 0):
    """A server of <folder>/models that takes updates; keys and token are the caller's flags."""
    return harness.Espalierd(
        folder / "models",
        f"--update_address=127.0.0.1:{port}",
        *flags,
        state_dir=folder / state,
    )


def expected(trained: Trained, version: int, folder: pathlib.Path) -> np.ndarray:
    """What a server answers that loaded the version's file, bit for bit."""
    repository = folder / f"expected-{trained.name}-{version}"
    write_config(repository / trained.name)
    model = repository / trained.name / "1"
    model.mkdir(exist_ok=True)
    (model / "model.onnx").write_bytes(trained.checkpoints[version].read_bytes())
    with harness.Espalierd(repository) as server, espalier.Client(server.url) as client:
        return client.infer(trained.name, trained.inputs).output


@dataclasses.dataclass
class Facts:
    """What a server serves: version, digest of its weights, and what it answers."""

    serving: int
    weights: bytes
    answer: bytes

    @classmethod
    def of(cls, server: harness.Espalierd, trained: Trained, token: str | None = None) -> Facts:
        with (
            updates.Client(server.update_url, token=token) as versions,
            espalier.Client(server.url) as client,
        ):
            for _ in range(3):  # another one may come between the two questions
                (model,) = versions.versions(trained.name)
                result = client.infer(trained.name, trained.inputs)
                if result.version == str(model.serving):
                    break
        assert result.version == str(model.serving)
        weights = {version.version: version.weights for version in model.versions}
        return cls(model.serving, weights[model.serving], result.output.tobytes())


def send(
    url: str,
    content: bytes,
    *,
    model: str,
    token: str | None = TOKEN,
    sha256: bytes | None = None,
    size: int | None = None,
    chunk: int = 64 << 10,
):
    """PushDelta by hand, so that it can lie; returns the last answer, raises grpc.RpcError."""
    header = new(
        "PushDeltaRequest",
        header=new(
            "PushHeader",
            model=model,
            sha256=hashlib.sha256(content).digest() if sha256 is None else sha256,
            bytes=len(content) if size is None else size,
        ),
    )
    chunks = [content[at : at + chunk] for at in range(0, len(content), chunk)]
    return stream(url, [header, *(new("PushDeltaRequest", chunk=each) for each in chunks)], token)


def new(message: str, **fields):
    """A message of the update service."""
    return _wire.new_update(message, **fields)


def stream(
    url: str, requests: list, token: str | None = TOKEN, timeout: float = 120, on_answer=None
):
    """Sends messages (or raw bytes) on one PushDelta, each when it likes; returns the last answer."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(url, [("grpc.max_send_message_length", -1)]) as channel:
        method = channel.stream_stream(
            f"/{_wire.UPDATE_SERVICE}/PushDelta",
            request_serializer=lambda r: r if isinstance(r, bytes) else r.SerializeToString(),
            response_deserializer=_wire.message_class(
                "PushDeltaResponse", _wire.UPDATE_PACKAGE
            ).FromString,
        )
        last = None
        for last in method(iter(requests), metadata=metadata, timeout=timeout):
            if on_answer:
                on_answer()
    return last


class Proxy:
    """TCP between a client and a server, that can be cut after so many bytes towards the server."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts: list[int] = []  # bytes after which each connection is cut, in turn
        self.forwarded = 0  # bytes towards the server, of all connections
        self.stop_at = b""  # bytes that are not let through to the server, nor what comes after
        self.stopped = threading.Event()  # that they came
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Ends everything."""
        self._cut([self._listener])
        self._acceptor.join()
        self._listener.close()
        for pair in self._pairs:
            self._cut(pair)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            limit = self.cuts.pop(0) if self.cuts else None
            pair = (client, server)
            self._pairs.append(pair)
            threading.Thread(target=self._join, args=[pair, limit], daemon=True).start()

    def _join(self, pair, limit) -> None:
        client, server = pair
        back = threading.Thread(
            target=self._pump, args=[server, client, pair, None, False], daemon=True
        )
        back.start()
        self._pump(client, server, pair, limit)
        back.join()
        # Not while one of the two may still read: the number of a closed socket is the next connection's.
        for end in pair:
            end.close()

    def _pump(self, source, sink, pair, limit, counts=True) -> None:
        passed = 0
        try:
            while piece := source.recv(65536):
                if limit is not None:
                    piece = piece[: limit - passed]
                if counts and self.stop_at and self.stop_at in piece:
                    self.stopped.set()
                    continue
                sink.sendall(piece)
                passed += len(piece)
                if counts:
                    self.forwarded += len(piece)
                if limit is not None and passed >= limit:
                    break
        except OSError:
            pass
        self._cut(pair)

    @staticmethod
    def _cut(pair) -> None:
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
