"""TRL's client of GRPO's server mode: `python server_mode.py URL ADAPTER`, whose server has the adapter.

Prints JSON of what it is answered. Stood in for is that vLLM is installed, which the client needs to send weights by
NCCL alone; to that this server says no.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from trl.generation import vllm_client

PROMPTS = [[20, 21, 22, 23, 24], [30, 31, 32]]


def main() -> None:
    url, adapter = sys.argv[1:]
    vllm_client.is_vllm_available = lambda *_, **__: True
    client = vllm_client.VLLMClient(base_url=url, connection_timeout=10)
    told: dict[str, Any] = {"base": client.model, "world_size": client.get_world_size(), "prompts": PROMPTS}
    try:
        client.init_communicator(device="cpu")
    except RuntimeError as refusal:
        told["refusal"] = str(refusal)
    told["of_base"] = client.generate(PROMPTS, temperature=0.0, max_tokens=6)["completion_ids"]
    client.model = adapter
    told["answers"] = client.generate(PROMPTS, n=2, temperature=0.0, max_tokens=6, top_k=0, logprobs=0)
    messages = [[{"role": "user", "content": "Tell me about the sea."}]] * 2
    told["chats"] = client.chat(messages, n=2, max_tokens=4, generation_kwargs={"seed": 1, "ignore_eos": True})
    answers = told["answers"]["completion_ids"][::2]
    sequences = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    lengths = [len(prompt) for prompt in PROMPTS]
    told["scored"] = client.get_sequence_logprobs(sequences, lengths, top_logprobs=5, chunk_size=1)
    client.reset_prefix_cache()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
