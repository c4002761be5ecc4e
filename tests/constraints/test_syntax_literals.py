"""Open strings in middles of Python programs: every prefix of a right one is kept, one that nothing closes is refused at once.

Tests of: constraints.syntax.viable and layout.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from shoal.constraints.syntax import viable as viable_module
from shoal.constraints.syntax.layout import SourceLayout
from shoal.constraints.syntax.viable import is_complete, is_viable

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="older parsers do not tell incomplete from wrong")
SIGNS = "{}!:r'+"
"""With these every part of a field can be written: expressions, strings in them, conversions, formats, fields in formats."""
ENDS = [
    inner + braces + '"'
    for inner in ("", "r", "'", "r'", "''", "}'", "r}'", "}}'", "+r", "=r", "r)", "'''")
    for braces in ("", "}", "}}", "}}}")
]


def viable(text: str) -> bool:
    layout = SourceLayout()
    return all((not layout.due or is_viable(layout)) and layout.feed(c) for c in text) and is_viable(layout)


def bodies(most: int) -> list[str]:
    """All texts of at most so many signs, behind the quote of an f-string."""
    return ['f"' + "".join(signs) for size in range(most + 1) for signs in itertools.product(SIGNS, repeat=size)]


def refused_wrongly(most: int) -> list[str]:
    """Beginnings of strings that compile."""
    whole = [body + '"' for body in bodies(most) if is_complete(body + '"')]
    return sorted({text[:end] for text in whole for end in range(len(text) + 1) if not viable(text[:end])})


def kept_wrongly(most: int) -> list[str]:
    """Texts that are kept, and none of the ends closes."""
    return [body for body in bodies(most) if viable(body) and not any(is_complete(body + end) for end in ENDS)]


def test_beginnings_of_strings_that_compile_are_kept() -> None:
    assert refused_wrongly(5) == []


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later parsers allow more within fields")
def test_what_nothing_closes_is_refused() -> None:
    assert kept_wrongly(4) == []


def _single_brace(body: str, raw: bool) -> Any:
    return viable_module.Field(0, "text")


@pytest.mark.parametrize(
    ("name", "wrong", "found"),
    [("_expression_begins", lambda *_: True, kept_wrongly), ("_field", _single_brace, refused_wrongly)],
)
def test_wrong_rules_are_caught(
    name: str, wrong: Callable[..., Any], found: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expression that nothing completes; a field that is read as text."""
    monkeypatch.setattr(viable_module, name, wrong)
    assert found(3)


@pytest.mark.parametrize(
    "text",
    [
        'x = f"{1 +',
        'x = f"{a!',
        'x = f"{a!r',
        'x = f"{a:{b',
        'x = f"{a:{b}}',
        'x = f"{lambda',
        'x = f"{(lambda x: 1)',
        'x = f"{a=',
        'x = f"{a==',
        'x = f"{a= !r',
        "x = f\"{d['a",
        "x = f\"{f'{b}'",
        "x = f\"{f'{b",
        "x = '\\x",
        "x = '\\N{DIGIT",
        "x = f'''{a}''",
        "x = '''a\\",
        "x = rb'\\x",
        "x = r'\\",
        'x = """a"\\',
        'x = fr"\\{',
        'x = fr"\\{a',
        'x = f"""{a:"\\',
        "x = '\\U0010",
        'x = f"{{}',
        'x = f"{x!=y',
        'x = f"\\N{DIGIT',
        'x = f"{a if b',
        'x = b"\\xa',
        'x = f"""{\na',
    ],
)
def test_what_can_be_closed_is_kept(text: str) -> None:
    assert viable(text)


@pytest.mark.parametrize(
    "text",
    [
        'x = f"{1 +}',
        'x = f"{)',
        'x = f"{}',
        'x = f"a}b',
        'x = f"{1 2',
        'x = f"{a!x',
        'x = f"{lambda x',
        "x = f\"{f'{b c ",
        "x = '\\xg",
        "x = b'é",
        "x = '\\U0012",
        'x = f"{{}a',
        'x = f"{1 +}"',
        "x = '\\x4'",
        "x = f'{a:{b:{c",
        "x = f'{a]",
        "x = f'{(a}",
    ],
)
def test_what_cannot_be_closed_is_refused(text: str) -> None:
    assert not viable(text)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later parsers allow these")
@pytest.mark.parametrize("text", ['x = f"{a\\', 'x = f"""{#'])
def test_what_older_parsers_do_not_allow_is_refused(text: str) -> None:
    assert not viable(text)
