"""Input files: what is refused, with the line and the reason, and what is never held in memory."""

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.jobs.validate import MAX_LINE_BYTES, TooLong, Validation, split_lines
from tests.scheduler.jobs.helpers import ENDPOINT, as_lines, task


def read(data: bytes, **limits: Any) -> Validation:
    validation = Validation(ENDPOINT, **limits)
    list(validation.read([data]))
    return validation


REFUSED: list[tuple[str, int | None, bytes]] = [
    ("empty_file", None, b""),
    ("empty_file", None, b"\n \n\r\n"),
    ("invalid_json_line", 1, b"{"),
    ("invalid_json_line", 1, b"[]"),
    ("invalid_json_line", 1, b"\xff\xfe"),
    ("invalid_json_line", 1, b"[" * 100_000),
    ("invalid_json_line", 1, b'{"custom_id": ' + b"9" * 10_000 + b"}"),
    ("missing_required_parameter", 1, b"{}"),
    ("invalid_method", 1, as_lines([task("a", method="GET")])),
    ("invalid_url", 2, as_lines([task("a"), task("b", url="/v1/chat/completions")])),
    ("invalid_request", 1, as_lines([task("a", body=[])])),
    ("invalid_custom_id", 1, as_lines([task("")])),
    ("invalid_custom_id", 1, as_lines([task("a" * 300)])),
    ("invalid_custom_id", 1, as_lines([task("a\u0000")])),
    ("invalid_custom_id", 1, as_lines([task("a\ud800")])),
    ("invalid_custom_id", 1, as_lines([task("a", custom_id=7)])),
    ("unknown_parameter", 1, as_lines([task("a", priority=1)])),
    ("duplicate_custom_id", 3, as_lines([task("a"), task("b"), task("a")])),
]


@pytest.mark.parametrize(("code", "line", "data"), REFUSED, ids=[r[0] for r in REFUSED])
def test_each_mistake_has_its_code_and_line(code: str, line: int | None, data: bytes) -> None:
    first = read(data).errors[0]
    assert (first.code, first.line) == (code, line)
    assert first.message


def test_too_many_lines() -> None:
    data = as_lines([task(str(k)) for k in range(4)])
    assert read(data, max_lines=4).errors == []
    (error,) = read(data, max_lines=3).errors
    assert (error.code, error.line) == ("too_many_tasks", 4)


def test_a_line_that_never_ends() -> None:
    (error,) = read(as_lines([task("a")]) + b"x" * (MAX_LINE_BYTES + 1)).errors
    assert (error.code, error.line) == ("invalid_json_line", 2)


def test_errors_stop_at_a_hundred() -> None:
    assert len(read(b"{\n" * 1000).errors) == 100


def test_blank_lines_count_as_lines_but_not_as_requests() -> None:
    validation = read(b"\n" + as_lines([task("a")]) + b"\r\n{\n")
    assert validation.count == 2
    assert validation.errors[0].line == 4


@given(st.binary(max_size=60), st.integers(1, 7))
def test_pieces_change_nothing(data: bytes, size: int) -> None:
    pieces = [data[k : k + size] for k in range(0, len(data), size)]
    expected = data.split(b"\n")
    assert list(split_lines(pieces)) == (expected if expected[-1] else expected[:-1])


def test_the_limit_of_a_line() -> None:
    assert list(split_lines([b"abc\nabcd"], 4)) == [b"abc", b"abcd"]
    with pytest.raises(TooLong) as error:
        list(split_lines([b"abc\nab", b"cde\n"], 4))
    assert error.value.number == 2


def test_fifty_thousand_lines_are_not_held_in_memory() -> None:
    def chunks() -> Iterator[bytes]:
        for k in range(50_000):
            body = {"prompt": "a" * 500}
            yield json.dumps(task(str(k), body=body)).encode() + b"\n"

    validation = Validation(ENDPOINT)
    tracemalloc.start()
    try:
        count = sum(1 for _ in validation.read(chunks()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 50_000
    assert peak < 12 << 20  # the file has 30 MB
