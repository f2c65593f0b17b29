"""Requests of `vllm bench serve`, by its own functions: `load.py DIRECTORY_OF_ITS_FILE URL`; the counts are printed."""

import asyncio
import sys

sys.path.insert(0, sys.argv[1])
import aiohttp
from endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput

URL, MODELS = sys.argv[2], ("base", "shout", "reverse", "json", "pig-latin")
PATHS = {"openai": "completions", "openai-chat": "chat/completions", "openai-responses": "responses"}
PATHS["openai-embeddings"] = "embeddings"


async def main() -> None:
    async with aiohttp.ClientSession() as session:
        for backend, path in PATHS.items():
            is_text = backend != "openai-embeddings"
            asked = [
                RequestFuncInput(
                    prompt="lamp tiger moss",
                    api_url=f"{URL}/v1/{path}",
                    prompt_len=15,
                    output_len=16,
                    model=model,
                    ignore_eos=is_text,
                    extra_body={"temperature": 0} if is_text else None,
                )
                for model in MODELS * 4
            ]
            found = await asyncio.gather(*(ASYNC_REQUEST_FUNCS[backend](one, session) for one in asked))
            for one in found:
                assert one.success, (backend, one.error)
                if is_text:
                    assert (one.output_tokens, one.ttft > 0, len(one.itl) > 8) == (16, True, True), (backend, one)
            if backend in ("openai-chat", "openai-responses"):
                assert found[1].generated_text == "LAMP TIGER MOSS!", found[1]
            print(backend, len(found))


asyncio.run(main())
