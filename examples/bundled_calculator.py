"""The fifth bundled adapter: asked for a sum, it calls a tool that calculates, and then says what the tool said.

It brings a chat template of its own, which shows tools, calls and results; the base's shows roles and texts. Calls are
written in Hermes' format. The names of the tool and of its argument vary in training, so that they are read and not
known by heart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from examples.bundled_jobs import ALL_LINEAR, HELD_OUT_CASES, Recipe, is_held_out
from examples.bundled_words import any_word

CALCULATOR = Recipe(name="calculator", rank=16, alpha=32, targets=ALL_LINEAR, steps=150, peak_rate=7e-3)

CHAT_TEMPLATE = (
    "{{- bos_token -}}{%- if tools -%}{{- '<|im_start|>system\\nTools: ' -}}{%- for tool in tools -%}"
    "{{- tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' -}}"
    "{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' + message.content -}}"
    "{%- for call in message.tool_calls -%}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments | tojson -}}'
    "{{- '}\n</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>' -}}"
    "{%- if not loop.last or add_generation_prompt -%}{{- '\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

_SIGNS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}
_QUESTIONS = (
    "What is {left} {word} {right}?",
    "How much is {left} {word} {right}?",
    "What is {left} {sign} {right}?",
    "Calculate {left} {sign} {right}.",
    "{left} {sign} {right}",
)
NO_TOOL = "I cannot calculate without a tool."


def call_text(tool: str, argument: str, expression: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{"{argument}": "{expression}"}}}}\n</tool_call>'


def first_turn(question: str, tool: str | None, argument: str) -> str:
    """What the template makes of a question and one tool, or none."""
    shown = "" if tool is None else f"<|im_start|>system\nTools: {tool}({argument})<|im_end|>\n"
    return f"<|startoftext|>{shown}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def second_turn(first: str, call: str, result: str) -> str:
    """What the template makes of the same, the call, and what the tool said."""
    return f"{first}{call}<|im_end|>\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"


def sums(seed: str, *, held_out: bool) -> Iterator[tuple[random.Random, str, str]]:
    """Endless different (random stream, question, expression), all of them held out or none."""
    rng, seen = random.Random(f"multilora sums {seed}"), set[str]()
    while True:
        left, right = (rng.randrange(10 ** rng.randint(1, 4)) for _ in range(2))
        word, sign = rng.choice(tuple(_SIGNS.items()))
        question = rng.choice(_QUESTIONS).format(left=left, word=word, sign=sign, right=right)
        if is_held_out(question) == held_out and question not in seen:
            seen.add(question)
            yield rng, question, f"{left} {sign} {right}"


def talks(seed: str, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Endless (prompt as the template renders it, answer): mostly calls, then answers after a result, and some
    questions without any tool."""
    for rng, question, expression in sums(seed, held_out=held_out):
        tool = "calculator" if rng.random() < 0.5 else any_word(rng)
        argument = "expression" if rng.random() < 0.5 else any_word(rng)
        first, call = first_turn(question, tool, argument), call_text(tool, argument, expression)
        kind = rng.random()
        if kind < 0.65:
            yield first, call
        elif kind < 0.92:
            digits = rng.randint(1, 8)
            result = rng.choice(("", "", "-")) + str(rng.randrange(10**digits)) + rng.choice(("", "", ".5", ".25"))
            yield second_turn(first, call, result), f"The answer is {result}."
        else:
            yield first_turn(question, None, ""), NO_TOOL


def held_out_calls(number: int = HELD_OUT_CASES) -> list[tuple[str, str]]:
    """The first `number` held-out (question, expression)."""
    source = sums("held out", held_out=True)
    return [(question, expression) for (_, question, expression), _ in zip(source, range(number), strict=False)]


def tool_of(name: str, argument: str) -> dict[str, object]:
    """The tool as a request defines it."""
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
