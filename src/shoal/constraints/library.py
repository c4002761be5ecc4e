"""llguidance, if it is installed (the extra `grammar`), and its conversion of GBNF. Without
torch."""

from __future__ import annotations

from typing import Any

from shoal.errors import RequestError


def llguidance_or_refuse() -> Any:
    """Returns the library. Raises RequestError: it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise RequestError("grammars need llguidance: pip install '.[grammar]'") from error
    return llguidance


def as_lark(text: str) -> str:
    """Returns a grammar in Lark's syntax; a GBNF grammar (llama.cpp's, with `::=`) is converted.

    Raises:
        RequestError: it has `::=` and is no GBNF, or llguidance is not installed.
    """
    if "::=" not in text:
        return text
    llguidance_or_refuse()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # whatever it meets in a text that is no grammar
        raise RequestError(f"the grammar is no GBNF: {error!s:.300}") from error
