"""Division of a byte budget into rows per projection group. Both processes compute it: the API to refuse uploads that
could never fit, the engine to size the row pool. The non-LoRA budget is divided into lines and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adapters.layout import NON_LORA_GROUPS, TABLE_GROUPS, BaseLayout, Group

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


# Vocabulary-wide rows serve few adapters: they get as many rows as the layers do, but at most this share of the budget.
EMBEDDINGS_SHARE = 0.125
# An adapter of experts has a row for each of them where it has one for the other projections of a layer.
EXPERTS_SHARE = 0.5
# int32 rank + float32 scaling on the device, per slice and place.
TABLE_BYTES = 8


@dataclass(frozen=True, slots=True)
class RowPlan:
    """rows, row_bytes: per group of the layout; row_bytes counts one row in all layers and projections of the group.
    With a non-LoRA budget the non-LoRA groups follow: their numbers of lines, or tables, and the bytes of one.

    num_places   most adapters that can be resident at once; follows from the rows, since each takes one range at least
    alignment    ranges are multiples of it
    table_bytes  of ranks and scalings of all places, and of the lines of the base itself
    max_rank     largest rank that the device's kernels support; None = any
    num_experts  of a layer: an adapter of experts has so many rows for each rank
    """

    rows: dict[Group, int]
    row_bytes: dict[Group, int]
    num_places: int
    alignment: int
    table_bytes: int
    max_rank: int | None = None
    num_experts: int = 1

    @property
    def total_bytes(self) -> int:
        """The most bytes that the pool can occupy; never more than its budget."""
        return sum(self.rows[group] * self.row_bytes[group] for group in self.rows) + self.table_bytes

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups in the order of `LoraMaps.first_rows`."""
        return tuple(self.rows)

    @property
    def num_rows(self) -> int:
        """Rows of all groups, without non-LoRA groups."""
        return sum(num for group, num in self.rows.items() if group not in NON_LORA_GROUPS)

    @property
    def most_rows(self) -> int:
        """Rows of the group that holds the most ranks."""
        return max((num for group, num in self.rows.items() if group != "experts"), default=0)

    def length(self, group: str, num_rows: int) -> int:
        """Length of the range for so many rows, or lines, of the group."""
        return num_rows if group in NON_LORA_GROUPS else self.aligned(num_rows)

    def aligned(self, rank: int) -> int:
        """Rows that a range for `rank` takes."""
        return -(-rank // self.alignment) * self.alignment

    def rank_of(self, rows: Mapping[str, int]) -> int:
        """The largest rank of an adapter that takes so many rows; of experts, that of one."""
        ranks = (num // (self.num_experts if group == "experts" else 1) for group, num in rows.items())
        return max(ranks, default=0)

    def group_too_small(self, rows: Mapping[str, int]) -> Group | None:
        """The first group in which `rows` could never fit, None if it fits an empty pool."""
        for group in (*self.rows, *NON_LORA_GROUPS):
            if self.length(group, rows.get(group, 0)) > self.rows.get(group, 0):
                return group
        return None

    def refusal(self, group: Group, rows: Mapping[str, int]) -> str:
        """The sentence that refuses `rows`, which are too many for this group; callers may add a hint."""
        needed, held, size = self.length(group, rows[group]), self.rows.get(group, 0), self.row_bytes.get(group, 0)
        if group in NON_LORA_GROUPS:
            return (
                f"The adapter needs room on the device for {MEANINGS[group]}, and the side budget holds none"
                f"{self._side_hint(rows)}."
            )
        return (
            f"The adapter needs {needed} {group} rows on the device ({needed * size} bytes); the row budget holds "
            f"{held} ({held * size} bytes). Use a smaller rank, or ask the operator for a larger --adapter-row-bytes."
        )

    def _side_hint(self, rows: Mapping[str, int]) -> str:
        """How large a side budget would take such an adapter, which a plan without one does not know."""
        units = self.row_bytes
        if not units.keys() >= set(NON_LORA_GROUPS):
            return ". Ask the operator for an --adapter-side-bytes that is not 0"
        num_bytes = non_lora_bytes_for(
            units["vectors"] + units["norms"],
            units["saved_embedding"] + units["saved_head"],
            num_lines=int(bool({"vectors", "norms"} & rows.keys())),
            num_tables=int(bool(set(TABLE_GROUPS) & rows.keys())),
        )
        return f". Ask the operator for an --adapter-side-bytes of {num_bytes} or more"


# Names of the non-LoRA groups in messages.
MEANINGS = {
    "vectors": "magnitudes or biases",
    "norms": "norms",
    "saved_embedding": "a whole embedding",
    "saved_head": "a whole head",
}


def row_bytes(layout: BaseLayout, element_bytes: int) -> dict[Group, int]:
    """Bytes of one row (of A and of B) in all projections of each group."""
    return {
        group: sum(
            (projection.in_features + piece.out_features) * element_bytes
            for projection in layout.projections
            if projection.group == group
            for piece in projection.slices
        )
        for group in layout.groups
    }


def plan_rows(
    layout: BaseLayout,
    budget_bytes: int,
    *,
    element_bytes: int,
    alignment: int = 16,
    max_rank: int | None = None,
    side_bytes: int = 0,
) -> RowPlan:
    """Split `budget_bytes` so that an adapter over all layer groups uses them evenly, and `side_bytes` among the
    non-LoRA groups; total_bytes <= budget_bytes + side_bytes."""
    assert budget_bytes >= 0
    assert element_bytes > 0
    assert alignment > 0
    per_row = row_bytes(layout, element_bytes)
    num_slices = sum(len(projection.slices) for projection in layout.projections)
    # One place per `alignment` rows of a group: its table entry is part of what these rows cost.
    per_block = {group: size * alignment + num_slices * TABLE_BYTES for group, size in per_row.items()}
    blocks = _split(per_block, budget_bytes)
    rows: dict[Group, int] = {group: blocks[group] * alignment for group in per_row}
    num_places = sum(blocks.values())
    table_bytes = num_places * num_slices * TABLE_BYTES
    if side_bytes:
        units = non_lora_unit_bytes(layout, element_bytes)
        lines = plan_non_lora(units, side_bytes)
        table_bytes += sum(units[group] for group in ("vectors", "norms") if lines[group])  # line 0 is the base's
        rows, per_row = rows | lines, per_row | units
    num_experts = max((experts.num for experts in layout.experts), default=1)
    return RowPlan(rows, per_row, num_places, alignment, table_bytes, max_rank, num_experts)


def _split(block_bytes: dict[Group, int], budget_bytes: int) -> dict[Group, int]:
    """Blocks per group: what its share holds for experts; of the rest as many in each other layer group; the embeddings
    as many, or what their share holds."""
    layers = {group: size for group, size in block_bytes.items() if group not in ("embeddings", "experts")}
    blocks = dict.fromkeys(block_bytes, 0)
    if "experts" in block_bytes:
        blocks["experts"] = int(budget_bytes * EXPERTS_SHARE) // block_bytes["experts"]
        budget_bytes -= blocks["experts"] * block_bytes["experts"]
    others = {group: size for group, size in block_bytes.items() if group != "experts"}
    even = budget_bytes // sum(others.values()) if others else 0
    blocks |= dict.fromkeys(others, even)
    if "embeddings" in block_bytes and layers:
        size = block_bytes["embeddings"]
        blocks["embeddings"] = min(even, int(budget_bytes * EMBEDDINGS_SHARE) // size)
        for group in layers:
            blocks[group] = (budget_bytes - blocks["embeddings"] * size) // sum(layers.values())
    return blocks
