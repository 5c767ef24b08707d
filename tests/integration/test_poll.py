"""--model_control_mode=poll: the server follows its repository."""

from __future__ import annotations

import os
import shutil

import espalier
import harness
import pytest
import serving

POLL = ("--model_control_mode=poll", "--repository_poll_interval=100ms")


@pytest.fixture
def polled(repository, tmp_path):
    """A server that polls, its client, and the repository with model m, version 1."""
    models = repository(m={"1": serving.scaling_model(1)})
    with (
        harness.Espalierd(models, *POLL) as server,
        espalier.Client(server.url, timeout=60) as client,
    ):
        assert serving.factor_of(client, "m") == 1
        yield server, client, models


def states(client: espalier.Client) -> dict[tuple[str, str], tuple[str, str]]:
    return {(m.name, m.version): (m.state, m.reason) for m in client.models()}


def answers(client: espalier.Client, name: str, factor: float) -> bool:
    try:
        return serving.factor_of(client, name) == factor
    except espalier.InferenceError:
        return False


def test_changes_additions_and_removals_are_followed(polled):
    server, client, models = polled
    with serving.Traffic(server.url, "m", threads=2) as traffic:
        serving.write(models / "m/1/model.onnx", serving.scaling_model(5))
        serving.eventually(lambda: answers(client, "m", 5))
        serving.write(models / "m/2/model.onnx", serving.scaling_model(6))
        serving.eventually(lambda: answers(client, "m", 6))
        shutil.rmtree(models / "m/2")
        serving.eventually(lambda: answers(client, "m", 5))
        serving.write(models / "n/1/model.onnx", serving.scaling_model(7))
        serving.eventually(lambda: answers(client, "n", 7))
        shutil.rmtree(models / "n")
        serving.eventually(lambda: not any(name == "n" for name, _ in states(client)))
    assert traffic.errors == []


def test_touching_and_copying_anew_load_nothing(polled, tmp_path):
    server, client, models = polled
    os.utime(models / "m/1/model.onnx")
    shutil.copy(models / "m/1/model.onnx", tmp_path / "copy")
    os.replace(tmp_path / "copy", models / "m/1/model.onnx")
    # At once: a look may come between the folder and the file.
    serving.write(tmp_path / "late/1/model.onnx", serving.scaling_model(2))
    os.rename(tmp_path / "late", models / "late")
    serving.eventually(lambda: answers(client, "late", 2))  # so a look has happened
    loads = [line for line in server.log().splitlines() if "model loading" in line]
    assert len(loads) == 2, loads


def test_a_repository_that_goes_away_takes_nothing_with_it(polled):
    server, client, models = polled
    away = models.with_name("away")
    models.rename(away)
    serving.eventually(lambda: "repository cannot be looked at" in server.log())
    assert serving.factor_of(client, "m") == 1
    away.rename(models)
    serving.write(models / "m/1/model.onnx", serving.scaling_model(2))
    serving.eventually(lambda: answers(client, "m", 2))
    assert server.log().count("repository cannot be looked at") == 1


def test_a_half_copied_file_is_loaded_when_it_is_complete(polled, tmp_path):
    server, client, models = polled
    whole = serving.scaling_model(8)
    with serving.Traffic(server.url, "m", threads=2) as traffic:
        # A look may come between the folder and the file, and is to find this half.
        serving.write(tmp_path / "half/model.onnx", whole[: len(whole) // 2])
        os.rename(tmp_path / "half", models / "m/2")
        serving.eventually(lambda: states(client).get(("m", "2"), ("",))[0] == "UNAVAILABLE")
        assert "model.onnx" in states(client)["m", "2"][1]
        assert serving.factor_of(client, "m") == 1, "the old version serves"
        with (models / "m/2/model.onnx").open("ab") as file:
            file.write(whole[len(whole) // 2 :])
        serving.eventually(lambda: answers(client, "m", 8))
    assert traffic.errors == []
    assert server.log().count("model not loaded") == 1, "the same half is not tried again"


def test_a_broken_config_keeps_the_model(polled):
    _, client, models = polled
    (models / "m/config.pbtxt").write_text("max_batch_size: {")
    serving.eventually(lambda: "config.pbtxt" in states(client)["m", "1"][1])
    assert states(client)["m", "1"][0] == "READY" and serving.factor_of(client, "m") == 1
    (models / "m/config.pbtxt").write_text("max_batch_size: 2")
    serving.eventually(lambda: client.model_config("m").max_batch_size == 2)
    assert states(client)["m", "1"] == ("READY", "")


def test_a_pipe_in_the_place_of_the_config_is_forgotten_with_it(polled):
    _, client, models = polled
    os.mkfifo(models / "m/config.pbtxt")
    serving.eventually(lambda: "is a FIFO" in states(client)["m", "1"][1])
    assert serving.factor_of(client, "m") == 1
    (models / "m/config.pbtxt").unlink()
    serving.eventually(lambda: states(client)["m", "1"] == ("READY", ""))


def test_what_is_no_model_name_is_said_once(polled):
    server, client, models = polled
    (models / 'no "name"').mkdir()
    for factor in (2, 3, 4):  # a look each, at the least
        serving.write(models / "m/1/model.onnx", serving.scaling_model(factor))
        serving.eventually(lambda factor=factor: answers(client, "m", factor))
    assert server.log().count("not a model name") == 1
