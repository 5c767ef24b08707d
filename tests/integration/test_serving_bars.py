"""The parts of tests/bench/serving_bench.py that are a matter of right and wrong, for seconds."""

from __future__ import annotations

import sys

import harness
import pytest

sys.path.insert(0, str(harness.ROOT / "tests/bench"))

import serving_bench  # noqa: E402


@pytest.fixture(scope="module")
def overloaded() -> dict:
    options = serving_bench.Options(seconds=1, warmup=0.2, soak_seconds=4)
    return serving_bench.overload(options)[0]


def test_under_twice_the_load_every_request_is_answered_once(overloaded):
    assert overloaded["sent"] == overloaded["answered"] > 100
    assert overloaded["unanswered"] == overloaded["unasked"] == overloaded["withheld"] == 0


def test_under_twice_the_load_what_does_not_fit_is_refused_in_time(overloaded):
    """Half of it, by the queue's cap or its timeout of 30 ms, and the rest goes on being served.

    The bounds are wide, and of the median, because other work on the machine slows the client too.
    """
    assert overloaded["errors"] == ["UNAVAILABLE"]
    assert 0.15 < overloaded["refused"] / overloaded["sent"] < 0.85
    assert overloaded["answered_per_second"] > 0.4 * overloaded["fits_per_second"]
    if not harness.SANITIZED:
        assert overloaded["refused_p50_us"] < 30_000 + 50_000


def test_under_twice_the_load_pending_stays_below_its_cap_and_memory_where_it_was(overloaded):
    assert 0 < overloaded["max_pending"] <= overloaded["pending_cap"]
    if not harness.SANITIZED:  # a sanitizer keeps freed memory for a while
        assert overloaded["resident_growth_bytes"] <= overloaded["growth_bar_bytes"]
