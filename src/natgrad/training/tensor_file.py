"""A nested state as one safetensors file: tensors as such, everything else as JSON in the header."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

# The key of the JSON in the header. Lists are arrays; other containers, tensors and numbers that JSON lacks are objects
# with one of the keys below.
_STRUCTURE = "structure"
_DICT, _TUPLE, _TENSOR, _FLOAT = "dict", "tuple", "tensor", "float"

_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
)
_DTYPES = {getattr(torch, name) for name in _NAMES.split()}


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state to a file.

    Args:
        path: The file.
        state: Nested mappings with string or integer keys, lists and tuples, of dense tensors, numbers, strings, bools
            and None.

    Raises:
        TypeError: The state holds something else.
        OSError: The file could not be written; so does safetensors' ``SafetensorError``.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_encoded(state, "", tensors))
    save_file(_separate(tensors), path, metadata={_STRUCTURE: structure})


def read(path: Path) -> dict[str, Any]:
    """Return the state in a file. Runs no code from it.

    Raises:
        ValueError: The file does not hold a state.
        OSError: It could not be read.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            structure = json.loads(file.metadata()[_STRUCTURE])
            state = _decoded(structure, lambda name: file.get_tensor(name).clone())
    except (OSError, MemoryError):
        raise
    except Exception as error:  # another file can raise anything
        raise ValueError(f"{path.name} does not hold a state: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} does not hold a state, but a {type(state).__name__}")
    return state


def _encoded(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, and put its tensors into `tensors` under their place in the state."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, Tensor):
        return {_TENSOR: _add(value, place, tensors)}
    if kind in (list, tuple):
        parts = [_encoded(part, f"{place}.{index}", tensors) for index, part in enumerate(value)]
        return parts if kind is list else {_TUPLE: parts}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{place or 'the state'} has the key {key!r}: a checkpoint holds strings and integers")
        return {
            _DICT: [
                [key, _encoded(part, f"{place}.{key}" if place else str(key), tensors)] for key, part in value.items()
            ]
        }
    raise TypeError(
        f"{place} is a {kind.__name__}: a checkpoint holds tensors, numbers, strings, bools, None, lists, tuples and "
        "mappings"
    )


def _add(tensor: Tensor, place: str, tensors: dict[str, Tensor]) -> str:
    """Add a tensor to `tensors`, and return its name there."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.dtype not in _DTYPES:
        kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}"
        raise TypeError(f"{place} is a {kind}: a checkpoint holds dense tensors of the dtypes {_NAMES}")
    while place in tensors:  # mappings may have both 0 and "0" as keys
        place += "'"
    tensors[place] = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return place


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which no two share memory, as safetensors demands: copies of all but the first."""
    seen, result = set[int](), {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if start in seen else tensor
        seen.add(start)
    return result


def _decoded(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Undo `_encoded`; `tensor` returns a tensor by its name.

    Raises:
        ValueError: The value is not one that `_encoded` returns.
    """
    if isinstance(value, list):
        return [_decoded(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _DICT:
        return {key: _decoded(part, tensor) for key, part in content}
    if kind == _TUPLE:
        return tuple(_decoded(part, tensor) for part in content)
    if kind == _TENSOR:
        return tensor(content)
    if kind == _FLOAT:
        return float(content)
    raise ValueError(f"the structure has an object {kind!r}")
