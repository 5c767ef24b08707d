"""A trainer pushes its steps into a busy server: every answer is that of the version it names."""

from __future__ import annotations

import collections
import pathlib
import threading

import espalier
import harness
import numpy as np
import pytest
import training
import updating
from espalier import updates

MODEL = "mnist_unstructured"
PUSHES, STEPS = 6, 3
QUESTIONS = [slice(8 * q, 8 * q + 1 + q % 4) for q in range(8)]  # of the test set, 1 to 4 images
# Bit-identical answers whatever requests were merged with: only then is "the version's own" a fact.
CONFIG = (
    'parameters { key: "deterministic" value { string_value: "true" } }'
    " version_policy { all {} }"
)


class Load:
    """Threads that ask all the time, and every distinct answer by version and question."""

    def __init__(self, url: str, images: np.ndarray) -> None:
        self.answers: dict[tuple[int, int], collections.Counter] = collections.defaultdict(
            collections.Counter
        )
        self.failures: list[str] = []
        self._url, self._images = url, images
        self._lock, self._done = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[i]) for i in range(4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def versions(self) -> set[int]:
        """The versions that have answered so far."""
        with self._lock:
            return {version for version, _ in self.answers}

    def wait_for(self, version: int) -> None:
        """Waits until a version has answered."""
        for _ in range(12000):
            if version in self.versions():
                return
            self._done.wait(0.01)
        raise AssertionError(f"version {version} did not answer within two minutes")

    def _ask(self, question: int) -> None:
        with espalier.Client(self._url) as client:
            while not self._done.is_set():
                question = (question + 1) % len(QUESTIONS)
                try:
                    result = client.infer(MODEL, self._images[QUESTIONS[question]])
                except espalier.InferenceError as error:
                    self.failures.append(str(error))
                    continue
                with self._lock:
                    answer = self.answers[int(result.version), question]
                    answer[result.output.tobytes()] += 1


def serve(
    root: pathlib.Path, versions: dict[int, pathlib.Path], *flags: str, **options
) -> harness.Espalierd:
    """A server of these files as versions of the model."""
    for version, path in versions.items():
        folder = root / MODEL / str(version)
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(path.read_bytes())
    (root / MODEL / "config.pbtxt").write_text(CONFIG)
    return harness.Espalierd(root, *flags, **options)


def test_every_answer_while_a_trainer_pushes_is_that_of_the_version_it_names(
    tmp_path, digits, monkeypatch
):
    monkeypatch.setenv("ESPALIER_BIN", str(harness.BIN))
    key = updating.keygen(tmp_path / "trainer")
    mlp = training.Mlp(MODEL, rate=1e-4)
    mask = {name: weight != 0 for name, weight in mlp.parameters.items()}
    checkpoints = {1: harness.model_path(MODEL)}
    flags = ("--update_address=127.0.0.1:0", f"--update_keys={key.with_suffix('.pub')}")
    with serve(
        tmp_path / "live", checkpoints, *flags, state_dir=tmp_path / "state"
    ) as server, Load(server.url, digits.images) as load:
        load.wait_for(1)
        for version in range(2, 2 + PUSHES):
            mlp.train(STEPS)
            checkpoints[version] = mlp.save_onnx(tmp_path / f"{version}.onnx")
            delta = updates.create(
                checkpoints[version - 1],
                checkpoints[version],
                tmp_path / f"{version}.espd",
                key=key,
                model=MODEL,
                base_version=version - 1,
                version=version,
            )
            updates.push(delta, to=server.update_url)
            load.wait_for(version)

    assert load.failures == []
    assert load.versions() == set(checkpoints)
    weights = {n: w for n, w in mlp.parameters.items() if n.endswith("weight")}
    assert all(np.array_equal(weight != 0, mask[name]) for name, weight in weights.items())
    expected = {}
    with serve(tmp_path / "offline", checkpoints) as server, espalier.Client(server.url) as client:
        for version, question in load.answers:
            result = client.infer(MODEL, digits.images[QUESTIONS[question]], version=str(version))
            expected[version, question] = result.output.tobytes()
    wrong = {
        at: sum(count for answer, count in answers.items() if answer != expected[at])
        for at, answers in load.answers.items()
        if set(answers) != {expected[at]}
    }
    assert not wrong, f"answers that are not those of the version that they name: {wrong}"
    # The versions do differ in what they answer, so that a mix would show.
    for question in range(len(QUESTIONS)):
        answers = [a for (_, q), a in expected.items() if q == question]
        assert len(set(answers)) == len(answers)
