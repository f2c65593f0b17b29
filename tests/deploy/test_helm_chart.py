"""The Helm chart: rendered by Helm itself, each manifest valid for Kubernetes' own schemas, its values understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import Settings

helm = pytest.importorskip("helm_python", reason="NOT RUN: Helm's library exists for Linux on x86-64 only")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "multilora"
KUBERNETES_VERSIONS = ["1.25", "1.31", "1.37"]

VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "cce": {"device": {"resource": "huawei.com/ascend-1980"}, "driver": {"mountFromHost": False}},
    "no device": {"device": {"resource": "", "name": "cpu"}},
    "cuda": {"device": {"resource": "nvidia.com/gpu", "name": "cuda"}},
    "several servers": {"replicas": 3, "podLabels": {"router": "lora"}},
    "several servers on a claim": {"replicas": 2, "adapterStore": {"size": "1Gi", "existingClaim": "adapters"}},
    "one server on a claim": {"adapterStore": {"size": "1Gi", "existingClaim": "adapters"}, "resources": None},
    "everything": {
        "image": {"repository": "registry.example/multilora", "tag": "1"},
        "imagePullSecrets": [{"name": "pull"}],
        "model": {"path": "/model", "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}},
        "settings": {"kv-bytes": "16GiB", "token-budget": 2048, "model-name": "base"},
        "apiKeysSecret": "keys",
        "shutdownLimitSeconds": 100,
        "adapterStore": {"size": "1Ti", "storageClassName": "fast"},
        "runtimeClassName": "ascend",
        "schedulerName": "volcano",
        "nodeSelector": {"accelerator": "huawei-Ascend910"},
        "tolerations": [{"operator": "Exists"}],
        "podAnnotations": {"a": "b"},
    },
}


def _render(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Kind -> manifest, of a release called `lora`."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="lora", namespace="models")
    manifests = [yaml.safe_load(text) for name, text in texts.items() if name.endswith(".yaml")]
    return {manifest["kind"]: manifest for manifest in manifests if manifest is not None}


def _pod(values: dict[str, Any]) -> dict[str, Any]:
    return _render(values)["StatefulSet"]["spec"]["template"]["spec"]


def _environment(values: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in _pod(values)["containers"][0]["env"]}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_manifests_are_valid(values: dict[str, Any], version: str) -> None:
    manifests = _render(values)
    has_claim = values is VALUES["several servers"]
    assert manifests.keys() == {"Service", "StatefulSet"} | ({"PersistentVolumeClaim"} if has_claim else set())
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, version, strict=True)
    for claim in manifests["StatefulSet"]["spec"]["volumeClaimTemplates"]:
        kubernetes_validate.validate(claim, version, strict=True)


def test_lint_finds_no_fault() -> None:
    report = helm.lint(CHART)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["error"] != "icon is recommended"] == []


@pytest.mark.parametrize("resource", ["huawei.com/Ascend910", "huawei.com/ascend-1980", "huawei.com/Ascend910-4c"])
def test_one_device_of_the_configured_name(resource: str) -> None:
    resources = _pod({"device": {"resource": resource}})["containers"][0]["resources"]
    assert resources["limits"] == {resource: 1, "memory": "64Gi"}
    assert resources["requests"] == {"cpu": "4", "memory": "16Gi"}


def test_no_device_where_none_is_named() -> None:
    assert _pod(VALUES["no device"])["containers"][0]["resources"]["limits"] == {"memory": "64Gi"}


@pytest.mark.parametrize(
    "values",
    [
        {"device": {"resource": "Ascend910"}},
        {"settings": {"port": 9000}},
        {"settings": {"KV_BYTES": "1GiB"}},
        {"devise": {}},
        {"shutdownLimitSeconds": "30s"},
        {"replicas": 0},
        {"settings": {"store-shared": True}},
        {"settings": {"replicas": 2}},
        {"podLabels": {"app.kubernetes.io/instance": "other"}},
    ],
    ids=[
        *("resource without a domain", "setting of the chart", "spelling of a setting", "unknown value", "text"),
        *("no server", "sharing by hand", "several engines for one device", "label of the chart"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        _render(values)


def test_a_volume_needs_the_path_where_it_is_mounted() -> None:
    volume = {"hostPath": {"path": "/data"}}
    with pytest.raises(helm.HelmError, match=r"model\.volume needs model\.path"):
        _render({"model": {"volume": volume}})
    pod = _pod({"model": {"volume": volume, "path": "/model"}})
    assert {"name": "model", **volume} in pod["volumes"]
    assert {"name": "model", "mountPath": "/model", "readOnly": True} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("device", "mount_from_host", "expected"),
    [("npu", True, True), ("npu", False, False), ("cuda", True, False), ("cpu", True, False)],
)
def test_the_driver_of_ascend_is_mounted_for_npus_alone(device: str, mount_from_host: bool, expected: bool) -> None:
    pod = _pod({"device": {"name": device}, "driver": {"mountFromHost": mount_from_host}})
    on_host = {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    driver = {
        "/usr/local/Ascend/driver",
        "/usr/local/dcmi",
        "/usr/local/bin/npu-smi",
        "/etc/ascend_install.info",
    }
    assert on_host == driver & mounted == (driver if expected else set())


def test_pod_outlives_the_shutdown_limit() -> None:
    for seconds in (0, 30, 600):
        pod = _pod({"shutdownLimitSeconds": seconds})
        assert pod["terminationGracePeriodSeconds"] >= seconds + 15
        assert _environment({"shutdownLimitSeconds": seconds})["MULTILORA_SHUTDOWN_LIMIT_SECONDS"] == str(seconds)


def test_every_variable_is_a_setting() -> None:
    known = {f"MULTILORA_{name.upper()}" for name in Settings.model_fields}
    environment = _environment(VALUES["everything"])
    assert environment.keys() <= known
    assert environment["MULTILORA_TOKEN_BUDGET"] == "2048"
    Settings(**{name.removeprefix("MULTILORA_").lower(): value for name, value in environment.items() if value})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(21474836480, "21474836480"), (1_000_000, "1000000"), (0.25, "0.25"), (True, "true"), ("1e3", "1e3")],
)
def test_settings_reach_the_server_as_they_are_written(value: object, expected: str) -> None:
    """Helm reads every number as a float, and would write large ones with an exponent."""
    assert _environment({"settings": {"kv-bytes": value}})["MULTILORA_KV_BYTES"] == expected


def test_probes_and_scrape() -> None:
    manifest = _render({})["StatefulSet"]["spec"]["template"]
    container = manifest["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["startupProbe"]["httpGet"]["path"] == "/health"
    annotations = manifest["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] == "/metrics"
    assert annotations["prometheus.io/port"] == str(container["ports"][0]["containerPort"])


def test_adapters_outlive_the_pod() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in _pod({})["containers"][0]["volumeMounts"]}
    claims = _render({})["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert {claim["metadata"]["name"]: mounts[claim["metadata"]["name"]] for claim in claims} == {
        "adapters": "/var/lib/multilora",
        "kernels": "/var/cache/multilora",
    }


def test_several_servers_share_one_volume_that_all_may_write() -> None:
    manifests = _render(VALUES["several servers"])
    claim, workload = manifests["PersistentVolumeClaim"], manifests["StatefulSet"]["spec"]
    assert workload["replicas"] == 3
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert workload["template"]["metadata"]["labels"]["router"] == "lora"
    assert _shared_claim(VALUES["several servers"]) == claim["metadata"]["name"]
    assert _shared_claim(VALUES["several servers on a claim"]) == "adapters"
    assert [one["metadata"]["name"] for one in workload["volumeClaimTemplates"]] == ["kernels"]
    assert _environment(VALUES["several servers"])["MULTILORA_STORE_SHARED"] == "true"
    assert "MULTILORA_STORE_SHARED" not in _environment({})


def test_one_server_can_have_a_claim_that_is_there() -> None:
    values = VALUES["one server on a claim"]
    assert _shared_claim(values) == "adapters"
    claims = _render(values)["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert [one["metadata"]["name"] for one in claims] == ["kernels"]
    assert "MULTILORA_STORE_SHARED" not in _environment(values)


def _shared_claim(values: dict[str, Any]) -> str:
    (volume,) = (one for one in _pod(values)["volumes"] if one["name"] == "adapters")
    name: str = volume["persistentVolumeClaim"]["claimName"]
    return name


def test_the_pod_may_do_little() -> None:
    pod = _pod({"driver": {"gid": 4711}})
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["supplementalGroups"] == [4711]
    container = pod["containers"][0]["securityContext"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert container["readOnlyRootFilesystem"] is True
    assert container["allowPrivilegeEscalation"] is False
