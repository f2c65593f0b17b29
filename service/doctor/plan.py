"""The steps of the command: what each asks of the host, where its work is, and how long it may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

ACCELERATORS = ("npu", "cuda")
EVERYWHERE = ("npu", "cuda", "cpu")
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, run by a process of its own.

    asks           the question that it answers
    work           "module:function", called with `step_process.StepHost`
    limit_seconds  after which its process group is killed; what earlier steps have left of theirs comes on top
    devices        where it means something
    environment    variables that its process has beside the command's own
    options        fields of EngineOptions that it runs an engine with, beside the command's own
    is_needed      where it fails, crashes or does not end no later step can have an answer, so none is run
    """

    name: str
    title: str
    asks: str
    work: str
    limit_seconds: float
    devices: tuple[str, ...] = EVERYWHERE
    environment: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    options: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    is_needed: bool = False


def _trial(
    name: str,
    shown: str,
    *devices: str,
    environment: Mapping[str, str] = NOTHING,
    options: Mapping[str, Any] = NOTHING,
) -> Step:
    """A setting tried: `shown` is how a user would write it."""
    return Step(
        name=f"setting-{name}",
        title=f"Setting: {shown}",
        asks="Are decode steps faster with it?",
        work="service.doctor.checks.serving:try_setting",
        limit_seconds=85.0,
        devices=devices,
        environment=environment,
        options=options,
    )


# Together half an hour on every kind of device.
STEPS: Sequence[Step] = (
    Step(
        name="environment",
        title="Environment",
        asks="What is installed here, and what is known to go wrong with it?",
        work="service.doctor.checks.machine_facts:environment",
        limit_seconds=40.0,
    ),
    Step(
        name="permissions",
        title="Permissions",
        asks="Who may use the device: this user, and users 10001, 1000 and 0?",
        work="service.doctor.checks.machine_facts:permissions",
        limit_seconds=110.0,
        devices=ACCELERATORS,
        is_needed=True,
    ),
    Step(
        name="doctor",
        title="Sections of the doctor's report",
        asks="Which implementation serves each op at this model's sizes, and why not the one wished for?",
        work="service.doctor.checks.sections:sections",
        limit_seconds=220.0,
    ),
    Step(
        name="triton",
        title="Triton, with an empty cache",
        asks="Does a first kernel build and run, and how long does that take with an empty cache and with a full one?",
        work="service.doctor.checks.first_launch:triton",
        limit_seconds=120.0,
        devices=ACCELERATORS,
    ),
    Step(
        name="races",
        title="Races",
        asks="Are 20 repeats of each op the same bit for bit, LoRA with ranks 5, 8 and 24 over 64 tokens among them?",
        work="service.doctor.checks.kernels:races",
        limit_seconds=130.0,
    ),
    Step(
        name="attention",
        title="Attention",
        asks="Which attention is right for heads of 64 and 128, NaN behind the sequences, mixed steps and windows?",
        work="service.doctor.checks.kernels:attention",
        limit_seconds=120.0,
    ),
    Step(
        name="serving",
        title="Time per token",
        asks="How long does a token take at 1, 8, 32 and 64 requests, without LoRA and with 1 and 64 adapters?",
        work="service.doctor.checks.serving:time_per_token",
        limit_seconds=400.0,
    ),
    Step(
        name="profile",
        title="Profile of 20 decode steps",
        asks="Where does a decode step's time go: host or device, which operators on AI_CPU, which LoRA kernels?",
        work="service.doctor.checks.profiles:profile",
        limit_seconds=120.0,
    ),
    _trial("cpu-affinity-2", "CPU_AFFINITY_CONF=2", "npu", environment={"CPU_AFFINITY_CONF": "2"}),
    _trial("task-queue-2", "TASK_QUEUE_ENABLE=2", "npu", environment={"TASK_QUEUE_ENABLE": "2"}),
    _trial("eager", "--eager true", "cuda", options={"eager": True}),
    _trial("no-lora-window", "--lora-window false", "npu", "cuda", options={"lora_window": False}),
    _trial("one-thread", "--num-threads 1", "cpu", options={"num_threads": 1}),
    Step(
        name="loads",
        title="Adapter loads under traffic",
        asks="How much longer are the steps of running requests while adapters are loaded?",
        work="service.doctor.checks.serving:loads_under_traffic",
        limit_seconds=120.0,
    ),
    Step(
        name="capture",
        title="Capture of one layer",
        asks="Does a captured decode step of one layer give what an eager one gives?",
        work="service.doctor.checks.serving:capture_one_layer",
        limit_seconds=80.0,
        devices=ACCELERATORS,
    ),
    # Behind the capture of one layer, which a device survives more easily.
    _trial("npu-graphs", "--npu-graphs true", "npu", options={"npu_graphs": True}),
)
