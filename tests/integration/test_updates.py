"""Weight updates of a server that serves: push, activate, roll back, watch; Python and the tool."""

from __future__ import annotations

import math
import threading
import time

import espalier
import grpc
import harness
import numpy as np
import pytest
import updating
from espalier import updates
from prometheus_client.parser import text_string_to_metric_families
from urllib.request import urlopen


@pytest.fixture(scope="module", autouse=True)
def tool_of_the_build():
    """`espalier.updates` runs the tool that is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPALIER_BIN", str(harness.BIN))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    return folder, updating.train(folder, "digits", steps=4)


@pytest.fixture(scope="module")
def answers(trained):
    folder, model = trained
    return {version: updating.expected(model, version, folder) for version in model.checkpoints}


def signed(folder):
    return f"--update_keys={folder / 'trainer.pub'}"


@pytest.fixture
def server(trained, tmp_path):
    folder, _ = trained
    with harness.Espalierd(
        folder / "models", "--update_address=127.0.0.1:0", signed(folder), state_dir=tmp_path / "s"
    ) as running:
        yield running


def infer(server, model):
    with espalier.Client(server.url) as client:
        result = client.infer(model.name, model.inputs)
        return int(result.version), result.output


def metrics(server, name: str) -> dict[tuple[str, ...], float]:
    """Samples of a metric by their labels' values."""
    text = urlopen(f"{server.metrics_url}/metrics", timeout=60).read().decode()
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_two_lines_of_a_trainer_bring_new_weights_into_a_server(trained, server, answers, tmp_path):
    _, model = trained
    delta = updates.create(
        model.checkpoints[1],
        model.checkpoints[2],
        tmp_path / "step.espd",
        key=model.key,
        model="digits",
        base_version=1,
    )
    assert infer(server, model)[0] == 1
    updates.push(delta, to=server.update_url)
    version, output = infer(server, model)
    assert version == 2
    np.testing.assert_array_equal(output, answers[2])


def test_every_version_answers_as_a_server_that_loaded_its_file(trained, server, answers):
    _, model = trained
    for version, delta in model.deltas.items():
        updates.push(delta, to=server.update_url)
        answered, output = infer(server, model)
        assert answered == version
        np.testing.assert_array_equal(output, answers[version])


def test_staging_changes_nothing_until_it_is_activated(trained, server, answers):
    _, model = trained
    seen = []
    with updates.Client(server.update_url) as client:
        staged = client.push(
            model.deltas[2], progress=lambda done, total: seen.append((done, total))
        )
        assert (staged.version, staged.state) == (2, "STAGED")
        size = model.deltas[2].stat().st_size
        assert seen[-1] == (size, size)
        assert infer(server, model)[0] == 1
        (versions,) = client.versions("digits")
        assert (versions.serving, versions.staged) == (1, 2)
        assert client.push(model.deltas[2]) == staged, "what is there is not sent again"
        client.activate("digits", 2)
        (versions,) = client.versions()
        assert (versions.serving, versions.staged) == (2, 0)
        assert client.push(model.deltas[2]).state == "LIVE"
    np.testing.assert_array_equal(infer(server, model)[1], answers[2])


def test_another_file_with_the_same_weights_is_the_version_that_they_have(trained, server, tmp_path):
    _, model = trained
    again = updates.create(
        model.checkpoints[1],
        model.checkpoints[2],
        tmp_path / "again.espd",
        key=model.key,
        model="digits",
        base_version=1,
        expires="1000h",
    )
    assert again.read_bytes() != model.deltas[2].read_bytes()
    with updates.Client(server.update_url) as client:
        staged = client.push(model.deltas[2])
        assert client.push(again) == staged
        client.activate("digits", 2)
        served = client.push(again)
        assert (served.version, served.state) == (2, "LIVE")
        (versions,) = client.versions("digits")
        assert (versions.serving, versions.staged) == (2, 0)


def test_rolling_back_and_forth_needs_no_delta(trained, server, answers):
    _, model = trained
    with updates.Client(server.update_url) as client:
        updates.push(model.deltas[2], to=server.update_url)
        for _ in range(5):
            assert client.rollback("digits", reason="it was worse") == 1
            np.testing.assert_array_equal(infer(server, model)[1], answers[1])
            client.activate("digits", 2)
            np.testing.assert_array_equal(infer(server, model)[1], answers[2])
        updates.push(model.deltas[3], to=server.update_url)
        assert client.rollback("digits", to=1) == 1
        assert infer(server, model)[0] == 1
        states = {v.version: (v.state, v.reason) for v in client.versions("digits")[0].versions}
        assert states[1][0] == "LIVE" and states[3][0] == "ROLLED_BACK"


def test_the_active_version_outlives_the_process(trained, answers, tmp_path):
    folder, model = trained
    for start in range(3):
        with harness.Espalierd(
            folder / "models",
            "--update_address=127.0.0.1:0",
            signed(folder),
            state_dir=tmp_path / "s",
        ) as server:
            version, output = infer(server, model)
            assert version == start + 1, "what the last one activated, from the first request on"
            np.testing.assert_array_equal(output, answers[version])
            updates.push(model.deltas[version + 1], to=server.update_url)


def test_requests_under_way_finish_on_the_version_that_they_name(trained, server, answers):
    _, model = trained
    done = threading.Event()
    wrong, versions = [], set()

    def ask() -> None:
        with espalier.Client(server.url) as client:
            while not done.is_set():
                result = client.infer(model.name, model.inputs)
                versions.add(result.version)
                if not np.array_equal(result.output, answers[int(result.version)]):
                    wrong.append(result.version)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    with updates.Client(server.update_url) as client:
        for version, delta in model.deltas.items():
            client.activate("digits", client.push(delta).version)
            for _ in range(3):
                client.rollback("digits")
                client.activate("digits", version)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong and versions == {"1", "2", "3", "4"} & versions and len(versions) > 1


def test_watching_tells_every_change_in_order(trained, server):
    _, model = trained
    events = []

    def watch() -> None:
        with updates.Client(server.update_url) as client:
            for event in client.watch("digits", timeout=60):
                events.append((event.version, event.state))
                if event.state == "ROLLED_BACK":
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    updates.push(model.deltas[2], to=server.update_url)
    with updates.Client(server.update_url) as client:
        client.rollback("digits", reason="no good")
        serials = []
        with pytest.raises(espalier.InferenceError) as error:
            for event in client.watch(timeout=3):
                serials.append(event.serial)
        assert error.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert serials == sorted(set(serials)) and serials
    thread.join(60)
    assert not thread.is_alive()
    assert [state for version, state in events if version == 2][-2:] == ["LIVE", "ROLLED_BACK"]
    assert (2, "STAGED") in events


def test_the_log_says_who_signed_and_what_served_before_and_after(trained, server):
    _, model = trained
    updates.push(model.deltas[2], to=server.update_url)
    with updates.Client(server.update_url) as client:
        client.rollback("digits", reason="accuracy fell")
        records = client.log("digits")
        weights = {v.version: v.weights for v in client.versions("digits")[0].versions}
    activated = next(r for r in records if r.action == "activated")
    assert (activated.version, len(activated.signers)) == (2, 1)
    assert (activated.weights_before, activated.weights_after) == (weights[1], weights[2])
    back = records[-1]
    assert (back.action, back.weights_after, back.reason) == (
        "rolled back",
        weights[1],
        "accuracy fell",
    )
    assert [r.sequence for r in records] == list(range(records[0].sequence, back.sequence + 1))


def test_a_version_on_probation_is_confirmed_by_hand(trained, server):
    _, model = trained
    updates.push(
        model.deltas[2], to=server.update_url, probation=updates.Probation(seconds=math.inf)
    )
    with updates.Client(server.update_url) as client:
        assert client.versions("digits")[0].on_probation
        assert metrics(server, "espalier_update_probation") == {("digits",): 1}
        client.confirm("digits", 2)
        assert not client.versions("digits")[0].on_probation
    assert metrics(server, "espalier_update_probation") == {("digits",): 0}


def test_a_probation_goes_on_where_a_killed_server_left_it(trained, tmp_path):
    folder, model = trained
    seconds = 8

    def serve():
        return harness.Espalierd(
            folder / "models",
            "--update_address=127.0.0.1:0",
            signed(folder),
            state_dir=tmp_path / "s",
        )

    with serve() as server:
        probation = updates.Probation(seconds=seconds, max_error_rate=0.1)
        updates.push(model.deltas[2], to=server.update_url, probation=probation)
        began = time.monotonic()
        server.process.kill()
        server.process.wait()
    with serve() as server, updates.Client(server.update_url) as client:
        assert client.versions("digits")[0].on_probation or time.monotonic() > began + seconds
        while client.versions("digits")[0].on_probation:
            assert time.monotonic() < began + seconds + 30
            time.sleep(0.1)
        assert time.monotonic() > began + seconds - 1
        assert infer(server, model)[0] == 2
        log = client.log("digits")
        assert [record.action for record in log[-3:]] == ["activated", "activated", "confirmed"]
        assert log[-3].reason.startswith("on probation until 2")
        assert log[-2].reason == "start 1 on probation"


def test_metrics_count_what_came_and_what_became_of_it(trained, server):
    _, model = trained
    updates.push(model.deltas[2], to=server.update_url)
    with updates.Client(server.update_url) as client:
        client.rollback("digits")
        with pytest.raises(espalier.InferenceError):
            client.push(model.deltas[4])  # its base is not here
    of = ("digits",)
    assert metrics(server, "espalier_update_staged_total")[of] == 1
    assert metrics(server, "espalier_update_activated_total")[of] == 1
    assert metrics(server, "espalier_update_rolled_back_total")[of] == 1
    assert sum(metrics(server, "espalier_update_refused_total").values()) == 1
    size = sum(model.deltas[version].stat().st_size for version in (2, 4))
    assert metrics(server, "espalier_update_received_bytes_total")[of] == size
    assert metrics(server, "espalier_update_version")[of] == 1
    assert metrics(server, "espalier_update_stage_seconds_total")[of] > 0
    assert metrics(server, "espalier_update_commit_seconds_total")[of] > 0
    rpcs = metrics(server, "espalier_rpcs_total")
    assert rpcs["PushDelta", "OK"] == 1 and rpcs["Rollback", "OK"] == 1


def test_the_tool_pushes_tells_and_rolls_back(trained, server, tmp_path):
    _, model = trained
    url = f"--url={server.update_url}"
    pushed = harness.espalier("delta", "push", str(model.deltas[2]), "--to", server.update_url)
    assert pushed.stdout == f"{server.update_url}: version 2 of digits serves\n"
    again = harness.espalier("delta", "push", str(model.deltas[2]), "--to", server.update_url)
    assert "serves already" in again.stdout
    staged = harness.espalier(
        "delta", "push", str(model.deltas[3]), "--to", server.update_url, "--no_activate"
    )
    assert "version 3 of digits is STAGED" in staged.stdout
    versions = harness.espalier("delta", "versions", "digits", url).stdout
    assert "version 2 serves; version 3 is ready" in versions and "STAGED" in versions
    harness.espalier("delta", "activate", "digits", "3", url, "--probation", "forever")
    assert "on probation" in harness.espalier("delta", "versions", url).stdout
    harness.espalier("delta", "confirm", "digits", "3", url)
    back = harness.espalier("delta", "rollback", "digits", "--to", "1", "--reason", "why", url)
    assert "version 1 serves" in back.stdout
    log = harness.espalier("delta", "log", "digits", url).stdout
    assert "rolled back" in log and "why" in log and "confirmed" in log
    for version in (2, 3):  # forward again, so that there is something to fetch
        harness.espalier("delta", "activate", "digits", str(version), url)
    harness.espalier("delta", "fetch", "digits", "--from", "1", "-o", str(tmp_path), url)
    for version in (2, 3):
        fetched = tmp_path / f"digits-{version}.espd"
        assert fetched.read_bytes() == model.deltas[version].read_bytes()


def test_the_tool_watches_until_it_is_stopped(trained, server):
    import subprocess

    _, model = trained
    watch = subprocess.Popen(
        [harness.BIN / "espalier", "delta", "watch", "--url", server.update_url],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        updates.push(model.deltas[2], to=server.update_url)
        lines = []
        while not lines or "LIVE" not in lines[-1]:
            lines.append(watch.stdout.readline())
            assert lines[-1], lines
        assert any("STAGED" in line and "digits" in line for line in lines)
    finally:
        watch.kill()
        watch.wait()
        watch.stdout.close()


@pytest.mark.parametrize("pusher", ["python", "tool"])
def test_a_push_goes_on_where_the_link_was_cut(tmp_path, pusher):
    model = updating.train(tmp_path, "wide", steps=2, sizes=(1024, 1024, 10), change=1, density=1)
    delta = model.deltas[2]
    size = delta.stat().st_size
    assert size > 400_000
    rng = np.random.default_rng(1)
    with updating.serve(tmp_path, signed(tmp_path)) as server:
        proxy = updating.Proxy(server.update_url)
        proxy.cuts = [int(n) for n in rng.integers(1000, size // 4, size=3)]
        try:
            if pusher == "python":
                with updates.Client(proxy.url) as client:
                    assert client.push(delta).state == "STAGED"
            else:
                harness.espalier("delta", "push", str(delta), "--to", proxy.url, "--no_activate")
        finally:
            proxy.close()
        assert not proxy.cuts, "all the cuts were made"
        # With each cut at most a chunk is lost, and what was sent ahead of it.
        assert proxy.forwarded < size + 3 * (128 << 10) + 40_000
        with updates.Client(server.update_url) as client:
            client.activate("wide", 2)
        np.testing.assert_array_equal(
            infer(server, model)[1], updating.expected(model, 2, tmp_path)
        )


def test_a_push_goes_on_after_the_server_was_killed(tmp_path):
    model = updating.train(tmp_path, "wide", steps=2, sizes=(1024, 1024, 10), change=1, density=1)
    content = model.deltas[2].read_bytes()
    half = len(content) // 2
    with updating.serve(tmp_path, signed(tmp_path)) as server:
        with pytest.raises(grpc.RpcError) as error:
            updating.send(
                server.update_url,
                content[:half],
                model="wide",
                sha256=digest_of(content),
                size=len(content),
                token=None,
            )
        assert f"after {half} of {len(content)} bytes" in error.value.details()
        server.process.kill()
        server.process.wait()
    seen = []
    with updating.serve(tmp_path, signed(tmp_path)) as server:
        with updates.Client(server.update_url) as client:
            client.push(model.deltas[2], progress=lambda done, total: seen.append(done))
    assert seen[0] > half - (256 << 10), "a quarter of a MiB is what a crash may cost"


def digest_of(content: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(content).digest()


def test_a_delta_in_the_repositorys_folder_is_taken_like_a_push(tmp_path):
    model = updating.train(tmp_path, "digits", steps=3)
    folder = tmp_path / "models/digits/deltas"
    folder.mkdir()
    with harness.Espalierd(
        tmp_path / "models",
        "--deltas_poll_interval=200ms",
        signed(tmp_path),
        state_dir=tmp_path / "state",
    ) as server:
        for version, delta in model.deltas.items():
            (folder / f"{version}.espd").write_bytes(delta.read_bytes())
            deadline = time.monotonic() + 120
            while infer(server, model)[0] != version:
                assert time.monotonic() < deadline, server.log()
                time.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--update_address=127.0.0.1:0"], "--state_dir"),
        (["--update_address=127.0.0.1:0", "STATE"], "whose updates?"),
        (["--update_keys=KEY", "STATE"], "no update can come in"),
        (["--update_address=0.0.0.0:0", "--update_keys=KEY", "STATE"], "--update_token_file"),
        (
            [
                "--update_address=127.0.0.1:0",
                "--update_keys=KEY",
                "--allow_unsigned_updates",
                "STATE",
            ],
            "contradict",
        ),
        (["--update_address=127.0.0.1:0", "--update_keys=KEY,KEY", "STATE"], "twice"),
        (
            ["--update_address=127.0.0.1:0", "--update_keys=KEY", "--update_threshold=2", "STATE"],
            "threshold",
        ),
        (["--update_address=127.0.0.1:0", "--update_keys=/nowhere", "STATE"], "/nowhere"),
        (["--update_address=127.0.0.1:0", "--update_keys=EMPTY", "STATE"], "no *.pub"),
        (
            [
                "--update_address=127.0.0.1:0",
                "--update_keys=KEY",
                "--update_token_file=SHORT",
                "STATE",
            ],
            "16 to 1024",
        ),
        (["--update_address=nonsense", "--update_keys=KEY", "STATE"], "host:port"),
        (
            [
                "--update_address=127.0.0.1:0",
                "--update_keys=KEY",
                "--deltas_poll_interval=x",
                "STATE",
            ],
            "--deltas_poll_interval",
        ),
    ],
)
def test_flags_that_make_no_sense_say_what_to_do(trained, tmp_path, flags, text):
    folder, _ = trained
    (tmp_path / "short").write_text("short")
    (tmp_path / "empty").mkdir()
    replace = {
        "KEY": str(folder / "trainer.pub"),
        "SHORT": str(tmp_path / "short"),
        "EMPTY": str(tmp_path / "empty"),
        "STATE": f"--state_dir={tmp_path / 'state'}",
    }
    for word, value in replace.items():
        flags = [flag.replace(word, value) for flag in flags]
    server = harness.Espalierd(folder / "models", *flags)
    process = server.spawn()
    assert process.wait(60) in (1, 2)
    assert text in server.log(), server.log()


def test_inference_does_not_wait_for_a_push_that_hangs(trained, server):
    _, model = trained
    content = model.deltas[2].read_bytes()
    release = threading.Event()

    def slow():
        yield updating.new(
            "PushDeltaRequest",
            header=updating.new(
                "PushHeader", model="digits", sha256=digest_of(content), bytes=len(content)
            ),
        )
        release.wait(120)

    threads = [
        threading.Thread(target=lambda: swallow(server.update_url, slow())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    with espalier.Client(server.url) as client:
        for _ in range(50):
            client.infer(model.name, model.inputs, timeout=30)
        assert client.is_ready()
    release.set()
    for thread in threads:
        thread.join()


def swallow(url, requests) -> None:
    with pytest.raises(grpc.RpcError):
        updating.stream(url, requests, token=None)
