"""A server that is attacked: two models, keys, a threshold, a token; and what it served at first."""

from __future__ import annotations

import shutil

import espalier
import grpc
import harness
import numpy as np
import onnx
import pytest
import updating
from espalier import updates
from onnx import numpy_helper


class Stage:
    """A server with two models, one of them at version 2 already, and what it served at first."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.key = updating.keygen(folder / "trainer")
        second = updating.keygen(folder / "second")
        self.stranger = updating.keygen(folder / "stranger")
        keys = folder / "keys"
        keys.mkdir()
        for path in (self.key, second):
            shutil.copy(path.with_suffix(".pub"), keys)
        self.both = [self.key, second]
        self.model = updating.train(folder, "digits", steps=2, key=self.key)
        self.other = updating.train(folder, "other", steps=2, key=self.key, seed=8)
        self.server = updating.serve(
            folder,
            f"--update_keys={keys}",
            "--update_threshold=2",
            f"--update_token_file={updating.write_token(folder)}",
        ).__enter__()
        self.url = self.server.update_url
        # Digits goes to version 2, so that there is something to replay and to downgrade to.
        self.second = self.model.delta(key=self.both, sequence=10)
        with self.client() as client:
            client.activate("digits", client.push(self.second).version)
        self.before = self.facts()

    def client(self) -> updates.Client:
        return updates.Client(self.url, token=updating.TOKEN)

    def facts(self):
        return [
            updating.Facts.of(self.server, model, updating.TOKEN)
            for model in (self.model, self.other)
        ]

    def third(self, **options) -> bytes:
        """A delta from version 2 to 3, with options that make it wrong."""
        defaults = {
            "old": self.model.checkpoints[2],
            "new": self.checkpoint_of_others(),
            "base_version": 2,
            "version": 3,
            "sequence": 11,
            "key": self.both,
        }
        return self.model.delta(**{**defaults, **options}).read_bytes()

    def checkpoint_of_others(self):
        """Weights that no version has."""
        path = self.folder / "others.onnx"
        model = onnx.load(self.model.checkpoints[2])
        tensor = model.graph.initializer[0]
        array = numpy_helper.to_array(tensor) * np.float32(3)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        onnx.save(model, path)
        return path


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPALIER_BIN", str(harness.BIN))
        running = Stage(tmp_path_factory.mktemp("attacks"))
        try:
            yield running
        finally:
            running.server.__exit__(None, None, None)


@pytest.fixture
def refuses(stage):
    """Runs an attack: the code and the text must be these, and nothing that serves may change."""

    def check(code, text, attack):
        with pytest.raises((grpc.RpcError, espalier.InferenceError)) as error:
            attack()
        raised = error.value
        got = raised.code() if isinstance(raised, grpc.RpcError) else raised.code
        message = raised.details() if isinstance(raised, grpc.RpcError) else raised.message
        codes = code if isinstance(code, tuple) else (code,)
        assert got in codes and text in message, (got, message)
        assert str(stage.folder) not in message, "where files lie is the server's business"
        assert stage.facts() == stage.before
        assert stage.server.process.poll() is None

    return check
