"""A short chat template in each format of tool calls: it shows tools, calls and results as the models' own do."""

from __future__ import annotations

_HEAD = "{{ bos_token }}{% if tools %}<|im_start|>system\n"
_MESSAGES = "<|im_end|>\n{% endif %}{% for message in messages %}"
_TAIL = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_OTHERS = "<|im_start|>{{ message.role }}\n{{ message.content }}"

HERMES = (
    _HEAD + "<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\nCall as\n<tool_call>\n"
    '{"name": <name>, "arguments": <object>}\n</tool_call>'
    + _MESSAGES
    + "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}" + _OTHERS + "{% for call in message.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>\n" + _TAIL
)
QWEN3_CODER = (
    _HEAD + "<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\nCall as\n<tool_call>\n"
    "<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
    + _MESSAGES
    + "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}"
    + _OTHERS
    + "{% for call in message.tool_calls %}\n<tool_call>\n{{ '<function=' ~ call.function.name ~ '>\n' }}"
    "{% for key, value in call.function.arguments | items %}{{ '<parameter=' ~ key ~ '>\n' }}"
    "{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{% endif %}<|im_end|>\n" + _TAIL
)
LLAMA3 = (
    _HEAD
    + 'Environment: ipython\nAnswer {"name": name, "parameters": object}.\n'
    + "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}"
    + _MESSAGES
    + "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '<|im_start|>assistant\n{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}<|im_start|>{{ 'ipython' if message.role == 'tool' else message.role }}\n{{ message.content }}"
    "{% endif %}<|im_end|>\n" + _TAIL
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ message.content }}[/INST]"
    "{% elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs have 9 characters!') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ "" if loop.last else ", " }}'
    "{% endfor %}]{{ eos_token }}"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{\"content\": {{ message.content }}, "
    '"call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
LFM2 = (
    _HEAD
    + "List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>"
    + _MESSAGES
    + "<|im_start|>{{ message.role }}\n{% if message.tool_calls %}<|tool_call_start|>["
    '{% for call in message.tool_calls %}{{ ", " if not loop.first }}{{ call.function.name }}('
    "{% for key, value in call.function.arguments.items() %}"
    '{{ ", " if not loop.first }}{{ key }}={{ value | tojson }}{% endfor %}){% endfor %}]<|tool_call_end|>{% endif %}'
    "{% if message.role == 'tool' %}<|tool_response_start|>{{ message.content }}<|tool_response_end|>"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n" + _TAIL
)
TEMPLATES = {"hermes": HERMES, "qwen3_coder": QWEN3_CODER, "llama3_json": LLAMA3, "mistral": MISTRAL, "lfm2": LFM2}
# What is a special token in models of the format.
SPECIAL_TOKENS: dict[str, tuple[str, ...]] = {
    "hermes": (),
    "qwen3_coder": (),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]", "[/INST]"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>", "<|tool_list_end|>"),
}
