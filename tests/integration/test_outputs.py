"""What the server answers is what onnxruntime computes, within the error of float32 arithmetic."""

from __future__ import annotations

import asyncio

import espalier
import harness
import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime
import pytest

BATCHES = (1, 2, 3, 7, 8, 16, 31, 64, 100, 255, 256)


class Reference:
    """A shipped model in onnxruntime, and how far another evaluation may be from it."""

    def __init__(self, name: str) -> None:
        path = harness.model_path(name)
        self.model = onnx.load(path)
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def check(self, x: np.ndarray, got: np.ndarray) -> None:
        expected = self.session.run(None, {"input": x})[0]
        _, bound = harness.evaluate(self.model, x)
        assert got.shape == expected.shape and got.dtype == np.float32
        excess = np.abs(got.astype(np.float64) - expected) / bound
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        assert excess[worst] <= 1, (
            f"worst at {worst}: expected {expected[worst]}, got {got[worst]} ± {bound[worst]}"
        )


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {name: Reference(name) for name in harness.SHIPPED}


@pytest.fixture(scope="module")
def client(server):
    with espalier.Client(server.url) as connected:
        yield connected


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", harness.SHIPPED)
def test_outputs_equal_onnxruntimes(client, digits, references, name, batch):
    x = digits.images[1000 : 1000 + batch]
    references[name].check(x, client.infer(name, x).output)


@pytest.mark.parametrize("name", harness.SHIPPED)
def test_outputs_equal_onnxruntimes_on_random_input_of_both_signs(client, references, name):
    x = np.random.default_rng(7).normal(scale=10, size=(33, 784)).astype(np.float32)
    references[name].check(x, client.infer(name, x).output)


@pytest.mark.parametrize("name", harness.SHIPPED)
def test_the_tolerance_is_tight_enough_to_notice_another_precision(references, digits, name):
    reference, x = references[name], digits.images[:64]
    exact, _ = harness.evaluate(reference.model, x)
    reference.check(x, exact.astype(np.float32))
    rounded, _ = harness.evaluate(reference.model, x, ml_dtypes.bfloat16)
    with pytest.raises(AssertionError):
        reference.check(x, rounded.astype(np.float32))


@pytest.mark.parametrize("name", harness.SHIPPED)
def test_concurrent_requests_each_get_their_own_answer(server, digits, references, name):
    """Requests that the server gathers into one batch must not see each other's rows."""
    sizes = np.random.default_rng(3).integers(1, 6, size=200)
    starts = np.concatenate([[0], np.cumsum(sizes)])

    async def ask() -> list[np.ndarray]:
        async with espalier.aio.Client(server.url) as client:
            calls = (client.infer(name, digits.images[a:b]) for a, b in zip(starts, starts[1:]))
            return [result.output for result in await asyncio.gather(*calls)]

    answers = asyncio.run(ask())
    assert [len(answer) for answer in answers] == list(sizes)
    references[name].check(digits.images[: starts[-1]], np.concatenate(answers))


@pytest.mark.parametrize("name", harness.SHIPPED)
def test_a_nan_stays_in_its_own_item(client, digits, references, name):
    x = digits.images[:4].copy()
    x[1] = np.nan
    x[2] = np.inf
    got = client.infer(name, x).output
    references[name].check(x[[0, 3]], got[[0, 3]])


def test_deterministic_mode_is_bit_identical_whatever_the_batch(repository, digits):
    models = {
        name: {
            "1": harness.model_path(name).read_bytes(),
            "config.pbtxt": 'parameters { key: "deterministic" value { string_value: "true" } }',
        }
        for name in harness.SHIPPED
    }
    with harness.Espalierd(repository(**models)) as server, espalier.Client(server.url) as client:
        for name in harness.SHIPPED:
            together = client.infer(name, digits.images[:256]).output
            for batch in (1, 3, 16, 100):
                apart = client.infer(name, digits.images[:batch]).output
                np.testing.assert_array_equal(
                    apart, together[:batch], err_msg=f"{name}, batch {batch}"
                )


def residual_blocks(width: int, hidden: int, rng: np.random.Generator) -> bytes:
    """x [N, 5, width] through two blocks x + W2 gelu(W1 norm(x) + b1) + b2, the last one's sum on the other side."""
    nodes, constants = [], {"sqrt2": np.sqrt(np.float32(2)), "one": 1.0, "half": 0.5}

    def node(op: str, inputs: str, output: str, **attributes: object) -> None:
        nodes.append(onnx.helper.make_node(op, inputs.split(), [output], output, **attributes))

    def pruned(rows: int, columns: int, block: int) -> np.ndarray:
        kept = rng.random((-(-rows // block), -(-columns // block))) < 0.25
        mask = np.kron(kept, np.ones((block, block)))[:rows, :columns]
        return rng.normal(scale=(columns / 4) ** -0.5, size=(rows, columns)) * mask

    for i, (x, y) in enumerate((("x", "s"), ("s", "y"))):
        constants[f"scale{i}"] = rng.normal(loc=1, scale=0.1, size=width)
        constants[f"shift{i}"] = rng.normal(scale=0.1, size=width)
        constants[f"w1{i}"] = pruned(hidden, width, block=1).T
        constants[f"b1{i}"] = rng.normal(scale=0.1, size=hidden)
        constants[f"w2{i}"] = pruned(width, hidden, block=16).T
        constants[f"b2{i}"] = rng.normal(scale=0.1, size=width)
        node("LayerNormalization", f"{x} scale{i} shift{i}", f"n{i}")
        node("MatMul", f"n{i} w1{i}", f"m{i}")
        node("Add", f"b1{i} m{i}", f"a{i}")
        node("Div", f"a{i} sqrt2", f"d{i}")
        node("Erf", f"d{i}", f"e{i}")
        node("Add", f"e{i} one", f"f{i}")
        node("Mul", f"a{i} f{i}", f"g{i}")
        node("Mul", f"g{i} half", f"h{i}")
        node("MatMul", f"h{i} w2{i}", f"o{i}")
        node("Add", f"o{i} b2{i}", f"p{i}")
        node("Add", f"{x} p{i}" if i == 0 else f"p{i} {x}", y)
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "residual_blocks",
        [info("x", onnx.TensorProto.FLOAT, ["N", 5, width])],
        [info("y", onnx.TensorProto.FLOAT, ["N", 5, width])],
        [
            onnx.numpy_helper.from_array(np.asarray(value, np.float32), name)
            for name, value in constants.items()
        ],
    )
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()


def test_residual_blocks_equal_onnxruntimes(repository):
    rng = np.random.default_rng(3)
    models = {f"blocks{width}": residual_blocks(width, 4 * width, rng) for width in (48, 77)}
    root = repository(**{name: {"1": content} for name, content in models.items()})
    with harness.Espalierd(root) as server, espalier.Client(server.url) as client:
        for name, content in models.items():
            session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
            for batch in (1, 2, 3, 7, 8, 31):
                x = rng.normal(size=(batch, 5, int(name[6:]))).astype(np.float32)
                expected = session.run(None, {"x": x})[0]
                # Two evaluations of sums of some 80 products of about 0.1, twice, from values of about 1 to 4.
                np.testing.assert_allclose(
                    client.infer(name, x).output, expected, rtol=1e-5, atol=1e-5, err_msg=name
                )
