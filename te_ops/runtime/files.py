"""Saving to and loading from safetensors files, with the version of the state's format in the file's header."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from te_ops.errors import Error, RecipeError
from te_ops.runtime.state import DelayedState

FORMAT = "te_ops.state"  # key in the header; its value is the version
ALIASES = "te_ops.aliases"  # names of tied tensors, which a file holds once


def _library() -> Any:
    try:
        return importlib.import_module("safetensors.torch"), importlib.import_module("safetensors")
    except ImportError as error:
        raise Error("safetensors is not installed: pip install safetensors") from error


def save_file(model: nn.Module, path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write the model's state dict as safetensors; tied tensors once.

    Raises:
        Error: safetensors is not installed, or a parameter is in a quantized format.
    """
    torch_io, _ = _library()
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise Error(f"save_file: {name} is a {type(tensor).__name__}; use torch.save for it")
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            kept[name] = tensor.detach().contiguous()
    header = {**(metadata or {}), FORMAT: str(DelayedState._version), ALIASES: json.dumps(aliases)}
    torch_io.save_file(kept, str(path), metadata=header)


def load_file(model: nn.Module, path: str | Path, *, strict: bool = True) -> Any:
    """Load a safetensors file into the model; quantizer state that the file has is created.

    Returns what `load_state_dict` returns. Files of other writers load too.

    Raises:
        Error: safetensors is not installed.
        RecipeError: the file was written in a later format.
    """
    torch_io, library = _library()
    with library.safe_open(str(path), framework="pt") as file:
        header = file.metadata() or {}
    version = int(header.get(FORMAT, DelayedState._version))
    if version > DelayedState._version:
        raise RecipeError(
            f"{path}: quantizer state of format {version}, this te_ops reads up to {DelayedState._version}; "
            "use a newer te_ops"
        )
    tensors = torch_io.load_file(str(path))
    for name, source in json.loads(header.get(ALIASES, "{}")).items():
        tensors[name] = tensors[source]
    return model.load_state_dict(tensors, strict=strict)
