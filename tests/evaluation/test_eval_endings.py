"""Where completions end and how they are asked for."""

from __future__ import annotations

import ast
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.constraints.fim import SUFFIX_FIRST, TOKENS, fill_in_middle
from shoal.errors import RequestError
from shoal.evaluation.endings import ending
from shoal.evaluation.languages import LANGUAGES
from shoal.evaluation.tasks import chat_ids, code_tasks, function_problems, infilling_tasks, open_ended
from shoal.testing import tiny_tokenizer

PYTHON = 'def f(x):\n    """Says {."""\n'


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("    return x\n", "    return x\n"),
        ("    return x\n\n\ndef g():\n    return 1\n", "    return x\n\n\ndef g():\n    return 1\n"),  # helpers belong to it
        ("    return x\n\n\ndef g():\n    return (1,\n", "    return x\n\n\n"),  # cut in the middle of the next one
        ("    return x\n\nAnd that is all.\n", "    return x\n\n"),
        ('    y = """\nleft edge\n"""\n    return y\n', '    y = """\nleft edge\n"""\n    return y\n'),
        ("    y = [\n1,\n]\n    return y\nOh so", "    y = [\n1,\n]\n    return y\n"),
        ("    return (x\n", "    return (x\n"),  # a syntax error of the function itself stays one
        ("    return (x\n\nprint(f(1))\n", "    return (x\n\n"),
        ("", ""),
    ],
)
def test_python_is_cut_after_the_last_block_that_parses(text: str, kept: str) -> None:
    assert ending("python").cut(PYTHON, text, False) == kept


@given(st.lists(st.sampled_from(["    return x", "def g():", "    y = (", "x = 1", ")", "", "é\x00"]), max_size=7))
def test_python_is_cut_to_a_beginning_that_parses_if_there_is_one(lines: list[str]) -> None:
    text = "\n".join(lines)
    kept = ending("python").cut(PYTHON, text, False)
    assert text.startswith(kept)
    assert text == kept or text[len(kept) - 1] == "\n"
    if not _parses(PYTHON + kept):
        assert not _parses(PYTHON + text)


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


JAVASCRIPT = "/** {{{ */\nfunction f(x) {\n"
JAVA = "class F {\n    public static int f(int x) {\n"
SCALA = "object Main extends App {\n    /** } */\n    def f(x : Int) : Int = {\n"
CSHARP = "namespace Solution\n{\n    public class Program\n    {\n        public static int f() {"
PERL = "# it's {\nsub f {\n"


@pytest.mark.parametrize(
    ("language", "prompt", "text", "stopped", "kept"),
    [
        ("javascript", JAVASCRIPT, "  return x;\n}\nfunction g() {\n}", False, "  return x;\n}"),
        ("javascript", JAVASCRIPT, "  return x;", True, "  return x;\n}"),  # the stop string's brace is put back
        ("javascript", JAVASCRIPT, "  return x;", False, "  return x;"),  # but not for a row that just ran out of tokens
        ("javascript", JAVASCRIPT, '  return "}" + `}`; // }\n}\n}', False, '  return "}" + `}`; // }\n}'),
        ("javascript", JAVASCRIPT, "  if (x) {\n    return 1;", True, "  if (x) {\n    return 1;"),  # two are missing
        ("javascript", "function f() ", '/* { */ {\n  g("}");\n}\nmore()', False, '/* { */ {\n  g("}");\n}'),
        ("javascript", JAVASCRIPT, "  /* a\n } */\n  return 1;\n}\nmore()", False, "  /* a\n } */\n  return 1;\n}"),
        ("javascript", JAVASCRIPT + "  if (x) {\n", "    return 1;\n  }", True, "    return 1;\n  }\n}"),
        ("java", JAVA, "        return x;\n    }", True, "        return x;\n    }\n}"),
        ("cpp", "int f(int x) { // {\n", "  return '}';\n}\nint main() {}", False, "  return '}';\n}"),
        ("go", "func f() int {\n", "\tif true { return 1 }\n\treturn 2", True, "\tif true { return 1 }\n\treturn 2\n}"),
        ("perl", PERL, "  split //, $x; # }\n  $#a;\n}\nf();", False, "  split //, $x; # }\n  $#a;\n}"),
        ("php", "<?php\nfunction f($x) {\n", "    return 1; # }", True, "    return 1; # }\n}"),
        ("ruby", "def f(x)\n", "  x + 1", True, "  x + 1\nend"),
        ("ruby", "def f(x)\n", "  x + 1", False, "  x + 1"),
        ("kotlin", "fun f(x : Int) : Int {\n", "    return x\n}\nfun main() {}", False, "    return x\n}"),
        ("swift", "func f(x : Int) -> Int {\n", "    return x", True, "    return x\n}"),
        ("scala", SCALA, "        x\n    }\n}", False, "        x\n    }"),  # the tests close the object
        ("scala", SCALA, "        x", True, "        x\n    }"),
        ("scala", SCALA, "        if (x > 1) {\n        1", True, "        if (x > 1) {\n        1"),
        ("csharp", CSHARP, '            return "}";', True, '            return "}";\n        }'),
        (
            "csharp",
            CSHARP,
            "            return 1;\n        }\n        int g() {}",
            False,
            "            return 1;\n        }",
        ),
    ],
)
def test_functions_with_braces_end_where_theirs_closes(
    language: str, prompt: str, text: str, stopped: bool, kept: str
) -> None:
    assert ending(language).cut(prompt, text, stopped) == kept


def test_every_language_has_an_ending_but_those_of_multipl_e_which_brings_stops() -> None:
    only_there = {"lua", "bash", "r", "racket"}
    assert {language for language in LANGUAGES if not ending(language).stops} == only_there
    assert not ending("cobol").stops


# ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_middle_is_asked_for_by_the_tokenizers_own_tokens() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(RequestError, match="fill-in-the-middle"):
        fill_in_middle(tokenizer, "a", "b")
    for tokens in [each for each in TOKENS if each[0] not in SUFFIX_FIRST]:  # the others: test_tokenizers_of_models
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(list(tokens), special_tokens=True)
        assert tokenizer.decode(fill_in_middle(tokenizer, "é\n", " z")) == f"{tokens[0]}é\n{tokens[1]} z{tokens[2]}"


def test_a_middle_needs_a_suffix() -> None:
    with pytest.raises(RequestError, match="no suffix"):
        infilling_tasks(function_problems(1))


def test_a_chat_begins_the_answer_with_the_prompt() -> None:
    (problem,), tokenizer = function_problems(1), tiny_tokenizer()
    (task,) = code_tasks([problem], chat=True)
    with pytest.raises(RequestError, match="chat template"):
        task.read(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
    )
    text = tokenizer.decode(task.read(tokenizer))
    assert text.startswith("[user]")
    assert text.count(problem.prompt) == 2
    assert text.endswith(f"[answer]```python\n{problem.prompt}")
    assert "\n```" in task.stops
    assert tokenizer.decode(chat_ids(tokenizer, "Why?")) == "[user]Why?[answer]"


class Joining:
    """Writes a line break and the blanks behind it as one token, as many tokenizers do."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [hash(part) for part in re.findall(r"\n *|[^\n]", text)]


def test_a_prompt_leaves_its_last_line_break_to_a_model_whose_tokenizer_joins_it_with_an_indent() -> None:
    for blanks in ("\n", "\n    ", "\n\n"):
        assert open_ended(Joining(), f"def f():{blanks}") == "def f():"
    assert open_ended(Joining(), "def f():") == "def f():"
    assert open_ended(tiny_tokenizer(), "def f():\n") == "def f():\n"
    assert open_ended(tiny_tokenizer(), "") == ""


def test_the_generated_problems_are_held_out_distinct_and_a_beginning_of_more() -> None:
    some, more = function_problems(12), function_problems(120)
    assert more[:12] == some
    assert len({problem.prompt for problem in more}) == len({problem.task_id for problem in more}) == 120
    assert [problem.task_id.split("/")[0] for problem in some[:4]] == ["templates", "constants"] * 2
    for problem in some:
        exec(problem.program(problem.canonical or ""), {})  # our own source
        with pytest.raises(AssertionError):
            exec(problem.program("    return 'wrong'\n"), {})
