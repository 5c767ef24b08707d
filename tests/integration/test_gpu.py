"""Serving on a GPU, where the GPU is host memory behind the CUDA module's table (tests/testing/fake_cuda.h)."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import urllib.request

import grpc
import numpy as np
import pytest

import harness

MODULE = harness.BIN.parent / "lib/libespalier_fake_cuda_module.so"
NAME = "mnist_diagonal16"

pytestmark = pytest.mark.skipif(not MODULE.exists(), reason="built without tests")


def repository_with(folder: pathlib.Path, config: str) -> pathlib.Path:
    """A repository with one small model and this config."""
    (folder / NAME / "1").mkdir(parents=True)
    shutil.copy(harness.model_path(NAME), folder / NAME / "1/model.onnx")
    (folder / NAME / "config.pbtxt").write_text(f"max_batch_size: 2\n{config}\n")
    return folder


def test_a_model_on_the_gpu_answers_like_one_on_the_cpu(tmp_path, digits):
    from tritonclient import grpc as triton

    repository = repository_with(tmp_path, "")
    answers, work = {}, {}
    for device in ("cpu", "cuda"):
        with harness.Espalierd(repository, f"--device={device}", f"--cuda_module={MODULE}") as server:
            assert ("Fake GPU" in server.log()) == (device == "cuda"), server.log()
            metrics = urllib.request.urlopen(server.metrics_url + "/metrics").read().decode()
            assert ('espalier_gpu_lost{gpu="0"} 0' in metrics) == (device == "cuda")
            client = triton.InferenceServerClient(server.url)
            image = triton.InferInput("input", [2, 784], "FP32")
            image.set_data_from_numpy(digits.images[:2])
            name = client.get_model_metadata(NAME).outputs[0].name
            answers[device] = client.infer(NAME, [image]).as_numpy(name)
            metrics = urllib.request.urlopen(server.metrics_url + "/metrics").read().decode()
            work[device] = {line.split("{")[0]: float(line.split()[-1]) for line in metrics.splitlines()
                            if line.startswith(("espalier_model_timed_", "espalier_model_peak_ratio"))}
    np.testing.assert_allclose(answers["cuda"], answers["cpu"], rtol=1e-4, atol=1e-4)
    assert not work["cpu"]
    assert work["cuda"]["espalier_model_timed_flops_total"] > 0
    assert work["cuda"]["espalier_model_timed_bytes_total"] > 0
    assert work["cuda"]["espalier_model_timed_device_seconds_total"] > 0
    assert work["cuda"]["espalier_model_peak_ratio"] > 0


def test_a_lost_gpu_fails_requests_with_text_and_ends_the_process(tmp_path, digits, monkeypatch):
    from tritonclient import grpc as triton
    from tritonclient.utils import InferenceServerException

    monkeypatch.setenv("ESPALIER_FAKE_CUDA_LAUNCHES", "2000")
    repository = repository_with(tmp_path, "")
    with harness.Espalierd(repository, "--device=cuda", f"--cuda_module={MODULE}") as server:
        client = triton.InferenceServerClient(server.url)
        image = triton.InferInput("input", [1, 784], "FP32")
        image.set_data_from_numpy(digits.images[:1])
        with pytest.raises(InferenceServerException) as failure:
            for _ in range(2500):
                client.infer(NAME, [image])
        assert "illegal memory access" in failure.value.message()
        assert "UNAVAILABLE" in failure.value.status()
        assert server.process.wait(30) == 4, server.log()
        assert "GPU lost" in server.log()


def test_the_command_line_plans_for_a_gpu(tmp_path):
    repository = repository_with(tmp_path, "")
    done = harness.espalier("plan", str(repository / NAME), "--device", "cuda", f"--cuda_module={MODULE}")
    assert "plan: measured on cuda Fake GPU" in done.stdout
    assert "cublaslt" in done.stdout
    advice = json.loads(harness.espalier("advise", "--shape", "512", "--batch", "64", "--pattern", "block(32)", "--sparsity", "75",
                                         "--device", "cuda", f"--cuda_module={MODULE}", "--json").stdout)
    point = advice["layers"][0]["points"][0]
    assert advice["device"].startswith("cuda Fake GPU") and point["pattern"] == "block(32)"
    assert point["batches"][0]["chosen"]["measured"] and point["gain"] >= 1
    refused = harness.espalier("plan", str(repository / NAME), "--device", "gpu", check=False)
    assert refused.returncode != 0 and "expected cpu or cuda" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device=tpu"], "--device is 'tpu', expected auto, cpu or cuda"),
        (["--device=cuda", "--cuda_module=/nowhere.so"], "--device=cuda: no CUDA module: /nowhere.so"),
        (["--device=cuda", "--cuda_module=libz.so.1"], "has no espalier_cuda_module"),
    ],
)
def test_a_gpu_that_cannot_be_had_is_said(tmp_path, arguments, expected):
    command = [str(harness.BIN / "espalierd"), f"--model_repository={tmp_path}", "--address=127.0.0.1:0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    assert expected in done.stderr


def test_without_a_gpu_one_line_says_so_and_a_model_that_demands_one_is_refused(tmp_path):
    repository = repository_with(tmp_path, "instance_group { kind: KIND_GPU }")
    with harness.Espalierd(repository, "--device=auto", "--cuda_module=/nowhere.so") as server:
        lines = [line for line in server.log().splitlines() if "serving on the CPU" in line]
        assert len(lines) == 1 and "/nowhere.so" in lines[0], server.log()
        assert "instance_group demands a GPU" in server.log()
