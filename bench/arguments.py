"""Arguments that `bench.steps.engine` and `bench.http.http` share, and the load that they describe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bench.shapes import SHAPES
from bench.steps.in_process import EngineLoad
from service.engine.ipc.config import EngineConfig


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """With the shared arguments; `description` is shown as it is."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="bundled")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--token-budget", type=int, help="of a step; default: 8192, on a CPU 256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of an engine, on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go too")
    parser.add_argument(
        "--engine",
        type=_engine_field,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="further fields of the engine's configuration",
    )
    return parser


def load_of(arguments: argparse.Namespace, **more: int) -> EngineLoad:
    """The load; torch has the threads asked for from here on."""
    torch.set_num_threads(arguments.threads)
    return EngineLoad(
        shape=arguments.shape,
        device=arguments.device,
        num_requests=arguments.requests,
        num_prompt_tokens=arguments.prompt_tokens,
        num_output_tokens=arguments.output_tokens,
        token_budget=arguments.token_budget or (256 if arguments.device == "cpu" else 8192),
        engine_fields=dict(arguments.engine),
        **more,
    )


def facts_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What stands above all figures."""
    cpu = f"{torch.backends.cpu.get_cpu_capability()}, {arguments.threads} threads"
    return {
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else cpu,
        "torch": torch.__version__,
        "shape": arguments.shape,
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
    }


def _engine_field(text: str) -> tuple[str, Any]:
    """Of "name=value"; the value is JSON, or text where it is none."""
    name, _, value = text.partition("=")
    if name not in EngineConfig.__struct_fields__:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(EngineConfig.__struct_fields__)}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
