"""The steps that serve: time per token, settings tried, adapter loads under traffic; and
capture, where eager and captured decode steps of a single layer must give the same tokens."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from service.doctor.checks.probe_engine import Run, Subject, budgets_of, build_subject, greedy, names, run_to_the_end
from service.doctor.checks.step_process import StepFailed, StepHost
from service.engine.ipc.messages import Submit

NUM_REQUESTS = (1, 8, 32, 64)
NUM_ADAPTERS = (0, 1, 64)
_OUTPUT_TOKENS = 32
# Share of the step's time after which no further load is begun.
_TIME_SHARE = 0.9
_NUM_LOADS = 8
# Decode steps that are looked at without a load, and after each load.
_QUIET_STEPS, _STEPS_AFTER_LOAD = 16, 4


def time_per_token(host: StepHost) -> None:
    """Decode steps of every number of requests and adapters: the time of a step is that of a token."""
    until = time.monotonic() + host.limit_seconds * _TIME_SHARE
    subject, num_requests = _subject(host)
    rows: list[dict[str, Any]] = []
    for adapters in NUM_ADAPTERS:
        for number in num_requests:
            if time.monotonic() > until:
                host.find("warning", "serving-cut-short", f"No time for {number} requests with {adapters} adapters.")
                return
            host.tell(f"{number} requests, {adapters} adapters")
            rows.append(_figures(subject, number, adapters))
            host.facts(loads=rows, **_captured(subject))


def try_setting(host: StepHost) -> None:
    """Decode steps of 64 requests with as many adapters, and of one request. `deep_report.py` compares them with
    those of `time_per_token`."""
    subject, num_requests = _subject(host)
    host.facts(requests=num_requests[-1])
    for name, number, adapters in (("many", num_requests[-1], NUM_ADAPTERS[-1]), ("one", 1, 1)):
        host.tell(f"{number} requests, {adapters} adapters")
        host.facts(**{f"{name}_ms": _figures(subject, number, adapters)["ms_per_token"], **_captured(subject)})


def loads_under_traffic(host: StepHost) -> None:
    """Running requests on adapters of their own, while others bring adapters that are not on the device."""
    subject, num_requests = _subject(host)
    number = min(32, num_requests[-1])
    room = max(1, subject.num_adapters - 1)
    traffic = names(min(number, max(1, room // 2)))
    new = names(_NUM_LOADS, first=1000)
    host.tell(f"{number} requests on {len(traffic)} adapters")
    num_tokens = _QUIET_STEPS + len(new) * (_STEPS_AFTER_LOAD + 16) + 8
    room_tokens = min(subject.engine.capacity.max_model_len_tokens, subject.engine.kv_capacity_tokens // number)
    num_tokens = min(num_tokens, room_tokens - subject.num_prompt_tokens - 1)
    subject.run(number, traffic, 2)
    driver = subject.decoding(subject.requests(number, traffic, num_tokens))
    for _ in range(_QUIET_STEPS):
        driver.step()
    quiet = [seconds * 1e3 for seconds, _, prompt in driver.run.steps[-_QUIET_STEPS:] if not prompt]
    num_loads_before = subject.engine.stats().num_adapter_loads
    first_tokens: list[float] = []
    begun = len(driver.run.steps)
    for index, adapter in enumerate(new):
        if driver.num_open < number:  # the model is too short for all of them
            break
        request = Submit(f"new-{index}", (1,), greedy(1), adapter, subject.adapter_rows)
        started = time.perf_counter()
        driver.submit([request])
        while request.request_id not in driver.run.arrivals:
            driver.step()
        first_tokens.append((driver.run.arrivals[request.request_id][0][0] - started) * 1e3)
        for _ in range(_STEPS_AFTER_LOAD):
            driver.step()
    loaded = [seconds * 1e3 for seconds, _, _ in driver.run.steps[begun:]]
    stats = subject.engine.stats()
    num_loads = stats.num_adapter_loads - num_loads_before
    driver.abort([*subject.requests(number, traffic, 1)])
    if not first_tokens or not num_loads:
        raise StepFailed("No adapter was loaded: the model's longest request is too short for this measurement.")
    usual, longest = statistics.median(quiet), max(loaded)
    host.facts(
        requests=number,
        adapters_in_use=len(traffic),
        loads=num_loads,
        bytes_of_an_adapter=stats.row_bytes_used // max(stats.num_adapters_on_device, 1),
        step_ms_without_loads=usual,
        step_ms_with_loads_median=statistics.median(loaded),
        step_ms_with_loads_longest=longest,
        first_token_ms_of_a_new_adapter_median=statistics.median(first_tokens),
        first_token_ms_of_a_new_adapter_longest=max(first_tokens),
    )
    if longest > 3 * usual and longest - usual > 20.0 and host.device_type != "cpu":
        message = f"A step took {longest:.1f} ms while an adapter was loaded, and {usual:.1f} ms otherwise."
        host.find("warning", "loads-stall-steps", message, "Report it: loads are to cost running requests nothing.")


def _subject(host: StepHost) -> tuple[Subject, tuple[int, ...]]:
    host.facts(budgets=budgets_of(host))
    subject = build_subject(host)
    most = min(subject.engine.config.max_sequences, subject.engine.capacity.num_slots - 1)
    num_requests = tuple(number for number in NUM_REQUESTS if number <= most) or (1,)
    host.facts(
        prompt_tokens=subject.num_prompt_tokens,
        output_tokens=_OUTPUT_TOKENS,
        rank=16,
        adapters_that_fit=subject.num_adapters,
        ops=[{"op": one.op, "implementation": one.implementation} for one in subject.engine.ready(0).ops],
    )
    if subject.num_adapters < NUM_ADAPTERS[-1]:
        host.find("note", "few-adapters-fit", f"{subject.num_adapters} adapters of rank 16 fit the rows at a time.")
    return subject, num_requests


def _figures(subject: Subject, num_requests: int, num_adapters: int) -> dict[str, Any]:
    """Figures of one load; the adapters in use are at most num_adapters, the requests and the ones that fit."""
    in_use = min(num_adapters, num_requests, subject.num_adapters)
    longest = min(subject.engine.capacity.max_model_len_tokens, subject.engine.kv_capacity_tokens // num_requests)
    num_tokens = max(2, min(_OUTPUT_TOKENS, longest - subject.num_prompt_tokens - 1))
    run: Run = subject.run(num_requests, names(in_use), num_tokens)
    steps = run.decode_step_ms(num_requests) or run.gaps_ms()
    return {
        "requests": num_requests,
        "adapters": num_adapters,
        "adapters_in_use": in_use,
        "ms_per_token": statistics.median(steps) if steps else None,
        "ms_per_token_longest": max(steps, default=None),
        "first_token_ms": statistics.median(run.first_token_ms()),
        "tokens_per_second": run.num_output_tokens / run.seconds,
    }


def _captured(subject: Subject) -> dict[str, Any]:
    stats = subject.engine.stats()
    return {"steps_replayed": stats.num_steps_replayed, "steps_eager": stats.num_steps_eager}


_NUM_REQUESTS, _NUM_TOKENS = 4, 8
_KV_BYTES, _ROW_BYTES = 512 << 20, 256 << 20


def capture_one_layer(host: StepHost) -> None:
    """The model's first attention layer between its embeddings and its head, with LoRA."""
    with tempfile.TemporaryDirectory(prefix="multilora-doctor-") as directory:
        layer = one_layer(Path(host.options["model_dir"]), Path(directory))
        host.facts(layer=layer)
        sizes: dict[str, Any] = {
            "model_dir": directory,
            "token_budget": 64,
            "max_sequences": _NUM_REQUESTS,
            "lora_window": False,
            # The first of two engines may not be freed yet when the second is built.
            "kv_bytes": _KV_BYTES,
            "row_bytes": _ROW_BYTES,
        }
        tokens: dict[str, dict[str, list[int]]] = {}
        for name, eager in (("eager", True), ("captured", False)):
            host.tell(f"{name} steps")
            subject = build_subject(host, **sizes, eager=eager, npu_graphs=not eager)
            tokens[name] = _tokens(subject)
            if not eager:
                captured = subject.engine.runner.captured
                host.facts(replayed=captured.num_replayed, graphs=captured.num_graphs, eager=dict(captured.eager))
                if not captured.num_replayed:
                    raise StepFailed(f"No step was captured: {', '.join(captured.eager) or 'nothing was run'}.")
            subject.engine.close()
        if tokens["eager"] != tokens["captured"]:
            raise StepFailed("Captured steps gave other tokens than eager ones.")


def _tokens(subject: Subject) -> dict[str, list[int]]:
    """By request, of the base and of two adapters."""
    work = [
        *subject.requests(_NUM_REQUESTS // 2, (), _NUM_TOKENS),
        *subject.requests(_NUM_REQUESTS, names(2), _NUM_TOKENS)[_NUM_REQUESTS // 2 :],
    ]
    return run_to_the_end(subject.engine, work).tokens


def one_layer(model_dir: Path, directory: Path) -> int:
    """A model directory of one layer, its other files where they are; returns which layer it is.

    Weights are taken by their layer's number, so it is the first; a model whose first layer has no attention keeps as
    many as lead to one.
    """
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_bytes())
    text = config.get("text_config", config)
    kinds = text.get("layer_types") or ["full_attention"]
    layer = next((index for index, kind in enumerate(kinds) if "attention" in kind and "linear" not in kind), 0)
    text["num_hidden_layers"] = layer + 1
    if text.get("layer_types"):
        text["layer_types"] = kinds[: layer + 1]
    (directory / "config.json").write_text(json.dumps(config))
    for path in model_dir.iterdir():
        if path.name != "config.json":
            (directory / path.name).symlink_to(path.absolute())
    return layer
