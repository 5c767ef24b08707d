"""Updates that move non-zeros until another layout is the right one for a weight."""

from __future__ import annotations

import threading
from urllib.request import urlopen

import espalier
import harness
import numpy as np
import pytest
import updating
from espalier import updates
from prometheus_client.parser import text_string_to_metric_families

SIZE = 256
CONFIG = 'parameters { key: "weight_memory" value { string_value: "smallest" } }\n'


@pytest.fixture(autouse=True)
def tool_of_the_build(monkeypatch):
    """`espalier.updates` runs the tool that is tested."""
    monkeypatch.setenv("ESPALIER_BIN", str(harness.BIN))


def weights() -> dict[int, np.ndarray]:
    """Weights of versions 1 to 5, of integers, so that every sum is exact."""
    rng = np.random.default_rng(3)
    diagonal = np.diag(rng.integers(1, 9, SIZE))
    values = np.where(diagonal != 0, rng.integers(1, 9, (SIZE, SIZE)), 0)
    moved = values[:, rng.permutation(SIZE)]
    full = rng.integers(1, 9, (SIZE, SIZE))
    return {1: diagonal, 2: values, 3: moved, 4: full, 5: diagonal}


def write_model(repository, weight: np.ndarray):
    path = repository / "layer" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    (path.parents[1] / "config.pbtxt").write_text(CONFIG)
    path.write_bytes(harness.perceptron([SIZE, SIZE], lambda *_: weight))
    return path


def parameter(server, name: str) -> str:
    with espalier.Client(server.url) as client:
        return client.model_config("layer").parameters[name].string_value


def replans(server) -> dict[str, float]:
    """Of the metric, by outcome."""
    text = urlopen(f"{server.metrics_url}/metrics", timeout=60).read().decode()
    return {
        sample.labels["outcome"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "espalier_update_replans_total"
    }


def test_a_delta_that_scatters_a_diagonal_serves_with_the_layout_of_a_fresh_load(tmp_path):
    key = updating.keygen(tmp_path / "trainer")
    x = np.random.default_rng(4).integers(-8, 9, (5, SIZE)).astype(np.float32)
    files, layouts, answers = {}, {}, {}
    for version, weight in weights().items():
        repository = tmp_path / f"fresh-{version}"
        files[version] = write_model(repository, weight)
        with harness.Espalierd(repository) as server, espalier.Client(server.url) as client:
            answers[version] = client.infer("layer", x).output
            layouts[version] = parameter(server, "layouts")
        np.testing.assert_array_equal(answers[version], x @ weight.T.astype(np.float32))
    assert layouts == {
        1: "diagonal(1) x1",
        2: "diagonal(1) x1",
        3: "csr x1",
        4: "dense x1",
        5: "diagonal(1) x1",
    }

    with harness.Espalierd(
        tmp_path / "fresh-1",
        "--update_address=127.0.0.1:0",
        f"--update_keys={tmp_path / 'trainer.pub'}",
        state_dir=tmp_path / "state",
    ) as server:
        stop = threading.Event()
        wrong, asked = [], []

        def ask():
            with espalier.Client(server.url) as client:
                while not stop.is_set():
                    result = client.infer("layer", x)
                    asked.append(int(result.version))
                    if not np.array_equal(result.output, answers[int(result.version)]):
                        wrong.append(result.version)

        clients = [threading.Thread(target=ask) for _ in range(2)]
        for client in clients:
            client.start()
        try:
            changed = {1: 0}
            for version in range(2, 6):
                delta = updates.create(
                    files[version - 1],
                    files[version],
                    tmp_path / f"{version}.espd",
                    key=key,
                    model="layer",
                    base_version=version - 1,
                    version=version,
                )
                with updates.Client(server.update_url) as client:
                    assert client.push(delta).state == "STAGED"
                    assert parameter(server, "layouts") == layouts[version - 1]
                    client.activate("layer", version)
                assert parameter(server, "layouts") == layouts[version]
                changed[version] = replans(server)["changed"]
            assert replans(server)["failed"] == 0
            assert changed == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3}, "values alone change no plan"
            with updates.Client(server.update_url) as client:
                assert client.rollback("layer") == 4
                assert parameter(server, "layouts") == layouts[4]
                assert client.rollback("layer", to=1) == 1
        finally:
            stop.set()
            for client in clients:
                client.join()
        assert not wrong and set(asked) <= set(answers) and len(asked) > 0
        with espalier.Client(server.url) as client:
            np.testing.assert_array_equal(client.infer("layer", x).output, answers[1])
