"""The process that tries grammars: it may die of one, says why, and the next one is tried all the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.train_base import BASE_DIR
from service.fairness.client_identity import CLIENT
from service.grammars.constraints import (
    Constraint,
    ConstraintError,
    choice_constraint,
    schema_constraint,
    tag_constraint,
    text_constraint,
)
from service.grammars.lark import Lark, json_rule
from service.grammars.matching import GrammarError, TokenTable, compile_grammar
from service.grammars.tool_calls import lark_of_thoughts
from service.grammars.trial import ENGINE_STACK_BYTES, GrammarTrial
from tests.support.http.noted_children import noted_children
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import make_tiny_model

FINE = choice_constraint(["yes", "no"])
SLOW = schema_constraint({"type": "integer", "multipleOf": 999_983})


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    made = GrammarTrial(BASE_DIR)
    yield made
    made.close()


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return TokenTable.load(BASE_DIR)


def chain(length: int) -> Constraint:
    parts = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return schema_constraint({"$ref": "#/$defs/d0", "$defs": {**parts, f"d{length}": {"type": "string"}}})


def test_what_is_good_is_remembered(trial: GrammarTrial) -> None:
    assert trial.known(FINE) is None
    grammar = trial.compile(FINE)
    assert trial.known(FINE) == trial.compile(FINE) == grammar


@pytest.mark.parametrize(
    ("hostile", "words"),
    [(chain(3000), "too deeply"), (SLOW, "longer than 1 s"), (schema_constraint({"enum": []}), "cannot be followed")],
    ids=["crash", "stall", "refusal"],
)
def test_what_is_not_says_why_and_hurts_nobody(trial: GrammarTrial, hostile: Constraint, words: str) -> None:
    for _ in range(2):
        with pytest.raises(ConstraintError, match=words):
            trial.compile(hostile)
        assert trial.known(hostile) is None
        assert trial.compile(choice_constraint([words]))


@pytest.mark.parametrize("is_thinking", [False, True], ids=["may think", "is thinking"])
def test_an_answer_behind_thoughts_is_tried_before_they_are_thought(trial: GrammarTrial, is_thinking: bool) -> None:
    around = lark_of_thoughts({}, is_thinking=is_thinking)
    with pytest.raises(ConstraintError, match="refers to itself"):
        trial.compile(replace(schema_constraint({"$ref": "#"}), around=around))
    assert trial.compile(replace(FINE, around=around))


def test_the_child_is_confined_and_ends_with_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a confined process reaches nothing is tried in test_template_worker.py."""
    started = noted_children(monkeypatch)
    trial = GrammarTrial(BASE_DIR)
    trial.compile(FINE)
    (child,) = started
    process = Path(f"/proc/{child.pid}")
    (thread,) = (process / "task").iterdir()  # others, which libraries start, would keep what Landlock takes
    status = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines())
    assert (status["Seccomp"].strip(), status["NoNewPrivs"].strip()) == ("2", "1")
    assert {file.name for file in (process / "fd").iterdir()} == {"0", "1", "2"}
    trial.close()
    assert child.returncode == 0


def test_who_sends_many_grammars_leaves_others_their_turn(trial: GrammarTrial) -> None:
    """A process has one grammar at a time: of those that wait, another client's is next."""
    ended: list[str] = []
    token = CLIENT.set("many")
    many = [trial.submit(choice_constraint(["many", str(index)])) for index in range(20)]
    CLIENT.reset(token)
    few = trial.submit(choice_constraint(["few"]))
    for name, future in (("few", few), ("many", many[-1])):
        future.add_done_callback(lambda _done, name=name: ended.append(name))
    assert many[-1].result(LIMIT_SECONDS)
    assert ended == ["few", "many"]


def test_who_sends_many_grammars_has_others_forgotten_no_more_than_its_own(
    trial: GrammarTrial,
) -> None:
    """The most that is remembered is of a few long choices. One of another client, which was there first, stays."""

    def compiled(name: str, client: str) -> Constraint:
        token = CLIENT.set(client)
        constraint = choice_constraint([f"{name} {'x' * 900} {index}" for index in range(200)])
        assert trial.submit(constraint).result(LIMIT_SECONDS)
        CLIENT.reset(token)
        return constraint

    few = compiled("few", "few")
    many = [compiled(f"many {index}", "many") for index in range(60)]
    assert trial.known(few)
    assert trial.known(many[0]) is None
    assert trial.known(many[-1])


def test_small_grammars_count_with_what_they_take_beside_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.grammars.trial._MAX_KNOWN_BYTES", 1 << 13)
    own = GrammarTrial(BASE_DIR)
    many = [text_constraint("regex", f"a{index}") for index in range(20)]
    texts = [own.compile(constraint) + constraint.text for constraint in many]
    assert sum(map(len, texts)) < 1 << 13
    assert [own.known(constraint) is not None for constraint in (many[0], many[-1])] == [False, True]
    own.close()


def test_the_longest_chain_that_passes_has_room_in_the_engine(trial: GrammarTrial, table: TokenTable) -> None:
    """The engine compiles in a thread with four times the stack: half of that is enough."""
    passing, failing = 50, 3000
    while failing - passing > 50:
        middle = (passing + failing) // 2
        try:
            trial.compile(chain(middle))
            passing = middle
        except ConstraintError:
            failing = middle
    grammar = trial.compile(chain(passing))
    found: list[Any] = []
    usual = threading.stack_size(ENGINE_STACK_BYTES // 2)
    thread = threading.Thread(target=lambda: found.append(compile_grammar(table, grammar)))
    thread.start()
    threading.stack_size(usual)
    thread.join()
    assert found


def test_a_model_that_can_follow_none_is_told_so(tmp_path: Path) -> None:
    model_dir = make_tiny_model("llama", tmp_path / "model")
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(GrammarError, match=r"no tokenizer\.json"):
        TokenTable.load(model_dir)
    trial = GrammarTrial(model_dir)
    with pytest.raises(ConstraintError, match=r"is not available with this model: .* no tokenizer\.json"):
        trial.compile(FINE)
    trial.close()


# ---- what the grammars say

SPECIAL = "<|im_start|>"


def accepts(trial: GrammarTrial, table: TokenTable, constraint: Constraint, text: str) -> bool:
    """Whether the text, SPECIAL being a token, is an answer that may end there."""
    matcher = compile_grammar(table, trial.compile(constraint))
    tokens = []
    for number, part in enumerate(text.split(SPECIAL)):
        tokens += ([table.special_ids[SPECIAL]] if number else []) + (table.tokens.tokenize_str(part) if part else [])
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return False
    mask = matcher.compute_bitmask()
    return any(mask[token // 8] >> token % 8 & 1 for token in table.eos_token_ids)


def tag(**fields: Any) -> Constraint:
    return tag_constraint(json.dumps(fields))


def call(name: str, schema: Any) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f"<f={name}>",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "</f>",
    }


TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [call("a", {"enum": [1]}), call("b", {"type": "null"})],
}
X_OBJECT = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}
# The constraint, what it takes, and what it does not.
SAID: dict[str, tuple[Constraint, tuple[str, ...], tuple[str, ...]]] = {
    "schema": (schema_constraint(X_OBJECT), ('{"x":1}', '{\n  "x": 1\n}'), ("{}", '{"x":1} ', '{  "x":1}', '{"x":2}')),
    "schema, no blanks": (schema_constraint(X_OBJECT, ""), ('{"x":1}',), ('{"x": 1}',)),
    "no \\u": (schema_constraint({"type": "string"}), ('"a"', '"\\n\\\\"'), ('"\\u0061"', '"\n"')),
    "true": (schema_constraint(True), ("{}", "1", "[[]]"), ("", "a")),
    "regex": (text_constraint("regex", r"\d\w"), ("1a", "9_"), ("1", "1é", "१a")),
    "anchors": (text_constraint("regex", "^(a|b)$"), ("a", "b"), ("", "ab")),
    "choices": (choice_constraint(["", "a\"\n\\", "é😀"]), ("", "a\"\n\\", "é😀"), ("a", "é")),
    "GBNF": (text_constraint("grammar", 'root ::= ("a" | b)+\nb ::= [0-9]'), ("a1", "9"), ("", "b")),
    "Lark": (text_constraint("grammar", 'start: "a" B\nB: /[0-9]+/'), ("a12",), ("a", "12")),
    "Lark with a schema": (
        text_constraint("lark", f'start: "x" {json_rule(X_OBJECT)}'), ('x{"x":1}',), ('x{"x":  1}',),
    ),
    "special text is text": (choice_constraint(["<|im_end|>"]), ("<|im_end|>",), ("",)),
    "special token": (text_constraint("lark", "start: <[2]> /a/"), (f"{SPECIAL}a",), ("a", "<|im_start |>a")),
    "text of a token": (
        text_constraint("lark", "start: " + Lark({SPECIAL: 2}).text(f"a{SPECIAL}b")), (f"a{SPECIAL}b",), ("ab",),
    ),
    "structures": (
        tag(type="structural_tag", triggers=["<f="], structures=[
            {"begin": "<f=a>", "schema": X_OBJECT, "end": "</f>"}, {"begin": "<f=b>", "end": "</f>"},
        ]),
        ("", "free <f text", 'so <f=a>{"x":1}</f> and <f=b>[]</f>.'),
        ("<f=", "<f=c></f>", "<f=a>{}</f>", '<f=a>{"x":1}'),
    ),
    "triggered": (tag(format=TRIGGERED), ("", "no", "<f=a>1</f>", "a <f=b>null</f> b"), ("<f=a>null</f>", "<f=")),
    "triggered once": (
        tag(format={**TRIGGERED, "at_least_one": True, "stop_after_first": True}),
        ("<f=a>1</f>", "a<f=b>null</f>"), ("", "free", "<f=a>1</f>."),
    ),
    "triggered, or free": (
        tag(format={**TRIGGERED, "stop_after_first": True}), ("", "free", "<f=a>1</f>"), ("<f=a>1</f>.",),
    ),
    "a token triggers": (
        tag(format={"type": "triggered_tags", "triggers": [SPECIAL], "tags": [
            {"type": "tag", "begin": f"{SPECIAL}f", "content": {"type": "regex", "pattern": "[0-9]"}, "end": SPECIAL},
        ]}),
        ("free", f"so {SPECIAL}f1{SPECIAL}!"), (f"so {SPECIAL}g", f"{SPECIAL}f1"),
    ),
    "any text in a tag": (
        tag(format={"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}),
        ("<t>a<b\n</t>", "<t></t>"), ("<t>", "<t>a</t>b"),
    ),
    "any text to a token": (
        tag(format={"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": f"{SPECIAL}."}),
        (f"a{SPECIAL}.", f"{SPECIAL}."), ("a", f"a{SPECIAL}"),
    ),
    "sequence": (
        tag(format={"type": "sequence", "elements": [
            {"type": "const_string", "value": "a"},
            {"type": "or", "elements": [
                {"type": "regex", "pattern": "[0-9/]"}, {"type": "grammar", "grammar": 'root ::= "x"'},
            ]},
            {"type": "any_text"},
        ]}),
        ("a1", "a/ and so on", "ax"), ("a", "ay"),
    ),
    "separated": (
        tag(format={"type": "tags_with_separator", "separator": ", ", "tags": [call("a", {"enum": [1, 2]})]}),
        ("", "<f=a>1</f>", "<f=a>1</f>, <f=a>2</f>"), ("<f=a>1</f>, ", "<f=a>1</f><f=a>2</f>"),
    ),
    "separated, one": (
        tag(format={"type": "tags_with_separator", "separator": ",", "at_least_one": True, "stop_after_first": True,
                    "tags": [call("a", {"enum": [1]})]}),
        ("<f=a>1</f>",), ("", "<f=a>1</f>,<f=a>1</f>"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("constraint", "right", "wrong"), SAID.values(), ids=SAID.keys())
def test_a_grammar_takes_what_was_asked_for_and_nothing_else(
    trial: GrammarTrial, table: TokenTable, constraint: Constraint, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    assert {text: accepts(trial, table, constraint, text) for text in right} == dict.fromkeys(right, True)
    assert {text: accepts(trial, table, constraint, text) for text in wrong} == dict.fromkeys(wrong, False)
