"""Chat templates render as transformers renders them, in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from service.text.chat_template import ChatTemplate, template_sources
from service.text.template_sandbox import TemplateError
from service.text.tokenizer import TextError, TextTokenizer
from tests.support.http.tool_templates import TEMPLATES as TOOL_TEMPLATES
from tests.support.models.tiny_models import make_tokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
TRIMMED_BLOCKS = (
    "{{ bos_token }}\n{% for message in messages %}\n    {% if message['role'] == 'system' %}\n"
    "      SYS {{ message['content'] | trim }}\n    {% else %}\n  {{ message['role'] }}: {{ message['content'] }}\n"
    "    {% endif %}\n{% endfor %}\n"
)
NAMESPACE_AND_LOOPS = (
    "{% set ns = namespace(system='', turns=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% continue %}{% endif %}{% set ns.turns = ns.turns + 1 %}"
    "[{{ ns.turns }}|{{ loop.index }}] {{ ns.system }} {{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}"
)
GENERATION_TAG = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<a>{{ m.content }}</a>{% endgeneration %}"
    "{% else %}<u>{{ m.content }}</u>{% endif %}{% endfor %}"
)
JSON_AND_DICT = (
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ dict(a=1) }}{{ {'k': '<&>'} | tojson }}"
    "{{ messages[0].name if messages[0].name is defined else 'none' }}{{ eos_token }}{{ tools is none }}"
)
STRICT_ROLES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}[{{ m.content }}]{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
VARIABLES = "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}{{ messages[-1].content }}"
TEMPLATES = {
    "chatml": CHATML,
    "trimmed blocks": TRIMMED_BLOCKS,
    "namespace and loop controls": NAMESPACE_AND_LOOPS,
    "generation tag": GENERATION_TAG,
    "json and dict": JSON_AND_DICT,
    "date": "{{ strftime_now('%Y-%m') }} {{ messages[0].content }}",
    "strict roles": STRICT_ROLES,
    "variables": VARIABLES,
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " be brief \n"}, {"role": "user", "content": "<b>ü & 'x'</b>"}],
    [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "日本 \U0001f600", "name": "Ann"},
    ],
    [{"role": "user", "content": "first"}, {"role": "assistant", "content": "  The answer is "}],
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def special_tokens(model_dir: Path) -> dict[str, str]:
    return TextTokenizer.load(model_dir).special_tokens


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("mode", ["generate", "as it is", "continue"])
def test_rendering_is_that_of_transformers(
    oracle: transformers.PreTrainedTokenizerFast, special_tokens: dict[str, str], name: str, chat: int, mode: str
) -> None:
    options = {"add_generation_prompt": mode == "generate", "continue_final_message": mode == "continue"}
    variables = {"enable_thinking": False}
    try:
        expected = oracle.apply_chat_template(
            CHATS[chat], chat_template=TEMPLATES[name], tokenize=False, **options, **variables
        )
    except Exception:
        expected = None
    template = ChatTemplate(TEMPLATES[name], special_tokens)
    if expected is None:
        with pytest.raises(TemplateError):
            template.render(CHATS[chat], **options, variables=variables)
    else:
        assert template.render(CHATS[chat], **options, variables=variables) == expected


def test_the_template_may_refuse_with_its_own_words(special_tokens: dict[str, str]) -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate(STRICT_ROLES, special_tokens).render([{"role": "assistant", "content": "x"}])


def test_a_template_that_knows_parts_gets_parts(
    oracle: transformers.PreTrainedTokenizerFast, special_tokens: dict[str, str]
) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
    template = ChatTemplate(PARTS, special_tokens)
    assert template.render(chat) == oracle.apply_chat_template(chat, chat_template=PARTS, tokenize=False) == "one two"


# How a template may show the content of one message, `m`.
CONTENTS = {
    "as it is": "{{ m.content }}",
    "as a text": '{"content": {{ m.content | string }}}',
    "as JSON": "{{ m.content | tojson }}",
    "trimmed": "{{ m.content | trim }}",
    "the first part": "{{ m.content if m.content is string else m.content[0].text }}",
    "texts alone": "{% if m.content is string %}{{ m.content }}{% endif %}",
    "texts, and parts by keys of another kind": (
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for b in m.content %}{{ b.output if b.output is defined else b }}{% endfor %}{% endif %}"
    ),
    "texts, and all that parts hold": (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
        "{% for key, value in b.items() %}{{ key }}={{ value }};{% endfor %}{% endfor %}{% endif %}"
    ),
    "texts, and a list of them": (
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | map(attribute='text') | list }}{% endif %}"
    ),
    "added to a text": "{{ 'x' + m.content }}",
    "texts, else its own refusal": (
        "{% if m.content is string %}{{ m.content }}{% else %}{{ raise_exception('texts only') }}{% endif %}"
    ),
    "texts, and the first and the last part": (
        "{{ m.content if m.content is string else m.content[0].text ~ m.content[-1].text }}"
    ),
    "only the first part": "{{ m.content[0].text }}",
    "parts alone": "{% for b in m.content | selectattr('type', 'equalto', 'text') %}{{ b.text }}{% endfor %}",
    "parts alone, by their tests": (
        "{% for b in m.content %}{% if b.type == 'text' %}{{ b['text'] }}{% elif b.type == 'image' %}<image>"
        "{% endif %}{% endfor %}"
    ),
    "both": (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
        "{% if b.type == 'text' %}{{ b.text }}{% endif %}{% endfor %}{% endif %}"
    ),
}
# Of these a part is shown as transformers shows it; elsewhere parts are joined with a newline, as vLLM joins them.
TAKE_PARTS = ("parts alone", "parts alone, by their tests", "both")
BOTH = CONTENTS["both"]
PART_ROLES = ("system", "user", "assistant", "call", "tool")


def shown_by(role: str, shown: str) -> str:
    """A template that shows contents of a role so, and those of others as both texts and parts."""
    is_role = {"assistant": "m.role == 'assistant' and not m.tool_calls", "call": "m.tool_calls"}
    return (
        "{% for m in messages %}<{{ m.role }}>"
        f"{{% if {is_role.get(role, f'm.role == {role!r}')} %}}{shown}{{% else %}}{BOTH}{{% endif %}}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}"
    )


def chat_with(role: str, content: Any) -> list[dict[str, Any]]:
    calls = [{"id": "c12345678", "type": "function", "function": {"name": "f", "arguments": {}}}]
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "said", "tool_calls": calls},
        {"role": "tool", "content": "20", "tool_call_id": "c12345678"},
        {"role": "assistant", "content": "done"},
    ]
    chat[{"system": 0, "user": 1, "call": 2, "tool": 3, "assistant": 4}[role]]["content"] = content
    return chat


@pytest.mark.parametrize("role", PART_ROLES)
@pytest.mark.parametrize("name", CONTENTS)
def test_no_part_is_lost_and_none_is_shown_as_python_data(
    oracle: transformers.PreTrainedTokenizerFast, special_tokens: dict[str, str], name: str, role: str
) -> None:
    source = shown_by(role, CONTENTS[name])
    template = ChatTemplate(source, special_tokens)
    one, two, three = ({"type": "text", "text": text} for text in ("the one", "the other", "more"))

    def expected(content: Any) -> str:
        return str(oracle.apply_chat_template(chat_with(role, content), chat_template=source, tokenize=False))

    for parts, joined in (([], ""), ([one], "the one"), ([one, two, three], "the one\nthe other\nmore")):
        from_parts, from_text = (template.render(chat_with(role, content)) for content in (parts, joined))
        if name in TAKE_PARTS:
            assert from_parts == expected(parts)
            assert from_text == expected([{"type": "text", "text": joined}])
        elif name == "only the first part":
            assert from_parts == from_text == expected([{"type": "text", "text": joined}])
        else:
            assert from_parts == from_text == expected(joined)


SOME_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for b in SOME %}{{ b.text }}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize("some", ["m.content[:3]", "m.content[:6]", "[m.content[0], m.content[1], m.content[-1]]"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_no_part_is_lost_where_a_template_shows_a_few_of_them(
    special_tokens: dict[str, str], some: str, role: str
) -> None:
    template = ChatTemplate(shown_by(role, SOME_PARTS.replace("SOME", some)), special_tokens)
    for num_parts in (2, 3, 4, 6, 7, 40, 1025):
        said = [f"part {index}." for index in range(num_parts)]
        shown = template.render(chat_with(role, [{"type": "text", "text": one} for one in said]))
        assert all(one in shown for one in said)
        assert said[0] + said[1] in shown or "\n".join(said) in shown


def test_all_parts_stay_parts_where_a_template_shows_all(special_tokens: dict[str, str]) -> None:
    template = ChatTemplate("{% for m in messages %}" + BOTH + "{% endfor %}", special_tokens)
    for num_parts in (4, 5, 9, 1024):
        said = [f"part {index}." for index in range(num_parts)]
        assert template.render([{"role": "user", "content": [{"type": "text", "text": one} for one in said]}]) == (
            "".join(said)
        )


def test_a_result_is_shown_where_all_contents_are_parts(special_tokens: dict[str, str]) -> None:
    """The probe's call has a part as well: a template that reads the first part of a call refuses texts."""
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}", special_tokens)
    shown = "[system]sys[user]ask[assistant]said[tool]20 degrees[assistant]done"
    for content in ("20 degrees", [{"type": "text", "text": "20 degrees"}]):
        assert template.render(chat_with("tool", content)) == shown


def test_where_tools_change_how_a_message_is_shown_no_python_data_is_shown(special_tokens: dict[str, str]) -> None:
    """As Llama 3.2's, which writes the first user message beside the tools."""
    source = (
        "{% if tools %}{{ tools | tojson }}{{ messages[0].content | trim }}{% else %}"
        f"{{% for m in messages %}}{BOTH}{{% endfor %}}{{% endif %}}"
    )
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = ChatTemplate(source, special_tokens)
    assert template.render([{"role": "user", "content": parts}], tools=tools).endswith("one \ntwo")


def test_where_a_variable_changes_how_a_message_is_shown_no_python_data_is_shown(
    special_tokens: dict[str, str],
) -> None:
    source = f"{{% if brief %}}{{{{ messages[0].content }}}}{{% else %}}{{% set m = messages[0] %}}{BOTH}{{% endif %}}"
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    template = ChatTemplate(source, special_tokens)
    assert template.render([{"role": "user", "content": parts}]) == "one two"
    assert template.render([{"role": "user", "content": parts}], variables={"brief": True}) == "one \ntwo"


def test_a_role_that_a_template_refuses_is_refused_with_its_words(special_tokens: dict[str, str]) -> None:
    source = (
        "{% for m in messages %}{% if m.role in ('system', 'tool') %}{{ raise_exception('No ' + m.role + ' here') }}"
        f"{{% endif %}}{BOTH}{{% endfor %}}"
    )
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate(source, special_tokens)
    for content in ("text", parts):
        with pytest.raises(TemplateError, match="No system here"):
            template.render(chat_with("system", content))


@pytest.mark.parametrize("name", ["both", "as it is", "parts alone"])
def test_the_last_of_several_parts_is_continued(special_tokens: dict[str, str], name: str) -> None:
    source = f"{{% for m in messages %}}<{{{{ m.role }}}}>{CONTENTS[name]}</>{{% endfor %}}"
    chat = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "is "}]},
    ]
    text = ChatTemplate(source, special_tokens).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert text == f"<user>ask</><assistant>It{chr(10) if name == 'as it is' else ''}is "


@pytest.mark.parametrize("name", ["lfm2", "qwen3_coder", "hermes"])
def test_a_history_with_arguments_that_are_no_object_can_be_shown(special_tokens: dict[str, str], name: str) -> None:
    """A model wrote them once, or was cut off, and every later turn brings them back."""
    template = ChatTemplate(TOOL_TEMPLATES[name], special_tokens)

    def history(arguments: Any) -> list[dict[str, Any]]:
        calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]

    as_member = template.render(history({"arguments": '{"a": 1, b'}))
    as_text = template.render(history('{"a": 1, b'))
    assert "b" in as_text.partition("f")[2]
    assert (as_text == as_member) == (name != "hermes")


def test_a_developer_is_a_system_to_templates_that_do_not_know_developers(special_tokens: dict[str, str]) -> None:
    chat = [{"role": "developer", "content": "x"}]
    assert "<|im_start|>system" in ChatTemplate(CHATML, special_tokens).render(chat)
    knows = ChatTemplate("{% if messages[0].role == 'developer' %}D{% endif %}", special_tokens)
    assert knows.render(chat) == "D"
    names_it = "As the developer says: {% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(names_it, special_tokens).render(chat) == "As the developer says: x"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 10 ** 100000 }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% include 'config.json' %}",
        "{{ undefined_function() }}",
    ],
)
def test_the_sandbox_holds(special_tokens: dict[str, str], source: str) -> None:
    template = ChatTemplate(source, special_tokens)
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "name", ["self", "names", "args", "kwargs", "context", "environment", "loop", "a b", "", "__class__", "caller"]
)
def test_a_variable_may_have_any_name(special_tokens: dict[str, str], name: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ tools is none }}", special_tokens)
    assert template.render([{"role": "user", "content": "x"}], variables={name: 1}) == "xTrue"


def test_a_special_token_takes_no_name_of_ours() -> None:
    """tokenizer_config.json may name its extra special tokens as it likes."""
    template = ChatTemplate("{{ messages[0].content }}{{ tools is none }}", {"messages": "<m>", "tools": "<t>"})
    assert template.render([{"role": "user", "content": "x"}]) == "xTrue"


def test_a_variable_that_breaks_the_template_is_the_client_s_fault(special_tokens: dict[str, str]) -> None:
    with pytest.raises(TemplateError, match="failed on these messages"):
        ChatTemplate("{{ strftime_now('%Y') }}", special_tokens).render(CHATS[0], variables={"strftime_now": 1})


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{% for m in messages %}" * 40 + "{% endfor %}" * 40,
        "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    ],
    ids=["open", "Python's limit of blocks", "too deep"],
)
def test_a_template_that_does_not_compile_is_refused_when_it_is_made(
    special_tokens: dict[str, str], source: str
) -> None:
    with pytest.raises(TextError, match="not valid jinja2"):
        ChatTemplate(source, special_tokens)


def test_templates_are_found_where_checkpoints_have_them(tmp_path: Path) -> None:
    assert template_sources(tmp_path) == {}
    # Where processors of models with a vision tower first had it.
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "P"}))
    assert template_sources(tmp_path) == {"default": "P"}
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert template_sources(tmp_path) == {"tool_use": "T", "default": "D"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "S"}))
    assert template_sources(tmp_path) == {"default": "S"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    (tmp_path / "chat_template.jinja").write_text("F")
    assert template_sources(tmp_path) == {"default": "F", "rag": "R"}
