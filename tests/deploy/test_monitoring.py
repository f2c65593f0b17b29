"""deploy/monitoring/: every query of the dashboard and of the alerts is answered from what a real server exports."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.http.server import Server, running_server, wait_for
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
ALERTS = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
QUERIES = {
    f"{panel['title']}: {target['legendFormat']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    bundled = ROOT / "service" / "bundled" / "base"
    with running_server(bundled, tmp_path_factory.mktemp("monitoring"), log_format="json", replicas=2) as running:
        yield running


def _ask(server: Server) -> None:
    body = {"model": "shout", "prompt": "lamp tiger", "max_tokens": 4, "ignore_eos": True}
    server.post("/v1/completions", json=body).raise_for_status()


def _exported(server: Server) -> set[str]:
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {sample.name for family in families for sample in family.samples}


def _names(query: str) -> set[str]:
    return set(re.findall(r"\bmultilora_\w+", query))


def test_every_query_names_what_the_server_exports(server: Server) -> None:
    _ask(server)
    # Engines tell of loads when they tell of their state, which is now and then.
    wait_for(lambda: "multilora_adapter_load_seconds_sum" in _exported(server), "an engine to tell of the load")
    exported = _exported(server)
    for title, query in QUERIES.items():
        assert _names(query), title
        assert _names(query) <= exported, title
    for alert in ALERTS:
        assert _names(alert["expr"]) <= exported, alert["alert"]
        assert _names(alert["expr"]) or alert["expr"].startswith("up{"), alert["alert"]


def test_panels_do_not_overlap_and_every_alert_says_what_it_means() -> None:
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in DASHBOARD["panels"]]
    assert len({(x, y) for x, y, _, _ in places}) == len(places)
    assert all(x % 12 == y % 8 == 0 and (width, height) == (12, 8) for x, y, width, height in places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    for alert in ALERTS:
        assert alert["annotations"]["summary"].endswith(".")
        assert alert["labels"]["severity"] in ("warning", "critical")


@contextmanager
def _prometheus(target: str, work_dir: Path) -> Iterator[str]:
    """Debian's Prometheus with our configuration at short intervals; its URL."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed: the queries of deploy/monitoring were NOT RUN, only their names read")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    (work_dir / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(MONITORING / "alerts.yml", work_dir)
    flags = [f"--storage.tsdb.path={work_dir / 'data'}", "--web.listen-address=127.0.0.1:0"]
    log_path = work_dir / "prometheus.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [program, f"--config.file={work_dir / 'prometheus.yml'}", *flags], stdout=log, stderr=log, cwd=work_dir
        )

    def listening() -> re.Match[str] | None:
        assert process.poll() is None, log_path.read_text()
        return re.search(r'msg="Listening on" address=(\S+)', log_path.read_text())

    try:
        yield f"http://{wait_for(listening, 'Prometheus').group(1)}"
    finally:
        process.terminate()
        process.wait(LIMIT_SECONDS)


def _answer(url: str, path: str, **params: str) -> Any:
    answer = httpx.get(f"{url}/api/v1/{path}", params=params, timeout=LIMIT_SECONDS).json()
    assert answer["status"] == "success", answer
    return answer["data"]


def _is_answered(url: str, query: str) -> bool:
    query = query.replace("$__rate_interval", "10s").replace("$instance", ".*")
    return any(math.isfinite(float(one["value"][1])) for one in _answer(url, "query", query=query)["result"])


def _alert_states(url: str) -> dict[str, str]:
    """Alert to its state; of those that have been evaluated without an error."""
    rules = [rule for group in _answer(url, "rules")["groups"] for rule in group["rules"]]
    assert all(rule["health"] != "err" for rule in rules), rules
    return {rule["name"]: rule["state"] for rule in rules if rule["health"] == "ok"}


def test_prometheus_answers_every_query(tmp_path: Path) -> None:
    with (
        running_server(ROOT / "service" / "bundled" / "base", tmp_path / "server", replicas=2) as server,
        _prometheus(server.url.removeprefix("http://"), tmp_path) as url,
    ):
        wait_for(
            lambda: httpx.get(f"{url}/-/ready", timeout=LIMIT_SECONDS).status_code == 200, "Prometheus to be ready"
        )
        unanswered = dict(QUERIES)

        def all_answered() -> bool:
            _ask(server)  # rates want counters that go on
            for title in [title for title, query in unanswered.items() if _is_answered(url, query)]:
                del unanswered[title]
            return not unanswered

        try:
            wait_for(all_answered, "an answer to every query")
        except AssertionError:
            pytest.fail(f"without a finite answer: {unanswered}")
        wait_for(lambda: len(_alert_states(url)) == len(ALERTS), "every alert to be evaluated")
        assert set(_alert_states(url).values()) == {"inactive"}, _alert_states(url)
        server.stop()
        wait_for(lambda: _alert_states(url)["MultiloraDown"] != "inactive", "the alert of a server that is gone")
