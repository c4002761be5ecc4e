"""The conditions, operations and expressions on the numbers of a list or of a dict's values."""

from __future__ import annotations

from problems.templates import Condition, Expression, Operation, integers

INT_CONDITIONS = (
    Condition("even", "even numbers", "even", "{x} % 2 == 0", {}),
    Condition("odd", "odd numbers", "odd", "{x} % 2 == 1", {}),
    Condition("positive", "positive numbers", "positive", "{x} > 0", {}),
    Condition("negative", "negative numbers", "negative", "{x} < 0", {}),
    Condition("above", "numbers greater than {k}", "above_{k}", "{x} > {k}", {"k": integers(1, 30)}),
    Condition("below", "numbers less than {k}", "below_{k}", "{x} < {k}", {"k": integers(1, 30)}),
    Condition("multiple", "multiples of {k}", "multiples_of_{k}", "{x} % {k} == 0", {"k": integers(3, 12)}),
    Condition(
        "indivisible",
        "numbers not divisible by {k}",
        "not_divisible_by_{k}",
        "{x} % {k} != 0",
        {"k": integers(2, 12)},
    ),
    Condition(
        "between",
        "numbers from {k} to {m}",
        "from_{k}_to_{m}",
        "{k} <= {x} <= {m}",
        {"k": integers(0, 9), "m": integers(10, 30)},
    ),
    Condition("ending", "numbers ending in {k}", "ending_in_{k}", "{x} % 10 == {k}", {"k": integers(0, 9)}),
    Condition("other", "numbers other than {k}", "other_than_{k}", "{x} != {k}", {"k": integers(0, 20)}),
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
    Operation("zero", ("Replace the {noun} in {a0} by zero.",), "return [0 if {p} else x for x in {a0}]"),
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


EXPRESSIONS = (
    Expression("plus", "plus {k}", "plus_{k}", "{x} + {k}", {"k": integers(1, 30)}),
    Expression("minus", "minus {k}", "minus_{k}", "{x} - {k}", {"k": integers(1, 30)}),
    Expression("times", "times {k}", "times_{k}", "{x} * {k}", {"k": integers(2, 20)}),
    Expression("over", "divided by {k}, rounded down", "over_{k}", "{x} // {k}", {"k": integers(2, 12)}),
    Expression("mod", "modulo {k}", "mod_{k}", "{x} % {k}", {"k": integers(2, 12)}),
    Expression("squared", "squared", "squared", "{x} * {x}", {}),
    Expression(
        "affine",
        "times {k} plus {m}",
        "times_{k}_plus_{m}",
        "{x} * {k} + {m}",
        {"k": integers(2, 9), "m": integers(1, 9)},
    ),
    Expression("at_most", "limited to at most {k}", "at_most_{k}", "min({x}, {k})", {"k": integers(2, 20)}),
    Expression(
        "at_least",
        "raised to at least {k}",
        "at_least_{k}",
        "max({x}, {k})",
        {"k": integers(1, 20)},
    ),
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
