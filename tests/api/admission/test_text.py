"""Tokens to text and back: ids as transformers gives them, no half characters, no part of a stop string."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from service.text.detokenizer import BytesDetokenizer, WindowDetokenizer, detokenizer_of
from service.text.stop_strings import StopAutomaton, StopStrings
from service.text.tokenizer import TextError, TextTokenizer, max_chars_of
from tests.support.models.tiny_models import BOS_ID, EOS_ID, VOCAB_SIZE, make_tokenizer

MODEL_IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=80)
TEXTS = ["", "the thing", " in and\n\ttab", "ünïcödé 日本 \U0001f600", "<|im_start|>user", "a</s>b"]


@pytest.fixture(scope="module", params=["alone", "in a sequence"])
def byte_level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Its decoder joins bytes; in a sequence it is taken for one that may do more."""
    directory = tmp_path_factory.mktemp("byte_level")
    make_tokenizer(directory)
    if request.param == "in a sequence":
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
        tokenizer.save(str(directory / "tokenizer.json"))
    found = TextTokenizer.load(directory)
    assert found.joins_bytes is (request.param == "alone")
    return found


def make_byte_fallback(directory: Path) -> None:
    """A sentencepiece-like tokenizer as Llama 2 has it: ▁ for spaces, bytes as <0x..> tokens."""
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "▁Hello", "▁world", "lo", "é", "a", "b", "▁a"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory = tmp_path_factory.mktemp("byte_fallback")
    make_byte_fallback(directory)
    return TextTokenizer.load(directory)


@pytest.fixture
def with_hole(tmp_path: Path) -> tuple[TextTokenizer, int]:
    """A byte-level tokenizer and an id that stands for nothing."""
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    parts = json.loads(path.read_text())
    last = max(parts["model"]["vocab"], key=parts["model"]["vocab"].get)
    parts["model"]["vocab"][last] += 100
    path.write_text(json.dumps(parts))
    tokenizer = TextTokenizer.load(tmp_path)
    hole = parts["model"]["vocab"][last] - 1
    assert tokenizer.token_bytes(hole) == b""
    return tokenizer, hole


def pieces_of(tokenizer: TextTokenizer, token_ids: list[int], **options: Any) -> list[str]:
    detokenizer = detokenizer_of(tokenizer, **options)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


class TestTokenizer:
    @pytest.mark.parametrize("text", TEXTS)
    def test_ids_are_those_of_transformers(self, tmp_path: Path, text: str) -> None:
        make_tokenizer(tmp_path)
        oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ours = TextTokenizer.load(tmp_path)
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == oracle.encode(text, add_special_tokens=special)
        assert ours.special_tokens == oracle.special_tokens_map
        assert ours.special_ids == set(oracle.all_special_ids) | {3, 4}

    def test_the_post_processor_alone_says_what_is_added(self, tmp_path: Path) -> None:
        make_tokenizer(tmp_path)
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "add_bos_token": True}))
        oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert TextTokenizer.load(tmp_path).encode("the") == oracle.encode("the")
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ids = TextTokenizer.load(tmp_path).encode("the")
        assert ids == oracle.encode("the")
        assert ids[0] == BOS_ID

    def test_end_tokens_come_from_all_three_files(self, tmp_path: Path) -> None:
        make_tokenizer(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 7]}))
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
        assert TextTokenizer.load(tmp_path).eos_token_ids == (4, 7, 5, EOS_ID)

    def test_missing_and_broken_files_are_refused_in_a_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(TextError, match=r"has no tokenizer\.json"):
            TextTokenizer.load(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(TextError, match="not a tokenizer"):
            TextTokenizer.load(tmp_path)

    def test_half_a_surrogate_pair_is_refused(self, byte_level: TextTokenizer) -> None:
        with pytest.raises(TextError, match="surrogate"):
            byte_level.encode("a\ud800b")

    def test_bytes_of_tokens_add_up_to_the_text(self, byte_level: TextTokenizer, byte_fallback: TextTokenizer) -> None:
        text = "the 日本 \U0001f600é"
        ids = byte_level.encode(text, add_special_tokens=False)
        assert b"".join(byte_level.token_bytes(token_id) for token_id in ids) == text.encode()
        assert byte_level.token_bytes(EOS_ID) == b"</s>"
        assert byte_fallback.token_bytes(3 + 0xE6) == b"\xe6"
        text = " Hello 日 world a"
        ids = byte_fallback.encode(text[1:], add_special_tokens=False)
        assert b"".join(byte_fallback.token_bytes(token_id) for token_id in ids) == text.encode()

    def test_a_word_and_its_end_read_differently(self, byte_fallback: TextTokenizer) -> None:
        assert [byte_fallback.token_text(byte_fallback.token_id(name) or 0) for name in ("▁a", "a", "</s>")] == [
            " a",
            "a",
            "</s>",
        ]
        assert byte_fallback.token_text(3 + 0xE6) == "\ufffd"

    def test_the_vocabulary_ends_behind_the_highest_id(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 9}, unk_token="a"))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        assert TextTokenizer.load(tmp_path).vocab_size == 10


class TestDetokenizer:
    @given(token_ids=MODEL_IDS)
    @example(token_ids=[])
    def test_pieces_add_up_to_the_whole_text(self, byte_level: TextTokenizer, token_ids: list[int]) -> None:
        assert "".join(pieces_of(byte_level, token_ids)) == byte_level.decode(token_ids)

    @given(token_ids=MODEL_IDS, cut=st.integers(0, 10), sees_all=st.booleans())
    @example(token_ids=[174, 99], cut=2, sees_all=True)  # the first bytes of half a surrogate pair
    def test_both_ways_to_decode_bytes_give_the_same_pieces(
        self, byte_level: TextTokenizer, token_ids: list[int], cut: int, sees_all: bool
    ) -> None:
        hidden = frozenset[int]() if sees_all else byte_level.special_ids
        found = []
        for kind in (BytesDetokenizer, WindowDetokenizer):
            detokenizer = kind(byte_level, token_ids[:cut], hidden)
            found.append("".join(map(detokenizer.push, token_ids[cut:])) + detokenizer.finish())
        assert found[0] == found[1]

    @given(text=st.text(max_size=40), cut=st.integers(0, 10))
    def test_after_a_prompt_the_pieces_are_what_comes_behind_it(
        self, byte_level: TextTokenizer, text: str, cut: int
    ) -> None:
        ids = byte_level.encode(text, add_special_tokens=False)
        before, after = ids[:cut], ids[cut:]
        if byte_level.decode(ids).startswith(byte_level.decode(before)):  # else a character is cut in two
            pieces = pieces_of(byte_level, after, prompt_token_ids=before)
            assert byte_level.decode(before) + "".join(pieces) == byte_level.decode(ids)

    @pytest.mark.parametrize("prompt", ["\U0001f600" * 2, "é\U0001f600", "日\U0001f600", "a\ufffd", "é" * 9])
    @pytest.mark.parametrize("answer", ["", "a", "\U0001f600", "\ufffd"])
    def test_nothing_of_the_prompt_is_given_out(
        self, byte_level: TextTokenizer, byte_fallback: TextTokenizer, prompt: str, answer: str
    ) -> None:
        for tokenizer in (byte_level, byte_fallback):
            before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
            if tokenizer is byte_fallback:  # behind another text there is no space before the first word
                after = [token_id for token_id in after if token_id != tokenizer.token_id("▁")]
            assert "".join(pieces_of(tokenizer, after, prompt_token_ids=before)).lstrip(" ") == answer

    @pytest.mark.parametrize("before", ["", "a", "\U0001f600"])
    @pytest.mark.parametrize("num_bytes", [1, 2, 3])
    def test_a_character_that_the_prompt_begins_is_the_answer_s(
        self, byte_level: TextTokenizer, byte_fallback: TextTokenizer, before: str, num_bytes: int
    ) -> None:
        for tokenizer in (byte_level, byte_fallback):
            first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (before, "\U0001f600"))
            face, other = last[-4:], tokenizer.encode("a", add_special_tokens=False)
            prompt = first + face[:num_bytes]
            assert "".join(pieces_of(tokenizer, face[num_bytes:] + face, prompt_token_ids=prompt)) == "\U0001f600" * 2
            # It comes to nothing: what the decoder shows for its bytes belongs to the prompt.
            assert "".join(pieces_of(tokenizer, other, prompt_token_ids=prompt)).strip() == "a"
            assert "".join(pieces_of(tokenizer, [], prompt_token_ids=prompt)) == ""

    def test_no_piece_ends_inside_a_character(self, byte_level: TextTokenizer) -> None:
        ids = byte_level.encode("a\U0001f600b日本" * 20, add_special_tokens=False)
        pieces = pieces_of(byte_level, ids)
        assert all("\ufffd" not in piece for piece in pieces)
        assert pieces[:3] == ["a", "", ""]

    def test_bytes_that_are_no_character_come_out_at_the_end(self, byte_level: TextTokenizer) -> None:
        ids = byte_level.encode("\U0001f600", add_special_tokens=False)[:3]
        assert pieces_of(byte_level, ids) == ["", "", "", "\ufffd"]

    def test_a_long_run_of_broken_bytes_is_decoded_right_and_in_bounded_windows(
        self, byte_level: TextTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lead = byte_level.encode("\U0001f600", add_special_tokens=False)[0]
        right, decode, lengths = byte_level.decode([lead] * 300), byte_level.decode, [0]

        def noted(token_ids: Sequence[int], **options: bool) -> str:
            lengths.append(len(token_ids))
            return decode(token_ids, **options)

        monkeypatch.setattr(byte_level, "decode", noted)
        detokenizer = detokenizer_of(byte_level)
        assert "".join(detokenizer.push(lead) for _ in range(300)) + detokenizer.finish() == right
        assert max(lengths) <= 65

    def test_leading_spaces_stay_after_a_prompt(self, byte_fallback: TextTokenizer) -> None:
        prompt = byte_fallback.encode("Hello")
        answer = [byte_fallback.token_id("▁world"), byte_fallback.token_id("▁a"), byte_fallback.token_id("b")]
        assert pieces_of(byte_fallback, answer, prompt_token_ids=prompt) == [" world", " a", "b", ""]

    def test_byte_tokens_wait_for_their_character(self, byte_fallback: TextTokenizer) -> None:
        ids = [3 + byte for byte in "é\U0001f600".encode()]
        assert pieces_of(byte_fallback, ids) == ["", "é", "", "", "", "\U0001f600", ""]

    def test_special_tokens_are_shown_on_request(self, byte_level: TextTokenizer) -> None:
        ids = [*byte_level.encode("the"), EOS_ID]
        assert "".join(pieces_of(byte_level, ids)).endswith("the")
        assert "".join(pieces_of(byte_level, ids, skip_special_tokens=False)).endswith("the</s>")


def test_long_lists_of_tokens_make_the_same_text(byte_level: TextTokenizer, byte_fallback: TextTokenizer) -> None:
    """They take another way through the library than short ones."""
    for tokenizer, text in ((byte_level, "the thing in and "), (byte_fallback, "a lo world ab")):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(token_ids * 500, skip_special_tokens=False)
        assert whole.startswith(tokenizer.decode(token_ids * 20, skip_special_tokens=False))
        assert whole.count("lo" if "lo" in text else "the") == 500


def cut_at(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What a reader of single characters does: stop as soon as the text ends with a stop string, the longest one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


class TestStopStrings:
    @given(
        text=st.text(alphabet="ab", max_size=20),
        stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
        cuts=st.lists(st.integers(0, 20), max_size=6),
    )
    @example(text="aab", stops=["ab", "b"], cuts=[1, 2])
    def test_wherever_the_pieces_are_cut_the_first_stop_ends_the_text(
        self, text: str, stops: list[str], cuts: list[int]
    ) -> None:
        watch = StopStrings(StopAutomaton(stops))
        given_out = "".join(watch.push(piece) for piece in cut_at(text, cuts))
        if watch.matched is None:
            given_out += watch.finish()
        assert (given_out, watch.matched) == first_stop(text, stops)

    def test_text_is_held_only_while_it_may_become_a_stop_string(self) -> None:
        watch = StopStrings(StopAutomaton(["END"]))
        assert [watch.push(piece) for piece in ("xE", "N", "x", "E")] == ["x", "", "ENx", ""]
        assert watch.finish() == "E"

    def test_a_stop_string_that_began_before_it_may_end_the_text_ends_it(self) -> None:
        watch = StopStrings(StopAutomaton(["END"]))
        assert [watch.push("ENDxE", may_end=False), watch.push("N", may_end=False)] == ["ENDx", ""]
        assert (watch.push("D"), watch.matched) == ("", "END")

    @pytest.mark.parametrize(("stops", "early", "late"), [(["\n", "\n\n"], "\n", "foo"), (["xaby", "ab"], "xab", "z")])
    def test_a_stop_string_before_that_is_text_although_it_begins_another(
        self, stops: list[str], early: str, late: str
    ) -> None:
        for piece in (late, ""):
            watch = StopStrings(StopAutomaton(stops))
            given_out = watch.push(early, may_end=False) + watch.push(piece) + watch.finish()
            assert (given_out, watch.matched) == (early + piece, None)

    @pytest.mark.parametrize(
        ("stops", "text"),
        [
            (["a" * (96 + index) + "b" for index in range(32)], ("a" * 127 + "c") * 20),
            (["ab" * 60 + str(index) for index in range(32)], "ab" * 1280),
            (["abc", "bca", "cab", "bb"], "abd" * 850),
        ],
        ids=["runs", "repeats", "short"],
    )
    @pytest.mark.parametrize("chars_at_once", [1, 5, 2560])
    def test_a_character_costs_the_same_whatever_the_stop_strings_are(
        self, stops: list[str], text: str, chars_at_once: int
    ) -> None:
        automata = [StopAutomaton(stops), StopAutomaton(["z"])]
        costs = []
        for automaton in automata:
            watch = StopStrings(automaton)
            with counted_lines(StopStrings.push) as counted:
                for at in range(0, len(text), chars_at_once):
                    watch.push(text[at : at + chars_at_once])
            assert watch.matched is None
            costs.append(counted.num_lines)
        assert costs[0] < 3 * costs[1]

    def test_to_build_costs_a_few_steps_for_each_character(self) -> None:
        def cost(stops: list[str]) -> float:
            with counted_lines(StopStrings.push) as counted:
                StopAutomaton(stops)
            return counted.num_lines / sum(map(len, stops))

        plain = cost([chr(0x4E00 + index) * 128 for index in range(32)])
        assert cost([("a" * index + "b") * (128 // (index + 1)) for index in range(32)]) < 2 * plain
        assert cost(["a" * 128 * 32]) < 2 * plain


@dataclass
class Counted:
    num_lines: int = 0


@contextmanager
def counted_lines(function: Any) -> Iterator[Counted]:
    """How many lines of the function's file are executed: what work costs, without a clock."""
    counted, file = Counted(), function.__code__.co_filename

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        counted.num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(before)


class TestMostCharactersOfAToken:
    @given(text=st.text())
    def test_no_text_has_more_for_each_of_its_tokens(self, byte_level: TextTokenizer, text: str) -> None:
        assert byte_level.max_chars_per_token is not None
        num_tokens = len(byte_level.encode(text, add_special_tokens=False))
        assert len(text) <= num_tokens * byte_level.max_chars_per_token

    @pytest.mark.parametrize(
        ("change", "factor"),
        [
            ({}, 1),
            ({"normalizer": {"type": "NFC"}}, 4),
            ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}]}}, 1),
            ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, None),
            ({"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}}, None),
            ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, None),
            ({"pre_tokenizer": None}, None),
            ({"added_tokens": [{"content": "<x>", "lstrip": True}]}, None),
        ],
    )
    def test_there_is_no_bound_where_characters_may_vanish(self, change: dict[str, Any], factor: int | None) -> None:
        vocabulary = {"a": 0, "four": 1}
        parts = {"model": {"type": "BPE", "vocab": vocabulary}, "pre_tokenizer": {"type": "ByteLevel"}, **change}
        assert max_chars_of(parts) == (None if factor is None else 4 * factor)
