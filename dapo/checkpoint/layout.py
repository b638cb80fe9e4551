"""Whether metadata makes sense: every tensor's pieces cover it, and lie in files of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from .errors import DamagedCheckpoint, reason


class _Senseless(Exception):
    """The message goes on after the file's name."""


def check_layout(path: Path, metadata: Any, sizes: Mapping[str, int]) -> Metadata:
    """The metadata read from `path`, if it makes sense.

    Args:
        sizes: of the checkpoint's files.

    Raises:
        DamagedCheckpoint: it does not.
    """
    try:
        _check(metadata, sizes)
    except _Senseless as error:
        raise DamagedCheckpoint(f"{path} {error}") from error
    except Exception as error:  # objects that lack what theirs have, values of any type
        raise DamagedCheckpoint(f"{path} makes no sense: {reason(error)}") from error
    return metadata


def _check(metadata: Any, sizes: Mapping[str, int]) -> None:
    if type(metadata) is not Metadata or type(metadata.state_dict_metadata) is not dict:
        raise _Senseless("holds no metadata")
    stored = metadata.storage_data
    pieces = 0
    for name, tensor in metadata.state_dict_metadata.items():
        if type(name) is not str or type(tensor) is not TensorStorageMetadata:
            raise _Senseless(f"holds {name!r}, which is no tensor")
        if type(tensor.properties.dtype) is not torch.dtype or not _shape(tensor.size):
            raise _Senseless(f"gives no shape and dtype of {name!r}")
        _check_cover(name, tensor)
        for chunk in tensor.chunks:
            _check_place(name, stored.get(MetadataIndex(name, chunk.offsets)), sizes)
        pieces += len(tensor.chunks)
    if len(stored) != pieces:
        raise _Senseless(f"places {len(stored)} pieces of tensors and describes {pieces}")


def _shape(value: Any) -> bool:
    return type(value) is torch.Size and all(size >= 0 for size in value)


def _check_cover(name: str, tensor: TensorStorageMetadata) -> None:
    """Every element belongs to exactly one piece."""
    whole, chunks = tensor.size, tensor.chunks
    for chunk in chunks:
        if (
            type(chunk) is not ChunkStorageMetadata
            or not _shape(chunk.offsets)
            or not _shape(chunk.sizes)
            or not len(chunk.offsets) == len(chunk.sizes) == len(whole)
            or any(at + size > end for at, size, end in zip(chunk.offsets, chunk.sizes, whole))
        ):
            raise _Senseless(f"has a piece of {name!r} that lies outside of it")
    if not chunks or sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(whole):
        raise _Senseless(f"has pieces of {name!r} that do not add up to it")
    if len(chunks) == 1:
        return
    # Pieces in order along the dimension that most of them differ in: few neighbours are left to compare.
    dim = max(range(len(whole)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets[dim])
    for i, chunk in enumerate(ordered):
        end = chunk.offsets[dim] + chunk.sizes[dim]
        for other in ordered[i + 1 :]:
            if other.offsets[dim] >= end:
                break
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes)
            ):
                raise _Senseless(f"has pieces of {name!r} that overlap")


def _check_place(name: str, place: Any, sizes: Mapping[str, int]) -> None:
    if type(place) is not _StorageInfo or place.transform_descriptors is not None:
        raise _Senseless(f"does not say where a piece of {name!r} is")
    file = place.relative_path
    if type(file) is not str or file not in sizes or not file.endswith(".distcp"):
        raise _Senseless(f"has a piece of {name!r} in {file!r}, which is no file of the checkpoint")
    if (
        type(place.offset) is not int
        or type(place.length) is not int
        or not 0 <= place.offset <= place.offset + place.length <= sizes[file]
    ):
        raise _Senseless(f"has a piece of {name!r} outside of {file}")
