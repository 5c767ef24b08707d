"""Queue policies through the protocol: refused, expired, cancelled and overtaken while a model is busy."""

from __future__ import annotations

import time

import batching
import grpc
import harness
import pytest
from tritonclient.grpc import service_pb2_grpc

Code = grpc.StatusCode
BUSY = 1.2  # seconds of an execution
LATE = 0.4  # what an answer may come late, on a busy machine
CONFIGS = {
    "rejecting": "max_batch_size: 1 dynamic_batching { default_queue_policy {"
    " max_queue_size: 3 allow_timeout_override: true } }",
    "timing": "max_batch_size: 1 dynamic_batching { default_queue_policy {"
    " default_timeout_microseconds: 100000 } }",
    "overriding": "max_batch_size: 1 dynamic_batching { default_queue_policy {"
    " default_timeout_microseconds: 500000 allow_timeout_override: true } }",
    "delaying": "max_batch_size: 1 dynamic_batching { default_queue_policy {"
    " timeout_action: DELAY allow_timeout_override: true } }",
    # More than 32 bits of levels.
    "prioritised": "max_batch_size: 1 dynamic_batching { priority_levels: 8589934592"
    " default_priority_level: 4294967296 priority_queue_policy { key: 8589934592 value {"
    " max_queue_size: 1 } } }",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    for name, config in CONFIGS.items():
        files = batching.model(config, execute_delay_ms=int(BUSY * 1000))
        (root / name / "1").mkdir(parents=True)
        (root / name / "1/model.onnx").write_bytes(files["1"])
        (root / name / "config.pbtxt").write_text(files["config.pbtxt"])
    with harness.Espalierd(root) as running:
        yield running


@pytest.fixture(scope="module")
def stub(server):
    with grpc.insecure_channel(server.url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def late(seconds: float) -> float:
    return seconds + (1.0 if harness.SANITIZED else LATE)


def failures(model: batching.Model) -> int:
    return model.statistics().inference_stats.fail.count


def test_a_delayed_model_is_warned_about(server):
    assert "every execution is delayed" in server.log()


def test_exactly_what_is_too_much_is_refused_at_once(stub):
    model = batching.Model(stub, "rejecting")
    before = failures(model)
    running = model.occupy()
    pending = [model.send() for _ in range(8)]
    answers = [one.answer() for one in pending]
    refused = [answer for answer in answers if answer.code != Code.OK]
    assert len(refused) == 5
    for answer in refused:
        assert answer.code == Code.UNAVAILABLE
        assert "Exceeds maximum queue size" in answer.details
        assert answer.seconds < BUSY / 2
    assert running.answer().code == Code.OK
    assert failures(model) == before + 5


def test_an_expired_request_is_answered_while_the_model_is_busy(stub):
    model = batching.Model(stub, "timing")
    executed = model.statistics().execution_count
    running = model.occupy()
    expired = model.send().answer()
    assert expired.code == Code.UNAVAILABLE
    assert "Request timeout expired" in expired.details
    assert 0.1 <= expired.seconds < late(0.1)
    assert not running.call.done()
    assert running.answer().code == Code.OK
    assert model.statistics().execution_count == executed + 1


@pytest.mark.parametrize(
    ("name", "asked", "waits"),
    [
        ("rejecting", 100_000, 0.1),  # the default is none
        ("overriding", 100_000, 0.1),
        ("overriding", 0, 0.5),
        ("overriding", 60_000_000, 0.5),  # longer than the default is not accepted
        ("timing", 50_000, 0.1),  # not allowed
    ],
)
def test_a_request_may_shorten_its_time_where_that_is_allowed(stub, name, asked, waits):
    model = batching.Model(stub, name)
    running = model.occupy()
    answer = model.send(timeout=asked).answer()
    assert answer.code == Code.UNAVAILABLE, answer
    assert waits <= answer.seconds < late(waits)
    assert not running.call.done()
    assert running.answer().code == Code.OK


def test_a_delayed_request_is_served_after_the_others(stub):
    model = batching.Model(stub, "delaying")
    running = model.occupy()
    first = model.send(timeout=50_000)
    time.sleep(0.1)
    second = model.send()
    answers = [first.answer(), second.answer(), running.answer()]
    assert [answer.code for answer in answers] == [Code.OK] * 3
    assert answers[1].answered < answers[0].answered


def test_a_higher_priority_overtakes(stub):
    model = batching.Model(stub, "prioritised")
    running = model.occupy()
    low = model.send(priority=2**33)
    time.sleep(0.1)
    middle = model.send()
    out_of_range = model.send(priority=2**40)  # means the default
    time.sleep(0.1)
    high = model.send(priority=1)
    order = sorted(
        [("low", low), ("middle", middle), ("range", out_of_range), ("high", high)],
        key=lambda one: one[1].answer().answered,
    )
    assert [name for name, _ in order][0] == "high"
    assert [name for name, _ in order][3] == "low"
    assert running.answer().code == Code.OK


def test_a_level_has_its_own_queue_size(stub):
    model = batching.Model(stub, "prioritised")
    running = model.occupy()
    waits = model.send(priority=2**33)
    time.sleep(0.2)
    refused = model.send(priority=2**33).answer()
    other = model.send(priority=2**32)
    assert refused.code == Code.UNAVAILABLE
    assert "at priority level 8589934592" in refused.details
    assert [one.answer().code for one in (running, waits, other)] == [Code.OK] * 3


def test_a_cancelled_request_leaves_the_queue_and_is_never_executed(stub):
    model = batching.Model(stub, "rejecting")
    executed, failed = model.statistics().execution_count, failures(model)
    running = model.occupy()
    waiting = [model.send() for _ in range(3)]
    time.sleep(0.2)  # until the server has them
    for pending in waiting:
        pending.call.cancel()
    deadline = time.monotonic() + BUSY / 2
    while failures(model) < failed + 3:
        assert time.monotonic() < deadline, "not answered while the model was busy"
    assert not running.call.done()
    room = [model.send() for _ in range(3)]  # which the cancelled ones have left
    assert running.answer().code == Code.OK
    assert [pending.answer().code for pending in room] == [Code.OK] * 3
    assert model.statistics().execution_count == executed + 4


def test_a_deadline_in_the_queue_is_never_executed(stub):
    model = batching.Model(stub, "rejecting")
    executed, failed = model.statistics().execution_count, failures(model)
    running = model.occupy()
    answer = model.send(deadline=0.3).answer()  # by when the server has it
    assert answer.code == Code.DEADLINE_EXCEEDED
    assert answer.seconds < late(0.3)
    deadline = time.monotonic() + BUSY / 2
    while failures(model) < failed + 1:
        assert time.monotonic() < deadline, "not taken out while the model was busy"
    assert running.answer().code == Code.OK
    assert model.statistics().execution_count == executed + 1
