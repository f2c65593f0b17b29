"""Chat templates render as transformers renders them, in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from service.text.chat_template import ChatTemplate, template_source
from service.text.template_sandbox import TemplateError
from service.text.tokenizer import TextError, TextTokenizer
from tests.support.tiny_models import make_tokenizer
from tests.support.tool_templates import TEMPLATES as TOOL_TEMPLATES

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
    assert template.takes_parts
    assert template.render(chat) == oracle.apply_chat_template(chat, chat_template=PARTS, tokenize=False) == "one two"


def test_a_template_that_knows_texts_only_gets_the_parts_joined(special_tokens: dict[str, str]) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", special_tokens)
    chat = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert not template.takes_parts
    assert template.render(chat) == "one\ntwo"


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
    assert template_source(tmp_path) is None
    # Where processors of models with a vision tower first had it.
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "P"}))
    assert template_source(tmp_path) == "P"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert template_source(tmp_path) == "D"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "S"}))
    assert template_source(tmp_path) == "S"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert template_source(tmp_path) == "F"


@given(content=st.text())
def test_any_content_is_rendered_unchanged(content: str) -> None:
    rendered = ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": content}])
    assert rendered == content
