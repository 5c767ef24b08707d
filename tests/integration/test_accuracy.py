"""The shipped models classify all 10,000 test images, as answered by the running server."""

from __future__ import annotations

import espalier
import harness
import numpy as np
import pytest

DENSE_BAR = 0.98
SPARSE_MARGIN = 0.01


@pytest.fixture(scope="module")
def accuracy(server, digits):
    measured = {}
    with espalier.Client(server.url) as client:
        for name in harness.SHIPPED:
            answers = [
                client.infer(name, digits.images[i : i + 250]).output.argmax(axis=1)
                for i in range(0, len(digits.images), 250)
            ]
            measured[name] = float(np.mean(np.concatenate(answers) == digits.labels))
    print(measured)
    return measured


def test_the_test_set_is_whole(digits):
    assert digits.images.shape == (10000, 784) and digits.labels.shape == (10000,)


def test_the_dense_model_is_good(accuracy):
    assert accuracy["mnist_dense"] >= DENSE_BAR


@pytest.mark.parametrize("name", [name for name in harness.SHIPPED if name != "mnist_dense"])
def test_a_sparse_model_is_within_a_point_of_the_dense(accuracy, name):
    assert accuracy[name] >= accuracy["mnist_dense"] - SPARSE_MARGIN
