"""Deltas that are not what they should be: refused with a reason of their own, while what serves,
here and in other models, stays as it is to the bit."""

from __future__ import annotations

import os
import time

import espalier
import grpc
import numpy as np
import pytest
import updating
from attack_stage import refuses, stage  # noqa: F401  (fixtures)
from espalier import updates

Code = grpc.StatusCode


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :]


SIGNATURE = 8 + 64  # bytes: the beginning of the key's id, and the signature


def manifest_of(content: bytes) -> range:
    """Where the manifest is: behind magic, version and its size, a varint."""
    size, at, shift = 0, 10, 0
    while True:
        size |= (content[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not content[at - 1] & 0x80:
            return range(at, at + size)


def head_bytes(content: bytes) -> int:
    manifest = manifest_of(content)
    return manifest.stop + 1 + SIGNATURE * content[manifest.stop]


# --- who signed -----------------------------------------------------------------------------------


def test_signatures(stage, refuses):
    sent = lambda content: lambda: updating.send(stage.url, content, model="digits")
    refuses(Code.PERMISSION_DENIED, "sign", sent(stage.third(key=[])))
    refuses(Code.PERMISSION_DENIED, "sign", sent(stage.third(key=stage.key)))
    refuses(Code.PERMISSION_DENIED, "sign", sent(stage.third(key=[stage.key, stage.stranger])))
    good = stage.third()
    manifest = manifest_of(good)
    first, second = manifest.stop + 1, manifest.stop + 1 + SIGNATURE
    body = second + SIGNATURE
    refuses(Code.PERMISSION_DENIED, "sign", sent(flipped(good, first + 8)))
    refuses(Code.PERMISSION_DENIED, "sign", sent(flipped(good, body - 1)))
    # The same key twice does not count as two.
    twice = good[:second] + good[first:second] + good[body:]
    refuses((Code.INVALID_ARGUMENT, Code.PERMISSION_DENIED), "", sent(twice))
    # Signatures of another delta.
    other = stage.third(sequence=12)
    assert manifest_of(other) == manifest
    grafted = good[:first] + other[first:body] + good[body:]
    refuses(Code.PERMISSION_DENIED, "sign", sent(grafted))
    # A manifest that was changed after it was signed: its sequence, its expiry, whatever it is.
    for at in manifest[8:40]:
        refuses(
            (Code.PERMISSION_DENIED, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION),
            "",
            sent(flipped(good, at)),
        )


# --- what it is for -------------------------------------------------------------------------------


def test_wrong_base(stage, refuses):
    wrong = stage.third(old=stage.model.checkpoints[1], new=stage.model.checkpoints[2])
    refuses(
        Code.FAILED_PRECONDITION,
        "made for weights with the digest",
        lambda: updating.send(stage.url, wrong, model="digits"),
    )


def test_a_base_version_that_is_not_kept(stage, refuses):
    unknown = stage.third(base_version=77, version=78)
    refuses(
        Code.FAILED_PRECONDITION, "77", lambda: updating.send(stage.url, unknown, model="digits")
    )


def test_another_models_delta(stage, refuses):
    other = stage.other.delta(key=stage.both).read_bytes()
    refuses(
        Code.FAILED_PRECONDITION, "other", lambda: updating.send(stage.url, other, model="digits")
    )


def test_an_expired_delta(stage, refuses):
    late = stage.third(expires="1s")
    time.sleep(2.1)
    refuses(
        Code.FAILED_PRECONDITION, "expired", lambda: updating.send(stage.url, late, model="digits")
    )


def test_a_downgrade(stage, refuses):
    refuses(
        Code.FAILED_PRECONDITION,
        "sequence",
        lambda: updating.send(stage.url, stage.third(sequence=10), model="digits"),
    )
    refuses(
        Code.FAILED_PRECONDITION,
        "sequence",
        lambda: updating.send(stage.url, stage.third(sequence=1), model="digits"),
    )


def test_a_known_version_number_with_other_bytes(stage, refuses):
    for version in (1, 2):
        again = (
            stage.third(version=version)
            if version == 1
            else stage.model.delta(
                key=stage.both, sequence=12, new=stage.checkpoint_of_others()
            ).read_bytes()
        )
        refuses(
            (Code.ALREADY_EXISTS, Code.FAILED_PRECONDITION),
            str(version),
            lambda: updating.send(stage.url, again, model="digits"),
        )


def test_a_replay_of_a_delta_that_had_its_time(tmp_path):
    model = updating.train(tmp_path, "digits", steps=3)
    with updating.serve(tmp_path, f"--update_keys={tmp_path / 'trainer.pub'}") as server:
        with updates.Client(server.update_url) as client:
            for delta in model.deltas.values():
                client.activate("digits", client.push(delta).version)
            before = updating.Facts.of(server, model)
            with pytest.raises(espalier.InferenceError, match="sent before.*SUPERSEDED") as error:
                client.push(model.deltas[2])
            assert error.value.code == Code.FAILED_PRECONDITION
            client.rollback("digits")
            with pytest.raises(espalier.InferenceError, match="sent before.*ROLLED_BACK"):
                client.push(model.deltas[3])
            client.activate("digits", 3)
        assert updating.Facts.of(server, model) == before


# --- bytes that are not what they say -------------------------------------------------------------


def test_truncated_anywhere(stage, refuses):
    good = stage.third()
    head = head_bytes(good)
    rng = np.random.default_rng(3)
    signatures = head - 2 * SIGNATURE
    places = [1, 7, 8, 9, 10, 11, 12, signatures - 1, signatures, head - 1, head, head + 1]
    places += [int(at) for at in rng.integers(1, len(good) - 1, size=20)] + [len(good) - 1]
    for at in places:
        refuses(
            Code.INVALID_ARGUMENT, "", lambda: updating.send(stage.url, good[:at], model="digits")
        )


def test_bytes_behind_the_end(stage, refuses):
    for tail in (b"\0", b"x" * 1000, stage.third()):
        refuses(
            Code.INVALID_ARGUMENT,
            "",
            lambda: updating.send(stage.url, stage.third() + tail, model="digits"),
        )


def test_a_body_that_was_changed(stage, refuses):
    good = stage.third()
    for at in (head_bytes(good), (head_bytes(good) + len(good)) // 2, len(good) - 1):
        refuses(
            Code.PERMISSION_DENIED,
            "damaged, or changed",
            lambda: updating.send(stage.url, flipped(good, at), model="digits"),
        )


def test_no_delta_at_all(stage, refuses):
    for content in (b"x", b"\0" * 100_000, os.urandom(4096), b"\x93ESPD\r\n\n"):
        refuses(
            Code.INVALID_ARGUMENT, "", lambda: updating.send(stage.url, content, model="digits")
        )


def test_a_newer_format(stage, refuses):
    good = stage.third()
    newer = good[:8] + (3).to_bytes(2, "little") + good[10:]
    refuses(Code.UNIMPLEMENTED, "version", lambda: updating.send(stage.url, newer, model="digits"))


def test_a_manifest_that_claims_to_be_huge(stage, refuses):
    good = stage.third()
    huge = good[:10] + b"\xff\xff\xff\xff\x0f" + good[manifest_of(good).start :]
    refuses(
        (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED),
        "",
        lambda: updating.send(stage.url, huge, model="digits"),
    )


def test_a_digest_that_is_not_the_files(stage, refuses):
    refuses(
        Code.INVALID_ARGUMENT,
        "",
        lambda: updating.send(stage.url, stage.third(), model="digits", sha256=b"\1" * 32),
    )
