"""Checkpoints on disk: what is read is what was written, on any number of ranks, or nothing is.

`checkpoint_cases.py` holds what several processes run. Damaged ones: test_checkpoint_fuzz.py.
"""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_cases import blank, full_disk, same_bits, values
from processes import environment, run_cases, shared_launch
from torch.distributed.checkpoint.filesystem import FileSystem

from dapo.checkpoint import (
    BackgroundWriter,
    CheckpointFailed,
    latest_checkpoint,
    open_checkpoint,
    prune,
    saved_steps,
    step_folder,
    write_checkpoint,
)
from dapo.checkpoint.manifest import Entry
from dapo.checkpoint.write import write_pieces
from dapo.errors import UserError
from dapo.parallel import World

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as the package does
ALONE = World(torch.device("cpu"))
TWO = "round_trip fsdp hsdp failure damage background"


def write(root: Path, step: int, tensors=None, state=None, rank_state=None) -> Path:
    tensors = values() if tensors is None else tensors
    return write_checkpoint(root, step, tensors, state or {}, rank_state or {}, ALONE)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = blank(values())
    open_checkpoint(folder, ALONE).load(tensors)
    return tensors


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Results of all cases on two processes, and the folder with what they wrote."""

    def launch(folder: Path) -> dict[str, dict]:
        write(folder / "one", 1)
        return run_cases(folder, 2, "checkpoint_cases.py", TWO.split())

    results, folder = shared_launch(tmp_path_factory, "checkpoints", launch)
    return results | {"folder": folder}


def test_one_process_reads_what_it_wrote(tmp_path):
    state, rank_state = {"step": 10, "losses": [0.1, 1e300], "name": "é"}, {"rng": list(range(5))}
    path = write(tmp_path, 10, state=state, rank_state=rank_state)
    assert path == step_folder(tmp_path, 10) == tmp_path / "step_000010"
    assert os.listdir(tmp_path) == ["step_000010"]
    checkpoint = latest_checkpoint(tmp_path, ALONE)
    assert (checkpoint.path, checkpoint.step) == (path, 10)
    assert (checkpoint.state, checkpoint.rank_states) == (state, [rank_state])
    assert checkpoint.names == values().keys()
    assert checkpoint.shapes == {name: value.shape for name, value in values().items()}
    assert same_bits(loaded(path), values())
    assert str(tmp_path).encode() not in (path / ".metadata").read_bytes()


def test_views_and_parameters(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    tensors = {"t": base.t(), "part": base[1:3, 2:4], "all": base, "weight": torch.nn.Parameter(base[:2])}
    path = write(tmp_path, 1, tensors)
    got = {"t": torch.empty(4, 6).t(), "part": torch.empty(2, 2), "all": torch.empty(6, 4).t()}
    got["weight"] = torch.nn.Parameter(torch.empty(2, 6))
    open_checkpoint(path, ALONE).load(got)
    assert all(torch.equal(got[name], value) for name, value in tensors.items())
    assert got["weight"].requires_grad
    assert (path / "__0_0.distcp").stat().st_size < 4 * 2000  # a view does not bring all of its memory


def test_two_ranks_read_what_they_wrote(two):
    result = two["round_trip"]
    assert result["same"] and result["whole"] and result["from one"]
    assert result["state"] == {"rank": 0}
    assert result["rank states"] == [{"rank": 0}, {"rank": 1}]
    assert result["shapes"] == result["want shapes"]
    tensors = ["__0_0.distcp", "__1_0.distcp"]
    assert result["files"] == [".metadata", *tensors, "manifest.json", "ranks.json", "state.json"]
    assert "even (torch.float32 [8, 3] there, torch.float32 [7, 5] here)" in result["refused"]


def test_one_process_reads_what_two_wrote(two):
    assert same_bits(loaded(two["folder"] / "shards" / "step_000010"), values())


def test_a_sharded_models_training_goes_on(two):
    assert two["fsdp"]["different"] and two["fsdp"]["same"]


def test_replicas_write_each_value_once(two):
    result = two["hsdp"]
    assert result["same"] and result["shards"] and result["from one"]
    assert sum(result["sizes"]) == result["alone"]
    assert max(result["sizes"]) < 0.7 * result["alone"]
    assert same_bits(loaded(two["folder"] / "hsdp" / "step_000001"), values())


@pytest.mark.slow
def test_four_ranks_read_what_two_wrote(two):
    results = run_cases(two["folder"], 4, "checkpoint_cases.py", ["from_two", "hsdp"])
    assert results["from_two"]["shards"] and results["from_two"]["hsdp"]
    assert results["hsdp"]["same"] and results["hsdp"]["shards"]
    assert same_bits(loaded(two["folder"] / "hsdp" / "step_000001"), values())


def test_what_one_rank_cannot_write_fails_on_all(two):
    result = two["failure"]
    first, second = result["errors"]
    assert first == second
    for name, rank in (("rank 1", 1), ("rank 0", 0), ("metadata", 0), ("manifest", 0), ("replacing", 1)):
        assert first[name].endswith(f"could not be written: No space left on device (process {rank})"), name
        assert first[name].startswith("CheckpointFailed: checkpoint /"), name
    assert first["not JSON"].endswith("object is not JSON serializable (process 1)")
    assert (result["left"], result["kept"], result["old"]) == (["step_000001"], 1, {})
    assert result["loads"]


def test_all_ranks_see_the_same_damage(two):
    first, second = two["damage"]["seen"]
    assert first == second
    assert "step_000002/ranks.json is not as it was written" in first[0]
    assert first[1:] == [1, None]


def test_two_ranks_write_in_the_background(two):
    result = two["background"]
    assert result["first"] and result["second"]
    (error, nothing), other = result["errors"]
    assert [error, nothing] == other
    assert error.endswith("step_000003 could not be written: No space left on device (process 1)")
    assert nothing == "none"
    assert result["done"] == [["step_000001", "step_000002"], []]
    assert result["steps"] == [1, 2, 4]


@pytest.mark.parametrize("calls", range(7))
def test_a_full_disk_leaves_what_was_there(tmp_path, calls):
    """Of two files of tensors, three of ours, and two folders, none may go unnoticed."""
    write(tmp_path, 1, state={"old": 1})
    with full_disk(True, calls), pytest.raises(CheckpointFailed) as error:
        write(tmp_path, 2)
    assert str(error.value) == (
        f"checkpoint {tmp_path}/step_000002 could not be written: No space left on device"
    )
    assert os.listdir(tmp_path) == ["step_000001"] if calls < 6 else saved_steps(tmp_path) == [1, 2]
    with full_disk(True, min(calls, 5)), pytest.raises(CheckpointFailed):
        write(tmp_path, 1)
    assert open_checkpoint(tmp_path / "step_000001", ALONE).state == {"old": 1}


class AlmostFull(io.FileIO):
    """Room is left for what is small."""

    def write(self, content) -> int:
        if len(content) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def full(path: Path, mode: str) -> io.BufferedWriter:
    return io.BufferedWriter(io.FileIO("/dev/full", mode))


@pytest.mark.parametrize("disk", [full, AlmostFull])
def test_a_disk_that_fills_up_while_tensors_are_written(tmp_path, monkeypatch, disk):
    """torch.save hides the reason behind one of its own."""

    @contextmanager
    def create_stream(self, path, mode):
        with disk(path, mode) as stream:
            yield stream

    monkeypatch.setattr(FileSystem, "create_stream", create_stream)
    with pytest.raises(CheckpointFailed, match=r"step_000001 could not be written: No space left on device$"):
        write(tmp_path, 1, {"a": torch.zeros(1000)})
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFailed, match=r"file/step_000001 could not be written: (Not a|File exists)"):
        write(tmp_path / "file", 1)


def test_processes_that_see_different_folders(tmp_path, monkeypatch):
    """As on two machines without a common disk: what the other wrote is not here."""
    elsewhere = {"__1_0.distcp": Entry(3, "0" * 64)}
    monkeypatch.setattr("dapo.checkpoint.write._written_by", lambda partial, world: elsewhere)
    with pytest.raises(
        CheckpointFailed, match=r"__1_0\.distcp of another process is not there: all must see"
    ):
        write(tmp_path, 1)
    assert os.listdir(tmp_path) == []


def test_ctrl_c_is_no_failure(tmp_path, monkeypatch):
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 1)
    assert os.listdir(tmp_path) == []


def killed(work, point: int) -> bool:
    """Runs `work` in a child that is killed at a numbered fsync, rename or deletion; whether it was."""
    child = os.fork()
    if child == 0:
        left = [point]

        def at(real, *args, **kwargs):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return real(*args, **kwargs)

        for name in ("fsync", "rename", "unlink", "rmdir"):
            setattr(os, name, functools.partial(at, getattr(os, name)))
        work()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_killed_writer_leaves_whole_checkpoints_only(tmp_path):
    small = {"a": torch.arange(3)}
    seen, point = set(), 0
    while True:
        root = tmp_path / str(point)
        write(root, 1, small, {"written": "first"})
        write(root, 2, small, {"written": "second"})

        def work(root=root) -> None:
            write(root, 2, small, {"written": "third"})
            prune(root, keep=1)

        if not killed(work, point):
            break
        assert [open_checkpoint(step_folder(root, step), ALONE).step for step in saved_steps(root)]
        found = latest_checkpoint(root, ALONE)
        seen.add(found.state["written"])
        found.load({"a": torch.zeros(3, dtype=torch.int64)})
        prune(root, keep=1)
        assert os.listdir(root) == [found.path.name]
        write(root, 3, small)
        assert saved_steps(root)[-1] == 3
        point += 1
    assert point >= 9
    assert seen == {"first", "second", "third"}  # first: between two renames


def test_strangers_are_no_checkpoints(tmp_path):
    names = (
        "step_000003 step_1234567 step_12 step_0000012 .step_000009.partial step_abc model step_000004.tmp"
    )
    for name in names.split():
        (tmp_path / name).mkdir()
    (tmp_path / "step_000007").write_text("a file")
    assert saved_steps(tmp_path) == [3, 1234567]
    assert saved_steps(tmp_path / "nowhere") == []
    assert step_folder(tmp_path, 1234567).name == "step_1234567"


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step in (1, 2, 3, 10, 20):
        write(tmp_path, step, {"a": torch.zeros(1)})
    for name in (".step_000002.partial", ".step_000003.replaced", ".step_000004.deleted", "notes", ".step_x"):
        (tmp_path / name).mkdir()
    prune(tmp_path, keep=2, best=2)
    assert sorted(os.listdir(tmp_path)) == [".step_x", "notes", "step_000002", "step_000010", "step_000020"]
    prune(tmp_path, keep=5)
    assert saved_steps(tmp_path) == [2, 10, 20]
    prune(tmp_path, keep=1, best=99)
    assert saved_steps(tmp_path) == [20]


def test_what_cannot_be_deleted_is_warned_of(tmp_path, monkeypatch, caplog):
    for step in (1, 2, 3):
        write(tmp_path, step, {"a": torch.zeros(1)})
    real = os.rename

    def rename(source, target) -> None:
        if Path(source).name == "step_000001":
            raise PermissionError(errno.EACCES, "Permission denied")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    prune(tmp_path, keep=1)
    assert saved_steps(tmp_path) == [1, 3]
    assert f"{tmp_path}/step_000001 could not be deleted: Permission denied" in caplog.text


def test_the_newest_whole_one_is_taken(tmp_path, caplog):
    assert latest_checkpoint(tmp_path, ALONE) is None
    for step in (1, 2, 3):
        path = write(tmp_path, step, {"a": torch.zeros(1)})
    (path / "manifest.json").unlink()
    (tmp_path / "step_000002" / "__0_0.distcp").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path, ALONE).step == 1
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    first, second = (record.getMessage() for record in warned)
    assert "step 3 is passed over" in first and "step_000003/manifest.json is missing" in first
    assert "step_000002/__0_0.distcp has 0 bytes instead of" in second
    (tmp_path / "step_000001" / "state.json").write_text("{ }\n")
    with pytest.raises(UserError, match=rf"all 3 checkpoints in {tmp_path} are damaged \(.*state.json"):
        latest_checkpoint(tmp_path, ALONE)
    with pytest.raises(UserError, match=r"checkpoint .*/step_000009 not found"):
        open_checkpoint(tmp_path / "step_000009", ALONE)


def test_tensors_of_another_model_are_refused_and_left_alone(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path, 1), ALONE)

    def refused(changes: dict) -> str:
        tensors = blank(values()) | changes
        with pytest.raises(UserError) as error:
            checkpoint.load(tensors)
        assert same_bits(tensors, blank(values()) | changes)
        return str(error.value).removeprefix(f"checkpoint {checkpoint.path} ")

    new = {f"new{i}": torch.ones(1) for i in range(5)}
    assert refused(new) == "lacks new0, new1, new2, and 2 more"
    assert refused({"long": torch.ones(34), "step": torch.ones((), dtype=torch.float64)}) == (
        "is of another model: long (torch.float32 [33] there, torch.float32 [34] here), "
        "step (torch.float32 [] there, torch.float64 [] here)"
    )
    some = {"long": torch.ones(33)}
    checkpoint.load(some)
    assert torch.equal(some["long"], values()["long"])


def test_the_background_writer_keeps_what_was_saved(tmp_path, monkeypatch):
    writer, paths, changed = BackgroundWriter(tmp_path, ALONE), [], threading.Event()

    def late(*arguments):
        assert changed.wait(60)
        return write_pieces(*arguments)

    monkeypatch.setattr("dapo.checkpoint.background.write_pieces", late)
    tensors, state = values(), {"list": [1]}
    writer.save(1, tensors, state, state, paths.append)
    state["list"].append(2)
    for value in tensors.values():
        value.zero_()
    assert saved_steps(tmp_path) == paths == []
    changed.set()
    writer.save(2, tensors, {}, {}, lambda path: 1 / 0)  # waits for the first
    assert paths == [tmp_path / "step_000001"]
    memory = {name: value.data_ptr() for name, value in writer._staged.items()}
    writer.save(3, tensors | {"long": torch.ones(2)}, {}, {})
    writer.wait()
    moved = {name for name, value in writer._staged.items() if value.data_ptr() != memory[name]}
    assert moved - {"none", "none.bf16"} == {"long"}  # the others were copied to where they had been
    assert same_bits(loaded(tmp_path / "step_000001"), values())
    assert same_bits(loaded(tmp_path / "step_000002"), tensors)
    first = open_checkpoint(tmp_path / "step_000001", ALONE)
    assert (first.state, first.rank_states) == ({"list": [1]}, [{"list": [1]}])
    assert saved_steps(tmp_path) == [1, 2, 3]
    writer.close()
    assert {value.data_ptr() for value in tensors.values()}.isdisjoint({*memory.values()} - {0})


def test_the_background_writer_fails_once(tmp_path, caplog):
    writer = BackgroundWriter(tmp_path, ALONE)
    tensors = {"a": torch.ones(1)}
    with full_disk(True):
        writer.save(1, tensors, {}, {})
        with pytest.raises(CheckpointFailed, match="No space left"):
            writer.wait()
        writer.wait()
        writer.save(2, tensors, {}, {})
        with pytest.raises(CheckpointFailed, match="step_000002"):
            writer.save(3, tensors, {}, {})
        writer.save(4, tensors, {}, {})
        writer.close()
    assert "step_000004 could not be written: No space left" in caplog.text
    writer.save(5, tensors, {}, {})
    writer.wait()
    assert os.listdir(tmp_path) == ["step_000005"]


def test_what_cannot_be_copied_fails_in_the_writer(tmp_path):
    writer = BackgroundWriter(tmp_path, ALONE)
    writer.save(1, {"a": torch.ones(1, device="meta")}, {}, {})
    with pytest.raises(CheckpointFailed, match="step_000001 could not be written: no copy in host memory: "):
        writer.wait()


def test_the_writer_ends_with_its_process(tmp_path):
    program = f"""if True:
        import os, sys, time, torch
        from pathlib import Path
        from dapo.checkpoint import BackgroundWriter
        from dapo.parallel import World
        os.fsync = lambda descriptor: (print("at it", flush=True), time.sleep(100))
        writer = BackgroundWriter(Path({str(tmp_path)!r}), World(torch.device("cpu")))
        writer.save(1, {{"a": torch.ones(1)}}, {{}}, {{}})
        sys.stdin.readline()
        raise SystemExit(3)"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], env=environment(), **pipes) as process:
        assert process.stdout.readline() == "at it\n"
        started = time.monotonic()
        process.communicate("\n", timeout=30)
        assert process.returncode == 3
        assert time.monotonic() - started < 20
    assert saved_steps(tmp_path) == []
