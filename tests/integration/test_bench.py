"""`espalier bench` against the running server: its numbers agree with what the server counted."""

from __future__ import annotations

import json
import time

import harness
import pytest

NAME = "mnist_block16"
IMAGES = "tests/data/mnist/t10k-images-idx3-ubyte.gz"


def bench(server, tmp_path, *flags: str) -> dict:
    """Runs a short bench; returns its JSON."""
    harness.espalier(
        "bench",
        NAME,
        f"--url={server.url}",
        "--warmup=0.2",
        f"--json={tmp_path}/bench.json",
        *flags,
    )
    return json.loads((tmp_path / "bench.json").read_text())


@pytest.mark.parametrize("transport", [(), ("--streaming",)], ids=["unary", "streaming"])
def test_closed_loop_agrees_with_the_server(server, tmp_path, transport):
    report = bench(
        server, tmp_path, "--concurrency=1,16", "--batch=3", "--duration=0.8", *transport
    )
    assert report["model"] == NAME and report["version"] == "1" and report["batch"] == 3
    assert report["server"]["name"] == "espalier" and "block_csr" in report["layouts"]
    for level in report["levels"]:
        assert level["errors"] == {} and level["ledger"]["balances"]
        requests = level["latency_us"]["count"]
        assert requests > 20
        split = level["server"]
        # Both count the same window; requests at its two ends are in one of them only.
        assert abs(split["requests"] - requests) <= 0.2 * requests + 2 * level["concurrency"]
        assert split["inferences"] == 3 * split["requests"]
        assert sum(
            int(batch) * count for batch, count in split["executions_by_batch"].items()
        ) == pytest.approx(split["inferences"], abs=3 * level["concurrency"])
        inside = sum(
            split[f"{phase}_us"]
            for phase in ("queue", "compute_input", "compute_infer", "compute_output")
        )
        assert 0 < inside <= split["request_us"] < level["latency_us"]["mean"] * 1.2


def test_open_loop_sends_real_images_at_its_rate(server, tmp_path):
    report = bench(server, tmp_path, "--rate=200", f"--input={IMAGES}", "--duration=1")
    level = report["levels"][0]
    assert report["inputs"].startswith("10000 items") and report["distinct_requests"] == 1024
    assert level["ledger"]["balances"] and level["withheld"] == 0
    assert level["latency_us"]["count"] == pytest.approx(200, abs=75)
    assert level["latency_us"]["p50"] >= level["since_sent_us"]["p50"]


def test_refusals_are_errors_by_code(repository, tmp_path):
    config = """
        parameters { key: "execute_delay_ms" value { string_value: "20" } }
        dynamic_batching { default_queue_policy { max_queue_size: 2 } }
        max_batch_size: 1
    """
    model = harness.model_path(NAME).read_bytes()
    models = repository(**{NAME: {"1": model, "config.pbtxt": config}})
    with harness.Espalierd(models) as server:
        report = bench(server, tmp_path, "--rate=300", "--duration=0.8")
    level = report["levels"][0]
    assert level["ledger"]["balances"]
    assert set(level["errors"]) == {"UNAVAILABLE"}
    assert level["errors"]["UNAVAILABLE"]["count"] == level["failure_us"]["count"] > 50
    assert "queue" in level["errors"]["UNAVAILABLE"]["example"]
    assert 5 < level["latency_us"]["count"] < 60, "50 a second fit"


def test_a_report_that_cannot_be_written_is_refused_before_the_load(server, tmp_path):
    for flag in ("json", "hgrm"):
        started = time.monotonic()
        done = harness.espalier(
            "bench",
            NAME,
            f"--url={server.url}",
            "--duration=30",
            f"--{flag}={tmp_path}/none/report",
            check=False,
        )
        assert done.returncode == 1 and "none/report" in done.stderr, done.stderr
        assert time.monotonic() - started < 25
