"""The server's metrics under vLLM's names and labels, so that dashboards made for vLLM show them.

Nothing is measured twice: the families are written anew from the server's own when they are scraped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.samples import Sample


class _Same(NamedTuple):
    """A family of vLLM's.

    renamed  of a label, where the two call it differently
    """

    name: str
    text: str
    renamed: tuple[str, str] = ("", "")


# By the name of our own, without `multilora_`; those of several names are asked for by dashboards of several versions.
_SAME: dict[str, tuple[_Same, ...]] = {
    "num_requests_running": (_Same("num_requests_running", "Sequences running in the engine."),),
    "num_requests_waiting": (_Same("num_requests_waiting", "Sequences waiting in the engine."),),
    "preemptions": (_Same("num_preemptions", "Sequences preempted."),),
    "prefix_cache_queries": (_Same("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),),
    "prefix_cache_hits": (_Same("prefix_cache_hits", "Prompt tokens that the prefix cache had."),),
    "all_prompt_tokens": (_Same("prompt_tokens", "Prompt tokens."),),
    "all_generation_tokens": (_Same("generation_tokens", "Tokens generated."),),
    "all_requests": (_Same("request_success", "Sequences that ended, by how.", ("outcome", "finished_reason")),),
    "time_to_first_token_seconds": (_Same("time_to_first_token_seconds", "From admission to the first token."),),
    "inter_token_seconds": (
        _Same("inter_token_latency_seconds", "Between two tokens of a sequence."),
        _Same("time_per_output_token_seconds", "The same, by the name that vLLM gave it before."),
    ),
    "time_per_output_token_seconds": (
        _Same("request_time_per_output_token_seconds", "Mean time between the tokens of a sequence after its first."),
    ),
    "request_seconds": (_Same("e2e_request_latency_seconds", "From admission to the last token."),),
    "request_queue_seconds": (_Same("request_queue_time_seconds", "From arrival in the engine to the first step."),),
    "request_prefill_seconds": (_Same("request_prefill_time_seconds", "From the first step to the first token."),),
    "request_decode_seconds": (_Same("request_decode_time_seconds", "From the first token to the last."),),
    "request_inference_seconds": (_Same("request_inference_time_seconds", "From the first step to the last token."),),
    "request_prompt_tokens": (_Same("request_prompt_tokens", "Prompt tokens of a sequence."),),
    "request_generation_tokens": (_Same("request_generation_tokens", "Tokens generated for a sequence."),),
    "step_tokens": (_Same("iteration_tokens_total", "Tokens of a step."),),
}
_PREFIX = "multilora_"


def with_vllm_names(families: Iterable[Metric], base_name: str, block_size_tokens: int) -> Iterator[Metric]:
    """The families, and behind them those that vLLM has too. block_size_tokens: of a KV block, 0 while not known."""
    labels = {"model_name": base_name, "engine": "0"}
    more: list[Metric] = []
    blocks: dict[str, float] = {}
    for family in families:
        yield family
        name = family.name.removeprefix(_PREFIX)
        more += [_renamed(family, same, labels) for same in _SAME.get(name, ())]
        if name in ("kv_blocks_used", "kv_blocks_total"):
            blocks[name] = family.samples[0].value
    yield from more
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV blocks in use, 1 for all.", labels=tuple(labels))
    usage.add_metric(tuple(labels.values()), blocks["kv_blocks_used"] / max(1, blocks["kv_blocks_total"]))
    yield usage
    sizes = {"block_size": str(block_size_tokens), "num_gpu_blocks": str(int(blocks["kv_blocks_total"]))}
    config = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, in labels.", labels=(*labels, *sizes))
    if block_size_tokens:
        config.add_metric((*labels.values(), *sizes.values()), 1)
    yield config


def _renamed(family: Metric, same: _Same, labels: dict[str, str]) -> Metric:
    copy = Metric(f"vllm:{same.name}", same.text, family.type)
    ours, theirs = same.renamed
    for sample in family.samples:
        own = {theirs if name == ours else name: value for name, value in sample.labels.items()}
        end = sample.name.removeprefix(family.name)
        copy.samples.append(Sample(f"{copy.name}{end}", {**labels, **own}, sample.value))
    return copy
