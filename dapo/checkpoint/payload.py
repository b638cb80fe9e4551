"""Reading tensors out of a checkpoint's files, which are checked against its metadata as they are read."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from .errors import DamagedCheckpoint, reason


@dataclass(frozen=True)
class Stored:
    """What metadata says of a piece."""

    file: str
    offset: int
    length: int
    shape: torch.Size
    dtype: torch.dtype


class TensorsPlanner(dcp.DefaultLoadPlanner):
    """Reads tensors and nothing else."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # The one that is replaced here unpickles anything.
        raise DamagedCheckpoint(f"{read_item.dest_index.fqn!r} is no tensor")


class TensorsReader(dcp.FileSystemReader):
    """Reads a folder whose metadata has been read and checked before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata
        self.pieces = _pieces(metadata)

    def read_metadata(self) -> Metadata:  # no **kwargs: without them no second attempt is made at other files
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Stored, ReadItem]]] = {}
        for item in plan.items:
            piece = self.pieces[item.storage_index]
            by_file.setdefault(piece.file, []).append((piece, item))
        for name, wanted in sorted(by_file.items()):
            path = self.path / name
            try:
                stream = path.open("rb")
            except OSError as error:
                raise DamagedCheckpoint(f"{path} cannot be read: {reason(error)}") from error
            with stream:
                for piece, item in sorted(wanted, key=lambda pair: pair[0].offset):
                    values = _read(path, stream, piece, item.storage_index.fqn)
                    target = planner.resolve_tensor(item).detach()
                    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                        values = values.narrow(dim, start, length)
                    target.copy_(values)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _pieces(metadata: Metadata) -> Mapping[MetadataIndex, Stored]:
    pieces = {}
    for name, tensor in metadata.state_dict_metadata.items():
        for chunk in tensor.chunks:
            index = MetadataIndex(name, chunk.offsets)
            place = metadata.storage_data[index]
            pieces[index] = Stored(
                place.relative_path, place.offset, place.length, chunk.sizes, tensor.properties.dtype
            )
    return pieces


def _read(path: Path, stream: io.BufferedReader, piece: Stored, name: str) -> Tensor:
    try:
        stream.seek(piece.offset)
        content = io.BytesIO(stream.read(piece.length))
        values = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # what comes of garbage has no end
        raise DamagedCheckpoint(f"{path} holds no {name!r} that can be read: {reason(error)}") from error
    if type(values) is not Tensor or values.layout != torch.strided or values.device.type != "cpu":
        raise DamagedCheckpoint(f"{path} holds something else than a tensor as {name!r}")
    if (values.shape, values.dtype) != (piece.shape, piece.dtype):
        raise DamagedCheckpoint(
            f"{path} holds {name!r} as {values.dtype} {list(values.shape)} instead of {piece.dtype} "
            f"{list(piece.shape)}"
        )
    return values
