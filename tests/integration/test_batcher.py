"""The dynamic batcher through the protocol: what is merged, what is split, and what waits."""

from __future__ import annotations

import time

import batching
import grpc
import harness
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

OK = grpc.StatusCode.OK
DELAY = 2.0
# Of an execution that others wait for: they come while it lasts, also on a busy machine.
BUSY, BUSY_PREFERRING, ORDERED = 0.6, 1.0, 0.1
CONFIGS = {
    # As in Triton's own suite for its batcher.
    "preferring": batching.model(
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 6 ]"
        f" max_queue_delay_microseconds: {int(DELAY * 1e6)} }}"
    ),
    "delaying": batching.model(
        "max_batch_size: 4 dynamic_batching {"
        f" max_queue_delay_microseconds: {int(DELAY * 1e6)} }}"
    ),
    "busy_preferring": batching.model(
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 6 ]"
        f" max_queue_delay_microseconds: {int(DELAY * 1e6)} }}",
        execute_delay_ms=int(BUSY_PREFERRING * 1000),
    ),
    "plain": batching.model("max_batch_size: 8", execute_delay_ms=int(BUSY * 1000)),
    "ordered": batching.model(
        "max_batch_size: 1 instance_group { count: 3 }"
        " dynamic_batching { preserve_ordering: true }",
        execute_delay_ms=int(ORDERED * 1000),
    ),
    "padded": batching.model(
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 4 ] }"
        ' parameters { key: "allowed_batch_sizes" value { string_value: "preferred" } }'
    ),
}


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    root = tmp_path_factory.mktemp("batching")
    for name, files in CONFIGS.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "1/model.onnx").write_bytes(files["1"])
        (root / name / "config.pbtxt").write_text(files["config.pbtxt"])
    with harness.Espalierd(root) as server, grpc.insecure_channel(server.url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def run(model: batching.Model, *batches: int) -> tuple[list[batching.Answer], dict[int, int]]:
    """Sends requests of these sizes; returns their answers and the batches that were run."""
    before = model.batches()
    answers = [pending.answer() for pending in [model.send(size) for size in batches]]
    assert [answer.code for answer in answers] == [OK] * len(batches)
    after = model.batches()
    ran = {size: after[size] - before.get(size, 0) for size in after}
    return answers, {size: count for size, count in ran.items() if count}


def test_a_preferred_size_runs_long_before_the_delay(stub):
    answers, ran = run(batching.Model(stub, "preferring"), 1, 1)
    assert ran == {2: 1}
    assert max(answer.seconds for answer in answers) < DELAY / 2


def test_below_a_preferred_size_a_request_waits_the_whole_delay(stub):
    (answer,), ran = run(batching.Model(stub, "preferring"), 1)
    assert ran == {1: 1}
    assert DELAY <= answer.seconds < 2 * DELAY


def test_a_sum_between_preferred_sizes_is_merged_at_the_delay(stub):
    answers, ran = run(batching.Model(stub, "preferring"), 3, 1)
    assert ran == {4: 1}
    assert answers[0].seconds >= DELAY * 0.99


def test_a_request_above_the_preferred_sizes_runs_at_once(stub):
    (answer,), ran = run(batching.Model(stub, "preferring"), 7)
    assert ran == {7: 1}
    assert answer.seconds < DELAY / 2


def test_a_sum_above_the_preferred_sizes_is_split_between_requests(stub):
    answers, ran = run(batching.Model(stub, "preferring"), 3, 4)
    assert ran == {3: 1, 4: 1}
    # One of them runs at once, whichever came first; the other is left to wait.
    assert min(answer.seconds for answer in answers) < DELAY / 2


def test_the_biggest_preferred_size_that_can_be_formed_is_chosen(stub):
    model = batching.Model(stub, "busy_preferring")
    running = model.send(2)  # keeps the instance
    time.sleep(0.3)
    answers, ran = run(model, *[1] * 8)
    assert ran == {2: 2, 6: 1}  # with the one that was running
    assert running.answer().code == OK
    first_six = sorted(answer.answered for answer in answers)[:6]
    assert first_six[-1] - first_six[0] < BUSY_PREFERRING / 2


def test_with_a_delay_alone_a_batch_runs_when_it_is_full_or_due(stub):
    model = batching.Model(stub, "delaying")
    answers, ran = run(model, 1, 1, 2)
    assert ran == {4: 1}
    assert max(answer.seconds for answer in answers) < DELAY / 2
    answers, ran = run(model, 1, 1)
    assert ran == {2: 1}
    assert max(answer.seconds for answer in answers) >= DELAY * 0.99


def test_without_a_configuration_an_idle_server_waits_for_nobody_and_a_busy_one_fills_batches(stub):
    model = batching.Model(stub, "plain")
    before = model.batches()
    running = model.occupy()
    waiting = [model.send(size) for size in (1, 2, 1, 3, 1)]
    assert running.answer().seconds < 1.9 * BUSY  # its own
    assert all(pending.answer().code == OK for pending in waiting)
    after = model.batches()
    ran = {size: after[size] - before.get(size, 0) for size in after}
    assert ran == {1: 1, 8: 1}
    assert max(pending.answer().seconds for pending in waiting) < 2.9 * BUSY


def test_a_batched_answer_is_the_one_that_a_request_gets_alone(stub, digits):
    model = batching.Model(stub, "plain")
    images = digits.images[:8]
    alone = [model.send(images[i : i + 1]).answer().logits for i in range(8)]
    running = model.occupy()
    before = model.batches().get(8, 0)
    together = [model.send(images[i : i + 1]) for i in range(8)]
    answers = [pending.answer() for pending in together]
    assert running.answer().code == OK
    assert model.batches()[8] == before + 1
    for i, answer in enumerate(answers):
        # Another batch size may take another kernel: the sums round differently.
        np.testing.assert_allclose(answer.logits, alone[i], rtol=1e-4, atol=1e-4)
        assert answer.logits.argmax() == alone[i].argmax()


def test_with_preserved_ordering_several_instances_answer_everything(stub):
    model = batching.Model(stub, "ordered")
    began = time.monotonic()
    pending = [model.send() for _ in range(12)]
    assert [one.answer().code for one in pending] == [OK] * 12
    # One instance would need 12 times as long; that answers keep their order is a unit test.
    assert time.monotonic() - began < 11 * ORDERED


def test_only_allowed_sizes_are_run(stub, digits):
    model = batching.Model(stub, "padded")
    answer = model.send(digits.images[:3]).answer()
    assert answer.logits.shape == (3, 10)
    plain = batching.Model(stub, "plain").send(digits.images[:3]).answer()
    np.testing.assert_allclose(answer.logits, plain.logits, rtol=1e-4, atol=1e-4)
    refused = model.send(5).answer()
    assert refused.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "batch-size must be <= 4" in refused.details


def test_another_shape_is_refused_and_those_that_wait_are_merged(stub):
    model = batching.Model(stub, "preferring")
    first = model.send(1)
    wrong = model.send(np.zeros((1, 783), np.float32)).answer()
    assert wrong.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "expected [-1, 784], got [1, 783]" in wrong.details
    second = model.send(1)
    assert first.answer().code == second.answer().code == OK
    assert second.answer().seconds < DELAY / 2


def test_inferences_are_the_sum_of_batches_times_their_sizes(stub):
    for name in CONFIGS:
        model = batching.Model(stub, name)
        model.send().answer()
        statistics = model.statistics()
        batches = model.batches()
        assert statistics.inference_count == sum(size * n for size, n in batches.items())
        assert statistics.execution_count == sum(batches.values())
        sums = statistics.inference_stats
        phases = (sums.queue, sums.compute_input, sums.compute_infer, sums.compute_output)
        assert sum(phase.ns for phase in phases) <= sums.success.ns
