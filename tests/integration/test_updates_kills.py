"""A server that is killed (SIGKILL) at random moments while it takes updates: each time it comes back, it serves exactly
the old weights or the new ones. 20 kills; ESPALIER_KILLS=1000 for the long run."""

from __future__ import annotations

import os
import random
import threading
import time

import espalier
import grpc
import harness
import numpy as np
import pytest
import updating
from espalier import updates

VERSIONS = 6
KILLS = int(os.environ.get("ESPALIER_KILLS", 20))


class Updater:
    """Walks through the versions, up by pushes and down by rollbacks, until the server is gone.

    What may serve after that: `active`, or, if an operation was under way, `target`.
    """

    def __init__(self, url: str, model: updating.Trained, active: int, seed: int) -> None:
        self.url, self.model = url, model
        self.active = self.target = active
        self.done = 0
        self.error: Exception | None = None
        self.random = random.Random(seed)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        try:
            with updates.Client(self.url) as client:
                while True:
                    self.step(client)
        except espalier.InferenceError as error:
            if error.code != grpc.StatusCode.UNAVAILABLE:
                self.error = error
        except Exception as error:  # noqa: BLE001: told by the thread that waits
            self.error = error

    def step(self, client: updates.Client) -> None:
        up = self.active == 1 or (self.active < VERSIONS and self.random.random() < 0.6)
        self.target = self.active + (1 if up else -1)
        if up:
            (known,) = client.versions(self.model.name)
            state = {version.version: version.state for version in known.versions}.get(self.target)
            if state not in ("SUPERSEDED", "ROLLED_BACK"):  # it never served
                client.push(self.model.deltas[self.target])
            client.activate(self.model.name, self.target)
        else:
            client.rollback(self.model.name, to=self.target)
        self.active = self.target
        self.done += 1


@pytest.mark.timeout(30 + 30 * KILLS)
def test_a_killed_server_comes_back_with_the_old_weights_or_the_new(tmp_path, monkeypatch):
    monkeypatch.setenv("ESPALIER_BIN", str(harness.BIN))
    model = updating.train(tmp_path, "digits", steps=VERSIONS)
    answers = {version: updating.expected(model, version, tmp_path) for version in model.checkpoints}
    moments = random.Random(9)
    possible, done, slowest = {1}, 0, 0.0
    for kill in range(KILLS):
        with updating.serve(tmp_path, f"--update_keys={tmp_path / 'trainer.pub'}") as server:
            slowest = max(slowest, server.seconds_to_ready)
            with espalier.Client(server.url) as client:
                result = client.infer(model.name, model.inputs)
            version = int(result.version)
            assert version in possible, f"after {kill} kills version {version} serves, expected one of {possible}"
            np.testing.assert_array_equal(result.output, answers[version], err_msg=f"after {kill} kills")
            updater = Updater(server.update_url, model, version, seed=kill)
            time.sleep(moments.random() * 0.25)
            server.process.kill()
            server.process.wait()
            updater.thread.join(60)
        assert updater.error is None, updater.error
        possible = {updater.active, updater.target}
        done += updater.done
    print(f"{KILLS} kills between {done} updates, ready again after {slowest:.2f} s at most")
    assert done >= KILLS / 4, "hardly an update was under way"
