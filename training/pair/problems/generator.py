"""A seeded generator of small documented Python functions with examples and tests.

A *template* is one operation on one kind of argument ("count", "multiples of k", in a list); a
*problem* is a template with constants, names, a wording and examples. Whole templates, and some
constants of every other template, are held out of training.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from problems.numbers import (
    DICT_OPERATIONS,
    EXPRESSIONS,
    INT_CONDITIONS,
    INT_OPERATIONS,
    MAPS,
)
from problems.pools import POOLS, Pool
from problems.singles import SINGLES
from problems.strings import (
    CHAR_CONDITIONS,
    CHAR_OPERATIONS,
    WORD_CONDITIONS,
    WORD_OPERATIONS,
)
from problems.templates import Condition, Operation, Template

Split = Literal["train", "constants", "templates"]


HELD_OUT_TEMPLATES = 12  # one template in this many is held out whole


HELD_OUT_CONSTANTS = 10  # one choice of constants in this many, of the other templates


MAX_LINE = 72  # characters of an example, so that a prompt stays short


@dataclass(frozen=True)
class FunctionProblem:
    """A function to write: `prompt` + `solution` is a whole function."""

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


def _fill(text: str, **parts: str) -> str:
    """Replaces only the named fields of a format string."""
    for key, part in parts.items():
        text = text.replace("{" + key + "}", part)
    return text


def _combined(
    family: str, variable: str, operations: Sequence[Operation], conditions: Sequence[Condition]
) -> Iterator[Template]:
    """Yields every operation with every condition over one kind of argument."""
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
    """Yields every use of a mapped list with every expression, over lists and over dicts."""
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
    """Returns every template, in a fixed order."""
    dict_conditions = [c for c in INT_CONDITIONS if not c.param]
    singles = (
        Template(f"single.{name.replace('_{k}', '')}", name, (doc,), body, kinds, constants)
        for name, doc, kinds, constants, body in SINGLES
    )
    return (
        *_combined("ints", "x", INT_OPERATIONS, INT_CONDITIONS),
        *_combined("text", "c", CHAR_OPERATIONS, CHAR_CONDITIONS),
        *_combined("words", "w", WORD_OPERATIONS, WORD_CONDITIONS),
        *_combined("dict", "v", DICT_OPERATIONS, dict_conditions),
        *_mapped(),
        *singles,
    )


def _hash_modulo(text: str, modulus: int) -> int:
    """Computes a hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % modulus


def split_of(template: str, constants: tuple[Any, ...]) -> Split:
    """Returns the split that a template with these constants belongs to."""
    if _hash_modulo(template, HELD_OUT_TEMPLATES) == 0:
        return "templates"
    if constants and _hash_modulo(f"{template} {constants}", HELD_OUT_CONSTANTS) == 0:
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
    """Returns up to `count` different calls, as source, with the repr of their results."""
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


def _problem(rng: random.Random, template: Template) -> FunctionProblem | None:
    """Makes one problem of a template; returns None if no two examples are found."""
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
    return FunctionProblem(
        template=template.key,
        constants=values,
        name=name,
        prompt=head + _indent(f'"""{doc}\n') + "\n" + _indent(f'{examples}"""'),
        solution=solution,
        tests=tuple(f"assert {call} == {_quoted(result)}" for call, result in calls[2:]),
        split=split_of(template.key, values),
    )


def _quoted(result: str) -> str:
    """Writes a repr with double quotes, like the rest of the source."""
    return result.replace("'", '"')


def generate(seed: int, n: int, split: Split) -> list[FunctionProblem]:
    """Generates `n` problems of one split, the same for the same seed."""
    rng = random.Random(f"{seed} {split}")
    held_out = [t for t in templates() if split_of(t.key, ()) == "templates"]
    pool = [t for t in templates() if t not in held_out]
    if split == "templates":
        pool = held_out
    elif split == "constants":
        pool = [t for t in pool if t.constants]
    weights = [3.0 if t.constants else 1.0 for t in pool]
    problems: list[FunctionProblem] = []
    while len(problems) < n:
        problem = _problem(rng, rng.choices(pool, weights)[0])
        if problem is not None and problem.split == split:
            problems.append(problem)
    return problems
