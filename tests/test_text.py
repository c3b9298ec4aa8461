# SPDX-License-Identifier: MIT
"""The tokenizer, decoding while tokens arrive, and stop strings."""

from __future__ import annotations

import base64
import codecs
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import k3session.text
from k3session.errors import CheckpointError, ConfigError, InvalidTokenError
from k3session.text import IncrementalDecoder, MissingExtraError, StopMatcher, Tokenizer, TokenizerLike
from k3session.tokenizer import MAX_CHUNK, MAX_RUN, _chunks

pytest.importorskip("tiktoken")

SHAKESPEARE = Path(k3session.text.__file__).parent / "models" / "k3-shakespeare"
# From Macbeth, which the shipped tokenizer was not made from, and the ids that an independent program gave.
MACBETH = (
    "MACDUFF.\nIs thy master stirring?--\nOur knocking has awak'd him; here he comes.\n\n[Enter Macbeth.]\n\n"
)
MACBETH_IDS = [
    *(
        77,
        65,
        67,
        977,
        847,
        259,
        823,
        406,
        263,
        728,
        355,
        322,
        114,
        301,
        63,
        454,
        79,
        369,
        433,
        875,
        301,
        315,
    ),
    *(115, 258, 119, 565, 328, 365, 59, 551, 297, 950, 280, 563, 460, 97, 99, 98, 313, 104, 378),
]
PIECES = [b"\xf0\x9f", b"\x98\x80a", b"\xe4\xb8", b"\xad\xe6\x96", b"ab", b"\xc3", b" \xff", b"\xbf\xbd"]


def make_tokenizer(pieces: Iterable[bytes] = ()) -> Tokenizer:
    """All bytes, and tokens for ``pieces``; a piece that is a token is never cut further."""
    tokens = dict.fromkeys([*(bytes([i]) for i in range(256)), *pieces])
    return Tokenizer({token: i for i, token in enumerate(tokens)})


shakespeare = Tokenizer.from_dir(SHAKESPEARE)
awkward = make_tokenizer(PIECES)  # tokens that begin and end inside characters


class OnlyTwoMethods:
    """The least that serves in place of a tokenizer."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode(ids)


class DropsFirstSpace(OnlyTwoMethods):
    """As some decoders do: no space at the beginning of what they are given."""

    def decode(self, ids: Iterable[int]) -> str:
        return super().decode(ids).removeprefix(" ")


class ReplacesEachByte(OnlyTwoMethods):
    """As some decoders do: U+FFFD for each byte that is not UTF-8, not for each broken character."""

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode_bytes(ids).decode("utf-8", "replace-each-byte")


def replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("replace-each-byte", replace_each_byte)
OTHERS = [OnlyTwoMethods(awkward), DropsFirstSpace(awkward), ReplacesEachByte(awkward)]


# ---- ids ----------------------------------------------------------------------------------------


def test_shipped_tokenizer_gives_known_ids() -> None:
    assert shakespeare.encode(MACBETH) == MACBETH_IDS
    assert shakespeare.decode(MACBETH_IDS) == MACBETH
    assert shakespeare.vocab_size == len(shakespeare) == 1280
    assert shakespeare.eos_ids == (1026, 1025)


def test_special_ids_follow_the_ranks() -> None:
    special = shakespeare.special_tokens
    assert sorted(special.values()) == list(range(1024, 1280))
    assert (special["[BOS]"], special["<|end_of_msg|>"], special["[PAD]"]) == (1024, 1026, 1279)
    assert special["<|reserved_token_1032|>"] == 1032
    special.clear()
    assert shakespeare.special_tokens


def test_names_without_a_config_are_those_of_k3(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes((SHAKESPEARE / "tiktoken.model").read_bytes())
    assert Tokenizer.from_dir(tmp_path).special_tokens == shakespeare.special_tokens


def test_special_names_in_text_are_text_unless_allowed() -> None:
    for name, token in shakespeare.special_tokens.items():
        assert max(shakespeare.encode(name)) < 1024
        assert shakespeare.encode(f"a{name}", allow_special=True)[-1] == token
        assert shakespeare.decode([token]) == name
        assert shakespeare.decode([97, token, 98], skip_special=True) == "ab"


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text("aé中𝄞 \n\r\t'sS0<|>", max_size=60))
def test_round_trip(text: str) -> None:
    for tokenizer in (shakespeare, awkward):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(np.array(ids, np.int32)) == text.encode()
        assert all(i < tokenizer.vocab_size - 256 for i in ids)


def test_lone_surrogate_becomes_the_replacement_character() -> None:
    for allow_special in (False, True):
        ids = shakespeare.encode("a\ud800b", allow_special=allow_special)
        assert shakespeare.decode(ids) == "a\ufffdb"


@pytest.mark.parametrize("bad", [-1, 1280, 1.0, "a", None])
def test_ids_outside_the_vocabulary_are_refused(bad: object) -> None:
    with pytest.raises(InvalidTokenError, match="token id"):
        shakespeare.decode([0, bad])  # type: ignore[list-item]
    with pytest.raises(InvalidTokenError, match="token id"):
        IncrementalDecoder(shakespeare).feed(bad)  # type: ignore[arg-type]


def test_only_text_is_encoded() -> None:
    with pytest.raises(TypeError, match="takes a str, not bytes"):
        shakespeare.encode(b"abc")  # type: ignore[arg-type]


# ---- pieces: where merges stop ------------------------------------------------------------------

# One line for each rule; "|" marks the cuts.
CUTS = [
    "中文|abc|漢字|é",  # Han runs stand alone, and Han is no part of a word
    "あいう|漢|カナ",  # other letters without case are words
    " Hello|World| HTTPServer|Ab",  # a space belongs to the word after it; upper case begins a word
    "don't|I'M|we've|xyz's|'t",  # contractions, in either case
    "123|456|7٣٤",  # at most three digits
    "a|  | b|\t|\tc",  # the last space before a word goes with the word
    "hi|!!\n\n|there| ...(|a|)?\r\n",  # punctuation takes the line ends after it
    "a|  \n\n|  | b",  # line ends take the space before them
    "x|   ",  # space at the end
    "_a|-b|$c|\u00a0d",  # one mark before a word belongs to it
    "🙂🙂|a| 🙂",
    "e\u0301a|!\u0301",  # marks are parts of words
]


@pytest.mark.parametrize("cuts", CUTS)
def test_where_text_is_cut(cuts: str) -> None:
    assert pieces_of(cuts.replace("|", "")) == cuts.split("|")


def pieces_of(text: str) -> list[str]:
    """The pieces of ``text``, seen from outside: any substring is a token, and a whole piece is looked up."""
    parts = {text[i:j].encode() for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    tokenizer = make_tokenizer(sorted(parts))
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


@settings(max_examples=60, deadline=None)
@given(st.text("aAbBé中文漢あǅʰ\u03010٣ⅷ \t\n\r\u3000'sSLl._-🙂", max_size=14))
def test_cuts_agree_with_another_engine(text: str) -> None:
    regex = pytest.importorskip("regex")
    # The same rules without class intersection.
    upper = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
    lower = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
    tail = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
    rules = [
        r"\p{Han}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{tail}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{tail}",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
    assert pieces_of(text) == regex.findall("|".join(rules), text)


def naive_chunks(text: str, max_chunk: int, max_run: int) -> Iterator[str]:
    for start in range(0, len(text), max_chunk):
        piece, run, space = "", 0, False
        for char in text[start : start + max_chunk]:
            run = run + 1 if char.isspace() == space else 1
            space = char.isspace()
            if run > max_run:
                yield piece
                piece, run = "", 1
            piece += char
        yield piece


@given(st.text("ab \n\u3000\x1c", max_size=60), st.integers(1, 30), st.integers(1, 8))
def test_chunks_are_cut_where_the_format_cuts(text: str, max_chunk: int, max_run: int) -> None:
    assert list(_chunks(text, max_chunk, max_run)) == list(naive_chunks(text, max_chunk, max_run))


def test_long_texts_are_cut_at_the_limits_of_the_format() -> None:
    tokenizer = make_tokenizer([b"aa", b"ab"])
    aa, b, ab = tokenizer.encode("aa")[0], ord("b"), tokenizer.encode("ab")[0]
    assert tokenizer.encode("a" * (MAX_RUN - 1) + "b")[-1] == ab
    assert tokenizer.encode("a" * MAX_RUN + "b")[-2:] == [aa, b]  # "ab" lies across the cut
    words = ("aaaa " * (MAX_CHUNK // 5))[:-1]
    assert tokenizer.encode(words[1:] + "ab")[-1] == ab
    assert tokenizer.encode(words + "ab")[-2:] == [ord("a"), b]


def test_long_runs_pass() -> None:
    text = " " * 60_001 + "x" * 60_001 + "\n" * 60_001 + "中" * 30_000 + "é " * 300_000
    assert shakespeare.decode(shakespeare.encode(text)) == text


# ---- while tokens arrive ------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, awkward.vocab_size - 1) | st.sampled_from(range(256, 264))))
def test_incremental_text_is_the_whole_text(ids: list[int]) -> None:
    tokenizer = awkward
    decoder = IncrementalDecoder(tokenizer)
    shown = ""
    for n, token in enumerate(ids, start=1):
        shown += decoder.feed(token)
        whole = tokenizer.decode(ids[:n])
        assert shown in (whole, whole.removesuffix("\ufffd"))
    assert shown + decoder.flush() == tokenizer.decode(ids)
    assert decoder.flush() == ""


@settings(max_examples=200, deadline=None)
@given(st.text("a é中🙂\ufffd", max_size=40))
def test_half_a_character_is_never_shown(text: str) -> None:
    ids = awkward.encode(text)
    tokenizers: list[TokenizerLike] = [awkward, *OTHERS]
    for tokenizer in tokenizers:
        decoder = IncrementalDecoder(tokenizer)
        whole, shown = tokenizer.decode(ids), ""
        for token in ids:
            shown += decoder.feed(token)
            assert whole.startswith(shown)
        assert shown + decoder.flush() == whole


def test_what_cannot_become_a_character_is_not_held_back() -> None:
    characters = [chr(i).encode() for i in range(0x80, 0x110000) if not 0xD800 <= i < 0xE000]
    unfinished = {c[:n] for c in characters for n in range(1, len(c))}
    assert b"\xf4\x8f" in unfinished
    for pair in (bytes([i, j]) for i in range(0x7F, 256) for j in range(256)):
        decoder = IncrementalDecoder(awkward)
        shown = decoder.feed(pair[0]) + decoder.feed(pair[1])
        held = next((pair[i:] for i in range(2) if pair[i:] in unfinished), b"")
        assert shown == pair[: 2 - len(held)].decode("utf-8", "replace"), pair


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 263) | st.sampled_from(range(256, 264)), max_size=90))
def test_any_object_with_encode_and_decode_serves(ids: list[int]) -> None:
    for tokenizer in OTHERS:
        assert isinstance(tokenizer, TokenizerLike)
        decoder = IncrementalDecoder(tokenizer)
        shown = "".join(decoder.feed(i) for i in ids) + decoder.flush()
        assert shown == tokenizer.decode(ids)


def test_special_tokens_can_be_left_out() -> None:
    end = shakespeare.special_tokens["<|end_of_msg|>"]
    first, second = "é".encode()
    decoder = IncrementalDecoder(shakespeare, skip_special=True)
    byte = {shakespeare.token_bytes(i): i for i in range(1024)}
    ids = [byte[bytes([first])], end, byte[bytes([second])]]
    assert [decoder.feed(i) for i in ids] == ["", "", "é"]
    with pytest.raises(ConfigError, match="skip_special"):
        IncrementalDecoder(OnlyTwoMethods(shakespeare), skip_special=True)


@pytest.mark.parametrize("wrap", [lambda t: t, OnlyTwoMethods])
def test_a_character_begun_in_the_context_is_finished(wrap: type[OnlyTwoMethods]) -> None:
    before, after = [97, 0xF0, 0x9F], [0x99, 0x82, 98]
    decoder = IncrementalDecoder(wrap(awkward), context=before)
    assert [decoder.feed(i) for i in after] == ["", "🙂", "b"]
    decoder = IncrementalDecoder(wrap(awkward), context=[97, 0xC3, -1])
    assert decoder.feed(98) == "b"
    long = awkward.encode("words " * 9 + "🙂")
    decoder = IncrementalDecoder(wrap(awkward), context=np.array(long[:-1]))
    assert decoder.feed(long[-1]) == "🙂"


# ---- stop strings -------------------------------------------------------------------------------


def run_stop(stops: list[str], parts: Iterable[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for part in parts:
        new, matched = matcher.feed(part)
        shown += new
        assert matched == matcher.matched
    return shown + matcher.flush(), matcher.matched


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300)
@given(STOPS, st.text("abc", max_size=20), st.data())
def test_stop_does_not_depend_on_how_the_text_was_cut(
    stops: list[str], text: str, data: st.DataObject
) -> None:
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    if ends:
        matched = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
        expected: tuple[str, str | None] = (text[: ends[0] - len(matched)], matched)
    else:
        expected = (text, None)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run_stop(stops, parts) == run_stop(stops, text) == expected


@given(STOPS, st.text("abc", max_size=20))
def test_stop_holds_back_only_what_may_begin_one(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for n, char in enumerate(text, start=1):
        new, matched = matcher.feed(char)
        if matched is not None:
            break
        shown += new
        held = text[len(shown) : n]
        possible = [text[i:n] for i in range(n) if any(s.startswith(text[i:n]) for s in stops)]
        assert held == max(possible, key=len, default="")


def test_stop_edges() -> None:
    assert StopMatcher("\n\n").feed("a\n\nb") == ("a", "\n\n")
    assert StopMatcher().feed("anything") == ("anything", None)
    matcher = StopMatcher(["x"])
    assert matcher.feed("axb") == ("a", "x")
    assert matcher.feed("more") == ("", "x")
    assert matcher.flush() == ""
    for bad in ("", [""], ["a", ""], [1]):
        with pytest.raises(ConfigError, match="stop string"):
            StopMatcher(bad)  # type: ignore[arg-type]


# ---- files that cannot be used ------------------------------------------------------------------


def ranks_file(tokens: list[bytes], ranks: Iterable[int] | None = None) -> str:
    pairs = zip(tokens, range(len(tokens)) if ranks is None else ranks, strict=True)
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in pairs)


BYTES = [bytes([i]) for i in range(256)]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, "expected the tokenizer's ranks in .*tiktoken.model, one base64 token and its rank"),
        ("", "every single byte, and 256 are missing"),
        (ranks_file(BYTES) + "@@@@ 256\n", r"line 257: .* found '@@@@ 256'"),
        (ranks_file(BYTES) + "YWI=\n", "line 257: expected a base64 token and its rank"),
        (ranks_file(BYTES) + "YWI= -1\n", "line 257"),
        (ranks_file(BYTES) + "YWI= 1 1\n", "line 257"),
        (ranks_file(BYTES) + " 256\n", "line 257"),
        (ranks_file([*BYTES, b"a"]), r"line 257: the token b'a' already has rank 97"),
        (ranks_file([*BYTES, b"ab"], [*range(256), 97]), "line 257: rank 97 already stands on line 98"),
        (
            ranks_file([*BYTES, b"ab"], [*range(256), 257]),
            "ranks 0 to 256 once each, and rank 256 is missing",
        ),
        (ranks_file([*BYTES[:255], b"ab"]), "1 are missing, the first 0xff"),
        ("\x00\x01binary", "line 1"),
    ],
)
def test_bad_ranks_are_refused(tmp_path: Path, model: str | None, said: str) -> None:
    if model is not None:
        (tmp_path / "tiktoken.model").write_text(model)
    with pytest.raises(CheckpointError, match=said):
        Tokenizer.from_dir(tmp_path)


def test_all_bad_lines_are_listed(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text(ranks_file(BYTES) + "?\n" * 5)
    with pytest.raises(CheckpointError, match="and 2 more") as caught:
        Tokenizer.from_dir(tmp_path)
    assert len(caught.value.problems) == 5


def added(names: dict[str, object]) -> str:
    return json.dumps({"added_tokens_decoder": {i: {"content": name} for i, name in names.items()}})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "expected JSON .* list"),
        ('{"added_tokens_decoder": [1]}', "expected JSON"),
        ('{"added_tokens_decoder": {"256": {}}}', "expected JSON .*content"),
        (added({"x": "a"}), "expected JSON"),
        (added({"256": 1}), "not a string"),
        (added({"255": "a"}), "'a' has id 255, expected 256 to 511"),
        (added({"512": "a"}), "'a' has id 512, expected 256 to 511"),
        (added({"256": ""}), "called ''"),
        (added({"256": "a", "300": "a"}), "256 and 300 are both called 'a'"),
        (added({"256": "<|reserved_token_300|>"}), "token 256 has the name that is reserved for 300"),
    ],
)
def test_bad_names_are_refused(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "tiktoken.model").write_text(ranks_file(BYTES))
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=said):
        Tokenizer.from_dir(tmp_path)


def test_eos_token_of_the_config_ends_too(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text(ranks_file(BYTES))
    config = json.loads(added({"257": "[EOS]", "260": "<end>"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<end>"}))
    assert Tokenizer.from_dir(tmp_path).eos_ids == (257, 260)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": {"content": "<end>"}}))
    assert Tokenizer.from_dir(tmp_path).eos_ids == (257, 260)


# ---- the extra ----------------------------------------------------------------------------------


def test_without_tiktoken_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'k3session\[text\]'$") as caught:
        Tokenizer.from_dir(SHAKESPEARE)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, ConfigError)


def test_importing_text_does_not_load_tiktoken() -> None:
    code = "import sys, k3session.text, k3session.chat\nprint('tiktoken' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
