"""Hostile bundle files: each is refused with one error, nothing else is read, nothing is written."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze.serve.bundle import PolicyBundle
from maze.serve.bundle_file import BundleError, packed, unpacked
from tests.security.attack import mutated_json


@pytest.fixture
def networks(cartpole_bundle: Path) -> dict[str, bytes]:
    return unpacked(cartpole_bundle.read_bytes(), "it")[1]


@pytest.fixture
def description(cartpole_bundle: Path) -> dict[str, Any]:
    """The description as it is written, with encoded arrays."""
    with zipfile.ZipFile(cartpole_bundle) as file:
        return json.loads(file.read("bundle.json"))


@pytest.fixture(autouse=True)
def _nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.rglob("*")) == []


def sealed(content: bytes) -> bytes:
    """An archive without a comment, with the sum that makes it look like a bundle."""
    content = content[:-2] + struct.pack("<H", 12 + 64)
    return content + b"maze-sha256:" + hashlib.sha256(content).hexdigest().encode()


def zipped(entries: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in entries:
            file.writestr(name, data)
    return sealed(buffer.getvalue())


def refused(content: bytes) -> str:
    with pytest.raises(BundleError) as caught:
        PolicyBundle(content)
    return str(caught.value)


def test_any_changed_byte_is_noticed(cartpole_bundle):
    content = cartpole_bundle.read_bytes()
    places = [*range(40), *range(40, len(content), 997), *range(len(content) - 120, len(content))]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1
        assert "SHA-256" in refused(bytes(changed)) or "not a complete policy bundle" in refused(bytes(changed))


def test_missing_bytes_are_noticed(cartpole_bundle):
    content = cartpole_bundle.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 1):
        assert "bundle" in refused(content[:size])


def test_zip_bombs_are_refused_before_anything_is_unpacked(monkeypatch):
    bomb = zipped([("bundle.json", b" " * 50_000_000)], zipfile.ZIP_DEFLATED)
    assert len(bomb) < 100_000
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("unpacked"))
    assert "compressed or encrypted" in refused(bomb)


def test_members_that_overlap_cannot_claim_more_than_the_file_has(monkeypatch):
    content = bytearray(zipped([("bundle.json", b" " * 1000), ("networks/0.onnx", b" " * 1000)]))
    first = content.index(b"PK\x01\x02")
    second = content.index(b"PK\x01\x02", first + 4)
    for start in (first, second):
        content[start + 20 : start + 28] = struct.pack("<II", 3000, 3000)
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("unpacked"))
    assert "claim more bytes" in refused(sealed(bytes(content)[: -(12 + 64)]))


@pytest.mark.parametrize(
    "name", ["../evil.json", "/etc/evil", "networks/../../evil.onnx", "networks\\0.onnx", "evil.pkl"]
)
def test_names_outside_of_the_archive_are_refused(name):
    assert f"has an unknown member {name!r}" in refused(zipped([("bundle.json", b"{}"), (name, b"x")]))


def test_folders_are_refused():
    assert "a folder" in refused(zipped([("bundle.json", b"{}"), ("networks/", b"x")]))


def test_duplicate_names_are_refused():
    with pytest.warns(UserWarning, match="Duplicate"):
        content = zipped([("bundle.json", b"1"), ("bundle.json", b"2")])
    assert "there are two of them" in refused(content)


def test_networks_that_refer_to_other_files_are_refused(description, networks, tmp_path_factory):
    onnx = pytest.importorskip("onnx")
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_bytes(bytes(4096))
    original = networks["networks/0.onnx"]

    def model() -> Any:
        return onnx.load_from_string(original)

    def outside(tensor: Any) -> None:
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=str(secret))

    in_initializer, in_attribute, in_branch, in_function = model(), model(), model(), model()
    outside(in_initializer.graph.initializer[0])
    tensor = onnx.numpy_helper.from_array(np.zeros(4, np.float32))
    outside(tensor)
    constant = onnx.helper.make_node("Constant", [], ["unused"], value=tensor)
    in_attribute.graph.node.append(constant)
    branch = onnx.helper.make_graph([constant], "branch", [], [])
    in_branch.graph.node.append(onnx.helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch))
    in_function.functions.append(onnx.helper.make_function("own", "f", [], [], [constant], []))
    for changed in (in_initializer, in_attribute, in_branch, in_function):
        content = packed(description, {"networks/0.onnx": changed.SerializeToString()})
        assert "external data" in refused(content)


def test_references_to_other_files_are_found_in_unusual_encodings_of_their_length(description, networks):
    padded_length, in_a_name = b"\x0a\x88\x80\x00location", b"\x0a\x14observation/location"
    assert "external data" in refused(packed(description, {"networks/0.onnx": padded_length}))
    assert "external data" not in refused(packed(description, {"networks/0.onnx": in_a_name}))


@pytest.mark.parametrize("graph", [b"", b"\xff" * 100, b"\x3a\xff\xff\xff\xff\x7f", b"no graph at all"])
def test_networks_that_are_none_are_refused(description, graph):
    assert "onnxruntime cannot read" in refused(packed(description, {"networks/0.onnx": graph}))


@pytest.fixture
def edited(description: dict[str, Any], networks: dict[str, bytes]) -> Callable[..., bytes]:
    """Pack the bundle after a change of its description."""

    def changed(edit: Callable[[dict[str, Any]], None]) -> bytes:
        edit(description)
        return packed(description, networks)

    return changed


@pytest.mark.parametrize(
    "edit",
    [
        lambda each: each.clear(),
        lambda each: each.pop("networks"),
        lambda each: each["steps"].clear() or each["reference"].clear() or each["networks"].clear() or each.pop("card"),
        lambda each: each["steps"][0]["heads"]["action"].update(distribution="own"),
        lambda each: each["steps"][0].update(networks=[[None, 7]]),
        lambda each: each["networks"][0].update(file="networks/9.onnx"),
        lambda each: each["networks"][0].update(inputs={"observation": "elsewhere"}),
        lambda each: each["reference"][0]["inputs"]["observation"].update(values=[[1.0], [2.0, 3.0]]),
        lambda each: each["reference"][0]["inputs"]["observation"].update(values=["a"]),
        lambda each: each["reference"][0]["inputs"]["observation"].update(shape=[10**12]),
        lambda each: each["reference"][0]["inputs"]["observation"].update(dtype="object"),
        lambda each: each["reference"][0]["inputs"]["observation"].update(shape=[-1, 4]),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(edited, edit):
    assert refused(edited(edit))


@pytest.mark.parametrize(
    "edit",
    [
        lambda drift: drift["observation"]["components"].pop(),
        lambda drift: drift["observation"]["components"].append(drift["observation"]["components"][0]),
        lambda drift: drift["observation"].pop("components"),
        lambda drift: drift["observation"].update(components=7),
        lambda drift: drift["observation"].update(features=["mean"]),
        lambda drift: drift["observation"].update(n_samples="many"),
        lambda drift: drift["observation"]["n_effective"].append(1.0),
        lambda drift: drift["observation"].update(n_effective=[0.0] * 4),
        lambda drift: drift["observation"]["components"][0].pop("min"),
        lambda drift: drift["observation"]["components"][0]["shares"].pop(),
        lambda drift: drift["observation"]["components"][0]["edges"].append("a"),
        lambda drift: drift["observation"]["components"][0].update(edges=[[1.0, 2.0]]),
        lambda drift: drift["observation"]["components"][0].update(max="nan"),
        lambda drift: drift["observation"]["components"][0].update(max=10**400),
        lambda drift: drift["observation"]["components"][0].update(values=[], shares=[]),
        lambda drift: drift.update(unknown=drift["observation"]),
        lambda drift: drift.update(observation=None),
    ],
)
def test_drift_sections_that_are_not_those_of_the_observation_are_refused(edited, edit):
    """Such a section would fail later, when observations are compared with it."""
    assert "drift" in refused(edited(lambda description: edit(description["steps"][0]["drift"])))


def test_descriptions_of_any_content_are_refused_or_read(description, networks):
    n_refused = 0
    for number in range(200):
        changed = json.dumps(mutated_json(random.Random(number), description)).encode()
        with np.errstate(all="ignore"):
            try:
                PolicyBundle(zipped([("bundle.json", changed), *networks.items()]))
            except BundleError:
                n_refused += 1
    assert n_refused > 100


def test_a_bundle_that_differs_from_the_trained_policy_is_refused(edited):
    def other_actions(description: dict[str, Any]) -> None:
        description["reference"][0]["actions"]["action"]["values"] = [0, 1] * 30

    assert "differs from the trained policy" in refused(edited(other_actions))


def test_other_versions_are_named(edited):
    assert "found ('maze-policy-bundle', 1)" in refused(edited(lambda each: each.update(version=1)))


def test_large_files_are_not_read(tmp_path_factory, monkeypatch):
    path = tmp_path_factory.mktemp("large") / "large.maze"
    path.write_bytes(b"PK\x03\x04" * 10)
    monkeypatch.setattr("maze.serve.bundle.LARGEST_FILE", 20)
    with pytest.raises(BundleError, match="has 40 bytes"):
        PolicyBundle.load(path)
    with pytest.raises(BundleError, match="cannot be read: No such file"):
        PolicyBundle.load(path.with_name("nothing"))
