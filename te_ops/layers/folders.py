"""Llama-like models from folders: Hugging Face's (config.json, one file or shards with an index) and Meta's
(params.json, consolidated files, which may each hold a slice of every tensor).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from te_ops.errors import Error, PlanError
from te_ops.layers.config import LlamaConfig, llama_model
from te_ops.layers.llama import Naming, parts
from te_ops.sequential import Sequential

# Hugging Face: what holds the weights, in this order; an index names the file of each tensor.
_HF_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
# Meta: the dimension that model-parallel files slice; the embedding's is found by its shape, norms are whole in each.
_SLICED = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of several files by name, each read when it is asked for.

    Args:
        files: for each name the files that hold it, or its slices.
        joined: makes one tensor of a name's slices.
    """

    def __init__(
        self,
        files: Mapping[str, tuple[Path, ...]],
        joined: Callable[[str, list[torch.Tensor]], torch.Tensor],
    ) -> None:
        self._files = files
        self._joined = joined
        self._open: dict[Path, Callable[[str], torch.Tensor]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        found = [self._reader(path)(name) for path in self._files[name]]
        return found[0] if len(found) == 1 else self._joined(name, found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _reader(self, path: Path) -> Callable[[str], torch.Tensor]:
        if path not in self._open:
            self._open[path] = _opened(path)[1]
        return self._open[path]


def load_llama(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Sequential:
    """The model of a folder, as `te.layers.llama_model` makes it, with its weights.

    Args:
        folder: has `config.json` and weights in Hugging Face's names (model.safetensors, pytorch_model.bin, or shards
            of them with their index), or `params.json` and consolidated*.pth (or .safetensors) in Meta's.
        dtype: of the parameters; that of the checkpoint's embedding if None.
        device: of the parameters.
        options: as for `te.layers.llama_model`.

    Raises:
        Error: a file is missing, or the library that reads it.
        PlanError: the config describes another model, or a tensor is missing or left over.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        naming: Naming = "hugging_face"
        state = _hugging_face(folder)
        config = LlamaConfig.from_hugging_face(_json(folder / "config.json"))
        embedding = "model.embed_tokens.weight"
    elif (folder / "params.json").exists():
        naming, embedding = "meta", "tok_embeddings.weight"
        params = _json(folder / "params.json")
        state = _meta(folder, params)
        rows = state[embedding].shape[0] if embedding in state else 1
        config = LlamaConfig.from_meta(params, vocab_size=rows, tied="output.weight" not in state)
    else:
        raise Error(f"{folder} has neither config.json nor params.json")
    if dtype is None and embedding in state:
        dtype = state[embedding].dtype
    model = llama_model(config, dtype=dtype, device="meta", **options)
    model.to_empty(device=device or "cpu")
    if config.tied:  # the move has made two of them
        model["head"].weight = model["embedding"].weight
    for path, part in parts(model, state, naming=naming):
        model.get_submodule(path.rstrip(".")).load_state_dict(part)
    return model


def _hugging_face(folder: Path) -> Tensors:
    found = next((folder / name for name in _HF_FILES if (folder / name).exists()), None)
    if found is None:
        raise Error(f"{folder} has none of {', '.join(_HF_FILES)}")
    if found.suffix != ".json":
        return Tensors(dict.fromkeys(_opened(found)[0], (found,)), _not_sliced)
    files = {name: (folder / file,) for name, file in _json(found)["weight_map"].items()}
    missing = sorted({str(path) for (path,) in files.values() if not path.exists()})
    if missing:
        raise Error(f"{found.name} names files that are not there: {', '.join(missing)}")
    return Tensors(files, _not_sliced)


def _meta(folder: Path, params: Mapping[str, Any]) -> Tensors:
    found = sorted(folder.glob("consolidated*.pth")) or sorted(
        folder.glob("consolidated*.safetensors")
    )
    if not found:
        raise Error(f"{folder} has no consolidated*.pth and no consolidated.safetensors")

    def joined(name: str, slices: list[torch.Tensor]) -> torch.Tensor:
        kind = name.split(".")[-2]
        if kind == "tok_embeddings":  # sliced by rows in later models, by columns in earlier ones
            return torch.cat(slices, 0 if slices[0].shape[1] == params["dim"] else 1)
        return torch.cat(slices, _SLICED[kind]) if kind in _SLICED else slices[0]

    return Tensors({name: tuple(found) for name in _opened(found[0])[0]}, joined)


def _not_sliced(name: str, slices: list[torch.Tensor]) -> torch.Tensor:
    raise PlanError(f"{name} is in {len(slices)} files")


def _opened(path: Path) -> tuple[list[str], Callable[[str], torch.Tensor]]:
    """The names in a file, and what reads one of them."""
    if path.suffix == ".safetensors":
        try:
            library = importlib.import_module("safetensors")
        except ImportError as error:
            raise Error("safetensors is not installed: pip install safetensors") from error
        try:
            file = library.safe_open(
                str(path), framework="pt"
            ).__enter__()  # closed with the last reference
        except (OSError, library.SafetensorError) as error:
            raise Error(f"{path} cannot be read: {error}") from error
        return list(file.keys()), file.get_tensor
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise Error(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    return list(held), held.__getitem__


def _json(path: Path) -> dict[str, Any]:
    try:
        made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Error(f"{path} cannot be read: {error}") from error
    return made


__all__ = ["Tensors", "load_llama"]
