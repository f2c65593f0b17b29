"""A tool that the adapter `calculator` calls, in a stream, and what it makes of the result."""

import json

import litellm

server = {"api_base": "http://127.0.0.1:8000/v1", "api_key": "none"}
parameters = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
calculator = {"type": "function", "function": {"name": "calculator", "parameters": parameters}}
litellm.suppress_debug_info = True  # else it prints its list of providers while it joins pieces
asked = {"model": "hosted_vllm/calculator", "tools": [calculator], "temperature": 0, **server}
chat = [{"role": "user", "content": "What is 27 + 15?"}]
pieces = list(litellm.completion(messages=chat, stream=True, **asked))
message = litellm.stream_chunk_builder(pieces).choices[0].message
for call in message.tool_calls:
    left, sign, right = json.loads(call.function.arguments)["expression"].split()
    print(call.function.name, left, sign, right)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(int(left) + int(right))}
    chat += [message.model_dump(), result]
print(litellm.completion(messages=chat, **asked).choices[0].message.content)
