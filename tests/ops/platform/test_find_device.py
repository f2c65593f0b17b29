"""What `--device auto` stands for: an NPU before a GPU before the CPU, and never a device that torch does not see."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest import mock

import pytest

from kernels import platform
from kernels.platform import find_device
from tests.support.npu.fake_npu import made_up_npu


def with_cuda(is_there: bool) -> mock._patch[mock.MagicMock]:
    return mock.patch("torch.cuda.is_available", return_value=is_there)


@pytest.fixture(autouse=True)
def device_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platform, "DEVICE_NODES", tmp_path)
    return tmp_path


@pytest.mark.parametrize("is_there", [True, False])
def test_an_npu_goes_before_a_gpu(is_there: bool) -> None:
    with made_up_npu(), with_cuda(is_there):
        assert find_device("auto") == "npu"


def test_an_npu_that_torch_does_not_see_is_passed_over() -> None:
    with made_up_npu(others={"npu.is_available": lambda: False}):
        with with_cuda(True):
            assert find_device("auto") == "cuda"
        with with_cuda(False):
            assert find_device("auto") == "cpu"


def test_a_torch_npu_that_cannot_be_imported_is_told_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    broken = mock.Mock(side_effect=platform.BackendError("torch_npu cannot be imported (libhccl.so)"))
    with made_up_npu(), mock.patch("kernels.ascend_runtime.torch_npu", broken), with_cuda(True):
        assert find_device("auto") == "cuda"
    assert caplog.messages == ["torch_npu cannot be imported (libhccl.so)"]


@pytest.mark.parametrize(("node", "vendor"), [("davinci0", "Ascend NPU"), ("nvidia0", "NVIDIA GPU")])
def test_a_device_that_torch_was_not_built_for_is_told(
    node: str, vendor: str, device_nodes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (device_nodes / node).touch()
    (device_nodes / "nvidiactl").touch()  # there without any GPU
    with made_up_npu(others={"npu.is_available": lambda: False}), with_cuda(False), caplog.at_level(logging.WARNING):
        assert find_device("auto") == "cpu"
    assert [vendor in message for message in caplog.messages] == [True]


def test_a_named_device_is_taken_as_it_is() -> None:
    with made_up_npu() as (said, _):
        assert [find_device(name) for name in ("cpu", "cuda:1", "npu:3")] == ["cpu", "cuda:1", "npu:3"]
    assert said == []
