"""Sequences that follow a grammar, in an engine over the mock model: only tokens that it allows, of these the model's
choice, whatever else runs, waits, is preempted or goes away. Token t is the character 32 + t."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from examples.train_base import BASE_DIR
from service.engine.grammar.compiled_grammars import (
    MAX_COMPILED,
    Grammars,
)
from service.engine.ipc.messages import Sampling
from service.engine.sequences.constraint import MAX_SECONDS_BEHIND, SECONDS_A_TOKEN, TOO_COSTLY, TokenConstraint
from service.grammars.matching import TOO_AMBIGUOUS, TokenTable, compile_grammar
from tests.support.engine.engine_mock import (
    EOS,
    VOCAB,
    MockEngine,
    adapter_number,
    expected_tokens,
    make_mock_engine,
    mock_tokens,
)
from tests.support.engine.engine_mock import next_logits as logits_after

PROMPT = (1, 2, 3)


@pytest.fixture(params=[False, True], ids=["one after another", "overlap"])
def mock(request: pytest.FixtureRequest) -> Iterator[MockEngine]:
    made = make_mock_engine(overlap=request.param)
    yield made
    made.engine.close()


def regex(pattern: str) -> str:
    return lark(f"start: /{pattern}/")


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def ids(text: str) -> list[int]:
    return [ord(char) - 32 for char in text]


def best(allowed: Sequence[str], adapter: str | None = None, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """The mock model's greedy choice where position i allows the characters `allowed[i]` only."""
    history = list(prompt)
    for chars in allowed:
        logits = torch.full((VOCAB,), -torch.inf)
        logits[ids(chars)] = logits_after(history, adapter_number(adapter))[ids(chars)]
        history.append(int(logits.argmax()))
    return history[len(prompt) :]


def ending(mock: MockEngine, name: str) -> tuple[str, int | None]:
    return mock.finished[name].reason, mock.finished[name].stop_token_id


def test_only_what_the_grammar_allows_and_of_that_the_models_choice(mock: MockEngine) -> None:
    mock.submit("r", max_tokens=9, grammar=regex("[a-h]{3}[xyz]"))
    mock.settle()
    assert mock.output["r"] == best(["abcdefgh"] * 3 + ["xyz"])
    assert ending(mock, "r") == ("stop", None)


def test_lists_of_tokens_hold_beside_a_grammar_but_for_its_end(mock: MockEngine) -> None:
    def mask(text: str) -> bytes:
        return sum(1 << token for token in ids(text)).to_bytes(13, "little")

    free = best(["abcd"] * 3 + ["xy"])
    word = (free[0], free[1])
    mock.submit("r", max_tokens=9, grammar=regex("[a-h]{3}[xyz]"), allowed_tokens=mask("abcdxy"))
    mock.submit("word", max_tokens=9, grammar=regex("[a-h]{3}[xyz]"), allowed_tokens=mask("abcdxy"), bad_words=(word,))
    mock.submit("open", max_tokens=9, grammar=regex("a+"), allowed_tokens=mask("a"), logit_bias={EOS: 100.0})
    mock.submit("nothing", max_tokens=9, grammar=regex("[a-h]{3}[xyz]"), allowed_tokens=mask("q"))
    mock.settle()
    assert mock.output["r"] == free
    assert mock.output["word"][0] == word[0]
    assert mock.output["word"][1] != word[1]
    assert (mock.output["open"], ending(mock, "open")) == ([*ids("a"), EOS], ("stop", EOS))
    assert (mock.finished["nothing"].reason, mock.finished["nothing"].client_fault) == ("error", True)
    assert "leave no token" in (mock.finished["nothing"].error or "")


def test_others_in_the_step_are_as_if_it_were_not_there(mock: MockEngine) -> None:
    for index in range(3):
        mock.submit(f"free-{index}", (5, 6, index), adapter=f"a{index}" if index else None, max_tokens=9)
        mock.submit(f"bound-{index}", (7, index), adapter="a1", max_tokens=9, grammar=regex("[a-h]{5}"))
    mock.settle()
    for index in range(3):
        adapter = f"a{index}" if index else None
        assert mock.output[f"free-{index}"] == expected_tokens((5, 6, index), adapter, 9)
        assert mock.output[f"bound-{index}"] == best(["abcdefgh"] * 5, "a1", (7, index))


def test_random_choices_stay_within_it(mock: MockEngine) -> None:
    for seed in range(6):
        mock.submit(f"r{seed}", max_tokens=20, temperature=2.0, seed=seed, grammar=regex("[a-c]{9}"))
    mock.settle()
    outputs = {tuple(mock.output[f"r{seed}"]) for seed in range(6)}
    assert len(outputs) > 1
    assert all(len(output) == 9 and set(output) <= set(ids("abc")) for output in outputs)


def test_a_preempted_one_goes_on_where_it_was(mock: MockEngine) -> None:
    made = make_mock_engine(num_blocks=8, overlap=mock.engine.config.overlap)
    for index in range(3):
        made.submit(f"r{index}", (index,), max_tokens=20, grammar=regex("[a-h]{14}"))
    made.settle()
    assert made.engine.scheduler.num_preemptions
    for index in range(3):
        assert made.output[f"r{index}"] == best(["abcdefgh"] * 14, prompt=(index,))
    made.engine.close()


def test_a_grammar_of_many_characters_and_chunked_prompts(mock: MockEngine) -> None:
    prompt = tuple(range(40))
    mock.submit("r", prompt, max_tokens=3, grammar=regex("[0-9]{3}"), logprobs=0, prompt_logprobs=0)
    mock.settle()
    assert mock.output["r"] == best(["0123456789"] * 3, prompt=prompt)
    prompt_logprobs = mock.messages["r"][0].prompt_logprobs
    assert prompt_logprobs is not None
    assert len(prompt_logprobs) == len(prompt)


# ---- endings


def test_it_ends_by_length_unless_it_is_complete_then(mock: MockEngine) -> None:
    mock.submit("cut", max_tokens=3, grammar=regex("a{4}"))
    mock.submit("whole", max_tokens=4, grammar=regex("a{4}"))
    mock.settle()
    assert (mock.output["cut"], ending(mock, "cut")) == (ids("aaa"), ("length", None))
    assert (mock.output["whole"], ending(mock, "whole")) == (ids("aaaa"), ("stop", None))


def test_the_end_of_the_sequence_is_allowed_where_the_grammar_may_end(mock: MockEngine) -> None:
    mock.submit("r", max_tokens=9, grammar=regex("aaa+"), logit_bias={EOS: 100.0})
    mock.settle()
    assert (mock.output["r"], ending(mock, "r")) == ([*ids("aaa"), EOS], ("stop", EOS))


ENDS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "min_tokens": ("a+", {"min_tokens": 4}, [*ids("aaaa"), EOS]),
    "min_tokens of a stop token": ("[ab]+", {"min_tokens": 2, "stop_token_ids": (66,)}, [*ids("aa"), EOS]),
    "ignore_eos": ("a{2,5}", {"ignore_eos": True}, ids("aaaaa")),
    # Nothing else may come, and an answer must end somewhere.
    "min_tokens beyond the grammar": ("ab", {"min_tokens": 5}, ids("ab")),
    "an empty answer": ("", {"min_tokens": 5}, [EOS]),
    "an empty answer, ignore_eos": ("", {"ignore_eos": True}, [EOS]),
}


@pytest.mark.parametrize(("pattern", "wanted", "output"), ENDS.values(), ids=ENDS.keys())
def test_ends_that_are_forbidden_are_barred_unless_nothing_else_is_allowed(
    mock: MockEngine, pattern: str, wanted: dict[str, Any], output: list[int]
) -> None:
    mock.submit("r", max_tokens=9, grammar=regex(pattern), logit_bias={EOS: 100.0, 66: 50.0}, **wanted)
    mock.settle()
    assert (mock.output["r"], mock.finished["r"].reason) == (output, "stop")


def test_a_prompt_alone_needs_no_grammar(mock: MockEngine) -> None:
    mock.submit("r", max_tokens=0, prompt_logprobs=0, grammar=regex("a"))
    mock.settle()
    assert ("r" in mock.output, mock.finished["r"].reason) == (True, "length")


# ---- what goes wrong

BAD = {
    "not a grammar": lark("start: nobody"),
    "not JSON": "{",
    "nothing possible": json.dumps({"grammars": [{"json_schema": {"enum": []}}]}),
    "endless": json.dumps({"grammars": [{"json_schema": {"$ref": "#"}}]}),
}


@pytest.mark.parametrize("grammar", BAD.values(), ids=BAD.keys())
def test_a_bad_grammar_is_answered_and_stops_nobody(mock: MockEngine, grammar: str) -> None:
    mock.submit("bad", grammar=grammar)
    mock.submit("good", grammar=regex("[a-h]{4}"))
    mock.settle()
    assert (mock.finished["bad"].reason, mock.finished["bad"].client_fault) == ("error", True)
    assert "cannot be followed" in (mock.finished["bad"].error or "")
    assert mock.output["good"] == best(["abcdefgh"] * 4)


def test_a_grammar_that_goes_wrong_later_is_answered_then(mock: MockEngine) -> None:
    many = " | ".join(f'"x{number}"' for number in range(2500))
    mock.submit("bad", max_tokens=9, grammar=lark(f'start: "a" "b" many\nmany: {many}'))
    mock.submit("good", max_tokens=9, grammar=regex("[a-h]{9}"))
    mock.settle()
    assert mock.output["bad"] in (ids("a"), ids("ab"))
    assert (mock.finished["bad"].reason, mock.finished["bad"].client_fault) == ("error", True)
    assert mock.output["good"] == best(["abcdefgh"] * 9)


AMBIGUOUS = {
    "threes and twos": 's: s s s | s s | "a" | "b"',
    "around": 's: x s x | x s | s x | x\nx: "a" | "a" x | x "a"',
}


@pytest.mark.parametrize("rules", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_an_ambiguous_grammar_ends_its_own_answer(mock: MockEngine, rules: str) -> None:
    """By its processor time or by its items, whichever comes first on this machine; both are the client's fault."""
    mock.submit("bad", max_tokens=240, ignore_eos=True, grammar=lark(f"start: s\n{rules}"))
    mock.submit("good", max_tokens=9, grammar=regex("[a-h]{9}"))
    mock.settle()
    assert (mock.finished["bad"].reason, mock.finished["bad"].client_fault) == ("error", True)
    assert any(reason in (mock.finished["bad"].error or "") for reason in (TOO_COSTLY, TOO_AMBIGUOUS))
    assert mock.output["good"] == best(["abcdefgh"] * 9)


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_an_adapters_end_token_ends_where_the_grammar_may_end(mock: MockEngine, min_tokens: int) -> None:
    """And nowhere else: the grammar wants a character first, and `min_tokens` some more."""
    end = ids("z")[0]
    asked: Any = {"stop_token_ids": (EOS, end), "eos_token_ids": (end,), "logit_bias": {end: 100.0}}
    mock.submit("r", max_tokens=9, grammar=regex("[a-h]+"), min_tokens=min_tokens, **asked)
    mock.submit("fixed", max_tokens=9, grammar=regex("[a-h]{4}"), **asked)
    mock.settle()
    assert mock.output["r"] == [*best(["abcdefgh"] * max(1, min_tokens)), end]
    assert ending(mock, "r") == ("stop", end)
    assert mock.output["fixed"] == best(["abcdefgh"] * 4)


@pytest.mark.parametrize(
    ("seconds_a_call", "num_tokens", "error"),
    [(SECONDS_A_TOKEN / 2, 999, ""), (SECONDS_A_TOKEN * 1.1, 84, TOO_COSTLY), (MAX_SECONDS_BEHIND, 1, TOO_COSTLY)],
)
def test_a_sequence_may_not_fall_behind_in_processor_time(seconds_a_call: float, num_tokens: int, error: str) -> None:
    """A token takes a call that follows it and one that makes the mask of the next."""
    calls = count()
    constraint = TokenConstraint(
        Sampling(max_tokens=1000),
        frozenset(),
        VOCAB,
        matcher=compile_grammar(mock_tokens(), lark('start: "a"*')),
        # Two readings of the clock are a call.
        clock=lambda: (next(calls) + 1) // 2 * seconds_a_call,
    )
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    num_followed = 0
    constraint.fill(mask)
    while not constraint.error and num_followed < 999:
        constraint.consume(*ids("a"))
        constraint.fill(mask)
        num_followed += 1
    assert (num_followed, constraint.error) == (num_tokens, error)


def test_a_constraint_is_costly_while_its_masks_are() -> None:
    readings = iter(list[float]())
    constraint = TokenConstraint(
        Sampling(max_tokens=1000),
        frozenset(),
        VOCAB,
        matcher=compile_grammar(mock_tokens(), lark('start: "a"*')),
        clock=lambda: next(readings),
    )
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    for begin, end, is_costly in ((0.0, 0.9, False), (1.0, 3.0, True), (3.0, 3.5, False)):
        readings = iter([begin * SECONDS_A_TOKEN, end * SECONDS_A_TOKEN])
        constraint.fill(mask)
        assert constraint.is_costly is is_costly


def test_a_lexer_that_is_full_is_no_fault_of_the_next(mock: MockEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a compiled grammar share its lexer's states, of which there may be so many. Their making takes long:
    without its bound, the processor time ends some of them before."""
    monkeypatch.setattr("service.engine.sequences.constraint.MAX_SECONDS_BEHIND", math.inf)
    full = regex("|".join(f"[a-p]*{char}[a-p]{{200}}{char}" for char in "abcdefghijklmnop"))
    sampling: dict[str, Any] = {"max_tokens": 240, "temperature": 2.0, "ignore_eos": True, "grammar": full}
    names = [f"r{number}" for number in range(8)]
    for number, name in enumerate(names):
        mock.submit(name, seed=number, **sampling)
    mock.settle()
    assert any("too many states" in (mock.finished[name].error or "") for name in names)
    mock.submit("next", **{**sampling, "max_tokens": 9})
    mock.settle()
    assert len(mock.output["next"]) == 9


def test_an_engine_without_tokens_refuses_grammars() -> None:
    mock = make_mock_engine(has_tokens=False)
    mock.submit("r", grammar=regex("a"))
    mock.submit("free")
    mock.settle()
    assert "leave the constraint out" in (mock.finished["r"].error or "")
    assert mock.finished["free"].reason == "length"


# ---- who goes away


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_frees_everything_at_any_time(mock: MockEngine, num_steps: int) -> None:
    mock.submit("other", max_tokens=9, grammar=regex("[a-h]{9}"))
    mock.submit("gone", max_tokens=9, grammar=regex("[a-h]{9}"))
    for _ in range(num_steps):
        mock.step_and_load()
    mock.engine.abort("gone")
    mock.engine.check_integrity()
    mock.settle()
    assert "gone" not in mock.finished
    assert mock.output["other"] == best(["abcdefgh"] * 9)
    assert mock.engine.blocks.num_used == mock.engine.slots.num_used == 0


def test_it_counts_as_waiting_while_its_grammar_is_compiled(mock: MockEngine) -> None:
    mock.submit("r", grammar=regex("a"))
    mock.step()
    assert (mock.engine.stats().num_waiting, mock.engine.num_requests) == (1, 1)
    mock.engine.fail_all("over")
    assert [event.error for event in mock.step()] == ["over"]  # type: ignore[union-attr]
    mock.loader.do_all()
    assert not mock.step()


# ---- compiling


def test_a_grammar_is_compiled_once(mock: MockEngine) -> None:
    for name in ("first", "second"):
        mock.submit(name, max_tokens=9, grammar=regex("[a-h]{4}"))
    assert mock.loader.do_all() == 1
    mock.settle()
    mock.submit("third", max_tokens=9, grammar=regex("[a-h]{4}"))
    assert mock.loader.do_all() == 0
    mock.settle()
    assert mock.output["first"] == mock.output["second"] == mock.output["third"] == best(["abcdefgh"] * 4)


def test_those_unused_for_longest_are_forgotten(mock: MockEngine) -> None:
    def use(number: int) -> int:
        mock.submit(f"r{mock.engine.num_steps}-{number}", max_tokens=1, grammar=regex(f"a{{{number + 1}}}"))
        num_compiled = mock.loader.do_all()
        mock.settle()
        return num_compiled

    assert sum(use(number) for number in range(MAX_COMPILED)) == MAX_COMPILED
    assert use(0) == 0
    assert use(MAX_COMPILED) == 1
    assert [use(0), use(1)] == [0, 1]


def test_without_a_thread_to_compile_in_it_is_answered(mock: MockEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(mock.loader, "submit", refuse)
    mock.submit("r", grammar=regex("a"))
    mock.settle()
    assert "no thread" in (mock.finished["r"].error or "")


def test_log_probabilities_are_the_models_own(mock: MockEngine) -> None:
    mock.submit("r", max_tokens=1, grammar=regex("[xy]z"), logprobs=3)
    mock.settle()
    (logprob,) = mock.messages["r"][0].logprobs
    expected = logits_after(list(PROMPT), -1).log_softmax(-1)
    assert logprob.logprob == pytest.approx(float(expected[mock.output["r"][0]]))
    assert [token for token, _ in logprob.top] == expected.topk(3).indices.tolist()


# ---- who waits for whom


class ByHand:
    """A thread whose work runs when the test says so."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def close(self) -> None:
        self.work.clear()


def test_tenants_take_turns_to_have_grammars_compiled() -> None:
    thread = ByHand()
    grammars, order = Grammars(TokenTable.load(BASE_DIR), thread, lambda: None), list[str]()
    for name in ("many 1", "many 2", "many 3", "few 1", "other 1", "few 2"):
        grammars.begin(regex(name), name, name.partition(" ")[0])
    while thread.work:
        thread.work.popleft()()
        order += [name for name, _, _ in grammars.take_done()]
    assert order == ["many 1", "few 1", "other 1", "many 2", "few 2", "many 3"]


def test_who_has_many_grammars_compiled_makes_others_wait_for_none_that_they_had() -> None:
    thread = ByHand()
    grammars = Grammars(TokenTable.load(BASE_DIR), thread, lambda: None)

    def num_compiled(name: str, owner: str) -> int:
        grammars.begin(regex(name), name, owner)
        num_begun = len(thread.work)
        while thread.work:
            thread.work.popleft()()
        assert [taken for taken, _, _ in grammars.take_done()] == [name]
        return num_begun

    assert num_compiled("few", "few") == 1
    assert sum(num_compiled(f"many {index}", "many") for index in range(2 * MAX_COMPILED)) == 2 * MAX_COMPILED
    assert num_compiled("few", "few") == 0
    assert num_compiled(f"many {2 * MAX_COMPILED - 1}", "many") == 0
    assert num_compiled("many 0", "many") == 1


def test_a_grammar_that_is_forgotten_while_another_waits_for_it_is_not_kept_again() -> None:
    thread = ByHand()
    grammars = Grammars(TokenTable.load(BASE_DIR), thread, lambda: None)

    def begin(key: str) -> int:
        """How many are to be compiled for it."""
        grammars.begin(regex("a"), key, "one")
        return len(thread.work)

    assert begin("first") == 1
    thread.work.popleft()()
    grammars.take_done()
    assert begin("second") == 0
    grammars.forget(regex("a"))
    grammars.take_done()
    assert begin("third") == 1
