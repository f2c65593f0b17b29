"""What a specification calls for is what is read of a checkpoint, and what is wrong with it is told of every kind of
tensor before any is read, by the loader and by the doctor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.linear.quantised import Quantised
from service.doctor.checks.model import look_at_model
from service.doctor.report import Examination, Section
from service.models.checkpoint.checkpoint import TensorSource, compare, open_checkpoint
from service.models.families import model_spec
from service.models.loader import load_model
from service.models.spec.config_json import ModelError, read_config
from service.models.spec.model_spec import ModelSpec
from service.settings import load_settings
from tests.support.models.tiny_models import FAMILIES, WITH_EXPERTS, make_tiny_model

Tensors = dict[str, torch.Tensor]


class Noted:
    """A checkpoint that notes what is asked for."""

    def __init__(self, inner: TensorSource) -> None:
        self._inner = inner
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def __contains__(self, name: object, /) -> bool:
        return name in self._inner

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.asked.append((name, shape))
        return self._inner.tensor(name, shape)

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | Quantised:
        self.asked.append((name, shape))
        return self._inner.weight(name, shape)

    def dtype(self, name: str) -> str:
        return self._inner.dtype(name)

    def fault(self, name: str, shape: tuple[int, ...]) -> str | None:
        return self._inner.fault(name, shape)

    def others(self, names: Iterable[str]) -> list[str]:
        return self._inner.others(names)


def edit(model_dir: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = model_dir / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def experts_apart(tensors: Tensors) -> Tensors:
    """With each expert's weights in tensors of their own, as the first checkpoints of mixtures have them."""
    apart: Tensors = {}
    for name, tensor in tensors.items():
        experts, _, part = name.rpartition(".")
        for index, weight in enumerate(tensor if part in ("gate_up_proj", "down_proj") else ()):
            pieces = {"gate_proj": weight.chunk(2)[0], "up_proj": weight.chunk(2)[1]}
            pieces = {"down_proj": weight} if part == "down_proj" else pieces
            apart |= {f"{experts}.{index}.{piece}.weight": part.clone() for piece, part in pieces.items()}
        if part not in ("gate_up_proj", "down_proj"):
            apart[name] = tensor
    return apart


def experts_together(tensors: Tensors) -> Tensors:
    """With the weights of all experts in two tensors, as transformers holds them."""
    found = {name: re.fullmatch(r"(.*\.experts)\.\d+\.gate_proj\.weight", name) for name in tensors}
    together = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for experts in {match[1] for match in found.values() if match}:
        count = sum(name.startswith(f"{experts}.") for name in tensors) // 3
        gate, up, down = (
            [tensors[f"{experts}.{index}.{part}.weight"] for index in range(count)]
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        together[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(both) for both in zip(gate, up, strict=True)])
        together[f"{experts}.down_proj"] = torch.stack(down)
    return together


def model_of(family: str, directory: Path) -> tuple[Path, ModelSpec]:
    """A tiny model; of "family, apart" and "family, together" with its experts stored so."""
    family, _, stored = family.partition(", ")
    make_tiny_model(family, directory, **({"conv_bias": True} if family == "lfm2" else {}))
    if stored:
        names = load_file(directory / "model.safetensors")
        are_apart = any(name.endswith(".experts.0.gate_proj.weight") for name in names)
        if are_apart != (stored == "apart"):
            edit(directory, experts_apart if stored == "apart" else experts_together)
    return directory, model_spec(read_config(directory))


def examined(model_dir: Path) -> Section:
    return look_at_model(Examination(load_settings(model_dir=model_dir), tell=lambda _: None))


MIXTURES = tuple(
    f"{family}, {stored}" for family in ("qwen3_moe", "qwen3_5_moe_text") for stored in ("apart", "together")
)
CASES = (*(one for one in FAMILIES if not one.startswith(("qwen3_moe", "qwen3_5_moe", "mixtral"))), *MIXTURES)


@pytest.mark.parametrize("case", [*CASES, "mixtral", *WITH_EXPERTS])
def test_what_a_specification_calls_for_is_what_is_read(case: str, tmp_path: Path) -> None:
    model_dir, spec = model_of(case, tmp_path)
    sources: list[Noted] = []

    @contextmanager
    def noting(directory: Path) -> Iterator[TensorSource]:
        with open_checkpoint(directory) as checkpoint:
            sources.append(Noted(checkpoint))
            yield sources[-1]

    load_model(model_dir, open_tensors=noting)
    with open_checkpoint(model_dir) as checkpoint:
        called_for = spec.tensors(checkpoint)
        assert compare(spec, checkpoint).faults == compare(spec, checkpoint).unexpected == ()
        stored = {checkpoint.file_of(name)[1] for name in called_for}
    assert sorted(sources[0].asked) == sorted(called_for.items())
    assert set(load_file(model_dir / "model.safetensors")) == stored


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_that_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    """Every second one is missing, the others have a row too many."""
    model_dir, _ = model_of(case, tmp_path)
    names = sorted(load_file(model_dir / "model.safetensors"))
    # What tells how experts are stored stays.
    missing = {name for name in names[::2] if not name.endswith(("gate_up_proj", "embed_tokens.weight"))}
    edit(model_dir, lambda tensors: {n: torch.cat((t, t[:1])) for n, t in tensors.items() if n not in missing})
    section = examined(model_dir)
    assert {(one.level, one.code) for one in section.findings} == {("error", "model-refused")}
    told = [one.message for one in section.findings]
    with pytest.raises(ModelError) as caught:
        load_model(model_dir)
    first, _, others = str(caught.value).partition(" (")
    assert told[0] == f"{first[:1].upper()}{first[1:]}."
    assert others == f"and {len(names) - 1} more: see `multilora doctor`)"
    spec = model_spec(read_config(model_dir))
    with open_checkpoint(model_dir) as checkpoint:
        assert dict(map(is_missing, compare(spec, checkpoint).faults)) == {name: name in missing for name in names}
    assert len(told) == min(len(names), 21)
    if len(names) > 20:
        assert told[-1] == f"{len(names) - 20} more tensors are missing or do not fit."


def is_missing(fault: str) -> tuple[str, bool]:
    """The tensor that a sentence is about, and whether it says that there is none."""
    found = re.search(r"(has no )?tensor (\S+?)(?:,| in )", fault)
    assert found is not None, fault
    return found[2], found[1] is not None


def test_the_doctor_warns_of_tensors_that_nobody_uses_in_the_loaders_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir, _ = model_of("qwen3_5_text", tmp_path)
    extra = {f"model.layers.{index}.linear_attn.extra": torch.zeros(1) for index in range(23)}
    edit(model_dir, lambda tensors: tensors | extra | {"mtp.fc.weight": torch.zeros(1)})
    section = examined(model_dir)
    assert [(one.level, one.code) for one in section.findings] == [("warning", "tensors-unused")]
    message = section.findings[0].message
    assert message.endswith(", model.layers.6.linear_attn.extra and 3 more.") and message.count("extra") == 20
    assert section.facts["not_served"] == "mtp.*"
    load_model(model_dir)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [f"{one[:1].upper()}{one[1:]}." for one in warnings] == [message]
