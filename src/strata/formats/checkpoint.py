"""A checkpoint on disk: names, shapes, types and bytes of its tensors, and what lies beside.

One face over a GGUF file or split set and a safetensors file, set or folder. Knows no models: what
a tensor is for is decided above. Invariant: everything is checked on open, so that reading a tensor
cannot fail on damage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.core.closing import Closing
from strata.core.errors import InputError, UnsupportedError
from strata.formats.claims import check_quantization_claim
from strata.formats.discover import Format, Found, find_checkpoint
from strata.formats.gguf import MetadataValue
from strata.formats.gguf_split import ARCHITECTURE_KEY, GgufSet, open_gguf_set
from strata.formats.json_file import read_json_object
from strata.formats.mapped import MappedFile
from strata.formats.quants import dequantize
from strata.formats.safetensors_set import open_safetensors_set
from strata.formats.tensor_info import TensorInfo
from strata.formats.text import counted, listed, quoted

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_NATIVE_DTYPES = {
    "F32": "<f4",
    "F16": "<f2",
    "F64": "<f8",
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "<u1",
    "BOOL": "<u1",
}
_NOT_MODELS = {
    "adapter": "a LoRA adapter; merge it into its base model",
    "mmproj": "a vision tower; only the language model's file is supported",
    "imatrix": "an importance matrix, which holds no weights",
}


@dataclass(frozen=True)
class Beside:
    """The descriptions in a safetensors checkpoint's folder."""

    config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_files: dict[str, Path] = field(default_factory=dict)


class Checkpoint(Closing):
    """An open checkpoint, made by ``open_checkpoint``; closing leaves views handed out alive.

    format: "gguf" or "safetensors". path: what was asked for. root: its folder. paths: its files in
    order. size_bytes: of all files. tensors: by name, in the files' order.
    metadata: the GGUF keys of the model's part, or the safetensors headers' free text; stays
    readable after close. metadata_types: what each key is stored as.
    config, generation_config: contents of the JSON files, {} when absent and for GGUF.
    tokenizer_files: those of tokenizer.json, tokenizer_config.json and chat_template.jinja that are
    there; {} for GGUF.
    """

    def __init__(
        self,
        found: Found,
        files: tuple[MappedFile, ...],
        tensors: Mapping[str, TensorInfo],
        metadata: Mapping[str, MetadataValue],
        metadata_types: Mapping[str, str],
        beside: Beside,
    ) -> None:
        self.format: Format = found.format
        self.path = found.given
        self.root = found.root
        self.paths = tuple(file.path for file in files)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(dict(metadata))
        self.metadata_types: Mapping[str, str] = MappingProxyType(dict(metadata_types))
        self.config = beside.config
        self.generation_config = beside.generation_config
        self.tokenizer_files = beside.tokenizer_files
        self.size_bytes = sum(file.size for file in files)
        self._files = {file.path: file for file in files}
        self._closed = False

    def info(self, name: str) -> TensorInfo:
        """Where tensor ``name`` lies; InputError when there is none."""
        info = self.tensors.get(name)
        if info is None:
            raise InputError(f"{self.path} has no tensor {quoted(name)}")
        return info

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as they lie in the file: 1-D read-only uint8 view, no copy."""
        if self._closed:
            raise InputError(f"the checkpoint {self.path} is closed; open it again")
        info = self.info(name)
        if info.n_bytes == 0:
            empty = np.empty(0, np.uint8)
            empty.flags.writeable = False
            return empty
        return self._files[info.path].view(info.offset, info.n_bytes)

    def rows(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes by row: read-only uint8 view [n_rows, row_bytes], no copy."""
        raw, info = self.raw(name), self._loadable(name)
        return raw.reshape(info.n_rows, info.type.row_bytes(info.n_cols))

    def float32(self, name: str) -> NDArray[np.float32]:
        """The tensor's numbers as a float32 array of its shape (a new, writable array).

        BF16 and F16 are widened exactly, so bfloat16's range survives; quantized types equal ggml's
        dequantization; F64 is rounded. UnsupportedError for integer tensors: use ``array``.
        """
        rows, info = self.rows(name), self._loadable(name)
        if info.type.kind == "integer":
            raise UnsupportedError(
                f"tensor {quoted(name)} holds integers ({info.type.name}), read it with array()"
            )
        if rows.size == 0:
            return np.zeros(info.shape, np.float32)
        return dequantize(info.type, rows).reshape(info.shape)

    def array(self, name: str) -> NDArray[Any]:
        """The tensor in its own number type (integers, bool, F16, F32, F64), a new array.

        UnsupportedError for types numpy does not have (BF16, FP8, quantized): use ``float32`` or
        ``rows``.
        """
        info = self._loadable(name)
        dtype = _NATIVE_DTYPES.get(info.type.name)
        if dtype is None:
            raise UnsupportedError(
                f"tensor {quoted(name)} is {info.type.name}, which numpy cannot hold; use "
                "float32() or rows()"
            )
        # bytes may lie at any offset: the copy aligns them
        values = np.frombuffer(self.raw(name).tobytes(), dtype).reshape(info.shape)
        return values != 0 if info.type.name == "BOOL" else values.copy()

    def dtype_counts(self) -> dict[str, int]:
        """Number of tensors per type name, most frequent first."""
        return dict(Counter(info.type.name for info in self.tensors.values()).most_common())

    def close(self) -> None:
        """Release the files (again: nothing). Reading tensors afterwards is an InputError."""
        self._closed = True
        for file in self._files.values():
            file.close()

    def __repr__(self) -> str:
        return (
            f"Checkpoint({str(self.path)!r}, {self.format}, {counted(len(self.tensors), 'tensor')})"
        )

    def _loadable(self, name: str) -> TensorInfo:
        info = self.info(name)
        if not info.readable:
            raise UnsupportedError(
                f"tensor {quoted(name)} has type {info.type.name}, which cannot be loaded"
            )
        return info


def open_checkpoint(path: str | Path, *, for_inspection: bool = False) -> Checkpoint:
    """Open the checkpoint at ``path``: a folder, any GGUF part, a safetensors file or index.

    for_inspection: tolerate what can be listed but not loaded (unknown tensor types, quantizations
    without a decoder). Damage is refused either way. Raises InputError, FormatError or
    UnsupportedError, one line.
    """
    if not str(path):  # pathlib takes it for the current folder
        raise InputError("the model's path is empty; give a file or a folder")
    found = find_checkpoint(Path(path))
    if found.format == "gguf":
        checkpoint = _open_gguf(found, for_inspection)
    else:
        checkpoint = _open_safetensors(found, for_inspection)
    if not for_inspection:
        try:
            check_quantization_claim(checkpoint.path, checkpoint.config, checkpoint.tensors)
            _refuse_unreadable(checkpoint)
        except BaseException:
            checkpoint.close()
            raise
    return checkpoint


def _open_gguf(found: Found, for_inspection: bool) -> Checkpoint:
    opened = open_gguf_set(found.path)
    files = tuple(part.file for part in opened.parts)
    if not for_inspection:
        reason = _not_a_model(opened)
        if reason is not None:
            for file in files:
                file.close()
            raise UnsupportedError(f"{found.given} is {reason}")
    return Checkpoint(
        found,
        files,
        opened.tensors,
        opened.metadata,
        opened.metadata_types,
        Beside(),
    )


def _not_a_model(opened: GgufSet) -> str | None:
    """Why a GGUF is no language model, by its own words; None when it may be one."""
    architecture, kind = (opened.metadata.get(k) for k in (ARCHITECTURE_KEY, "general.type"))
    if isinstance(architecture, str) and architecture == "clip":
        return _NOT_MODELS["mmproj"]
    return _NOT_MODELS.get(kind) if isinstance(kind, str) else None


def _open_safetensors(found: Found, for_inspection: bool) -> Checkpoint:
    beside = Beside(
        _optional_json(found.root / "config.json"),
        _optional_json(found.root / "generation_config.json"),
        {n: found.root / n for n in _TOKENIZER_FILES if (found.root / n).is_file()},
    )
    opened = open_safetensors_set(found.path, check=not for_inspection)
    files = tuple(part.file for part in opened.parts)
    return Checkpoint(
        found,
        files,
        opened.tensors,
        opened.metadata,
        dict.fromkeys(opened.metadata, "str"),
        beside,
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _refuse_unreadable(checkpoint: Checkpoint) -> None:
    """Every tensor's type must be loadable; the error lists all tensors that are not."""
    affected = [info for info in checkpoint.tensors.values() if not info.readable]
    if affected:
        raise UnsupportedError(
            f"{checkpoint.path}: {counted(len(affected), 'tensor')} of a type that cannot be "
            "loaded: "
            + listed(f"{quoted(info.name)} type {info.type.name}" for info in affected)
            + "; use a file with other tensor types (strata inspect lists them)"
        )
