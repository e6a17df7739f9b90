"""Stop strings: nothing leaks, nothing is held back without need, cuts do not matter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.text.stop import StopChecker

LETTERS = st.text(alphabet="ab", min_size=1, max_size=5)


def expected_result(text, stop, include_stop):
    """The rule, by trying every end."""
    for end in range(1, len(text) + 1):
        complete = [word for word in stop if text[:end].endswith(word)]
        if complete:
            word = max(complete, key=len)
            return text[: end if include_stop else end - len(word)], word
    return text, None


def feed(checker, pieces):
    sent = ""
    for piece in pieces:
        text, word = checker.push(piece)
        sent += text
        if word is not None:
            return sent + checker.flush(), word
    return sent + checker.flush(), None


@settings(deadline=None, max_examples=1000)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4)),
    stop=st.lists(LETTERS, max_size=4),
    include_stop=st.booleans(),
)
def test_is_the_rule_for_every_cut(pieces, stop, include_stop):
    checker = StopChecker(stop, include_stop=include_stop)
    assert feed(checker, pieces) == expected_result("".join(pieces), stop, include_stop)


@settings(deadline=None, max_examples=500)
@given(pieces=st.lists(st.text(alphabet="abc", max_size=4)), stop=st.lists(LETTERS, min_size=1))
def test_holds_back_only_what_begins_a_stop_string(pieces, stop):
    checker = StopChecker(stop, include_stop=False)
    whole = sent = ""
    for piece in pieces:
        text, word = checker.push(piece)
        if word is not None:
            return
        whole, sent = whole + piece, sent + text
        held = whole.removeprefix(sent)
        beginnings = [word[:length] for word in stop for length in range(len(word))]
        assert held == max((b for b in beginnings if whole.endswith(b)), key=len)


def test_a_stop_string_over_three_pushes_does_not_leak():
    checker = StopChecker(["four five si"], include_stop=False)
    pushed = [checker.push(text) for text in ("three fo", "ur five", " si", "x")[:3]]
    assert pushed == [("three ", None), ("", None), ("", "four five si")]


def test_included_text_ends_with_the_stop_string():
    checker = StopChecker(["stop"], include_stop=True)
    assert checker.push("a st") == ("a ", None)
    assert checker.push("opping there") == ("stop", "stop")


def test_a_long_stop_string_delays_nothing():
    checker = StopChecker(["<" + "x" * 199], include_stop=False)
    assert checker.push("plain text") == ("plain text", None)
    assert checker.push("a < b") == ("a < b", None)
    assert checker.push("a <") == ("a ", None)
    assert checker.push("xx") == ("", None)
    assert checker.push("y") == ("<xxy", None)


def test_the_first_to_be_complete_and_the_longest_of_those():
    assert StopChecker(["abcd", "bc"], include_stop=False).push("abcd") == ("a", "bc")
    assert StopChecker(["bc", "abc"], include_stop=False).push("xabc") == ("x", "abc")


def test_what_is_kept_back_is_flushed_once():
    checker = StopChecker(["ab"], include_stop=False)
    assert checker.push("xa") == ("x", None)
    assert checker.flush() == "a"
    assert checker.flush() == ""


def test_without_stop_strings_text_passes():
    assert StopChecker([], include_stop=False).push("x") == ("x", None)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""], include_stop=False)


def test_work_is_linear():
    """An almost-match of 4,000 characters, fed by single characters, looks at each a few times."""

    class Counted(str):
        looks = 0

        def __getitem__(self, index):
            Counted.looks += 1
            return super().__getitem__(index)

    checker = StopChecker([Counted("a" * 4000 + "b")], include_stop=False)
    Counted.looks = 0
    for _ in range(20_000):
        checker.push("a")
    assert Counted.looks < 5 * 20_000
