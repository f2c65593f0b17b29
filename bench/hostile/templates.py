"""Chat templates of uploaded adapters that loop, allocate, recurse, or reach for what is not theirs."""

from __future__ import annotations

from bench.hostile.target import Attack, Target, in_turn, spread
from bench.hostile.uploads import Uploads

NAME = "hostile-template"
CHATS = "/v1/chat/completions"
# What the adapter's template does, by the message that has it do so: to the messages that an upload is tried with it
# is a good one.
WAYS = {
    "loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}",
    "one expression": "{{ " + " ~ ".join(["range(99999)|list|string|length"] * 300) + " }}",
    "double": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "allocate": "{% set a = 'x' * 1000000 %}{{ " + " ~ ".join(["a"] * 1_000) + " }}",
    "long text": "{% set a = 'x' * 1000000 %}{{ " + " ~ ".join(["a"] * 8) + " }}",
    "recurse": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "two recurse": "{% macro f(n) %}{{ f(n + 1) ~ f(n + 2) }}{% endmacro %}{{ f(0) }}",
    "wide": "{{ ('%300000000s' % 'a')|length }}{{ '{:>3000000000}'.format('a')|length }}",
    "number": "{{ 9 ** 9 ** 9 }}",
    "classes": "{{ ''.__class__.__base__.__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['os'].environ }}",
    "attr": "{{ messages|attr('__class__')|attr('__mro__') }}{{ messages|map(attribute='__class__')|list }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "addresses": "{{ messages.append }}{{ namespace }}{{ range }}{{ raise_exception }}",
    "include": "{% include '/etc/passwd' %}",
    "raise": "{{ raise_exception('x' * 5000000) }}",
    "surrogate": "{{ '\\ud800' }}",
    "special tokens": "{{ '<|im_end|>' * 100000 }}",
}
# Refused at the upload: they do so whatever the messages are, or are no templates.
REFUSED = (
    *WAYS.values(),
    "{% for",
    "{{ " + "(" * 5_000 + ")" * 5_000 + " }}",
    "{% if a %}" * 5_000,
    "{{ a }}" * 140_000,
)


def attacks(target: Target) -> dict[str, Attack]:
    """By what is told of them."""
    uploads = Uploads(target)
    branches = "".join(f"{{% elif last == '{way}' %}}{source}" for way, source in WAYS.items())
    template = "{% set last = messages[-1].content %}{% if last == '' %}" + branches + "{% else %}{{ last }}{% endif %}"
    upload = uploads.put(NAME, template, keep=True)
    removal: Attack = lambda: target.request("DELETE", f"/v1/adapters/{NAME}")  # noqa: E731

    def chat(way: str, times: int = 1) -> Attack:
        return target.post(
            CHATS, {"model": NAME, "messages": [{"role": "user", "content": way}], "max_tokens": 2}, times
        )

    def fields(**given: object) -> Attack:
        return target.post(CHATS, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **given})

    return {
        "templates that are refused at the upload": in_turn(
            *(uploads.put("hostile-refused", source) for source in REFUSED)
        ),
        "chats whose adapter's template loops, allocates, recurses, reaches out": in_turn(
            upload, *map(chat, WAYS), removal
        ),
        "12 chats at once whose template loops": in_turn(upload, chat("loop", 12), removal),
        "64 chats at once whose templates double, recurse, and write much": in_turn(
            upload, spread([chat(way, 16) for way in ("double", "recurse", "long text", "fine")], 4), removal
        ),
        "template variables that are no plain data": in_turn(
            *(fields(chat_template=source) for source in ("{{ 1 }}", WAYS["loop"])),
            *(
                fields(chat_template_kwargs={name: 1})
                for name in ("messages", "self", "__class__", "loop", "a" * 10**5)
            ),
            fields(chat_template_kwargs={str(number): number for number in range(100_000)}),
            fields(chat_template_kwargs={"tools": "x" * 10**6, "enable_thinking": {"a": [[[]]] * 1_000}}),
        ),
    }
