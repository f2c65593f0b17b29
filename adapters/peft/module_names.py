"""Names that trainers use for modules: the prefix before a module's path is not part of the base model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from adapters.layout import BaseLayout, Experts, ProjectionSpec, Slice

# Path components that wrap a model without being part of it; training frameworks stack them in any order.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PEFT_PREFIX = re.compile(r"(?:module\.)*(?:base_model\.model\.)?(?:module\.)*")
# Models inside models: the text part of a multimodal model is the same tree under another name.
_MODEL_PREFIX = re.compile(r"(?:(?:base_model|model|language_model|text_model|module)\.)*")
# Parts of a model beside its text model: towers that see or hear, what leads from them to the text, what speaks, and
# layers that predict several tokens at once. None of them changes the answer to a text.
_BESIDE_TEXT = re.compile(
    r"(?:visual|vision_\w+|audio_\w+|speech_\w+|image_\w+|img_\w+|embed_vision|embed_audio|mm_projector|mlp1|connector"
    r"|multi_modal_projector|modality_projection|aligner|resampler|qformer|vpm|apm|vqmodel|talker|token2wav|code2wav|mtp)"
    r"(?=\.)"
)
_EXPERTS = re.compile(r".*?\.\d+\.(?:[^.]+\.)?experts(?=\.|$)")
# Mixtral's, as transformers called them before version 5.
_CALLED_ONCE, _CALLED_NOW = "block_sparse_moe.experts", "mlp.experts"
_OF_MODULE = re.compile(r"\.(?:weight|bias)$")


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Rows [start, end) of the output of a slice's module."""

    module: str
    start: int
    end: int

    @property
    def num(self) -> int:
        return self.end - self.start

    def meets(self, other: OutputRows) -> bool:
        """Whether they have a row in common."""
        return self.module == other.module and self.start < other.end and other.start < self.end


class KnownModules:
    """The layout's slices by module path, and by path without the name of the model around it.

    renamed           modules that only some trainers have, by such a path: the rows that each covers, in order
    unserved_modules  modules among `unserved`, without the parameters: only modules match an expression
    """

    def __init__(self, layout: BaseLayout) -> None:
        self.slices = {
            piece.module: (p, piece) for p in layout.projections if p.kind != "experts" for piece in p.slices
        }
        self.by_tail = {tail_of(module): module for module in self.slices}
        assert len(self.by_tail) == len(self.slices), "module paths are unique without the model's name"

        self.experts = {tail_of(one.module): one for one in layout.experts}
        # A tensor called "weight" or "bias" is a module's; another is a parameter of what stands around it.
        fixed = {tail_of(name): _OF_MODULE.sub("", tail_of(name)) for name in layout.fixed}
        self._fixed = tuple(dict.fromkeys(fixed.values()))
        self.unserved_modules = (*self.experts, *dict.fromkeys(part for name, part in fixed.items() if part != name))
        self.ties_head = layout.ties_head
        ends = [(p.kind, piece.module) for p in layout.projections if p.group == "embeddings" for piece in p.slices]
        self.embeddings = tuple(module for kind, module in ends if kind == "embedding")
        self.heads = tuple(module for kind, module in ends if kind == "linear")
        self.norms = {tail_of(norm.module): norm for norm in layout.norms}
        merged = {tail_of(name): rows for p in layout.projections for name, rows in _merged(p)}
        self.renamed = {tail: rows for tail, rows in merged.items() if tail not in self.by_tail}
        for split in layout.splits:
            borders = accumulate((part.out_features for part in split.parts), initial=0)
            for part, rows in zip(split.parts, pairwise(borders), strict=True):
                self.renamed[tail_of(part.module)] = (OutputRows(split.module, *rows),)
        # Tinker's names of the head and, of gpt-oss, of attention.
        self.renamed.update(("unembed_tokens", (_all_rows(self.slices[head][1]),)) for head in self.heads)
        for tail, module in self.by_tail.items():
            if (tinkers := tail.replace(".self_attn.", ".attn.")) not in self.by_tail:
                self.renamed[tinkers] = (_all_rows(self.slices[module][1]),)
        self._places = {module: place for place, module in enumerate(self.slices)}

    def place(self, rows: OutputRows) -> tuple[int, int]:
        """Sort key: the order of the layout."""
        return self._places[rows.module], rows.start

    def resolve(self, path: str) -> str | None:
        return self.by_tail.get(tail_of(path))

    def experts_at(self, path: str) -> tuple[Experts, str, str] | None:
        """The experts that the module at `path` is, or belongs to, the path of theirs, and the rest behind it."""
        module = _EXPERTS.match(path)
        if module is None:
            return None
        tail = tail_of(module[0])
        experts = self.experts.get(tail) or self.experts.get(tail.replace(_CALLED_ONCE, _CALLED_NOW))
        return None if experts is None else (experts, module[0], path[len(module[0]) + 1 :])

    def why_unknown(self, path: str) -> str:
        """Why nothing binds to the module at `path`."""
        return self.why_unserved(path) or f"this base model has no projection {path[:200]!r}"

    def why_unserved(self, path: str) -> str | None:
        """Why nothing binds to the module or parameter at `path`, which this base has; None if it has none such."""
        tail = f"{tail_of(path)}."
        module = next((module for module in self.experts if tail.startswith(f"{module}.")), None)
        if module is not None:
            return f"of experts ({module}) lora_A and lora_B of their weights are served, nothing else"
        module = next((module for module in self._fixed if tail.startswith(f"{module}.")), None)
        return None if module is None else f"adapters that change {module} are not served: train without it"

    @property
    def unserved(self) -> tuple[str, ...]:
        """Modules and parameters of this base, without the model's name, which no adapter changes."""
        return (*self.experts, *self._fixed)

    def rows_of(self, path: str) -> tuple[OutputRows, ...] | None:
        """Output rows that the module at `path` covers, in their order."""
        module = self.resolve(path)
        return self.renamed.get(tail_of(path)) if module is None else (_all_rows(self.slices[module][1]),)


def tail_of(path: str) -> str:
    return path[_end(_MODEL_PREFIX, path) :]


def model_prefix(path: str) -> str:
    return path[: _end(_MODEL_PREFIX, path)]


def part_beside_text(path: str) -> str | None:
    """The part of a multimodal model around the module at `path` that is not its text model; None for all else."""
    match = _BESIDE_TEXT.match(tail_of(path))
    return None if match is None else match[0]


def trained_path(name: str) -> str:
    """The module path as the trainer's configuration sees it: without what PEFT and wrappers put before it."""
    name = _WRAPPERS.sub("", name)
    return name[_end(_PEFT_PREFIX, name) :]


def _merged(projection: ProjectionSpec) -> Iterator[tuple[str, tuple[OutputRows, ...]]]:
    """Modules that trainers merge out of neighbours of one input: all of attention (qkv_proj) or of a gated layer
    (gate_up_proj), in their order; and two neighbours, named by joining what tells them apart: in_proj_qkv and
    in_proj_z become in_proj_qkvz, with the rows of the first before those of the second."""
    if projection.group in ("attention", "mlp") and len(projection.slices) > 1:
        yield projection.name, tuple(map(_all_rows, projection.slices))
    for first, second in pairwise(projection.slices):
        shared, underscore, _ = first.module.rpartition("_")
        told_apart = second.module.removeprefix(shared + underscore)
        if underscore and told_apart != second.module and "." not in told_apart:
            yield first.module + told_apart, (_all_rows(first), _all_rows(second))


def _all_rows(piece: Slice) -> OutputRows:
    return OutputRows(piece.module, 0, piece.out_features)


def _end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match else 0
