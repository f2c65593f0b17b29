"""Division of the non-LoRA budget into lines and tables."""

from __future__ import annotations

from collections.abc import Mapping

from adapters.layout import BaseLayout, Group

# Most of each: a step of captured heads costs one product per table, and more lines than sequences are of little use.
MAX_LINES = 64
MAX_TABLES = 8
_FLOAT_BYTES = 4


def non_lora_unit_bytes(layout: BaseLayout, element_bytes: int) -> dict[Group, int]:
    """Bytes of one line, or table, of each non-LoRA group.

    vectors          float32 scale and shift of each output of every projection
    norms            float32 weights of every norm
    saved_embedding  [vocabulary, hidden] in the rows' dtype; saved_head likewise
    """
    outputs = sum(piece.out_features for p in layout.projections if p.kind != "experts" for piece in p.slices)
    norms = sum(norm.out_features for norm in layout.norms)
    embeddings = [p for p in layout.projections if p.kind == "embedding"]
    table = sum(p.in_features * p.slices[0].out_features * element_bytes for p in embeddings[:1])
    return {
        "vectors": 2 * outputs * _FLOAT_BYTES,
        "norms": norms * _FLOAT_BYTES,
        "saved_embedding": table,
        "saved_head": table,
    }


def plan_non_lora(units: Mapping[Group, int], budget_bytes: int) -> dict[Group, int]:
    """Lines and tables per non-LoRA group: half of the budget for lines, up to MAX_LINES; the rest for tables, as many
    of heads as of embeddings. Where no table fits, all of it for lines. The base's line is paid for too."""
    line_bytes = units["vectors"] + units["norms"]
    table_bytes = units["saved_embedding"] + units["saved_head"]
    lines = _lines(budget_bytes // 2, line_bytes)
    left = budget_bytes - (lines + 1) * line_bytes
    tables = max(min(left // table_bytes, MAX_TABLES), 0) if table_bytes else 0
    if not tables:
        lines = _lines(budget_bytes, line_bytes)
    return {"vectors": lines, "norms": lines, "saved_embedding": tables, "saved_head": tables}


def non_lora_bytes_for(line_bytes: int, table_bytes: int, *, num_lines: int = 0, num_tables: int = 0) -> int:
    """A budget from which `plan_non_lora` makes at least so many lines, and so many tables of each kind.

    line_bytes   of one line of vectors and one of norms
    table_bytes  of an embedding and a head
    """
    assert num_lines <= MAX_LINES
    assert num_tables <= MAX_TABLES
    lines, tables = 2 * (1 + num_lines) * line_bytes if num_lines else 0, num_tables * table_bytes
    if tables:
        tables += min(max(tables, line_bytes), (1 + MAX_LINES) * line_bytes)
    return max(lines, tables)


def _lines(budget_bytes: int, line_bytes: int) -> int:
    return max(min(budget_bytes // line_bytes - 1, MAX_LINES), 0) if line_bytes else 0
