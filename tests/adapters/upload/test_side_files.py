"""JSON beside an adapter's tensors: as much as trainers write is read, and what would take seconds is not parsed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, cast

import pytest

from adapters.errors import Malformed, Unsupported
from adapters.files.safetensors_header import MAX_CONTAINERS, MAX_VALUES, parse_json_object
from adapters.text.tokenizer_files import AdapterText, read_text
from adapters.text.vocabulary import FLAGS, BaseText

TOO_MUCH = r"cannot be read: it may have 32768 lists and objects and 262144 commas\.$"


def entry(token_id: int) -> dict[str, Any]:
    """As tokenizers write one."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": f"<unused{token_id}>", **flags}


def check(**files: bytes) -> None:
    """With a base that has 10,000 such tokens."""
    known = {f"<unused{i}>": i for i in range(10_000)}
    read_text(cast(Any, files), {}, BaseText(known.get), 10_000)


def test_files_of_a_tokenizer_with_6400_added_tokens_are_read() -> None:
    entries = [entry(i) for i in range(6400)]
    rest = {"model": {"vocab": {"a": 0}, "merges": [["a", "b"]] * 10_000}}
    for indent in (None, 2):
        check(
            added_tokens=json.dumps({one["content"]: one["id"] for one in entries}, indent=indent).encode(),
            tokenizer_config=json.dumps({"added_tokens_decoder": {str(e["id"]): e for e in entries}}).encode(),
            tokenizer=json.dumps({"version": "1.0", "added_tokens": entries, **rest}, indent=indent).encode(),
        )


@pytest.mark.parametrize("tail", [b"", b', "model": {"merges": [["a", "b"], ["c'], ids=["to its end", "cut off behind"])
def test_a_token_that_the_base_has_not_is_found_at_any_place(tail: bytes) -> None:
    listed = json.dumps([entry(1), entry(2), entry(10_000)]).encode()
    with pytest.raises(Unsupported, match="<unused10000>"):
        check(tokenizer=b'{"added_tokens" : ' + listed + (tail or b"}"))


@pytest.mark.parametrize("empty", ["[]", "[ ]", "null", '{"a": [1]}'])
def test_no_list_of_added_tokens_adds_none(empty: str) -> None:
    check(tokenizer=f'{{"added_tokens": {empty}, "model": {{"merges": [["a", "b"]]}}}}'.encode())


@pytest.mark.parametrize("text", ["[{}", "[{} {}]", "[{},]", "[,]", '[{"content": "a"}; {}]', "[{]"])
def test_a_broken_list_is_refused(text: str) -> None:
    with pytest.raises(Malformed, match=r"^tokenizer.json cannot be read: its list of added tokens is broken\.$"):
        check(tokenizer=f'{{"added_tokens": {text}'.encode())


@pytest.mark.parametrize("item", [b"[]", b"{}", b"0", b'"a"'])
def test_a_list_of_millions_is_not_parsed(item: bytes) -> None:
    text = b"[" + b",".join([item] * (1 << 21)) + b"]"
    with pytest.raises(Malformed, match=r"^tokenizer.json cannot be read: it has more than 16384 added tokens\.$"):
        check(tokenizer=b'{"added_tokens":' + text + b"}")
    for name in ("added_tokens", "tokenizer_config"):
        with pytest.raises(Malformed, match=TOO_MUCH):
            check(**{name: b'{"x":' + text + b"}"})


def test_one_entry_of_millions_is_not_parsed() -> None:
    with pytest.raises(Malformed, match="broken"):
        check(tokenizer=b'{"added_tokens":[[' + b",".join([b"[]"] * (1 << 20)) + b"]]}")


def test_the_bounds_are_met_exactly() -> None:
    most = b'{"x":[' + b",".join([b"{}"] * (MAX_CONTAINERS - 2)) + b"]}"
    assert len(parse_json_object(most, "it")["x"]) == MAX_CONTAINERS - 2
    values = b'{"x":[' + b",".join([b"0"] * (MAX_VALUES + 1)) + b"]}"
    assert len(parse_json_object(values, "it")["x"]) == MAX_VALUES + 1
    for text in (most.replace(b"]}", b",{}]}"), values.replace(b"]}", b",0]}")):
        with pytest.raises(Malformed, match=TOO_MUCH):
            parse_json_object(text, "it")
        assert parse_json_object(text, "it", max_containers=math.inf, max_values=math.inf)


# ---- what a tokenizer's files change

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
BASE = BaseText(
    token_id={"<pad>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": 3, "<|im_end|>": 4, "x": 5}.get,
    token_text=lambda token_id: f"text of {token_id}",
    token_flags=lambda text: {**dict.fromkeys(FLAGS, False), "special": True} if text == "<|im_end|>" else None,
    special_tokens=SPECIAL,
    eos_token_ids=(2,),
    template_sources=("{{ bos_token }}{{ messages }}{{ eos_token }}",),
)


def read(template: str | None = None, **files: Any) -> AdapterText:
    """The end tokens of an adapter on a base with a vocabulary of 10; `files` by role, parsed."""
    made = {role: json.dumps(content).encode() for role, content in files.items()}
    if template is not None:
        made["template"] = template.encode()
    return read_text(cast(Any, made), {}, BASE, 10)


def added(text: str, token_id: int) -> dict[str, dict[str, Any]]:
    """The files in which tokenizers of several versions write an added token, by role."""
    one = {**entry(token_id), "content": text}
    return {
        "added_tokens": {text: token_id},
        "tokenizer_config": {"added_tokens_decoder": {str(token_id): one}},
        "tokenizer": {"added_tokens": [one]},
    }


@pytest.mark.parametrize("role", ["added_tokens", "tokenizer_config", "tokenizer"])
@pytest.mark.parametrize(("text", "token_id"), [("<|PAD_TOKEN|>", 10), ("[PAD]", 9), ("<|finetune_right_pad_id|>", 10)])
def test_a_token_that_only_pads_is_left_out_with_a_note(role: str, text: str, token_id: int) -> None:
    found = read(**{role: added(text, token_id)[role]})
    assert any(repr(text) in note and "left out" in note for note in found.notes)
    assert found.special_tokens == {}


@pytest.mark.parametrize("role", ["tokenizer_config", "tokenizer"])
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"lstrip": True}, "lstrip: true"),
        ({"special": False, "rstrip": True}, "rstrip: true, special: false"),
        ({"normalized": True}, None),
        ({}, None),
    ],
)
def test_other_flags_of_the_bases_tokens_are_told(role: str, flags: dict[str, bool], told: str | None) -> None:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "special": True, "normalized": False}
    one = {"id": 4, "content": "<|im_end|>", **plain, **flags}
    made = {"tokenizer": {"added_tokens": [one]}, "tokenizer_config": {"added_tokens_decoder": {"4": one}}}[role]
    notes = read(**{role: made}).notes
    assert (notes == ()) == (told is None), notes
    assert told is None or f"for '<|im_end|>' ({told}); they are not used" in notes[0]


@pytest.mark.parametrize("role", ["pad_token", "unk_token", "mask_token"])
def test_a_token_that_no_prompt_holds_is_left_out_with_a_note(role: str) -> None:
    """Whatever it is called; the template sees the base's in its place, if it has one."""
    config = {**SPECIAL, role: {"__type": "AddedToken", "content": "<|fill|>", "lstrip": False}}
    found = read(tokenizer_config=config, tokenizer=added("<|fill|>", 10)["tokenizer"])
    assert any("'<|fill|>' (tokenizer.json, tokenizer_config.json)" in note for note in found.notes)
    assert (found.special_tokens, found.eos_token_ids) == ({}, ())


@pytest.mark.parametrize(
    ("template", "files"),
    [
        (None, added("<|tool|>", 10)),
        (None, {"tokenizer_config": {**SPECIAL, "eos_token": "<|eot|>"}}),
        (None, {"tokenizer_config": SPECIAL, "special_tokens_map": {"eos_token": {"content": "<|eot|>"}}}),
        (None, {"tokenizer_config": {**SPECIAL, "additional_special_tokens": ["<|im_start|>", "<|user|>"]}}),
        # Padding that prompts hold.
        ("{{ pad_token }}", {"tokenizer_config": {"pad_token": "[PAD]"}}),
        ("[PAD] {{ messages }}", {"added_tokens": {"[PAD]": 10}}),
        # Padding that also ends answers.
        (None, {"tokenizer_config": {"pad_token": "[PAD]", "eos_token": "[PAD]"}, "added_tokens": {"[PAD]": 10}}),
    ],
)
def test_a_token_that_matters_is_refused_with_the_files_to_leave_at_home(
    template: str | None, files: dict[str, Any]
) -> None:
    with pytest.raises(Unsupported, match=r"adds the token .*leave out .*--without-tokenizer") as error:
        read(template, **files)
    names = {"added_tokens": "added_tokens.json", "tokenizer": "tokenizer.json"}
    assert all(names.get(role, f"{role}.json") in str(error.value) for role in files)


def test_names_that_the_base_itself_cannot_spell_change_nothing() -> None:
    base = replace(BASE, special_tokens={**SPECIAL, "bos_token": "<none>"})
    files = {"tokenizer_config": json.dumps({**SPECIAL, "bos_token": "<none>"}).encode()}
    assert read_text(cast(Any, files), {}, base, 10) == AdapterText({}, {}, (), ())


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, [4]),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}}, [4]),
        ({"tokenizer_config": {"eos_token": ["</s>", "<|im_end|>"]}}, [4]),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, [4]),
        # A config that lists added tokens comes from a version that reads no special_tokens_map.json.
        ({"tokenizer_config": {"added_tokens_decoder": {}}, "special_tokens_map": {"eos_token": "<|im_end|>"}}, []),
        ({"generation_config": {"eos_token_id": 5, "transformers_version": "4"}}, [5]),
        ({"generation_config": {"eos_token_id": [2, 4, 5]}}, [4, 5]),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "generation_config": {"eos_token_id": [5]}}, [4, 5]),
        ({"tokenizer_config": {"eos_token": "</s>", "pad_token": "</s>"}}, []),
        ({"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": None}}, []),
    ],
)
def test_the_adapters_end_tokens_are_found_and_named(files: dict[str, Any], ends: list[int]) -> None:
    found = read(**files)
    assert sorted(found.eos_token_ids) == ends
    assert len(found.notes) == len(ends)
    assert all(any(f"'text of {token_id}' ({token_id})" in note for note in found.notes) for token_id in ends)
    assert all(any(f" of {file}.json says." in note for file in files) for note in found.notes)


def test_what_generation_config_says_beside_is_named() -> None:
    found = read(
        generation_config={"eos_token_id": [10, -1, True], "temperature": 0.6, "top_p": 0.9, "pad_token_id": 0}
    )
    assert found.eos_token_ids == ()
    assert sum("none of the base model's" in note for note in found.notes) == 2
    assert any("True of generation_config.json is no token's id" in note for note in found.notes)
    assert any(note.endswith("not used: temperature, top_p.") for note in found.notes)


@pytest.mark.parametrize("odd", ["2", 2.0, {"id": 2}, [[2]], True])
def test_an_end_token_of_another_type_in_generation_config_is_named(odd: Any) -> None:
    found = read(generation_config={"eos_token_id": odd})
    (note,) = found.notes
    assert (found.eos_token_ids, "is no token's id; it was left out" in note) == ((), True)


@pytest.mark.parametrize("odd", [5, 5.0, True, [5], {"id": 5}, {"content": 5}])
@pytest.mark.parametrize("key", ["eos_token", "bos_token", "pad_token", "turn_token"])
@pytest.mark.parametrize("role", ["tokenizer_config", "special_tokens_map"])
def test_a_special_token_of_another_type_is_named_and_the_bases_stays(role: str, key: str, odd: Any) -> None:
    found = read("{{ eos_token }}{{ bos_token }}{{ pad_token }}", **{role: {**SPECIAL, key: odd}})
    is_switch = odd is True and key == "turn_token"
    told = f"The special token '{key}' of {role}.json is no token's text; what is none was left out."
    assert (found.special_tokens, found.eos_token_ids, found.notes) == ({}, (), () if is_switch else (told,))


def test_an_odd_special_token_counts_in_the_file_that_is_read() -> None:
    odd, decoder = {"eos_token": 5}, {"added_tokens_decoder": {}}
    named = read(tokenizer_config={**SPECIAL, "extra_special_tokens": {"turn_token": 5}, "pad_token": []})
    assert [one.split("'")[1] for one in named.notes] == ["pad_token", "turn_token"]
    some = read(tokenizer_config={**SPECIAL, "eos_token": ["<|im_end|>", 5]})
    assert (some.special_tokens, some.eos_token_ids, len(some.notes)) == ({"eos_token": "<|im_end|>"}, (4,), 2)
    assert read(tokenizer_config=odd, special_tokens_map=SPECIAL).notes == ()
    assert read(tokenizer_config={**SPECIAL, **decoder}, special_tokens_map=odd).notes == ()
    assert read(tokenizer_config={**odd, **decoder}, special_tokens_map=SPECIAL).notes != ()
    assert read(tokenizer_config={**SPECIAL, "eos_token": []}).notes == ()


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        ({}, {}),
        (SPECIAL, {}),
        ({**SPECIAL, "bos_token": None}, {"bos_token": None}),
        ({"eos_token": "<|im_end|>"}, {"bos_token": None, "eos_token": "<|im_end|>"}),
        ({**SPECIAL, "pad_token": "</s>"}, {}),  # which no template writes
        ({**SPECIAL, "turn_token": "x"}, {}),
    ],
)
def test_special_tokens_are_the_adapters_where_a_template_may_write_them(
    config: dict[str, Any], changed: dict[str, str | None]
) -> None:
    assert read(tokenizer_config=config).special_tokens == changed


@pytest.mark.parametrize("key", ["extra_special_tokens", "model_specific_special_tokens", None])
def test_further_names_of_special_tokens_are_seen(key: str | None) -> None:
    more = {"turn_token": "x"}
    found = read("{{ turn_token }}", tokenizer_config={**SPECIAL, **(more if key is None else {key: more})})
    assert found.special_tokens == more


def test_templates_that_are_not_used_are_named() -> None:
    config = {"chat_template": [{"name": "default", "template": "L"}, {"name": "rag", "template": "R"}]}
    found = read("F", tokenizer_config=config, processor_template={"chat_template": "F"})
    assert found.templates == {"default": "F"}
    assert [note.split(" is not used")[0] for note in found.notes] == [
        f"The chat template {name!r} of tokenizer_config.json" for name in ("default", "rag")
    ]
    found = read_text(cast(Any, {"tokenizer_config": json.dumps(config).encode()}), {"tool_use": b"T"}, BASE, 10)
    assert found.templates == {"tool_use": "T", "default": "L"}
    assert len(found.notes) == 1


@pytest.mark.parametrize("name", ["", "a b", ".x", "a" * 65])
def test_a_template_of_a_name_that_no_request_could_send_is_refused(name: str) -> None:
    with pytest.raises(Malformed, match="chat template's name"):
        read(tokenizer_config={"chat_template": [{"name": name, "template": "T"}]})


@pytest.mark.parametrize("value", [1, [1], [{"name": "a"}], {"a": 1}])
def test_a_chat_template_that_is_none_is_refused(value: Any) -> None:
    for role in ("tokenizer_config", "processor_template"):
        with pytest.raises(Malformed, match="chat_template must be text or a list of named templates"):
            read(**{role: {"chat_template": value}})
