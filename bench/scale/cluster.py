"""Several engines behind one server, beside one engine, and beside as many servers that are chosen at random.

python -m bench.scale.cluster [--device cpu] [--shape tiny] [--replicas 1 2] [--requests 64] [--adapters 128] [--rank
                        16] [--zipf 1.0] [--rows-for N] [--prompt-tokens 64] [--output-tokens 64] [--waves 4] [--random]
                        [--ray] [--turns 1] [--json FILE]

For each number of engines a server is started, which has `--requests` times as many requests at once, in waves, each
for an adapter drawn by Zipf's law (0: all alike). The model and its adapters are random numbers, written to a temporary
directory: 16 GB for 8b, and for each of its adapters 84 MB at rank 16. The first wave is not counted.

--rows-for  adapters that the rows of one device hold; default: as the server chooses
--random    also the largest number as servers of one engine each, on one store that they share, each request to any
--ray       also the largest number on Ray Serve, which has an environment: `make clients CLIENTS=ray`
--turns     so many times in turn, all being there at once: a machine that others use is then as slow for each

tokens/s    of all answers; tok/CPU s: through the processor time of servers and engines
server us   processor time of the servers for each token; engine us: of the engines; tok/step: in a step of an engine
loads       adapters brought to a device, per request; on device: requests that needed none
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import itertools
import json
import os
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from bench.http.http import processor_seconds
from bench.http.http_client import complete_all
from bench.shapes import SEED, SHAPES, Shape, write_checkpoint
from tests.support.http.server import ServerOnRay
from tests.support.http.server_process import Server, running_server

# Head, figure, width, digits.
_COLUMNS = (
    ("tok/CPU s", "tokens_per_cpu_second", 11, 1),
    ("server us", "server_us_per_token", 11, 1),
    ("engine us", "engine_us_per_token", 11, 1),
    ("tok/step", "tokens_per_step", 10, 2),
    ("loads", "loads_per_request", 7, 3),
    ("on device", "on_device", 11, 3),
)
_WORDS = [f"word{number}" for number in range(200)]


def write_adapter(directory: Path, shape: Shape, rank: int, seed: int, dtype: torch.dtype) -> int:
    """A PEFT directory with random weights on every projection of every layer; its bytes."""
    generator = torch.Generator().manual_seed(seed)
    q_width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = {
        "self_attn.q_proj": (hidden, q_width),
        "self_attn.k_proj": (hidden, kv_width),
        "self_attn.v_proj": (hidden, kv_width),
        "self_attn.o_proj": (q_width, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    tensors = {}
    for layer, (module, (width_in, width_out)) in itertools.product(range(shape.num_hidden_layers), sizes.items()):
        name = f"base_model.model.model.layers.{layer}.{module}"
        for side, size in (("lora_A", (rank, width_in)), ("lora_B", (width_out, rank))):
            tensors[f"{name}.{side}.weight"] = torch.empty(size, dtype=dtype).normal_(std=0.02, generator=generator)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = [module.partition(".")[2] for module in sizes]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


class Side:
    """One way to serve: the same waves for each."""

    def __init__(self, servers: list[Server], given: argparse.Namespace, num_engines: int) -> None:
        self.servers, self._given, self._num_engines = servers, given, num_engines
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._random = random.Random(SEED)
        weights = (1 / (one + 1) ** given.zipf for one in range(given.adapters))
        self._weights = list(itertools.accumulate(weights))

    def turn(self) -> None:
        """So many waves more that count."""
        before = self._counted()
        for _ in range(self._given.waves):
            num_tokens, seconds = self.wave()
            self._sums["tokens"] += num_tokens
            self._sums["seconds"] += seconds
            self._sums["requests"] += self._given.requests * self._num_engines
        for what, count in self._counted().items():
            self._sums[what] += count - before[what]

    def figures(self) -> dict[str, float]:
        """Of all turns."""
        sums = self._sums
        loads, num_tokens = sums["loads"] / sums["requests"], sums["tokens"]
        return {
            "tokens_per_second": num_tokens / sums["seconds"],
            "tokens_per_cpu_second": num_tokens / (sums["server_seconds"] + sums["engine_seconds"]),
            "server_us_per_token": sums["server_seconds"] / num_tokens * 1e6,
            "engine_us_per_token": sums["engine_seconds"] / num_tokens * 1e6,
            "tokens_per_step": num_tokens / sums["steps"],
            "loads_per_request": loads,
            "on_device": 1 - loads,
        }

    def wave(self) -> tuple[int, float]:
        """Requests at once, which count for nothing; tokens and seconds."""
        bodies: list[list[dict[str, Any]]] = [[] for _ in self.servers]
        for _ in range(self._given.requests * self._num_engines):
            self._random.choice(bodies).append(self._body())
        with ThreadPoolExecutor(len(bodies)) as pool:
            runs = list(pool.map(complete_all, [one.url for one in self.servers], bodies))
        begins, ends = [run[1] for run in runs], [run[2] for run in runs]
        return sum(answer.num_tokens for run in runs for answer in run[0]), max(ends) - min(begins)

    def _body(self) -> dict[str, Any]:
        which = bisect.bisect(self._weights, self._random.random() * self._weights[-1])
        prompt = " ".join(self._random.choices(_WORDS, k=self._given.prompt_tokens))
        body = {"model": f"adapter-{which}", "prompt": prompt, "max_tokens": self._given.output_tokens}
        return body | {"temperature": 0, "ignore_eos": True}

    def _counted(self) -> dict[str, float]:
        """Loads, steps, and processor seconds, since the start."""
        engine_pids = [pid for one in self.servers for pid in one.engine_pids()]
        pids = [pid for one in self.servers for pid in (one.process.pid, *one.child_pids())]
        return {
            "loads": sum(one.metric("adapter_loads_total") for one in self.servers),
            "steps": sum(one.metric("engine_steps_total") for one in self.servers),
            "engine_seconds": sum(map(processor_seconds, engine_pids)),
            "server_seconds": sum(processor_seconds(pid) for pid in pids if pid not in engine_pids),
        }


@dataclass(frozen=True)
class Way:
    """How engines serve: behind one server, as servers of their own, or on Ray Serve."""

    name: str
    num_engines: int
    kind: Literal["own", "apart", "ray"] = "own"


def write_model(given: argparse.Namespace, root: Path) -> None:
    """The model, and the adapters."""
    shape = SHAPES[given.shape]
    assert shape is not None, "a shape with random weights"
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    (root / "model").mkdir()
    write_checkpoint(root / "model", shape, given.device, dtype)

    def write(number: int) -> int:
        return write_adapter(root / "adapters" / f"adapter-{number}", shape, given.rank, number, dtype)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # making random numbers leaves Python's lock
        given.adapter_bytes = list(pool.map(write, range(given.adapters)))[-1]


def ways(given: argparse.Namespace) -> list[Way]:
    """Those that are asked for."""
    most = max(given.replicas)
    made = [Way(f"engines: {number}", number) for number in given.replicas]
    if given.random:
        made.append(Way(f"servers at random: {most}", most, "apart"))
    if given.ray:
        made.append(Way(f"on Ray Serve: {most}", most, "ray"))
    return made


@contextlib.contextmanager
def serving(given: argparse.Namespace, root: Path, way: Way) -> Iterator[Side]:
    """One side, warm."""
    is_apart, own = way.kind == "apart", f"{way.num_engines}-{way.kind}"
    settings: dict[str, Any] = {
        "model_name": "base",
        "device": given.device,
        "preload_adapters_dir": root / "adapters",
        "store_dir": root / ("store" if given.turns == 1 and way.kind != "ray" else f"store-{own}"),
        "store_shared": is_apart,
        "replicas": 1 if is_apart else way.num_engines,
        "num_threads": 1 if given.device == "cpu" else None,
        "kv_bytes": given.kv_bytes,
        "host_tier_bytes": given.host_tier_bytes,
        "adapter_row_bytes": None if given.rows_for is None else given.rows_for * given.adapter_bytes,
        "max_queued_requests": max(512, 2 * given.requests * way.num_engines),
    }
    if way.kind == "ray":
        settings |= {"module": "tests.support.on_ray.ray_server", "server_class": ServerOnRay}
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(way.num_engines if is_apart else 1):
            started = running_server(root / "model", root / f"server-{own}-{number}", **settings)
            servers.append(stack.enter_context(started))
        side = Side(servers, given, way.num_engines)
        side.wave()
        yield side


def measure(given: argparse.Namespace, root: Path, made: list[Way]) -> Iterator[dict[str, float]]:
    """Of each side: one after the other, or in turns."""
    if given.turns == 1:
        for way in made:
            with serving(given, root, way) as side:
                side.turn()
                yield side.figures()
        return
    with contextlib.ExitStack() as stack:
        all_sides = [stack.enter_context(serving(given, root, way)) for way in made]
        for _ in range(given.turns):
            for side in all_sides:
                side.turn()
        yield from (side.figures() for side in all_sides)


def parser(**texts: Any) -> argparse.ArgumentParser:
    """Of the flags that say what is served."""
    made = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    made.add_argument("--device", default="cpu")
    made.add_argument("--shape", choices=[name for name, shape in SHAPES.items() if shape is not None], default="tiny")
    made.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    for flag, default in (("requests", 64), ("adapters", 128), ("rank", 16), ("waves", 4), ("turns", 1)):
        made.add_argument(f"--{flag}", type=int, default=default)
    made.add_argument("--prompt-tokens", type=int, default=64)
    made.add_argument("--output-tokens", type=int, default=64)
    made.add_argument("--zipf", type=float, default=1.0)
    made.add_argument("--rows-for", type=int)
    made.add_argument("--kv-bytes", help="of an engine; default: the server's own")
    made.add_argument("--host-tier-bytes", default="4GiB")
    made.add_argument("--random", action="store_true")
    made.add_argument("--ray", action="store_true")
    return made


def main() -> None:
    flags = parser(prog="python -m bench.scale.cluster", description=__doc__)
    flags.add_argument("--json", type=Path, metavar="FILE")
    given = flags.parse_args()
    result = {}
    print(f"{'side':22}{'tokens/s':>9}{'of first':>9}" + "".join(f"{head:>{width}}" for head, _, width, _ in _COLUMNS))
    made = ways(given)
    with tempfile.TemporaryDirectory() as scratch:
        write_model(given, Path(scratch))
        for way, one in zip(made, measure(given, Path(scratch), made), strict=True):
            result[way.name] = one
            share = one["tokens_per_second"] / next(iter(result.values()))["tokens_per_second"]
            rest = "".join(f"{one[key]:{width}.{digits}f}" for _, key, width, digits in _COLUMNS)
            print(f"{way.name:22}{one['tokens_per_second']:9.1f}{share:9.2f}{rest}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
