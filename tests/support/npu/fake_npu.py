"""An NPU that is not there: a made-up torch_npu and Triton, and checks of how this process asks for a device.

The made-up torch_npu writes down what is called and set, and knows no other names than those of `_ANSWERS`. The twin
holds the same calls against the signatures of the true one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest

from kernels import ascend_runtime, platform
from kernels.platform import Platform
from tests.support.npu import npu_streams

KIB = 2**10
TritonKind = Literal["ascend", "upstream", "none"]


@dataclass(frozen=True)
class Said:
    """One call, or with `is_set` one assignment, by its name within torch_npu."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_set: bool = False


EVERYTHING_SAID: list[Said] = []  # since somebody emptied it


class MadeUp:
    """Part of a module: any name that leads to one of `answers`."""

    def __init__(self, answers: dict[str, Any], said: list[Said], path: str = "") -> None:
        self.__dict__.update(_answers=answers, _said=said, _path=path)

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}".removeprefix(".")
        if isinstance(self._answers.get(path), str):
            return self._answers[path]
        if not any(known == path or known.startswith(f"{path}.") for known in self._answers):
            raise AttributeError(path)
        return MadeUp(self._answers, self._said, path)

    def __setattr__(self, name: str, value: Any) -> None:
        self._write(Said(f"{self._path}.{name}", (value,), is_set=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._write(Said(self._path, args, kwargs))
        return self._answers[self._path](*args, **kwargs)

    def _write(self, said: Said) -> None:
        self._said.append(said)
        EVERYTHING_SAID.append(said)


@contextmanager
def made_up_npu(
    properties: dict[str, Any] | None = None, triton: TritonKind = "ascend", others: dict[str, Any] | None = None
) -> Iterator[tuple[list[Said], type[Any]]]:
    """A process with torch_npu, an NPU of these properties and some Triton: what was said, and Triton's driver.

    others  answers in place of the usual ones; None for a name that is not there
    """
    said: list[Said] = []
    answers: dict[str, Any] = {
        "__version__": "2.13.0",
        "npu.is_available": lambda: True,
        "npu.set_device": lambda _: None,
        "npu.set_compile_mode": lambda **_: None,
        "npu.get_device_properties": lambda _: SimpleNamespace(**properties or {}),
        "npu.utils.get_cann_version": lambda module: {"CANN": "9.1.0"}.get(module, ""),
        "npu.conv.allow_hf32": True,
        "_C._npu_getCurrentRawStreamNoWait": lambda device: 40 + device,
        **(others or {}),
    }
    module = MadeUp({name: answer for name, answer in answers.items() if answer is not None}, said)
    module.__dict__["__spec__"] = ModuleSpec("torch_npu", None)

    class NPUDriver:
        def get_current_device(self) -> int:
            return 1

        def get_current_stream(self, _device: int | None = None) -> str:
            return "waits for the queue"

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, MULTILORA_TRITON_CACHE_IN_USE="a test's"))
        os.environ.pop("TRITON_ENABLE_TASKQUEUE", None)  # given back with the rest
        site = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        driver = ModuleType("triton.backends.ascend.driver")
        driver.__dict__["NPUDriver"] = NPUDriver
        stack.enter_context(mock.patch.dict(sys.modules, {"torch_npu": module, driver.__name__: driver}))  # type: ignore[dict-item]
        stack.enter_context(mock.patch.object(importlib.util, "find_spec", _finder(site, triton)))
        stack.enter_context(mock.patch.object(ascend_runtime, "installed_version", return_value="3.2.0"))
        for forget in (
            ascend_runtime.torch_npu.cache_clear,
            ascend_runtime.triton_fault.cache_clear,
            platform.forget_detected,
        ):
            forget()
            stack.callback(forget)
        yield said, NPUDriver


def _finder(site: Path, triton: TritonKind) -> Callable[[str], ModuleSpec | None]:
    """importlib's, but for `triton`, whose backends lie in `site`."""
    true_find_spec = importlib.util.find_spec
    (site / "backends" / {"ascend": "ascend", "upstream": "nvidia", "none": ""}[triton]).mkdir(parents=True)

    def find_spec(name: str) -> ModuleSpec | None:
        if name != "triton":
            return true_find_spec(name)
        return None if triton == "none" else ModuleSpec("triton", None, origin=str(site / "__init__.py"))

    return find_spec


# What serves without Triton.
TRITON_OPS = {
    "lora": "any_device",
    "lora_window": "reference",
    "causal_conv1d": "any_device",
    "gated_delta": "any_device",
    "expert_lora": "any_device",
    "rotary_kv": "npu",
}
NO_TRITON = "Triton kernels are off: triton-ascend is not installed (see docs/ascend.md)."
NO_310P = "Triton kernels are off: triton-ascend 3.2.x does not serve Ascend310P3."
UPSTREAM = (
    "Triton kernels are off: the package `triton` is upstream's, not triton-ascend. Uninstall both, then install "
    "triton-ascend last and without dependencies (see docs/ascend.md)."
)
SERVED = {
    "lora": "triton_ascend",
    "lora_window": "triton_ascend",
    "causal_conv1d": "triton_ascend",
    "gated_delta": "triton_ascend",
    "expert_lora": "triton_ascend",
    "mamba2": "any_device",
    "experts": "npu",
    "paged_attention": "npu_heads_first",
    "linear": "npu",
    "sampling": "any_device",
    "rms_norm": "npu",
    "rotary_kv": "triton_ascend",
    "row_scatter": "reference",
    "swiglu": "npu",
}


def check_platform(
    properties: dict[str, Any], triton: TritonKind, num_cores: int, buffer_kib: int, fault: str | None, bfloat16: bool
) -> None:
    with made_up_npu(properties, triton) as (said, _):
        found = platform.detect("npu:3")
    assert said == [Said("npu.is_available"), Said("npu.get_device_properties", ("npu:3",)), *_cann_of(said)]
    assert found == Platform(
        "npu",
        properties["name"],
        num_cores,
        buffer_kib * KIB,
        16,
        SERVED if fault is None else {**SERVED, **TRITON_OPS},
        () if fault is None else (fault,),
        passed_over={} if fault is None else dict.fromkeys(TRITON_OPS, fault),
        native_bfloat16=bfloat16,
    )


def _cann_of(said: list[Said]) -> list[Said]:
    return [one for one in said if one.name == "npu.utils.get_cann_version"]


def check_without_torch_npu() -> None:
    """It is not installed, or cannot be imported."""
    with made_up_npu(), mock.patch.object(importlib.util, "find_spec", return_value=None):
        _assert_refused("An NPU was asked for, but torch_npu is not installed; see docs/ascend.md.")
    broken = mock.Mock(side_effect=OSError("libhccl.so:\n no such file"))
    with made_up_npu(), mock.patch.object(importlib, "import_module", broken):
        _assert_refused(
            "An NPU was asked for, but torch_npu cannot be imported (libhccl.so: no such file); has CANN's set_env.sh "
            "been sourced?"
        )
    broken.assert_called_once_with("torch_npu")


def _assert_refused(sentence: str) -> None:
    with pytest.raises(platform.BackendError, match=f"^{re.escape(sentence)}$"):
        ascend_runtime.torch_npu()


def check_other_devices() -> None:
    with made_up_npu() as (said, _), mock.patch("torch.cuda.is_available", return_value=True):
        for device, calls in (("cpu", []), ("cuda", []), ("cuda:2", [mock.call(2)])):
            with mock.patch("torch.cuda.set_device") as set_device:
                platform.prepare(device)
            assert set_device.mock_calls == calls
    assert said == []


def check_absent() -> None:
    with made_up_npu(others={"npu.is_available": lambda: False}) as (said, _):
        platform.prepare("npu:3")
        with pytest.raises(platform.BackendError, match=r"^Device 'npu:3' was asked for, but torch_npu sees no NPU: "):
            platform.detect("npu:3")
    assert said == [Said("npu.is_available")] * 2


def check_prepare() -> None:
    with made_up_npu() as (said, driver):
        platform.prepare("npu:3")
        assert said == PREPARED
        assert (driver().get_current_stream(), driver().get_current_stream(2)) == (41, 42)
        assert said[len(PREPARED) :] == [Said("_C._npu_getCurrentRawStreamNoWait", (device,)) for device in (1, 2)]


PREPARED = [
    Said("npu.is_available"),
    Said("npu.set_device", ("npu:3",)),
    Said("npu.set_compile_mode", (), {"jit_compile": False}),
    Said("npu.conv.allow_hf32", (False,), is_set=True),
    Said("npu.utils.get_cann_version", ("CANN",)),
]


def check_prepare_without_triton() -> None:
    with made_up_npu(triton="none") as (said, driver):
        platform.prepare("npu:3")
        assert driver().get_current_stream() == "waits for the queue"
    assert said == PREPARED


def check_prepare_keeps_the_drivers_stream() -> None:
    """Where the queue is off, and where torch_npu has no other way to the stream."""
    for value, waits in (("false", True), ("", True), ("True", False), ("1", False)):
        with made_up_npu() as (_, driver), mock.patch.dict(os.environ, TRITON_ENABLE_TASKQUEUE=value):
            platform.prepare("npu:3")
            assert driver().get_current_stream() == ("waits for the queue" if waits else 41)
    with made_up_npu(others={"_C._npu_getCurrentRawStreamNoWait": None, "_C.other": print}) as (said, driver):
        platform.prepare("npu:3")
        assert driver().get_current_stream() == "waits for the queue"
    assert said == PREPARED


def check_cann_version() -> None:
    def broken(module: str) -> str:
        raise RuntimeError(module)

    for answer, version in ((lambda _: "9.2.0", "9.2.0"), (broken, ""), (None, "")):
        with made_up_npu(others={"npu.utils.get_cann_version": answer}) as (said, _):
            assert ascend_runtime.cann_version() == version
        assert all(one == Said("npu.utils.get_cann_version", ("CANN",)) for one in said)


ORDERS: dict[str, Callable[[list[npu_streams.Stream]], npu_streams.Stream]] = {
    "updates first": npu_streams.updates_first,
    "steps first": npu_streams.steps_first,
    **{f"at random {seed}": npu_streams.at_random(seed) for seed in range(5)},
}


def run_steps(order: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Steps of two graphs of two attention calls each, asked for faster than the device runs them, with an eager one
    among them: the lengths that attention is to see, and those that it saw."""
    from service.engine.model import npu_graphs

    device = npu_streams.Device(order)
    steps = [(1, 2), (3, 4, 5), (2, 3), (4, 5, 6), (5, 6, 7), (7, 7), (8, 8), (9, 9)]
    updating = SimpleNamespace(updates=lambda maps: {"lengths": list(maps)})
    with (
        made_up_npu(others=npu_streams.answers(device)),
        mock.patch.object(npu_graphs, "contract", lambda op, *_: {"paged_attention": updating}[op]),
    ):
        graphs = npu_graphs.NpuGraphs(_Place("npu:3"))  # type: ignore[arg-type]

        def work() -> None:
            for _ in range(2):
                device.attend([0])

        captured = {length: graphs.capture(work) for length in (2, 3)}
        for step in steps:
            batch: Any = SimpleNamespace(attention=step, token_ids=SimpleNamespace(device=None))
            captured[len(step)].update(batch)
            captured[len(step)].replay()
        device.run()
    return [step for step in steps for _ in range(2)], device.results


class _Place:
    """What torch would call a device of a kind that it knows with torch_npu only."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name


def check_graphs() -> None:
    for order in ORDERS.values():
        steps, results = run_steps(order)
        assert results == steps


def check_profile() -> None:
    """The tables lie where they were asked for, and are of what ran."""
    from service.doctor.checks.profiles import record_npu

    done: list[str] = []

    @contextmanager
    def profile(*, activities: Any, on_trace_ready: Any, experimental_config: Any) -> Iterator[None]:
        assert activities == ["the host", "the NPU"]
        assert experimental_config == "of level one, no counters"
        assert on_trace_ready == "a handler of here"
        done.append("begun")
        yield
        done.append("written")

    others = {
        "profiler.ProfilerActivity.CPU": "the host",
        "profiler.ProfilerActivity.NPU": "the NPU",
        "profiler.tensorboard_trace_handler": lambda directory: f"a handler of {directory}",
        "profiler.ProfilerLevel.Level1": "one",
        "profiler.AiCMetrics.AiCoreNone": "no counters",
        "profiler._ExperimentalConfig": lambda profiler_level, aic_metrics: f"of level {profiler_level}, {aic_metrics}",
        "profiler.profile": profile,
    }
    with made_up_npu(others=others):
        record_npu("here", lambda: done.append("worked"))
    assert done == ["begun", "worked", "written"]


_B4, _P3 = {"name": "Ascend910B4", "vector_core_num": 42}, {"name": "Ascend310P3", "vector_core_num": 8}
# Properties, Triton; then what is to be found: cores, KiB of a core, what is wrong with Triton, bfloat16.
PLATFORMS: dict[str, tuple[Any, ...]] = {
    "910B4": (_B4, "ascend", 42, 192, None, True),
    "910B4 without triton-ascend": (_B4, "none", 42, 192, NO_TRITON, True),
    "910B4 with upstream's triton": (_B4, "upstream", 42, 192, UPSTREAM, True),
    "910_9392": ({"name": "Ascend910_9392", "vector_core_num": 48}, "ascend", 48, 192, None, True),
    "310P3": (_P3, "none", 8, 0, NO_310P, False),
    "310P3 with triton-ascend": (_P3, "ascend", 8, 0, NO_310P, False),
    "no number of cores": ({"name": "Ascend910B2"}, "ascend", 40, 192, None, True),
    "no cores": ({"name": "Ascend910B2", "vector_core_num": 0}, "ascend", 40, 192, None, True),
}


def _check_of(case: tuple[Any, ...]) -> Callable[[], None]:
    return lambda: check_platform(*case)


CHECKS: dict[str, Callable[[], None]] = {
    **{name: _check_of(case) for name, case in PLATFORMS.items()},
    "without torch_npu": check_without_torch_npu,
    "absent": check_absent,
    "prepare": check_prepare,
    "prepare without Triton": check_prepare_without_triton,
    "prepare keeps the driver's stream": check_prepare_keeps_the_drivers_stream,
    "other devices": check_other_devices,
    "CANN's version": check_cann_version,
    "graphs": check_graphs,
    "profile": check_profile,
}
