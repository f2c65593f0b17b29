"""Metrics of single adapters: few, whatever there is; and totals that miss nothing."""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from service.api.metrics.adapter_metrics import MOST_LISTED, Resident, VersionOf
from service.api.metrics.metrics import Metrics, SequenceTimer
from service.engine.ipc.messages import Tier
from tests.api.conftest import BASE
from tests.support.http.server import Server, wait_for

NUM_ADAPTERS = 3000


def used(num_adapters: int, name: str = "{:04}") -> Metrics:
    """Adapter n has had n + 1 tokens of prompts."""
    metrics = Metrics("base", most_adapters=64)
    for at in range(num_adapters):
        metrics.by_adapter.know(name.format(at))
        SequenceTimer(metrics, name.format(at), at + 1).end("stop")
    return metrics


def samples(metrics: Metrics, *wanted: str) -> Mapping[tuple[str, str], float]:
    """(metric, adapter) -> value, summed over the other labels."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics.render(wanted).decode()):
        for sample in family.samples:
            sums[sample.name.removeprefix("multilora_"), sample.labels.get("adapter", "")] += sample.value
    return sums


def adapters(metrics: Metrics, *wanted: str) -> list[str]:
    return sorted(adapter for name, adapter in samples(metrics, *wanted) if name == "prompt_tokens_total")


def test_the_busiest_are_shown_and_all_are_in_the_totals() -> None:
    metrics = used(NUM_ADAPTERS)
    assert adapters(metrics) == [f"{at:04}" for at in range(NUM_ADAPTERS - 64, NUM_ADAPTERS)] + ["base"]
    shown = samples(metrics)
    assert shown["all_prompt_tokens_total", ""] == NUM_ADAPTERS * (NUM_ADAPTERS + 1) / 2
    assert shown["all_requests_total", ""] == NUM_ADAPTERS
    assert shown["prompt_tokens_total", "2999"] == 3000


def test_others_are_shown_to_those_who_ask() -> None:
    metrics = used(NUM_ADAPTERS)
    assert adapters(metrics, "0007", "nobody", "0007") == ["0007", "base"]
    assert samples(metrics, "0007")["requests_total", "0007"] == 1
    metrics.by_adapter.forget("0007")
    assert adapters(metrics, "0007") == ["base"]
    metrics.by_adapter.forget("2999")
    assert "2999" not in adapters(metrics)


def test_an_exposition_stays_small_whatever_adapters_are_called_and_do() -> None:
    metrics = used(0)
    for at in range(NUM_ADAPTERS):
        name = f"{'n' * 190}{at:05}"
        metrics.by_adapter.know(name)
        for outcome in ("stop", "length", "abort", "error"):
            SequenceTimer(metrics, name, 10**9).end(outcome)
        SequenceTimer(metrics, name, 1)  # waits
        SequenceTimer(metrics, name, 1).token()  # runs
    metrics.by_adapter.version_of = lambda _: VersionOf(10**9, "f" * 64)
    tiers: tuple[Tier, Tier] = ("device", "host")
    there = [Resident(f"{'n' * 190}{at:05}", tier, 1 << 16, False) for tier in tiers for at in range(MOST_LISTED)]
    metrics.by_adapter.residents = lambda: (there, MOST_LISTED)
    text = metrics.render()
    assert len(text) < 228_000, len(text)  # 13 KB are cached tokens by adapter; with the engine's series below 245 KB
    levels = [line.split('level="')[1][:3] for line in text.decode().splitlines() if "adapter_loaded{" in line]
    assert set(levels) == {"gpu", "cpu"}
    assert b"_created" not in text


def test_counts_are_nothing_for_the_garbage_collector_to_walk_through() -> None:
    """There is one for each adapter that was ever used."""

    def num_tracked() -> int:
        gc.collect()
        return sum(str(type(one).__module__).startswith("service.") for one in gc.get_objects())

    num_before = num_tracked()
    metrics = used(50)
    assert num_tracked() - num_before < 50
    assert len(adapters(metrics)) == 51  # the base too


def test_a_version_is_told() -> None:
    metrics = used(2)
    metrics.by_adapter.version_of = lambda name: VersionOf(3, "ab" * 32) if name == "0001" else None
    (line,) = [line for line in metrics.render().decode().splitlines() if line.startswith("multilora_adapter_info{")]
    assert line == 'multilora_adapter_info{adapter="0001",digest="abababababab",version="3"} 1.0'


def test_routers_are_told_who_runs_and_who_waits() -> None:
    metrics = used(0)
    metrics.by_adapter.max_adapters = 4
    one, two, base = (SequenceTimer(metrics, name, 1) for name in ("one", "two", "base"))

    def told() -> tuple[str, str, str]:
        families = text_string_to_metric_families(metrics.render().decode())
        (sample,) = (one for family in families for one in family.samples if one.name == "vllm:lora_requests_info")
        labels = sample.labels
        return labels["max_lora"], labels["running_lora_adapters"], labels["waiting_lora_adapters"]

    assert told() == ("4", "", "one,two")
    one.token()
    base.token()
    assert told() == ("4", "one", "two")
    again = SequenceTimer(metrics, "one", 1)
    assert told() == ("4", "one", "two,one")
    for timer in (one, two, base, again):
        timer.end("stop")
    assert told() == ("4", "", "")


def test_routers_are_told_what_is_on_the_device() -> None:
    metrics = used(0)
    metrics.by_adapter.max_adapters = 4
    residents = [Resident("idle", "device", 8, is_pinned=True), Resident("one", "device", 16, is_pinned=False)]
    residents.append(Resident("near", "host", 4, is_pinned=False))
    metrics.by_adapter.residents = lambda: (residents, 2)
    SequenceTimer(metrics, "one", 1).token()
    text = metrics.render().decode()
    assert 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="one,idle",waiting_lora_adapters=""}' in text
    assert {line for line in text.splitlines() if re.match(r"vllm:\w*lora_adapter", line)} == {
        'vllm:lora_adapter_loaded{adapter_name="idle",level="gpu",pinned="true",rank="8"} 1.0',
        'vllm:lora_adapter_loaded{adapter_name="one",level="gpu",pinned="false",rank="16"} 1.0',
        'vllm:lora_adapter_loaded{adapter_name="near",level="cpu",pinned="false",rank="4"} 1.0',
        "vllm:num_gpu_loaded_lora_adapters 2.0",
        "vllm:max_gpu_lora_adapters 4.0",
    }


def test_a_scrape_may_ask_for_adapters(server: Server) -> None:
    server.post("/v1/completions", json={"model": "alpha", "prompt": "the", "max_tokens": 1}).raise_for_status()
    wait_for(lambda: server.metric("requests_total", adapter="alpha") > 0, "the request to be counted")
    text = server.get("/metrics", params={"adapter": ["beta"]}).text
    assert 'multilora_prompt_tokens_total{adapter="beta"}' in text
    assert f'multilora_prompt_tokens_total{{adapter="{BASE}"}}' in text
    assert 'adapter="alpha"' not in text
    assert 'multilora_adapter_info{adapter="beta",digest="' in text
    (info,) = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert int(info.partition('max_lora="')[2].partition('"')[0]) > 0
    # Long over, and still on the device, where others may have come since their upload.
    assert "alpha" in info.partition('running_lora_adapters="')[2].partition('"')[0].split(",")
    loaded = [line for line in text.splitlines() if line.startswith("vllm:lora_adapter_loaded{")]
    assert sum('adapter_name="alpha",level="gpu",pinned="false"' in line for line in loaded) == 1
