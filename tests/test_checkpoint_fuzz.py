"""Damaged and malicious checkpoints: one line that names what is wrong, or exactly what was written."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_cases import blank, same_bits, values
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from dapo.checkpoint import DamagedCheckpoint, latest_checkpoint, open_checkpoint, write_checkpoint
from dapo.checkpoint.manifest import sealed
from dapo.errors import UserError
from dapo.parallel import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as the package does
ALONE = World(torch.device("cpu"))
FILES = (".metadata", "__0_0.distcp", "manifest.json", "ranks.json", "state.json")
SEEDS = 25


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    state = {"step": 7, "losses": [0.5, 1.25], "stream": {"epoch": 1, "position": 3}}
    return write_checkpoint(
        tmp_path_factory.mktemp("whole"), 7, values(), state, {"rng": list(range(20))}, ALONE
    )


@pytest.fixture
def fresh(original, tmp_path) -> Callable[[], Path]:
    """A copy to damage, each time."""

    def copy() -> Path:
        folder = tmp_path / original.name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        return folder

    return copy


def attempt(folder: Path) -> str:
    """What is said of the checkpoint; "" where it was loaded exactly, "other" where with other values. Errors
    of other types, and those of several lines, pass through."""
    try:
        checkpoint = open_checkpoint(folder, ALONE)
        tensors = blank(values())
        checkpoint.load(tensors)
    except UserError as error:
        assert "\n" not in str(error) and str(error)
        return str(error)
    return "" if same_bits(tensors, values()) else "other"


def reseal(folder: Path, change: Callable[[dict], None] = lambda manifest: None) -> None:
    """Brings the manifest's sizes and digests up to date, as one who wants to be believed would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    change(manifest)
    (folder / "manifest.json").write_bytes(sealed(manifest))


def flip(path: Path, rng: random.Random, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(bits):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def overwrite(path: Path, rng: random.Random) -> None:
    """A stretch of it, by noise: the size stays."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    length = min(rng.randrange(1, 200), len(content) - start)
    content[start : start + length] = bytes(
        b ^ rng.randrange(1, 256) for b in content[start : start + length]
    )
    path.write_bytes(content)


def append(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 30)))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def link(path: Path, rng: random.Random) -> None:
    """To the very same content."""
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(elsewhere)


def to_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def swap(path: Path, rng: random.Random) -> None:
    other = path.with_name(rng.choice([name for name in FILES if name != path.name]))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


DAMAGES = (flip, truncate, overwrite, append, remove, link, to_folder, swap)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_seen(fresh, damage):
    for seed in range(6 if damage in (flip, truncate, overwrite) else 2):
        for name in FILES:
            folder = fresh()
            damage(folder / name, random.Random(seed))
            said = attempt(folder)
            assert f"{folder}/" in said, (seed, name, said)
            if damage is not swap:
                assert name in said, (seed, name, said)
            with pytest.raises(UserError, match=r"all 1 checkpoints in .* are damaged"):
                latest_checkpoint(folder.parent, ALONE)


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
@pytest.mark.parametrize("damage", [flip, overwrite, truncate])
def test_damage_that_was_signed_is_seen_or_harmless(fresh, name, damage):
    """The parsers are reached. A tensor's values may be others then; nothing else."""
    found = []
    for seed in range(SEEDS):
        folder = fresh()
        damage(folder / name, random.Random(seed))
        reseal(folder)
        said = attempt(folder)
        assert said != "other" or name == "__0_0.distcp", seed
        assert said in ("", "other") or str(folder) in said, (seed, said)
        found.append(said)
    assert any(said not in ("", "other") for said in found)


def test_an_extra_file_is_refused(fresh):
    for extra in (".hidden", "__1_0.distcp", "notes.txt", "two\nlines"):
        folder = fresh()
        (folder / extra).write_text("")
        assert attempt(folder).endswith(f"holds {extra!r}, which manifest.json does not list")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "manifest.json is not JSON"),
        (b"[]", "manifest.json must hold a mapping"),
        (b"{}", "manifest.json is without a digest of its own"),
        (b"null", "manifest.json must hold a mapping"),
        (b"[" * 100_000, "manifest.json is not JSON"),
        (b'{"step": 1' + b"0" * 5000 + b"}", "manifest.json is not JSON"),
        (b"\xff\xfe\x00", "manifest.json is not JSON"),
    ],
)
def test_a_manifest_that_is_none(fresh, content, message):
    folder = fresh()
    (folder / "manifest.json").write_bytes(content)
    assert message in attempt(folder)


SENSELESS = [
    (lambda m: m.update(format=2), "manifest.json has format 2, this version reads 1"),
    (lambda m: m.update(format=True), "manifest.json has format True"),
    (lambda m: m.pop("format"), "manifest.json has format None"),
    (lambda m: m.update(step="7"), "manifest.json has step '7'"),
    (lambda m: m.update(step=-1), "manifest.json has step -1"),
    (lambda m: m.update(step=8), "step_000007 holds the checkpoint of step 8"),
    (lambda m: m.update(files=[]), "manifest.json lists no files"),
    (lambda m: m.update(files={}), "manifest.json does not list .metadata"),
    (lambda m: m["files"].pop("state.json"), "manifest.json does not list state.json"),
    (lambda m: m["files"].pop("__0_0.distcp"), "holds '__0_0.distcp', which manifest.json does not list"),
    (lambda m: m["files"].update({"__1_0.distcp": m["files"]["state.json"]}), "__1_0.distcp is missing"),
    (lambda m: m["files"].update({".metadata": 3}), "gives no size and digest of .metadata"),
    (lambda m: m["files"][".metadata"].update(size=1.5), "gives no size and digest of .metadata"),
    (lambda m: m["files"][".metadata"].update(size=True), "gives no size and digest of .metadata"),
    (lambda m: m["files"][".metadata"].update(sha256="0" * 63), "gives no size and digest of .metadata"),
    (lambda m: m["files"][".metadata"].update(sha256=None), "gives no size and digest of .metadata"),
]
SENSELESS += [
    (
        lambda m, name=name: m["files"].update({name: m["files"]["state.json"]}),
        "which is no file of a checkpoint",
    )
    for name in ("../state.json", "/etc/passwd", "a/../state.json", "", ".", "__0_0.distcp\n", "x.distcp")
]


@pytest.mark.parametrize(("change", "message"), SENSELESS)
def test_a_signed_manifest_that_makes_no_sense(fresh, change, message):
    folder = fresh()
    reseal(folder, change)
    assert message in attempt(folder)


def test_a_checkpoint_of_another_format_is_not_passed_over(fresh):
    """It is whole: whoever goes on from an older one should know."""
    folder = fresh()
    shutil.copytree(folder, folder.with_name("step_000006"))
    reseal(folder.with_name("step_000006"), lambda manifest: manifest.update(step=6))
    reseal(folder, lambda manifest: manifest.update(format=2))
    with pytest.raises(UserError, match="has format 2, this version reads 1: go on with the version"):
        latest_checkpoint(folder.parent, ALONE)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", "[]", "state.json must hold a mapping"),
        ("state.json", "", "state.json is not JSON"),
        ("ranks.json", "{}", "ranks.json must hold a list"),
        ("ranks.json", "[]", "ranks.json must hold a list of mappings"),
        ("ranks.json", "[1]", "ranks.json must hold a list of mappings"),
        (".metadata", "", ".metadata cannot be read"),
    ],
)
def test_signed_files_of_other_types(fresh, name, content, message):
    folder = fresh()
    (folder / name).write_text(content)
    reseal(folder)
    assert message in attempt(folder)


def edit_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    reseal(folder)


def place(metadata: Metadata, **changes) -> None:
    """Changes where the piece of `long` is said to be."""
    vars(metadata.storage_data[MetadataIndex("long", torch.Size([0]))]).update(changes)


def chunks(metadata: Metadata, *pieces: tuple[int, int]) -> None:
    """Gives `long`, of 33 values, other pieces."""
    metadata.state_dict_metadata["long"].chunks = [
        ChunkStorageMetadata(torch.Size([at]), torch.Size([size])) for at, size in pieces
    ]
    stored = metadata.storage_data.pop(MetadataIndex("long", torch.Size([0])))
    metadata.storage_data |= {MetadataIndex("long", torch.Size([at])): stored for at, _ in pieces}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: vars(m).update(state_dict_metadata=[]), "holds no metadata"),
        (lambda m: m.state_dict_metadata.update(more=3), "holds 'more', which is no tensor"),
        (
            lambda m: m.state_dict_metadata.update(more=BytesStorageMetadata()),
            "checkpoint.metadata.BytesStorageMetadata', which a checkpoint has no use for",
        ),
        (lambda m: m.storage_data.clear(), "does not say where a piece of"),
        (lambda m: vars(m).update(storage_data=None), "makes no sense: AttributeError"),
        (lambda m: vars(m.state_dict_metadata["long"]).pop("chunks"), "makes no sense: AttributeError"),
        (lambda m: vars(m.state_dict_metadata["long"]).update(size=(33,)), "no shape and dtype of 'long'"),
        (
            lambda m: place(m, relative_path="../step_000007/__0_0.distcp"),
            "which is no file of the checkpoint",
        ),
        (lambda m: place(m, relative_path="/etc/passwd"), "which is no file of the checkpoint"),
        (lambda m: place(m, relative_path="state.json"), "which is no file of the checkpoint"),
        (lambda m: place(m, relative_path="__1_0.distcp"), "which is no file of the checkpoint"),
        (lambda m: place(m, offset=-1), "has a piece of 'long' outside of __0_0.distcp"),
        (lambda m: place(m, length=10**9), "has a piece of 'long' outside of __0_0.distcp"),
        (lambda m: place(m, offset=2**70), "has a piece of 'long' outside of __0_0.distcp"),
        (lambda m: place(m, transform_descriptors=["zstd"]), "does not say where a piece of 'long' is"),
        (lambda m: place(m, offset=0), "holds 'long' as"),
        (lambda m: place(m, length=3), "holds no 'long' that can be read"),
        (lambda m: chunks(m, (0, 32)), "has pieces of 'long' that do not add up to it"),
        (lambda m: chunks(m), "has pieces of 'long' that do not add up to it"),
        (lambda m: chunks(m, (0, 34)), "has a piece of 'long' that lies outside of it"),
        (lambda m: chunks(m, (0, 20), (13, 13)), "has pieces of 'long' that overlap"),
        (lambda m: chunks(m, (0, 20), (20, 13)), "holds 'long' as torch.float32 [33] instead of"),
        (
            lambda m: vars(m.state_dict_metadata["long"].properties).update(dtype=torch.int32),
            "is of another model: long (torch.int32 [33] there, torch.float32 [33] here)",
        ),
        (
            lambda m: m.state_dict_metadata.pop("long"),
            "places 15 pieces of tensors and describes 14",
        ),
        (lambda m: m.storage_meta.modules.append(os.system), "which a checkpoint has no use for"),
        (lambda m: m.storage_meta.modules.append({1}), "holds EMPTY_SET, which a checkpoint has no use for"),
        (
            lambda m: m.storage_meta.modules.append(b"x"),
            "holds SHORT_BINBYTES, which a checkpoint has no use",
        ),
    ],
)
def test_signed_metadata_that_makes_no_sense(fresh, change, message):
    folder = fresh()
    edit_metadata(folder, change)
    said = attempt(folder)
    assert message in said
    assert str(folder) in said


def test_metadata_of_another_tensor_is_refused_by_its_values_type(fresh):
    """The tensor that is asked for has the dtype that metadata gives, the stored one another."""
    folder = fresh()
    edit_metadata(folder, lambda m: vars(m.state_dict_metadata["long"].properties).update(dtype=torch.int32))
    checkpoint = open_checkpoint(folder, ALONE)
    with pytest.raises(
        DamagedCheckpoint, match=r"'long' as torch.float32 \[33\] instead of torch.int32 \[33\]"
    ):
        checkpoint.load({"long": torch.zeros(33, dtype=torch.int32)})


class Payload:
    """Runs a command where it is unpickled by a trusting reader."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_metadata_runs_no_code(fresh, tmp_path, protocol):
    folder, trace = fresh(), tmp_path / "trace"
    hostile = pickle.dumps(Payload(f"touch {trace}"), protocol=protocol)
    pickle.loads(hostile)
    assert trace.exists()  # it would
    trace.unlink()
    (folder / ".metadata").write_bytes(hostile)
    reseal(folder)
    said = attempt(folder)
    assert f"{folder}/.metadata holds " in said and said.endswith(", which a checkpoint has no use for")
    assert not trace.exists()


def test_metadata_cannot_reach_what_hides_behind_a_name(fresh, tmp_path):
    """Dotted names, aliases in allowed modules."""
    for module, name in (
        ("torch", "os.system"),
        ("torch.serialization", "os"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("builtins", "eval"),
    ):
        folder = fresh()
        # PROTO 4, the two names, STACK_GLOBAL, STOP
        names = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
        (folder / ".metadata").write_bytes(b"\x80\x04" + names + b"\x93.")
        reseal(folder)
        assert f"holds '{module}.{name}', which a checkpoint has no use for" in attempt(folder)


def test_metadata_cannot_fill_memory(fresh):
    """An index of two billion into the unpickler's memo: 16 GiB, before it is found that nothing follows."""
    folder = fresh()
    (folder / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\x7f.")
    reseal(folder)
    assert "holds LONG_BINPUT, which a checkpoint has no use for" in attempt(folder)


def test_tensors_run_no_code(fresh, tmp_path):
    """Of each tensor's pickle, and of one that is no archive."""
    trace = tmp_path / "trace"
    for whole in (True, False):
        folder = fresh()
        path = folder / "__0_0.distcp"
        hostile = pickle.dumps(Payload(f"touch {trace}"), protocol=2)
        if whole:
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as archive:
                archive.writestr("archive/data.pkl", hostile)
                archive.writestr("archive/version", "3\n")
                archive.writestr("archive/byteorder", "little")
            hostile = buffer.getvalue()
        path.write_bytes(hostile)

        def point(metadata: Metadata, length: int = len(hostile)) -> None:
            for stored in metadata.storage_data.values():
                vars(stored).update(offset=0, length=length)

        edit_metadata(folder, point)
        said = attempt(folder)
        assert f"{path} holds no " in said and "that can be read" in said
        assert not trace.exists()


def test_what_is_no_tensor_is_refused(fresh):
    for value in ({"a": torch.ones(1)}, torch.nn.Parameter(torch.ones(33)), torch.ones(33).to_sparse(), 3):
        folder = fresh()
        buffer = io.BytesIO()
        torch.save(value, buffer)
        (folder / "__0_0.distcp").write_bytes(buffer.getvalue())

        def point(metadata: Metadata, length: int = buffer.tell()) -> None:
            for stored in metadata.storage_data.values():
                vars(stored).update(offset=0, length=length)

        edit_metadata(folder, point)
        assert "holds something else than a tensor as" in attempt(folder)
