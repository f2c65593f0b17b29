"""Mutants that survive because they change nothing that matters, each with its reason."""

from __future__ import annotations

from tests.ascend.mutants.changes import Mutant

_BEYOND = "the compiler drops a row or tap beyond the width: no output reads it"

# (function, before, after) -> reason.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (function, f"WIDTH > {width}", f"WIDTH >= {width}"): _BEYOND
    for function in ("_shifted", "_taps")
    for width in range(2, 8)
}
EQUIVALENT |= {
    (function, "tl.minimum(first_item + share, num_items)", "first_item + share"): (
        "items behind the last one are blocks of channels behind the last channel, where every access is masked"
    )
    for function in ("conv_update", "conv_prefill")
}
EQUIVALENT |= {
    (function, "(slice_index * num_tokens + begin).to(tl.int64)", "slice_index * num_tokens + begin"): (
        "h is a step's workspace, of slices x tokens x splits x 256 elements, which 32 bits count by far"
    )
    for function in ("lora_shrink_few", "lora_shrink_many", "lora_expand_few", "lora_expand_many")
}
EQUIVALENT |= {
    (function, "end < stop", "end <= stop"): "one more round for a segment without tokens, in which all is masked"
    for function in (
        *("lora_shrink_few", "lora_expand_few", "lora_shrink_many", "lora_expand_many"),
        "lora_expand_window_few",
    )
}
EQUIVALENT |= {
    (function, "(end < stop) & (segment < max_segments)", "segment < max_segments"): (
        "the next segment's end is cut to where this group stops, so it has no token and the walk ends there"
    )
    for function in (
        *("lora_shrink_few", "lora_expand_few", "lora_shrink_many", "lora_expand_many"),
        "lora_expand_window_few",
    )
}
EQUIVALENT |= {
    (function, "tl.minimum(begin + T, num_tokens)", "begin + T"): (
        "the last segment ends with the step's tokens at the latest; at most one more round for a segment without any"
    )
    for function in ("lora_shrink_few", "lora_shrink_many", "lora_expand_few", "lora_expand_many")
}
EQUIVALENT |= {
    (function, "rank > part * R", "rank >= part * R"): (
        "no block of ranks begins at the rank: the loop over them is empty"
    )
    for function in ("lora_shrink_few", "lora_shrink_many")
}
EQUIVALENT |= {
    (function, "tl.cast(slice_index * num_pairs + pair, tl.int64)", "slice_index * num_pairs + pair"): (
        "h is a step's workspace, of slices x pairs x 256 elements, which 32 bits count by far"
    )
    for function in ("expert_shrink", "expert_expand")
}
EQUIVALENT["expert_expand", "rank > 0", "rank >= 0"] = "without ranks nothing is added"
EQUIVALENT["rows_of", "tl.maximum(first_row, 0)", "first_row"] = (
    "where the first row is negative the rank is 0, and no kernel uses an address of rows that it has not"
)
EQUIVALENT["lora_expand_few", "tl.cast(t, tl.int64)", "t"] = (
    "of the tokens of a group, at most 16, whose rows 32 bits count from the first one's"
)
EQUIVALENT["rotary_kv_kernel", "tl.minimum(first_item + share, num_items)", "first_item + share"] = (
    "items behind the last one are blocks of heads behind the last value head, where every access is masked"
)
EQUIVALENT["rotary_kv_kernel", "slot >= 0", "slot > 0"] = (
    "slot 0 stands in the null block, of which no token has a slot"
)
EQUIVALENT["swiglu_window_few", "end > begin", "end >= begin"] = (
    "one more round for each segment without tokens; the base's tokens come after the last segment all the same"
)
EQUIVALENT["conv_prefill", "index < num_sequences", "index <= num_sequences"] = (
    "one start more is where the last sequence ends: it counts in tiles behind all tokens, which compute nothing"
)
EQUIVALENT["conv_prefill", "starts <= first_token", "starts < first_token"] = (
    "one more round, for the sequence that ends where the tile begins: it has no token there, nor is it the head's"
)
EQUIVALENT |= {
    ("_copy_state", before, after): "changes only rows that are inputs, of which the state's are not read"
    for before, after in (
        ("tl.minimum(token - start + WIDTH - 1, WIDTH - 2)", "token - start + WIDTH - 1"),
        (
            "tl.maximum(tl.minimum(token - start + WIDTH - 1, WIDTH - 2), 0)",
            "tl.minimum(token - start + WIDTH - 1, WIDTH - 2)",
        ),
    )
}
EQUIVALENT["_copy_state", "tl.maximum(token, 0)", "token"] = (
    "a token before the first one is no input, and nothing of its load is inside the mask"
)
EQUIVALENT |= {
    (function, "tl.cast(first_token, tl.int64)", "first_token"): (
        "of a step's tokens, whose rows of queries, keys and values, and of outputs, 32 bits count by far"
    )
    for function in ("gated_delta_norm", "gated_delta_scan")
}
EQUIVALENT |= {
    (function, f"tl.cast({index}, tl.int64)", index): (
        "of the buffers of a piece, 2048 tokens at most, whose elements 32 bits count by far"
    )
    for function, index in (
        ("gated_delta_norm", "item"),
        ("gated_delta_prepare", "item"),
        ("gated_delta_prepare", "chunk"),
        ("gated_delta_solve", "item"),
        ("gated_delta_double", "item // PAIRS"),
        ("gated_delta_scan", "chunk"),
    )
}

_SAME_ROW = "the block is shorter than the row, and no output reads what lies beyond the half"
_EMPTY_REST = "where all of a head is turned, a load of which nothing is inside its mask, and which nobody reads"

# (function, before, after, first line of the statement) -> reason, where it holds in one statement alone.
EQUIVALENT_IN: dict[tuple[str, str, str, str], str] = {
    ("rotary_kv_kernel", "ROTARY_DIM < HEAD_DIM", "ROTARY_DIM <= HEAD_DIM", "if ROTARY_DIM < HEAD_DIM:"): _EMPTY_REST,
    (
        "rotary_kv_kernel", "tl.cast(token, tl.int64)", "token", "angles = tl.cast(token, tl.int64) * ROTARY_DIM"
    ): "a step's angles, of tokens x head_dim elements, which 32 bits count by far",
    (
        "rotary_kv_kernel", "tl.cast(token, tl.int64)", "token",
        "out = q_ptr + (tl.cast(token, tl.int64) * (NUM_HEADS * HEAD_DIM) + first * HEAD_DIM)",
    ): "a step's fresh queries, of tokens x heads x head_dim elements, which 32 bits count by far",
    (
        "swiglu_window_few", "tl.cast(begin + group, tl.int64)", "begin + group",
        "out_rows = out_ptr + tl.cast(begin + group, tl.int64) * size + first_column",
    ): "a step's fresh output, of at most 64 tokens x size elements, which 32 bits count by far",
}  # fmt: skip
for _function in ("lora_expand_few", "lora_expand_window_few", "swiglu_window_few"):
    EQUIVALENT_IN[_function, "end - begin", "end", "group_tokens = tl.where(is_summed, G, end - begin)"] = (
        "a group of more tokens than there are: one group all the same, whose members are counted up to the last token"
    )
for _function in ("lora_shrink_few", "lora_shrink_many"):
    EQUIVALENT_IN[_function, "part * R", "part", "if rank > part * R:"] = (
        "the loop over the blocks of ranks is empty where the part's first one is behind the rank"
    )
for _name in ("cos", "sin"):
    _statement = f"{_name} = tl.load({_name}_ptr + angles + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]"
    _load = f"tl.load({_name}_ptr + angles + dim"
    EQUIVALENT_IN["rotary_kv_kernel", f"{_load}, mask=dim < HALF, other=0.0)", f"{_load})", _statement] = _SAME_ROW
    EQUIVALENT_IN["rotary_kv_kernel", "dim < HALF", "dim <= HALF", _statement] = _SAME_ROW
_statement = "first_weight = tl.load(weight + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]"
_load = "tl.load(weight + dim"
EQUIVALENT_IN["rotary_kv_kernel", f"{_load}, mask=dim < HALF, other=0.0)", f"{_load})", _statement] = _SAME_ROW
EQUIVALENT_IN["rotary_kv_kernel", "dim < HALF", "dim <= HALF", _statement] = _SAME_ROW


def reason_for(mutant: Mutant) -> str | None:
    """Why a surviving mutant is equivalent; None if it is not listed."""
    key = mutant.function, mutant.before, mutant.after
    return EQUIVALENT.get(key) or EQUIVALENT_IN.get((*key, mutant.statement))
