"""The Compose files: valid for the specification's schema, and what they say of the images is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import Settings, load_settings
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
COMPOSE = {name: ROOT / "deploy" / name for name in ("compose.yaml", "compose-cpu.yaml")}


def services_of(name: str) -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(COMPOSE[name].read_text())["services"]
    return services


@pytest.fixture(params=COMPOSE)
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    return services_of(request.param)["multilora"]


def _check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)


@pytest.mark.parametrize("path", COMPOSE.values(), ids=COMPOSE)
def test_valid_for_the_compose_specification(path: Path, tmp_path: Path) -> None:
    checked = _check(path)
    assert checked.returncode == 0, checked.stdout
    broken = tmp_path / "compose.yaml"
    broken.write_text(path.read_text().replace("stop_grace_period", "stop_grace_time"))
    assert _check(broken).returncode != 0


def test_every_variable_is_a_setting(service: dict[str, Any]) -> None:
    known = {f"MULTILORA_{name.upper()}" for name in Settings.model_fields}
    assert service["environment"].keys() <= known


@pytest.mark.parametrize("name", ["MULTILORA_API_KEYS", "MULTILORA_ADMIN_API_KEYS"])
def test_keys_are_passed_on_only_where_the_host_has_them(service: dict[str, Any], name: str) -> None:
    """Without a value, Compose takes the host's, and sets nothing where there is none; a server refuses empty ones."""
    assert service["environment"][name] is None


def test_grace_period_is_longer_than_the_shutdown_limit(service: dict[str, Any]) -> None:
    limit_seconds = float(service["environment"]["MULTILORA_SHUTDOWN_LIMIT_SECONDS"])
    assert float(service["stop_grace_period"].removesuffix("s")) >= limit_seconds + 10


def test_the_profile_of_traces_starts_what_the_endpoint_names() -> None:
    """One variable starts Jaeger and tells the server of it: OTLP over HTTP, at Jaeger's own port for that."""
    services = services_of("compose-cpu.yaml")
    endpoint = services["multilora"]["environment"]["MULTILORA_OTLP_ENDPOINT"]
    assert endpoint == "${OTLP_ENDPOINT-${COMPOSE_PROFILES:+http://jaeger:4318}}"
    assert {name for name, one in services.items() if "profiles" in one} == {"jaeger"}
    assert load_settings(otlp_endpoint="http://jaeger:4318").otlp_endpoint == "http://jaeger:4318/v1/traces"


def test_what_the_image_keeps_is_in_volumes() -> None:
    service = services_of("compose.yaml")["multilora"]
    targets = {volume.rsplit(":", 1)[1] for volume in service["volumes"] if not volume.endswith(":ro")}
    kept = re.findall(r"^VOLUME (\[.*\])$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[-1]
    assert targets == set(yaml.safe_load(kept))
