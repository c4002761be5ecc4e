"""A seeded generator of small documented Python functions with examples and tests.

A *template* is one operation on one kind of argument ("count", "multiples of k", in
a list); a *problem* is a template with constants, names, a wording and examples.
Whole templates, and some constants of every other template, are held out of training.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from shoal.problems.pools import POOLS, Pool

Split = Literal["train", "constants", "templates"]
Choices = Mapping[str, Sequence[Any]]

HELD_OUT_TEMPLATES = 12  # one template in this many is held out whole
HELD_OUT_CONSTANTS = 10  # one choice of constants in this many, of the other templates
MAX_LINE = 72  # characters of an example, so that a prompt stays short


@dataclass(frozen=True)
class Template:
    """A format string for each part of a function, and the constants they may name.

    Every string may use ``{a0}``, ``{a1}`` (argument names) and the keys of `constants`.
    """

    key: str
    name: str
    docs: tuple[str, ...]
    body: str
    kinds: tuple[str, ...]
    constants: Choices
    params: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """One function to write: `prompt` + `solution` is a whole function."""

    template: str
    constants: tuple[Any, ...]
    name: str
    prompt: str
    solution: str
    tests: tuple[str, ...]
    split: Split

    @property
    def function(self) -> str:
        """The source of the whole function, examples included."""
        return self.prompt + self.solution

    @property
    def document(self) -> str:
        """The function followed by its unit tests."""
        return self.function + "\n\n" + "\n".join(self.tests) + "\n"


@dataclass(frozen=True)
class Condition:
    """A predicate on ``{x}``: how it is said, how it is named, how it is computed."""

    key: str
    noun: str
    suffix: str
    expr: str
    constants: Choices
    param: str = ""


@dataclass(frozen=True)
class Operation:
    """What is done with the elements that fulfil a condition ``{p}``."""

    key: str
    docs: tuple[str, ...]
    body: str


def _ints(low: int, high: int) -> tuple[int, ...]:
    return tuple(range(low, high + 1))


INT_CONDITIONS = (
    Condition("even", "even numbers", "even", "{x} % 2 == 0", {}),
    Condition("odd", "odd numbers", "odd", "{x} % 2 == 1", {}),
    Condition("positive", "positive numbers", "positive", "{x} > 0", {}),
    Condition("negative", "negative numbers", "negative", "{x} < 0", {}),
    Condition("above", "numbers greater than {k}", "above_{k}", "{x} > {k}", {"k": _ints(1, 30)}),
    Condition("below", "numbers less than {k}", "below_{k}", "{x} < {k}", {"k": _ints(1, 30)}),
    Condition("multiple", "multiples of {k}", "multiples_of_{k}", "{x} % {k} == 0", {"k": _ints(3, 12)}),
    Condition(
        "indivisible",
        "numbers not divisible by {k}",
        "not_divisible_by_{k}",
        "{x} % {k} != 0",
        {"k": _ints(2, 12)},
    ),
    Condition(
        "between",
        "numbers from {k} to {m}",
        "from_{k}_to_{m}",
        "{k} <= {x} <= {m}",
        {"k": _ints(0, 9), "m": _ints(10, 30)},
    ),
    Condition("ending", "numbers ending in {k}", "ending_in_{k}", "{x} % 10 == {k}", {"k": _ints(0, 9)}),
    Condition("other", "numbers other than {k}", "other_than_{k}", "{x} != {k}", {"k": _ints(0, 20)}),
    Condition("above_arg", "numbers greater than {a1}", "above", "{x} > {a1}", {}, "limit"),
    Condition("below_arg", "numbers less than {a1}", "below", "{x} < {a1}", {}, "limit"),
    Condition("multiple_arg", "multiples of {a1}", "multiples", "{x} % {a1} == 0", {}, "divisor"),
)

INT_OPERATIONS = (
    Operation(
        "keep",
        ("Return the {noun} in {a0}, in order.", "Keep only the {noun} in {a0}."),
        "return [x for x in {a0} if {p}]",
    ),
    Operation(
        "drop",
        ("Return {a0} without the {noun}.", "Remove the {noun} from {a0}."),
        "return [x for x in {a0} if not {p}]",
    ),
    Operation(
        "count",
        ("Count the {noun} in {a0}.", "Return how many {noun} are in {a0}."),
        "return sum(1 for x in {a0} if {p})",
    ),
    Operation(
        "sum",
        ("Return the sum of the {noun} in {a0}.", "Add up the {noun} in {a0}."),
        "return sum(x for x in {a0} if {p})",
    ),
    Operation(
        "first",
        ("Return the first of the {noun} in {a0}, or None.",),
        "for x in {a0}:\n    if {p}:\n        return x\nreturn None",
    ),
    Operation(
        "any",
        ("Return True if {a0} has any {noun}.", "Check whether {a0} contains {noun}."),
        "return any({p} for x in {a0})",
    ),
    Operation(
        "all",
        ("Return True if {a0} has only {noun}.", "Check whether all of {a0} are {noun}."),
        "return all({p} for x in {a0})",
    ),
    Operation(
        "largest",
        ("Return the largest of the {noun} in {a0}, or None.",),
        "return max((x for x in {a0} if {p}), default=None)",
    ),
    Operation(
        "smallest",
        ("Return the smallest of the {noun} in {a0}, or None.",),
        "return min((x for x in {a0} if {p}), default=None)",
    ),
    Operation(
        "index",
        ("Return the positions of the {noun} in {a0}.",),
        "return [i for i, x in enumerate({a0}) if {p}]",
    ),
    Operation(
        "zero",
        ("Replace the {noun} in {a0} by zero.",),
        "return [0 if {p} else x for x in {a0}]",
    ),
    Operation(
        "square",
        ("Return the squares of the {noun} in {a0}.",),
        "return [x * x for x in {a0} if {p}]",
    ),
    Operation(
        "multiply",
        ("Return the product of the {noun} in {a0}.", "Multiply the {noun} in {a0}."),
        "result = 1\nfor x in {a0}:\n    if {p}:\n        result *= x\nreturn result",
    ),
    Operation(
        "sort",
        ("Return the {noun} in {a0}, sorted.", "Sort the {noun} in {a0}."),
        "return sorted(x for x in {a0} if {p})",
    ),
)

CHAR_CONDITIONS = (
    Condition("vowels", "vowels", "vowels", '{x} in "aeiou"', {}),
    Condition("digits", "digits", "digits", "{x}.isdigit()", {}),
    Condition("capitals", "capital letters", "capitals", "{x}.isupper()", {}),
    Condition("letters", "letters", "letters", "{x}.isalpha()", {}),
    Condition("spaces", "spaces", "spaces", '{x} == " "', {}),
    Condition("char", "letters {k!r}", "letter_{k}", '{x} == "{k}"', {"k": "abcdeghilmnoprstuw"}),
    Condition(
        "pair",
        "letters {k!r} and {m!r}",
        "{k}_and_{m}",
        '{x} in "{k}{m}"',
        {"k": "aeilno", "m": "bcdprst"},
    ),
    Condition("char_arg", "characters equal to {a1}", "matching", "{x} == {a1}", {}, "letter"),
)

CHAR_OPERATIONS = (
    Operation(
        "keep",
        ("Keep only the {noun} in {a0}.",),
        'return "".join(c for c in {a0} if {p})',
    ),
    Operation(
        "drop",
        ("Remove the {noun} from {a0}.", "Return {a0} without the {noun}."),
        'return "".join(c for c in {a0} if not {p})',
    ),
    Operation(
        "count",
        ("Count the {noun} in {a0}.", "Return how many {noun} are in {a0}."),
        "return sum(1 for c in {a0} if {p})",
    ),
    Operation(
        "index",
        ("Return the positions of the {noun} in {a0}.",),
        "return [i for i, c in enumerate({a0}) if {p}]",
    ),
    Operation(
        "hide",
        ("Replace the {noun} in {a0} by stars.",),
        'return "".join("*" if {p} else c for c in {a0})',
    ),
    Operation(
        "double",
        ("Double the {noun} in {a0}.",),
        'return "".join(c * 2 if {p} else c for c in {a0})',
    ),
    Operation(
        "any",
        ("Check whether {a0} contains {noun}.",),
        "return any({p} for c in {a0})",
    ),
)

WORD_CONDITIONS = (
    Condition(
        "longer",
        "words longer than {k} letters",
        "longer_than_{k}",
        "len({x}) > {k}",
        {"k": _ints(2, 9)},
    ),
    Condition(
        "shorter",
        "words shorter than {k} letters",
        "shorter_than_{k}",
        "len({x}) < {k}",
        {"k": _ints(3, 9)},
    ),
    Condition("exactly", "words of {k} letters", "of_{k}_letters", "len({x}) == {k}", {"k": _ints(2, 8)}),
    Condition(
        "starting",
        "words starting with {k!r}",
        "starting_with_{k}",
        '{x}.startswith("{k}")',
        {"k": "abcdefghlmoprstw"},
    ),
    Condition(
        "ending",
        "words ending with {k!r}",
        "ending_with_{k}",
        '{x}.endswith("{k}")',
        {"k": "adeghklnrsty"},
    ),
    Condition(
        "containing",
        "words containing {k!r}",
        "containing_{k}",
        '"{k}" in {x}',
        {"k": "abcdeghilnoprstu"},
    ),
    Condition("longer_arg", "words longer than {a1}", "longer", "len({x}) > {a1}", {}, "limit"),
    Condition("starting_arg", "words starting with {a1}", "starting", "{x}.startswith({a1})", {}, "letter"),
)

WORD_OPERATIONS = (
    Operation(
        "keep",
        ("Return the {noun} in {a0}, in order.", "Keep only the {noun} in {a0}."),
        "return [w for w in {a0} if {p}]",
    ),
    Operation(
        "drop",
        ("Return {a0} without the {noun}.", "Remove the {noun} from {a0}."),
        "return [w for w in {a0} if not {p}]",
    ),
    Operation(
        "count",
        ("Count the {noun} in {a0}.", "Return how many {noun} are in {a0}."),
        "return sum(1 for w in {a0} if {p})",
    ),
    Operation(
        "join",
        ("Join the {noun} in {a0} with spaces.",),
        'return " ".join(w for w in {a0} if {p})',
    ),
    Operation(
        "measure",
        ("Return the lengths of the {noun} in {a0}.",),
        "return [len(w) for w in {a0} if {p}]",
    ),
    Operation(
        "upper",
        ("Return the {noun} in {a0} in upper case.",),
        "return [w.upper() for w in {a0} if {p}]",
    ),
    Operation(
        "reverse",
        ("Return the {noun} in {a0}, each one reversed.",),
        "return [w[::-1] for w in {a0} if {p}]",
    ),
    Operation(
        "any",
        ("Check whether {a0} contains {noun}.",),
        "return any({p} for w in {a0})",
    ),
)

DICT_OPERATIONS = (
    Operation(
        "select",
        ("Keep the items of {a0} whose values are {noun}.",),
        "return {{k: v for k, v in {a0}.items() if {p}}}",
    ),
    Operation(
        "keys",
        ("Return the keys of {a0} whose values are {noun}.",),
        "return [k for k, v in {a0}.items() if {p}]",
    ),
    Operation(
        "tally",
        ("Count the values of {a0} that are {noun}.",),
        "return sum(1 for v in {a0}.values() if {p})",
    ),
    Operation(
        "total",
        ("Return the sum of the values of {a0} that are {noun}.",),
        "return sum(v for v in {a0}.values() if {p})",
    ),
)


@dataclass(frozen=True)
class Mapped:
    """An expression in ``{x}``, and how it is said and named."""

    key: str
    phrase: str
    suffix: str
    expr: str
    constants: Choices


EXPRESSIONS = (
    Mapped("plus", "plus {k}", "plus_{k}", "{x} + {k}", {"k": _ints(1, 30)}),
    Mapped("minus", "minus {k}", "minus_{k}", "{x} - {k}", {"k": _ints(1, 30)}),
    Mapped("times", "times {k}", "times_{k}", "{x} * {k}", {"k": _ints(2, 20)}),
    Mapped("over", "divided by {k}, rounded down", "over_{k}", "{x} // {k}", {"k": _ints(2, 12)}),
    Mapped("mod", "modulo {k}", "mod_{k}", "{x} % {k}", {"k": _ints(2, 12)}),
    Mapped("squared", "squared", "squared", "{x} * {x}", {}),
    Mapped(
        "affine",
        "times {k} plus {m}",
        "times_{k}_plus_{m}",
        "{x} * {k} + {m}",
        {"k": _ints(2, 9), "m": _ints(1, 9)},
    ),
    Mapped("at_most", "limited to at most {k}", "at_most_{k}", "min({x}, {k})", {"k": _ints(2, 20)}),
    Mapped("at_least", "raised to at least {k}", "at_least_{k}", "max({x}, {k})", {"k": _ints(1, 20)}),
)

MAPS = (
    Operation(
        "each",
        ("Return each number in {a0} {phrase}.", "Return a list of the numbers in {a0} {phrase}."),
        "return [{e} for x in {a0}]",
    ),
    Operation(
        "total",
        ("Return the sum of each number in {a0} {phrase}.",),
        "return sum({e} for x in {a0})",
    ),
    Operation(
        "table",
        ("Map each number in {a0} to the number {phrase}.",),
        "return {{x: {e} for x in {a0}}}",
    ),
    Operation(
        "distinct",
        ("Return the distinct numbers in {a0} {phrase}, sorted.",),
        "return sorted({{{e} for x in {a0}}})",
    ),
)


def _fill(text: str, **parts: str) -> str:
    """Replaces only the named fields of a format string."""
    for key, part in parts.items():
        text = text.replace("{" + key + "}", part)
    return text


def _crossed(
    family: str, variable: str, operations: Sequence[Operation], conditions: Sequence[Condition]
) -> Iterator[Template]:
    """Every operation with every condition over one kind of argument."""
    for operation, condition in itertools.product(operations, conditions):
        test = _fill(condition.expr, x=variable)
        if operation.key == "drop":
            test = test if test.endswith(")") else f"({test})"
        argument_kinds = {"limit": "limit", "divisor": "divisor", "letter": "letter"}
        extra = (condition.param,) if condition.param else ()
        yield Template(
            key=f"{family}.{operation.key}.{condition.key}",
            name=f"{operation.key}_{condition.suffix}",
            docs=tuple(_fill(doc, noun=condition.noun) for doc in operation.docs),
            body=_fill(operation.body, p=test),
            kinds=(family, *(argument_kinds[name] for name in extra)),
            constants=condition.constants,
            params=extra,
        )


def _mapped() -> Iterator[Template]:
    """Every use of a mapped list with every expression; and the same over dicts."""
    for operation, mapped in itertools.product(MAPS, EXPRESSIONS):
        yield Template(
            key=f"ints.{operation.key}.{mapped.key}",
            name=f"{operation.key}_{mapped.suffix}",
            docs=tuple(_fill(doc, phrase=mapped.phrase) for doc in operation.docs),
            body=_fill(operation.body, e=_fill(mapped.expr, x="x")),
            kinds=("ints",),
            constants=mapped.constants,
        )
    for mapped in EXPRESSIONS:
        expression = _fill(mapped.expr, x="v")
        yield Template(
            key=f"dict.values.{mapped.key}",
            name=f"values_{mapped.suffix}",
            docs=(f"Return {{a0}} with each value {mapped.phrase}.",),
            body=f"return {{{{k: {expression} for k, v in {{a0}}.items()}}}}",
            kinds=("dict",),
            constants=mapped.constants,
        )


@cache
def templates() -> tuple[Template, ...]:
    """Every template, in a fixed order."""
    from shoal.problems.singles import SINGLES

    dict_conditions = [c for c in INT_CONDITIONS if not c.param]
    singles = (
        Template(f"single.{name.replace('_{k}', '')}", name, (doc,), body, kinds, constants)
        for name, doc, kinds, constants, body in SINGLES
    )
    return (
        *_crossed("ints", "x", INT_OPERATIONS, INT_CONDITIONS),
        *_crossed("text", "c", CHAR_OPERATIONS, CHAR_CONDITIONS),
        *_crossed("words", "w", WORD_OPERATIONS, WORD_CONDITIONS),
        *_crossed("dict", "v", DICT_OPERATIONS, dict_conditions),
        *_mapped(),
        *singles,
    )


def _bucket(text: str, buckets: int) -> int:
    """A hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % buckets


def split_of(template: str, constants: tuple[Any, ...]) -> Split:
    """The split that a template with these constants belongs to."""
    if _bucket(template, HELD_OUT_TEMPLATES) == 0:
        return "templates"
    if constants and _bucket(f"{template} {constants}", HELD_OUT_CONSTANTS) == 0:
        return "constants"
    return "train"


def _run(source: str, name: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(source, scope)  # our own generated source
    function: Callable[..., Any] = scope[name]
    return function


def _calls(
    rng: random.Random, function: Callable[..., Any], name: str, pools: Sequence[Pool], count: int
) -> list[tuple[str, str]]:
    """Up to `count` different calls, as source, with the repr of their results."""
    found: dict[str, str] = {}
    for _ in range(6 * count):
        arguments = [pool.draw(rng) for pool in pools]
        call = f"{name}({', '.join(map(repr, arguments))})"
        result = function(*arguments)
        # The doctest prompt prints nothing for None, so such a call is no example.
        if result is None or len(call) > MAX_LINE or len(repr(result)) > MAX_LINE:
            continue
        found[call.replace("'", '"')] = repr(result)
        if len(found) == count:
            break
    return list(found.items())


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _problem(rng: random.Random, template: Template) -> Problem | None:
    """One problem of a template; None where no two examples were found."""
    constants = {key: rng.choice(choices) for key, choices in template.constants.items()}
    pools = [POOLS[kind] for kind in template.kinds]
    names = [rng.choice(pool.names) for pool in pools]
    if len(names) == 2 and names[0] == names[1]:
        names[1] = "other"
    fields = {**constants, **{f"a{i}": name for i, name in enumerate(names)}}
    name = template.name.format(**fields)
    head = f"def {name}({', '.join(names)}):\n"
    solution = _indent(template.body.format(**fields))
    calls = _calls(rng, _run(head + solution, name), name, pools, rng.choice((3, 4, 4, 5)))
    if len(calls) < 3:
        return None
    doc = rng.choice(template.docs).format(**fields)
    examples = "".join(f">>> {call}\n{result}\n" for call, result in calls[:2])
    values = tuple(constants.values())
    return Problem(
        template=template.key,
        constants=values,
        name=name,
        prompt=head + _indent(f'"""{doc}\n') + "\n" + _indent(f'{examples}"""'),
        solution=solution,
        tests=tuple(f"assert {call} == {_quoted(result)}" for call, result in calls[2:]),
        split=split_of(template.key, values),
    )


def _quoted(result: str) -> str:
    """A repr with double quotes, as the rest of the source has them."""
    return result.replace("'", '"')


def generate(seed: int, n: int, split: Split) -> list[Problem]:
    """`n` problems of one split, the same for the same seed."""
    rng = random.Random(f"{seed} {split}")
    held_out = [t for t in templates() if split_of(t.key, ()) == "templates"]
    pool = [t for t in templates() if t not in held_out]
    if split == "templates":
        pool = held_out
    elif split == "constants":
        pool = [t for t in pool if t.constants]
    weights = [3.0 if t.constants else 1.0 for t in pool]
    problems: list[Problem] = []
    while len(problems) < n:
        problem = _problem(rng, rng.choices(pool, weights)[0])
        if problem is not None and problem.split == split:
            problems.append(problem)
    return problems
