"""This rank's part of each tensor, as torch.distributed.checkpoint is told to write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Piece:
    """A block of a tensor. A DTensor would do, but not one in host memory of a mesh of GPUs."""

    shape: torch.Size
    """Of the whole tensor."""
    offsets: torch.Size
    """Where in it the block begins."""
    values: Tensor
    sharded: bool
    """Whether other ranks may have other blocks. If not, all have the same."""


def pieces_of(
    tensors: Mapping[str, Tensor], held: Callable[[str, Tensor], Tensor] = lambda name, values: values
) -> dict[str, Piece]:
    """By the tensor's name; without those of which this rank has nothing.

    Args:
        held: given the name and this rank's block, the tensor to keep in its place.
    """
    pieces = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        offsets = torch.Size([0] * tensor.dim())
        values = tensor
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()
            offsets, values = chunk.offsets, tensor.to_local()
        # A shard of nothing would be written as a piece that lies behind the tensor's end.
        if values.numel() or not tensor.numel():
            pieces[name] = Piece(tensor.shape, offsets, held(name, values), isinstance(tensor, DTensor))
    return pieces


class PiecesPlanner(DefaultSavePlanner):
    """Writes pieces. What several ranks have is written by one of them, chosen so that all write equally
    much."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, piece) for name, piece in self.pieces.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.pieces[write_item.index.fqn].values


def _write_item(name: str, piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, piece.offsets),
        type=WriteItemType.SHARD if piece.sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=piece.offsets, sizes=piece.values.shape),
            properties=TensorProperties(dtype=piece.values.dtype),
            size=piece.shape,
        ),
    )
