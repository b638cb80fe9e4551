"""torch.distributed.checkpoint keeps its metadata in a pickle. This reads it without trusting it."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from .errors import DamagedCheckpoint, reason

_CODES = frozenset(
    [
        "PROTO",
        "FRAME",
        "MEMOIZE",
        "BINGET",
        "LONG_BINGET",
        "MARK",
        "STOP",
        "STACK_GLOBAL",
        "NEWOBJ",
        "REDUCE",
        "BUILD",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "EMPTY_LIST",
        "APPEND",
        "APPENDS",
        "EMPTY_DICT",
        "SETITEM",
        "SETITEMS",
    ]
)
"""What metadata is made of. Of the others, some import what `find_class` never hears of (EXT1), and
LONG_BINPUT makes the interpreter fill memory up to any index that a damaged byte gives."""


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"holds tensors of layout {name!r}")
    return torch.strided


_CLASSES = {
    (cls.__module__, cls.__name__): cls
    for cls in (
        dcp.Metadata,
        dcp.TensorStorageMetadata,
        dcp.TensorProperties,
        dcp.ChunkStorageMetadata,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        dcp._MEM_FORMAT_ENCODING,
        _StorageInfo,
    )
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **_CLASSES,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""All that metadata of tensors refers to. None of it does anything but hold values."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"holds {f'{module}.{name}'[:200]!r}, which a checkpoint has no use for"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("refers to something outside")


def read_metadata(path: Path, content: bytes) -> Any:
    """What the metadata file at `path`, of this content, holds. Nothing in it can run code; whether it makes
    sense is to be checked.

    Raises:
        DamagedCheckpoint: it holds more than metadata of tensors, or cannot be read.
    """
    try:
        for code, _, _ in pickletools.genops(content):
            if code.name not in _CODES:
                raise pickle.UnpicklingError(f"holds {code.name}, which a checkpoint has no use for")
        return _Unpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        raise DamagedCheckpoint(f"{path} {reason(error).removeprefix('UnpicklingError: ')}") from error
    except Exception as error:  # what pickles of garbage raise has no end
        raise DamagedCheckpoint(f"{path} cannot be read: {reason(error)}") from error
