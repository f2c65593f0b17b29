"""The padded sizes of a step, and which of them are captured.

A captured step runs again for any step of its sizes, so there are few: padding to the next size costs at most an
eighth of the tokens above 8, and attention reads no more than the lengths say, whatever the width of its table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernels.lora_window.ops import LENGTHS, window_for, window_lengths
from kernels.platform import FEW_TOKENS

# Decode steps are small and must fit closely; from 128 tokens on, chunks of prompts are among them.
TOKEN_SIZES = (1, 2, 4, *range(8, 65, 8), 96, 128, 192, 256, 384, 512, 768, 1024)
# Decode steps on an NPU, whose graphs take streams of which there are few.
NPU_TOKEN_SIZES = (1, 2, 4, 8, 16, 32, 64)
# Tokens that a row of the block table has room for; the widest is the engine's own.
CONTEXT_SIZES = (1024, 16384)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Everything that a captured step depends on but the contents of its inputs.

    num_tokens, num_sequences  padded
    num_rows       rows of logits; None: one for each token, which is the last of its sequence
    table_blocks   columns of the block table
    all_decode     one token of each sequence, each with a conv state to begin from
    has_lora       any token uses an adapter
    window_rows    rows that the window behind the base weights must hold, and once padded its length (see
                   `kernels.lora_window`); 0: there is none, or shrink and expand are kernels of their own
    has_experts    an adapter of the step has rows for experts
    side           see `service.engine.step.maps.non_lora_lines`; () where adapters have nothing but rows
    """

    num_tokens: int
    num_sequences: int
    num_rows: int | None
    table_blocks: int
    all_decode: bool
    has_lora: bool
    window_rows: int = 0
    side: tuple[tuple[str, int], ...] = ()
    has_experts: bool = False


def from_python_on_npu(exact: StepSizes) -> StepSizes:
    """The sizes of a step that an NPU is launched for call by call: as they are, with the length of the window. Decode
    steps have one, where it saves a launch for each projection; captured ones cost no launches, and have none, which
    leaves graphs few."""
    has_window = exact.window_rows and exact.all_decode and exact.num_tokens <= FEW_TOKENS["npu"]
    return replace(exact, window_rows=(window_for(exact.window_rows, exact.num_tokens) or 0) if has_window else 0)


def padded_tokens(num_tokens: int) -> int:
    """The size that so many tokens are padded to; themselves where they are too many to be captured."""
    index = bisect_left(TOKEN_SIZES, num_tokens)
    return TOKEN_SIZES[index] if index < len(TOKEN_SIZES) else num_tokens


@dataclass(frozen=True, slots=True)
class Padding:
    """How the steps of an engine on a device are padded: pure functions of its limits.

    max_sequences, max_blocks  of a step, and of a sequence
    block_size                 tokens
    is_npu                     decode steps alone are padded, to `NPU_TOKEN_SIZES` and to one width of the block table:
                               fused attention takes no empty sequences but as tokens of their own
    """

    max_sequences: int
    max_blocks: int
    block_size: int
    is_npu: bool = False

    @property
    def npu_token_sizes(self) -> tuple[int, ...]:
        """Those of `NPU_TOKEN_SIZES` that steps can have; the largest is no larger than they can be."""
        most = min(NPU_TOKEN_SIZES[-1], self.max_sequences)
        return (*(size for size in NPU_TOKEN_SIZES if size < most), most)

    @property
    def max_rows(self) -> int:
        """Rows of logits that a captured step can have."""
        return NPU_TOKEN_SIZES[-1] if self.is_npu else padded_tokens(self.max_sequences)

    def table_blocks(self, num_blocks: int) -> int:
        """The least width that is used for sequences of up to num_blocks blocks."""
        if self.is_npu:
            return self.max_blocks
        widths = [-(-tokens // self.block_size) for tokens in CONTEXT_SIZES]
        return next((width for width in widths if num_blocks <= width < self.max_blocks), self.max_blocks)

    def wide(self, exact: StepSizes) -> StepSizes:
        """The same with a width of the block table that is captured, and so compiled, and a length of the window."""
        num_tokens = padded_tokens(exact.num_tokens)
        return replace(
            exact,
            table_blocks=self.table_blocks(exact.table_blocks),
            window_rows=(window_for(exact.window_rows, num_tokens) or 0) if exact.window_rows else 0,
        )

    def captured(self, exact: StepSizes) -> StepSizes | None:
        """The sizes of the captured step that `exact` is run in; None for steps that are too large to be captured, or
        want other logits than one row of each sequence."""
        if self.is_npu:
            return self._captured_on_npu(exact)
        num_tokens = padded_tokens(exact.num_tokens)
        if num_tokens > TOKEN_SIZES[-1]:
            return None
        if exact.num_rows is None:
            assert exact.num_sequences == exact.num_tokens, "one token of each sequence"
            num_sequences = num_tokens
        else:
            num_sequences = min(num_tokens, self.max_sequences)
            if exact.num_rows > num_sequences:
                return None
        return replace(
            self.wide(exact),
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_rows=None if exact.num_rows is None else num_sequences,
        )

    @staticmethod
    def with_longer_windows(captured: StepSizes) -> Iterator[StepSizes]:
        """Sizes whose captured steps serve a step of these sizes too, and read more rows for it."""
        if captured.window_rows:
            for length in LENGTHS:
                if length.rows > captured.window_rows:
                    yield replace(captured, window_rows=length.rows)

    def _captured_on_npu(self, exact: StepSizes) -> StepSizes | None:
        sizes = self.npu_token_sizes
        if not exact.all_decode or exact.num_rows is not None or exact.num_tokens > sizes[-1]:
            return None
        num_tokens = sizes[bisect_left(sizes, exact.num_tokens)]
        return replace(
            exact, num_tokens=num_tokens, num_sequences=num_tokens, table_blocks=self.max_blocks, window_rows=0
        )

    def to_capture(
        self, *, token_budget: int, has_lora: bool, num_window_rows: int = 0
    ) -> tuple[list[StepSizes], list[StepSizes]]:
        """(what is captured before the first request, what while nobody waits), the largest first: later ones fit into
        the memory that they leave.

        Of every other number of tokens before the first request: decode steps of sequences that are not long, with the
        longest window, which serves for the shorter ones until these are there (`with_longer_windows`), and steps
        without a window that have short chunks among them. Then those of the numbers between, which a step that comes
        before them waits for once, and then the other lengths and widths, and chunks with windows.

        num_window_rows  rows behind the base weights; 0 without windows
        """
        if self.is_npu:
            loras_npu = (False, True) if has_lora else (False,)
            sizes = [
                StepSizes(size, size, None, self.max_blocks, True, lora)
                for size in reversed(self.npu_token_sizes)
                for lora in reversed(loras_npu)
            ]
            return sizes, []
        widths = sorted({self.table_blocks(-(-tokens // self.block_size)) for tokens in (1, *CONTEXT_SIZES[1:])})
        widths = sorted({*widths, self.max_blocks})
        first: list[StepSizes] = []
        later: list[StepSizes] = []
        for num_tokens in TOKEN_SIZES:
            if num_tokens > padded_tokens(token_budget):
                break
            num_sequences = min(num_tokens, self.max_sequences)
            loras = [(False, 0)]
            if has_lora:
                lengths = window_lengths(num_window_rows) if num_window_rows else ()
                windows = {window_for(length, num_tokens) or 0 for length in lengths} or {0}
                loras += [(True, window) for window in sorted(windows)]
            for lora, window in loras:
                if num_tokens <= self.max_rows:
                    decode = [StepSizes(num_tokens, num_tokens, None, width, True, lora, window) for width in widths]
                    (first if window in (0, loras[-1][1]) else later).append(decode[0])
                    later += decode[1:]
                rows = num_tokens, num_sequences, num_sequences
                mixed = [StepSizes(*rows, width, False, lora, window) for width in widths]
                (later if window else first).append(mixed[0])
                # Behind what the prefix cache has, a chunk is short and its context long.
                later += mixed[1:] if window in (0, loras[-1][1]) else []
        early = {1, self.max_rows, *TOKEN_SIZES[TOKEN_SIZES.index(first[-1].num_tokens) :: -2]}
        between = [one for one in first if one.num_tokens not in early]
        return [one for one in first[::-1] if one.num_tokens in early], [*between[::-1], *later[::-1]]
