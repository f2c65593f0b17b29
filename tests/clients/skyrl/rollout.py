"""Steps of SkyRL's remote inference client with LoRA: `python rollout.py URL MODEL ADAPTER_DIR ...`.

Each directory is what a trainer has saved at one step. Prints JSON: what the client says of each step. Its own code
runs (skyrl.backends.skyrl_train.inference_servers.remote_inference_client); stood in for is the package around it,
which imports Tinker's types, and these need Python 3.12.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_found = importlib.util.find_spec("skyrl")
assert _found is not None and _found.origin is not None
_backends = ModuleType("skyrl.backends")
_backends.__path__ = [str(Path(_found.origin).parent / "backends")]
sys.modules["skyrl.backends"] = _backends

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    SKYRL_LORA_ADAPTER_NAME,
    RemoteInferenceClient,
)

PROMPTS = [[20, 21, 22, 23, 24], [30, 31, 32]]
# `get_vllm_sampling_params` of SkyRL's engine_utils.py, with its defaults but for greedy choices.
SAMPLING = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 6,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}


async def main() -> None:
    url, model, *steps = sys.argv[1:]
    told: dict[str, Any] = {"prompts": PROMPTS, "steps": []}
    name = SKYRL_LORA_ADAPTER_NAME
    async with RemoteInferenceClient(url, [url], 1, model_name=model, uses_lora_weight_sync=True) as client:
        assert await client.get_world_size() == (1, 1)
        batch = {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING, "session_ids": ["a", "b"]}
        running = None
        for step in steps:
            await client.pause_generation()
            await client.load_lora_adapter(name, step)
            await client.reset_prefix_cache()
            client.increment_weight_version()
            await client.resume_generation()
            salt = str(client.weight_version)
            told["steps"].append(await client.generate({**batch, "cache_salt": salt}, model=name))
            if running is None:  # goes on over the next step's pause
                long = {**SAMPLING, "max_tokens": 40, "ignore_eos": True}
                running = asyncio.create_task(client.generate({**batch, "sampling_params": long}, model=name))
        assert running is not None
        told["long"] = (await running)["stop_reasons"]
        sample = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[0]}]}, "num_samples": 2}
        sample |= {"sampling_params": {"max_tokens": 3, "temperature": 0.0, "seed": 1}, "prompt_logprobs": True}
        told["sample"] = await client.sample({"json": {**sample, "model": name, "topk_prompt_logprobs": 2}})
        # Colocated: the memory goes while the trainer computes, and the adapter comes between the two wakes.
        await client.sleep()
        await client.wake_up(["weights"])
        await client.load_lora_adapter(name, steps[0])
        await client.wake_up(["kv_cache"])
        told["woken"] = await client.generate(batch, model=name)
        await client.unload_lora_adapter(name)
        await client.finish_session("a")
    print(json.dumps(told))


asyncio.run(main())
