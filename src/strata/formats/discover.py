"""From a path to the file that names a checkpoint: a GGUF part, a safetensors file or an index.

Looks at names and first bytes only. Whatever is not one clear checkpoint is refused with what was
found.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strata.core.errors import FormatError, InputError, UnsupportedError
from strata.formats.part_names import set_name
from strata.formats.safetensors_set import INDEX_SUFFIX, read_index
from strata.formats.text import listed

Format = Literal["gguf", "safetensors"]

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_REASON = (
    "is a PyTorch pickle; pickles can run code when opened and are not supported: use the "
    "safetensors or GGUF form"
)
_HEAD_BYTES = 64


@dataclass(frozen=True)
class Found:
    """given: what was asked for; path: the GGUF part, safetensors file or index to open."""

    format: Format
    given: Path
    path: Path

    @property
    def root(self) -> Path:
        """The folder of its files."""
        return self.path.parent


def find_checkpoint(path: Path) -> Found:
    """The one checkpoint at ``path`` (file or folder).

    Raises InputError when nothing is there, FormatError when it is not one clear checkpoint and
    UnsupportedError for formats that are known but not read (pickles, LoRA adapters).
    """
    try:
        if path.is_dir():
            return _in_folder(path)
        if path.is_file():
            return _of_file(path)
        exists = path.exists()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if exists:
        raise FormatError(f"{path} is neither a regular file nor a folder")
    raise InputError(f"{path} does not exist; give a .gguf file, a .safetensors file or a folder")


def _of_file(path: Path) -> Found:
    if path.name.endswith(INDEX_SUFFIX):
        return Found("safetensors", path, path)
    with open(path, "rb") as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(b"version https://git-lfs"):
        raise FormatError(
            f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
        )
    if head.startswith((b"PK\x03\x04", b"\x80\x02")) or path.suffix in _PICKLES:
        raise UnsupportedError(f"{path} {_PICKLE_REASON}")
    if head.startswith(b"GGUF") or path.suffix == ".gguf":
        return Found("gguf", path, path)
    if path.name.startswith("adapter_model"):
        raise _lora(path)
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return Found("safetensors", path, _index_with(path) or path)
    raise FormatError(
        f"{path} is neither GGUF nor safetensors: it begins with {head[:8]!r}; give a .gguf file, "
        "a .safetensors file or a folder"
    )


def _index_with(path: Path) -> Path | None:
    """The index file beside ``path`` that lists it as a part."""
    for index in sorted(path.parent.glob(f"*{INDEX_SUFFIX}")):
        if path.name in read_index(index).values():
            return index
    return None


def _lora(path: Path) -> UnsupportedError:
    return UnsupportedError(
        f"{path} is a LoRA adapter, not a model, and adapters are not supported; merge it into its "
        "base model"
    )


def _in_folder(folder: Path) -> Found:
    names = sorted(entry.name for entry in folder.iterdir())
    ggufs = [
        name for name in names if name.endswith(".gguf") and not name.lower().startswith("mmproj")
    ]
    tensors = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if ggufs and (tensors or indexes):
        raise FormatError(
            f"{folder} holds both GGUF ({listed(_sets(folder, ggufs))}) and safetensors "
            f"({listed(_sets(folder, tensors) + indexes)}) files; give the path of the one to open"
        )
    if ggufs:
        return Found("gguf", folder, _only(folder, ggufs))
    if indexes:
        if len(indexes) > 1:
            raise _several(folder, indexes)
        return Found("safetensors", folder, folder / indexes[0])
    models = [name for name in tensors if not name.startswith("adapter_model")]
    if models:
        return Found("safetensors", folder, _only(folder, models))
    raise _nothing(folder, names)


def _sets(folder: Path, names: list[str]) -> list[str]:
    return sorted({set_name(folder / name) for name in names})


def _only(folder: Path, names: list[str]) -> Path:
    """The first file of the one set in ``names``."""
    sets = _sets(folder, names)
    if len(sets) > 1:
        raise _several(folder, sets)
    return folder / names[0]


def _several(folder: Path, sets: list[str]) -> FormatError:
    return FormatError(
        f"{folder} holds {len(sets)} different checkpoints: {listed(sets)}; give the path of the "
        "one to open"
    )


def _nothing(folder: Path, names: list[str]) -> InputError:
    adapters = [n for n in names if n.startswith("adapter_model") or n == "adapter_config.json"]
    if adapters:
        return _lora(folder / adapters[0])
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return UnsupportedError(f"{folder / pickles[0]} {_PICKLE_REASON}")
    inside = [n for n in names if (folder / n).is_dir() and any((folder / n).glob("*.gguf"))]
    if inside:
        return FormatError(
            f"{folder} holds no checkpoint itself, but its folders do: {listed(inside)}; give one "
            "of them"
        )
    return FormatError(f"{folder} holds no .gguf and no .safetensors files")
