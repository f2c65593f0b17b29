"""What the stand-ins refuse, rule by rule, and that they sit on the real wheel's schemas and shape functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.shapes import ProbeShapes
from tests.ascend.twin.stand_ins import stand_ins
from tests.ascend.twin.stand_ins.stand_ins import BrokenRule

Arguments = dict[str, Any]
TOKENS, HEADS, KV_HEADS, HEAD_DIM, BLOCKS, BLOCK_SIZE = 6, 4, 2, 64, 5, 128


def test_the_wheel_is_the_one_that_is_served_with() -> None:
    import torch_npu

    assert not torch.npu.is_available()
    num_operators = sum(name.startswith("npu::") for name in torch._C._dispatch_get_all_op_names())
    # The second is that of NPU_PINS=2.12.
    assert (torch_npu.__version__, num_operators) in {("2.13.0", 425), ("2.12.0.post2", 424)}


def attention() -> Arguments:
    """A chunk of five tokens at the end of 130, and a first token."""
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, KV_HEADS * HEAD_DIM, dtype=torch.float16)
    return {
        "query": torch.zeros(TOKENS, HEADS, HEAD_DIM, dtype=torch.float16),
        "key": cache,
        "value": cache.clone(),
        "atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu_(1),
        "actual_seq_lengths": [5, 6],
        "actual_seq_lengths_kv": [130, 1],
        "block_table": torch.tensor([[1, 4], [2, 0]], dtype=torch.int32),
        "num_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "scale": 0.125,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": BLOCK_SIZE,
    }


def attention_to_out() -> Arguments:
    """The same in the form that is called, with a workspace that was asked for."""
    good = attention()
    return {**good, "workspace": stand_ins.largest_workspace(**good), "out": places_of(good)}


def places_of(good: Arguments) -> list[torch.Tensor]:
    return [torch.full_like(good["query"], torch.nan), torch.empty(1, dtype=good["query"].dtype)]


def scatter() -> Arguments:
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return {
        "key": torch.ones(3, KV_HEADS, HEAD_DIM),
        "value": torch.ones(3, KV_HEADS, HEAD_DIM),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "slot_mapping": torch.tensor([5, 639, 0]),
        "cache_mode": "Norm",
    }


def norm() -> Arguments:
    return {"input": torch.ones(3, 32), "gamma": torch.ones(32), "epsilon": 1e-6}


def norm_of_sum() -> Arguments:
    return {"x1": torch.ones(3, 32), "x2": torch.ones(3, 32), "gamma": torch.ones(32), "epsilon": 1e-6}


def rotation() -> Arguments:
    return {"input": torch.ones(3, 5, 8), "r1": torch.ones(3, 1, 8), "r2": torch.ones(3, 1, 8), "rotary_mode": "half"}


def gate() -> Arguments:
    return {"input": torch.ones(3, 8), "dim": -1}


def routing() -> Arguments:
    return {
        "x": torch.ones(3, 8),
        "expert_idx": torch.tensor([[1, 0], [0, 3], [3, 1]], dtype=torch.int32),
        "active_num": 6,
        "expert_num": 4,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 4],
        "quant_mode": -1,
    }


def groups() -> Arguments:
    return {
        "x": [torch.ones(6, 8)],
        "weight": [torch.ones(4, 5, 8).transpose(1, 2)],
        "group_list": torch.tensor([2, 2, 0, 2]),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
    }


def rounding() -> Arguments:
    return {"input": torch.ones(3, 8, dtype=torch.bfloat16)}


def integers() -> Arguments:
    return {
        "x1": torch.ones(3, 8, dtype=torch.int8),
        "x2": torch.ones(8, 5, dtype=torch.int8),
        "scale": torch.ones(5),
        "pertoken_scale": torch.ones(3),
        "output_dtype": torch.bfloat16,
    }


def blocks() -> Arguments:
    return {"input": torch.ones(8, 5, dtype=torch.int8), "acl_format": 29}


CALLS: dict[str, Callable[[], Arguments]] = {
    "npu_fused_infer_attention_score": attention_to_out,
    "_npu_fused_infer_attention_score_get_max_workspace": attention,
    "npu_scatter_pa_kv_cache": scatter,
    "npu_rms_norm": norm,
    "npu_add_rms_norm": norm_of_sum,
    "npu_rotary_mul": rotation,
    "npu_swiglu": gate,
    "npu_moe_init_routing_v2": routing,
    "npu_grouped_matmul": groups,
    "npu_dynamic_quant": rounding,
    "npu_quant_matmul": integers,
    "npu_format_cast": blocks,
}
ROUND, QUANT_MATMUL, CAST = "npu_dynamic_quant", "npu_quant_matmul", "npu_format_cast"
ROUTING, GROUPED = "npu_moe_init_routing_v2", "npu_grouped_matmul"
FIA, SCATTER = "npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache"
WORKSPACE = "_npu_fused_infer_attention_score_get_max_workspace"
RMS, ADD_RMS, ROTARY, SWIGLU = "npu_rms_norm", "npu_add_rms_norm", "npu_rotary_mul", "npu_swiglu"


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each row."""
    return torch.cat((tensor, tensor), 1)[:, : tensor.shape[1]]


def float32(*names: str) -> Callable[[Arguments], Arguments]:
    return lambda good: {name: good[name].float() for name in names}


def given(**changed: Any) -> Callable[[Arguments], Arguments]:
    return lambda _good: changed


# Operator, part of what is said, and the arguments that differ from the good ones above.
REFUSED: list[tuple[str, str, Callable[[Arguments], Arguments]]] = [
    (FIA, "layout TND", given(input_layout="TND_NTD")),
    (FIA, "16 bits", float32("query", "key", "value")),
    (FIA, "one dtype", float32("value")),
    (FIA, "contiguous", lambda good: {"query": strided(good["query"])}),
    (FIA, "contiguous", lambda good: {"key": strided(good["key"])}),
    (FIA, "three dimensions", lambda good: {"query": good["query"][None]}),
    (FIA, "one shape", lambda good: {"key": good["key"].view(BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)}),
    # Head by head is the order of its four dimensions, and of memory.
    (FIA, "the cache is", lambda good: {
        name: good[name].view(BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for name in ("key", "value")}),
    (FIA, "contiguous", lambda good: {
        name: good[name].view(BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM).transpose(1, 2) for name in ("key", "value")}),
    (FIA, "num_heads is", given(num_heads=2)),
    (FIA, "shared evenly", given(num_key_value_heads=3)),
    (FIA, "block_size is", given(block_size=64)),
    (FIA, "the cache is", given(block_size=256)),
    (FIA, "one shape", lambda good: {"value": good["value"][:4]}),
    (FIA, "needs actual_seq_lengths", given(actual_seq_lengths=None)),
    (FIA, "needs actual_seq_lengths_kv", given(actual_seq_lengths_kv=None)),
    (FIA, "cumulative", given(actual_seq_lengths=[7, 6])),
    (FIA, "number of tokens", given(actual_seq_lengths=[5, 5])),  # the second request's, not the sum
    (FIA, "one length", given(actual_seq_lengths=[6])),
    (FIA, "no more queries than keys", given(actual_seq_lengths_kv=[4, 1])),
    (FIA, "has a key", given(actual_seq_lengths_kv=[130, 0])),
    (FIA, "there is a block_table", given(block_table=None)),
    (FIA, "int32", lambda good: {"block_table": good["block_table"].long()}),
    (FIA, "contiguous matrix", lambda good: {"block_table": strided(good["block_table"])}),
    (FIA, "one row per request", lambda good: {"block_table": good["block_table"][:1]}),
    (FIA, "wide enough", given(actual_seq_lengths_kv=[257, 1])),
    (FIA, "blocks of all requests", given(actual_seq_lengths=[3, 6], actual_seq_lengths_kv=[384, 384],
                                          block_table=torch.ones(2, 3, dtype=torch.int32))),
    (FIA, "blocks of the cache", given(block_table=torch.tensor([[1, 5], [2, 0]], dtype=torch.int32))),
    (FIA, "sparse_mode 3", given(sparse_mode=0)),
    (FIA, "reaches back", given(sparse_mode=4, pre_tokens=-1, next_tokens=0)),
    (FIA, "ends at the token", given(sparse_mode=4, pre_tokens=3)),
    (FIA, "high precision", given(inner_precise=1)),
    (FIA, "need the mask", given(atten_mask=None)),
    (FIA, "bool, int8 or uint8", lambda good: {"atten_mask": good["atten_mask"].half()}),
    (FIA, "2048 x 2048", lambda good: {"atten_mask": good["atten_mask"][:128, :128]}),
    (FIA, "above its diagonal", lambda good: {"atten_mask": good["atten_mask"].t().contiguous()}),
    (FIA, "not used", given(softmax_lse_flag=True)),
    (FIA, "in query's dtype", lambda good: {"out": [good["out"][0].float(), good["out"][1]]}),
    (FIA, "in query's dtype", lambda good: {"out": [good["out"][0], good["out"][1].float()]}),
    (FIA, "the query's shape", lambda good: {"out": [good["out"][0][:-1], good["out"][1]]}),
    (FIA, "place of one element", lambda good: {"out": [good["out"][0], good["out"][1][:0]]}),
    (FIA, "has one dimension", lambda good: {"workspace": good["workspace"][None]}),
    (FIA, "workspace has the query's dtype", lambda good: {"workspace": good["workspace"].float()}),
    (FIA, "the workspace has", lambda good: {"workspace": good["workspace"][1:]}),
    (FIA, "these very arguments", given(scale=0.25)),
    (WORKSPACE, "need the mask", given(atten_mask=None)),
    (WORKSPACE, "cumulative", given(actual_seq_lengths=[7, 6])),
    (SCATTER, "plain layout", given(cache_mode="PA_NZ")),
    (SCATTER, "contiguous", lambda good: {"value": strided(good["value"])}),
    (SCATTER, "contiguous", lambda good: {"key_cache": strided(good["key_cache"])}),
    (SCATTER, "one dtype", lambda good: {"key": good["key"].half()}),
    (SCATTER, "fit the cache", lambda good: {"key": good["key"][..., :32].contiguous()}),
    (SCATTER, "int32 or int64", lambda good: {"slot_mapping": good["slot_mapping"].short()}),
    (SCATTER, "one slot per token", given(slot_mapping=torch.tensor([5, 6]))),
    (SCATTER, "lie in the cache", given(slot_mapping=torch.tensor([5, 640, 0]))),
    (SCATTER, "lie in the cache", given(slot_mapping=torch.tensor([5, -2, 0]))),
    (SCATTER, "no slot twice", given(slot_mapping=torch.tensor([5, 6, 5]))),
    (RMS, "gamma has the input's dtype", lambda good: {"input": good["input"].half()}),
    (RMS, "last dimensions", given(gamma=torch.ones(3))),
    (RMS, "2 to 8", given(input=torch.ones(32))),
    (RMS, "not empty", given(input=torch.ones(0, 32))),
    (ADD_RMS, "not empty", given(x1=torch.ones(0, 32), x2=torch.ones(0, 32))),
    (ADD_RMS, "one shape and dtype", lambda good: {"x2": good["x2"].half()}),
    (ROTARY, "not pairs", given(rotary_mode="interleave")),
    (ROTARY, "in full width", given(r1=torch.ones(3, 1, 4), r2=torch.ones(3, 1, 4))),
    (ROTARY, "in full width", given(r1=torch.ones(3, 5, 8))),
    (ROTARY, "dtype", lambda good: {"r2": good["r2"].half()}),
    (ROTARY, "lie in", lambda good: {"r1": 1.1 * good["r1"]}),
    (ROTARY, "even", given(input=torch.ones(3, 5, 7), r1=torch.ones(3, 1, 7), r2=torch.ones(3, 1, 7))),
    (ROTARY, "not empty", given(input=torch.ones(0, 5, 8), r1=torch.ones(0, 1, 8), r2=torch.ones(0, 1, 8))),
    (SWIGLU, "not empty", given(input=torch.ones(0, 8))),
    (SWIGLU, "halves are equal", given(dim=0)),
    (ROUND, "has 16 bits", float32("input")),
    (ROUND, "a matrix", given(input=torch.ones(8, dtype=torch.bfloat16))),
    (ROUND, "rows alone", given(smooth_scales=torch.ones(8, dtype=torch.bfloat16))),
    (QUANT_MATMUL, "both lie in order", lambda good: {"x1": strided(good["x1"])}),
    (QUANT_MATMUL, "one for each column", given(scale=torch.ones(1))),
    (QUANT_MATMUL, "pertoken_scale is given", given(pertoken_scale=None)),
    (QUANT_MATMUL, "not used", given(offset=torch.ones(5))),
    (CAST, "FRACTAL_NZ", given(acl_format=2)),
    (QUANT_MATMUL, "result's dtype", given(bias=torch.ones(5))),
    (CAST, "in order", lambda good: {"input": strided(good["input"])}),
    (ROUTING, "not used", given(scale=torch.ones(3))),
    (ROUTING, "x is a matrix", lambda good: {"x": good["x"].long()}),
    (ROUTING, "int32", lambda good: {"expert_idx": good["expert_idx"].long()}),
    (ROUTING, "one row per token", lambda good: {"expert_idx": good["expert_idx"][:2]}),
    (ROUTING, "is positive", given(expert_num=-1)),
    (ROUTING, "below expert_num", given(expert_num=3)),
    (ROUTING, "all pairs", given(active_num=5)),
    (ROUTING, "nothing is dropped", given(drop_pad_mode=1)),
    (ROUTING, "tokens are counted", given(expert_tokens_num_type=0)),
    (ROUTING, "nothing is quantised", given(quant_mode=1)),
    (ROUTING, "of all experts", given(active_expert_range=[1, 4])),
    (ROUTING, "for gathering", given(row_idx_type=1)),
    (GROUPED, "not used", given(bias=[torch.ones(4, 5)])),
    (GROUPED, "one x", given(split_item=0)),
    (GROUPED, "weight three", given(weight=[torch.ones(8, 5)])),
    (GROUPED, "x is not transposed", given(x=[torch.ones(8, 6).t()])),
    (GROUPED, "or transposed", given(weight=[torch.ones(4, 5, 16).transpose(1, 2)[:, ::2]])),
    (GROUPED, "one dtype", given(x=[torch.ones(6, 8).half()])),
    (GROUPED, "fits the weights", given(x=[torch.ones(6, 7)])),
    (GROUPED, "below 65536", given(weight=[torch.ones(4, 8, 65_536)])),
    (GROUPED, "not activated", given(group_type=-1)),
    (GROUPED, "int64", lambda good: {"group_list": good["group_list"].int()}),
    (GROUPED, "one number per group", given(group_list=torch.tensor([2, 4]))),
    (GROUPED, "all rows", given(group_list=torch.tensor([2, 2, 0, 1]))),
    (GROUPED, "do not fall", given(group_list=torch.tensor([2, 5, 3, 6]), group_list_type=0)),
]  # fmt: skip


def test_every_stand_in_has_a_good_call() -> None:
    assert CALLS.keys() == stand_ins.STAND_INS.keys() == {op for op, _, _ in REFUSED}
    for op, arguments in CALLS.items():
        getattr(torch.ops.npu, op)(**arguments())


@pytest.mark.parametrize(("op", "said", "change"), REFUSED, ids=[f"{op}-{said}" for op, said, _ in REFUSED])
def test_refuses(op: str, said: str, change: Callable[[Arguments], Arguments]) -> None:
    good = CALLS[op]()
    with pytest.raises(BrokenRule, match=said):
        stand_ins.STAND_INS[op](**{**good, **change(good)})


# num_blocks, block_size, kv_heads, head_dim; dtype; query heads; sequences
SIZES = (
    ((5, 128, 2, 64), torch.float16, 4, 2),
    ((5, 512, 1, 256), torch.bfloat16, 64, 4096),
    ((5, 128, 2, 64), torch.float32, 4, 2),
    ((5, 128, 2, 80), torch.float16, 4, 2),
    ((5, 16, 2, 64), torch.float16, 4, 2),
    ((5, 640, 2, 64), torch.float16, 4, 2),
    ((5, 128, 1, 64), torch.float16, 65, 2),
    ((5, 128, 16, 64), torch.float16, 272, 2),
    ((5, 128, 256, 256), torch.float16, 256, 2),
    ((2**17, 128, 2, 64), torch.float16, 4, 2),
    ((5, 128, 2, 64), torch.float16, 4, 4097),
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_service_keeps_away_what_attention_refuses(
    sizes: tuple[tuple[int, int, int, int], torch.dtype, int, int],
) -> None:
    """`refuses` in the service and the rules here were written apart; they say the same of each limit."""
    from kernels.paged_attention.npu import refuses

    (num_blocks, block_size, kv_heads, head_dim), dtype, num_heads, num_sequences = sizes
    query = torch.empty(num_sequences, num_heads, head_dim, dtype=dtype, device="meta")
    cache = torch.empty(num_blocks, block_size, kv_heads * head_dim, dtype=dtype, device="meta")
    refused = None
    try:
        stand_ins._check_attention_tensors(query, cache, cache, num_heads, kv_heads, block_size)
        stand_ins._check_lengths(list(range(num_sequences + 1)), [1] * num_sequences, num_sequences)
    except BrokenRule as rule:
        refused = str(rule)
    shapes = ProbeShapes(
        dtype=str(dtype).removeprefix("torch."),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        max_sequences=num_sequences,
    )
    said = refuses(shapes)
    assert (said is None) == (refused is None), f"the service says {said!r}, the stand-in {refused!r}"


def test_the_service_keeps_caps_and_sinks_away_from_attention() -> None:
    """The operator has no argument for them, nor grouped products for biases; plain torch serves such a model."""
    from kernels.experts import npu
    from kernels.paged_attention.npu import refuses

    shapes = ProbeShapes(dtype="bfloat16", block_size=128)
    assert refuses(shapes) is None
    assert refuses(replace(shapes, score_cap=50.0)) == "it does not cap scores"
    assert refuses(replace(shapes, has_sinks=True)) == "it has no attention sinks"
    assert npu.CONTRACT.refuses(shapes) is None
    assert npu.CONTRACT.refuses(replace(shapes, has_expert_biases=True)) == "it adds no biases of experts"


def test_the_16_bit_rule_can_be_lifted() -> None:
    good = attention()
    wide = {**good, **float32("query", "key", "value")(good)}
    wide["out"] = places_of(wide)
    with stand_ins.float32_attention():
        out, _ = torch.ops.npu.npu_fused_infer_attention_score(**wide)
    assert out is wide["out"][0] and not out.isnan().any()
    with pytest.raises(BrokenRule, match="16 bits"):
        torch.ops.npu.npu_fused_infer_attention_score(**wide)


def test_both_layouts_of_a_cache_give_one_result() -> None:
    good = attention()
    results = []
    for heads_first in (False, True):
        call = dict(good)
        if heads_first:
            for name in ("key", "value"):
                cache = good[name].view(BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
                call[name] = cache.transpose(1, 2).contiguous()
        out, _ = torch.ops.npu.npu_fused_infer_attention_score.out(**call, out=places_of(call))
        results.append(out)
    assert torch.equal(*results) and not results[0].isnan().any()


def test_the_wheels_own_shape_function_is_asked_first() -> None:
    good = {**attention(), "out": places_of(attention())}
    with pytest.raises(RuntimeError, match="queryDims"):
        torch.ops.npu.npu_fused_infer_attention_score(**{**good, "query": good["query"].view(TOKENS, -1)})


def test_the_wheels_schema_refuses_an_unknown_keyword() -> None:
    with pytest.raises(RuntimeError, match="eps"):
        torch.ops.npu.npu_rms_norm(torch.ones(3, 32), torch.ones(32), eps=1e-6)


def test_keys_and_values_are_written_in_place() -> None:
    call = scatter()
    torch.ops.npu.npu_scatter_pa_kv_cache(**call)
    for cache in (call["key_cache"], call["value_cache"]):
        written = cache.view(-1, KV_HEADS * HEAD_DIM).any(1).nonzero().flatten()
        assert written.tolist() == [0, 5, 639]


def test_slots_of_padding_are_skipped() -> None:
    call = {**scatter(), "slot_mapping": torch.tensor([-1, 639, -1])}
    torch.ops.npu.npu_scatter_pa_kv_cache(**call)
    for cache in (call["key_cache"], call["value_cache"]):
        assert cache.view(-1, KV_HEADS * HEAD_DIM).any(1).nonzero().flatten().tolist() == [639]
