"""Reading a checkpoint's tensors: sharded or single safetensors, one tensor at a time, through a memory map.

Nothing else is opened: no pickle, no code from the model's directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from adapters.peft.module_names import tail_of
from kernels.linear.quantised import Quantised, dequantise
from service.models.checkpoint import quantised
from service.models.checkpoint.gguf_checkpoint import GgufCheckpoint
from service.models.checkpoint.headers import FLOATS, Header, Sizes
from service.models.checkpoint.quantised import EXPERT_SUFFIXES
from service.models.gguf_file import LINK, ROPE_FACTORS
from service.models.spec.config_json import ModelError, read_config
from service.models.spec.model_spec import ModelSpec
from service.models.spec.quantisation import HELP, Quantisation, quantisation_of

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAPPED_BYTES = 128 << 20
# What files call some tensors that have other names since transformers 5, by the ends of the names.
_CALLED_NOW = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
    "block_sparse_moe.gate.weight": "mlp.gate.weight",
}
_OF_MIXTRAL = re.compile(r"block_sparse_moe\.(experts\.\d+)\.(w[123])(?=\.)")
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class TensorSource(Protocol):
    """Where a model's tensors come from: an open `Checkpoint`, or weights that are made up, for benchmarks."""

    def __contains__(self, name: object, /) -> bool: ...
    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...
    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | Quantised: ...
    def dtype(self, name: str) -> str: ...
    def fault(self, name: str, shape: tuple[int, ...]) -> str | None: ...
    def others(self, names: Iterable[str]) -> list[str]: ...


# Opens the tensors that belong to the config.json in a directory.
OpenTensors = Callable[[Path], AbstractContextManager[TensorSource]]


class Checkpoint:
    """The tensors of an open checkpoint by name; see `open_checkpoint`.

    Files name the model around a tensor as it was called when they were written, so a name that they do not have stands
    for the one tensor that is called so below another model (`adapters.peft.module_names.tail_of`), or was called
    otherwise once (`_CALLED_NOW`).

    The weight of a quantised module has the name of any other, "... .q_proj.weight", whatever its tensors are called;
    so have quantised experts in one tensor.
    """

    def __init__(self, model_dir: Path, quantisation: Quantisation | None = None) -> None:
        self._model_dir = model_dir
        self._quantisation = quantisation
        self._files = {file: _open(model_dir, file) for file in _file_names(model_dir)}
        self._file_of = {name: file for file, handle in self._files.items() for name in handle.keys()}  # noqa: SIM118
        self._by_tail: dict[str, list[str]] = {}
        for name in self._file_of:
            self._by_tail.setdefault(tail_of(_called_now(name)), []).append(name)
        self._mapped: dict[str, int] = {}

    def __contains__(self, name: object, /) -> bool:
        return isinstance(name, str) and (self._stored(name) is not None or bool(self._parts(name)))

    def fault(self, name: str, shape: tuple[int, ...]) -> str | None:
        """One sentence on the fault of a tensor that config.json calls for in this shape; None if it has none."""
        try:
            if self._layout(name, shape) is None:
                self._check(name, shape)
        except ModelError as error:
            return str(error)
        return None

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as it is stored, perhaps still in the memory map; a quantised weight in float32. Raises
        ModelError."""
        weight = self.weight(name, shape)
        if not isinstance(weight, Quantised):
            return weight
        values = dequantise(weight, torch.float32)
        return values if len(shape) == 2 else values.view(shape[0], shape[2], shape[1]).transpose(1, 2)

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | Quantised:
        """As `tensor`, with a quantised weight in its codes: of experts, [num_experts * out, in]. Raises ModelError."""
        found = self._layout(name, shape)
        if found is None:
            self._check(name, shape)
            return self._read(*self._find(name))
        layout, sizes = found
        known, stored = quantised.LAYOUTS[layout].known, self._parts(name)
        tensors = {suffix: self._read(*self._find(part)) for suffix, part in stored.items() if suffix in known}
        with _naming(name):
            return quantised.read(layout, sizes, tensors)

    def dtype(self, name: str) -> str:
        """The stored dtype in torch's spelling, or safetensors' where it is none of ours; "bfloat16" of a quantised
        weight. Raises ModelError."""
        if self._stored(name) is None and self._parts(name):
            return "bfloat16"
        name, file = self._find(name)
        stored: str = self._files[file].get_slice(name).get_dtype()
        return FLOATS.get(stored, stored)

    def file_of(self, name: str) -> tuple[str, str]:
        """The file of a tensor, and its name there; of a quantised weight, as it would be called without codes. Raises
        ModelError."""
        if self._stored(name) is None and (parts := self._parts(name)):
            suffix, stored = next(iter(parts.items()))
            return self._file_of[stored], stored.removesuffix(suffix) + ("weight" if name.endswith(".weight") else "")
        stored, file = self._find(name)
        return file, stored

    def is_quantised(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the tensor is stored in codes. Raises ModelError."""
        return self._layout(name, shape) is not None

    def raw(self, stored: str) -> tuple[str, Header, Callable[[], torch.Tensor]]:
        """File and header of a tensor that the model does not use, and what reads it."""
        return self._file_of[stored], self._header(stored), lambda: self._read(stored, self._file_of[stored])

    def others(self, names: Iterable[str]) -> list[str]:
        """Names of the stored tensors that none of `names` stands for, in order."""
        used = {stored for name in names for stored in (self._stored(name), *self._parts(name).values())}
        return sorted(set(self._file_of) - used)

    def close(self) -> None:
        self._files.clear()

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError unless the tensor is stored in this shape, and not quantised."""
        stored, file = self._find(name)
        header = self._header(stored)
        if header.shape != shape:
            raise ModelError(
                f"tensor {stored} in {file} has the shape {list(header.shape)}, and config.json calls for "
                f"{list(shape)}: take both from one download"
            )
        if header.dtype not in FLOATS:
            why = f": {HELP}" if self._quantisation else ", and config.json has no quantization_config"
            raise ModelError(f"tensor {stored} in {file} is {header.dtype}; served are {', '.join(FLOATS)}{why}")

    def _layout(self, name: str, shape: tuple[int, ...]) -> tuple[str, Sizes] | None:
        """How the weight of a quantised module is stored, once its tensors' headers are checked; None for any other
        tensor. Raises ModelError."""
        parts = self._parts(name)
        if self._quantisation is None or not parts or len(shape) not in (2, 3):
            return None
        headers = {suffix: self._header(stored) for suffix, stored in parts.items()}
        with _naming(name):
            layout = quantised.find_layout(headers, self._quantisation)
            if layout is None:
                return None
            num_experts, inputs, outputs = shape if len(shape) == 3 else (1, shape[1], shape[0])
            sizes = Sizes(outputs, inputs, headers, self._quantisation, num_experts)
            quantised.check(layout, sizes)
        return layout, sizes

    def _parts(self, name: str) -> dict[str, str]:
        """Stored tensors of the module whose weight is called `name`, by suffix; of models that are quantised."""
        if self._quantisation is None:
            return {}
        suffixes = quantised.SUFFIXES if name.endswith(".weight") else EXPERT_SUFFIXES
        module = name.removesuffix("weight") if name.endswith(".weight") else name
        found = ((suffix, self._stored(module + suffix)) for suffix in suffixes)
        return {suffix: stored for suffix, stored in found if stored is not None}

    def _header(self, stored: str) -> Header:
        header = self._files[self._file_of[stored]].get_slice(stored)
        return Header(header.get_dtype(), tuple(header.get_shape()))

    def _read(self, stored: str, file: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[file].get_tensor(stored)
        if sum(self._mapped.values()) + tensor.nbytes > _MAPPED_BYTES:
            # Map files anew now and then: the pages of tensors read so far would count as this process's memory.
            self._files |= {other: _open(self._model_dir, other) for other in (*self._mapped, file)}
            self._mapped.clear()
            tensor = self._files[file].get_tensor(stored)
        self._mapped[file] = self._mapped.get(file, 0) + tensor.nbytes
        return tensor

    def _find(self, name: str) -> tuple[str, str]:
        """The name in the file, and the file."""
        stored = self._stored(name)
        if stored is None:
            raise ModelError(self._missing(name))
        return stored, self._file_of[stored]

    def _missing(self, name: str) -> str:
        return (
            f"the checkpoint in {self._model_dir} has no tensor {name}, which config.json calls for: download it "
            "again, or take the config.json that belongs to it"
        )

    def _stored(self, name: str) -> str | None:
        if name in self._file_of:
            return name
        others = self._by_tail.get(tail_of(name), [])
        return others[0] if len(others) == 1 else None


@contextmanager
def open_checkpoint(model_dir: Path) -> Iterator[Checkpoint | GgufCheckpoint]:
    """Open the safetensors files of `model_dir`, or its GGUF file; the memory maps end with the context. Raises
    ModelError."""
    written = read_config(model_dir).get("quantization_config") if (model_dir / LINK).exists() else None
    if isinstance(written, dict) and written.get("quant_method") == "gguf":  # not any file of that name
        yield GgufCheckpoint(model_dir / LINK, has_paired_rows=bool(written.get("has_paired_rows")))
        return
    has_config = (model_dir / "config.json").is_file()
    checkpoint = Checkpoint(model_dir, quantisation_of(read_config(model_dir)) if has_config else None)
    try:
        yield checkpoint
    finally:
        checkpoint.close()


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the module before a ModelError of its quantised weight."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"the quantised {name.removesuffix('.weight')} cannot be read: {error}") from None


def _called_now(name: str) -> str:
    name = _OF_MIXTRAL.sub(lambda found: f"mlp.{found[1]}.{_PARTS[found[2]]}", name)
    end = next((end for end in _CALLED_NOW if name.endswith(f".{end}")), None)
    return name if end is None else name.removesuffix(end) + _CALLED_NOW[end]


def _open(model_dir: Path, file: str) -> Any:
    try:
        return safe_open(model_dir / file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ModelError(f"{_INDEX} names {file}, which {model_dir} does not have") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{model_dir / file} cannot be read as safetensors: {error}") from error


def _file_names(model_dir: Path) -> list[str]:
    index = model_dir / _INDEX
    if (model_dir / _SINGLE).is_file():
        return [_SINGLE]
    if not index.is_file():
        # msmodelslim names its files so, with the kind of quantisation behind.
        indices = sorted(model_dir.glob("quant_model_weight*.index.json"))
        singles = sorted(model_dir.glob("quant_model_weight*.safetensors"))
        if not indices and len(singles) == 1:
            return [singles[0].name]
        if not indices:
            raise ModelError(f"{model_dir} has neither {_SINGLE} nor {_INDEX} (pickled weights are never read)")
        index = indices[0]
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} has no readable weight_map: {error!r}") from error
    outside = [file for file in file_names if Path(file).name != file]
    if outside:
        raise ModelError(f"{_INDEX} names {outside[0]}, which is not a file of {model_dir} itself")
    return file_names


# Rotary frequencies, which some exports carry and nobody needs: they follow from the config. Scales of a cache in 8
# bits and of rounded activations: neither is rounded here.
_REDUNDANT = ("rotary_emb.inv_freq", ROPE_FACTORS, *(f".{of}_scale" for of in ("k", "v", "kv", "q", "output")))
_MOST_NAMES = 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    faults      one sentence for each tensor that is missing, misshapen or of a dtype that is not served
    unexpected  tensors that the model does not use
    not_served  beginnings of the names of what the model knows and leaves, a vision tower's say
    """

    faults: tuple[str, ...]
    unexpected: tuple[str, ...]
    not_served: tuple[str, ...]

    @property
    def warning(self) -> str | None:
        """A sentence on the unexpected tensors; None where there are none."""
        if not self.unexpected:
            return None
        more = len(self.unexpected) - _MOST_NAMES
        names = ", ".join(self.unexpected[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        return f"the model does not use these tensors of the checkpoint: {names}"


def compare(spec: ModelSpec, checkpoint: TensorSource) -> Comparison:
    """Faults of the checkpoint's tensors, of every kind, found before any is read."""
    shapes = spec.tensors(checkpoint)
    faults = (checkpoint.fault(name, shape) for name, shape in shapes.items())
    others = [
        name
        for name in checkpoint.others(shapes)
        if not name.endswith(_REDUNDANT) and not name.startswith(spec.redundant)
    ]
    return Comparison(
        faults=tuple(fault for fault in faults if fault is not None),
        unexpected=tuple(name for name in others if not name.startswith(spec.unused)),
        not_served=tuple(prefix for prefix in spec.unused if any(name.startswith(prefix) for name in others)),
    )
