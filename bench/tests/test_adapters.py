"""The benchmark of many adapters says all it promises, and the kills of a server lose nothing that was acknowledged."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from bench.adapters import __main__ as many
from bench.adapters import kills
from bench.adapters.kill_targets import OwnServers


def test_many_adapters_are_measured(tmp_path: Path) -> None:
    figures = many.measure(12, 1, tmp_path)
    cpu = ("cpu", "cpu_of_the_first_tenth", "cpu_of_the_last_tenth")
    assert set(figures["upload_ms"]) == {"p50_of_the_first", "p50_of_the_last", *cpu}
    assert all(figures[f"{start}_start_seconds"] > 0 for start in ("empty", "restarted"))
    assert figures["metrics_bytes"] > 1000
    assert figures["between_tokens"]["ratio"] > 0
    assert all(times["max"] >= times["p50"] > 0 for times in figures["page_ms"].values())
    assert {"uploads", "streams", "streams, polled", *figures["page_ms"]} == figures["longest_on_the_loop_ms"].keys()


def test_kills_of_any_process_lose_no_version_that_was_acknowledged(tmp_path: Path) -> None:
    """`python -m bench.adapters.kills` has 200 kills. Three tenants, with keys that come and go."""
    with closing(OwnServers(tmp_path, num_servers=1, num_replicas=1)) as servers:
        run = kills.Run(servers, seed=6)
        for victim in ("api", "engine", "template"):
            run.kill_one(victim)
    assert [run.counts[f"kills: {one}"] for one in ("api", "engine", "template")] == [1, 1, 1]
    assert sum(count for what, count in run.counts.items() if what.startswith("acknowledged: ")) > 0
