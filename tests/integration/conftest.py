"""Fixtures: one server with the shipped models for all tests that do not need their own."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Callable

import harness
import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: long or large; only in ./tests/run --full")
    for name in ("espalierd", "espalier"):
        if not (harness.BIN / name).is_file():
            pytest.exit(
                f"{harness.BIN / name} is missing; build it, or set ESPALIER_BIN to where it is", 2
            )


@pytest.fixture(scope="session")
def server() -> Iterator[harness.Espalierd]:
    """A server with the shipped models."""
    with harness.Espalierd(harness.MODELS) as running:
        yield running


@pytest.fixture(scope="session")
def digits() -> harness.Digits:
    """The shipped test set."""
    return harness.read_digits()


@pytest.fixture
def repository(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Makes a repository: `repository(name={"1": bytes, "config.pbtxt": text}, …)`."""

    def make(**models: dict[str, bytes | str]) -> pathlib.Path:
        root = tmp_path / "models"
        root.mkdir(exist_ok=True)
        for name, files in models.items():
            for file, content in files.items():
                path = root / name / file if "." in file else root / name / file / "model.onnx"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return root

    return make
