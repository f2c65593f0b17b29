"""Headers of a checkpoint's tensors, by which a module is checked before any of its tensors is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.models.spec.config_json import ModelError
from service.models.spec.quantisation import Quantisation

FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor before it is read: dtype in the spelling of safetensors, and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A module's weight [outputs, inputs], or one of so many experts, beside its headers by suffix, and what
    config.json says."""

    outputs: int
    inputs: int
    headers: Mapping[str, Header]
    config: Quantisation
    experts: int = 1

    def need(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raises ModelError unless the tensor is there, of one of the dtypes and, where any are given, shapes."""
        header = self.headers.get(suffix)
        if header is None:
            raise ModelError(f"{suffix} is missing")
        if header.dtype not in dtypes:
            raise ModelError(f"{suffix} is {header.dtype}, and must be {' or '.join(dtypes)}")
        if shapes and header.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise ModelError(
                f"{suffix} has the shape {list(header.shape)}, and a weight of {self.size} calls for {wanted}"
            )

    def check_bits(self, suffix: str, bits: int) -> None:
        """Raises ModelError unless config.json allows codes of so many bits."""
        if self.config.bits and bits not in self.config.bits:
            named = " or ".join(map(str, self.config.bits))
            raise ModelError(f"{suffix} has codes of {bits} bits, and config.json says {named}")

    def check_groups(self, suffix: str, num_groups: int) -> None:
        """Raises ModelError unless so many scales for each output are of equal groups of inputs, as config.json has."""
        group = self.config.group
        if num_groups < 1 or self.inputs % num_groups:
            raise ModelError(
                f"{suffix} has scales for {num_groups} groups, which do not divide the {self.inputs} inputs"
            )
        found = self.inputs // num_groups
        if group is not None and found != (self.inputs if group == -1 else group):
            raise ModelError(f"{suffix} has one scale for {found} inputs, and config.json gives the group_size {group}")

    @property
    def size(self) -> str:
        return f"[{self.outputs}, {self.inputs}]"
