"""The conditions and operations on the characters of a text and the words of a list."""

from __future__ import annotations

from problems.templates import Condition, Operation, integers

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
    Operation("keep", ("Keep only the {noun} in {a0}.",), 'return "".join(c for c in {a0} if {p})'),
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
    Operation("any", ("Check whether {a0} contains {noun}.",), "return any({p} for c in {a0})"),
)


WORD_CONDITIONS = (
    Condition(
        "longer",
        "words longer than {k} letters",
        "longer_than_{k}",
        "len({x}) > {k}",
        {"k": integers(2, 9)},
    ),
    Condition(
        "shorter",
        "words shorter than {k} letters",
        "shorter_than_{k}",
        "len({x}) < {k}",
        {"k": integers(3, 9)},
    ),
    Condition(
        "exactly",
        "words of {k} letters",
        "of_{k}_letters",
        "len({x}) == {k}",
        {"k": integers(2, 8)},
    ),
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
    Operation("join", ("Join the {noun} in {a0} with spaces.",), 'return " ".join(w for w in {a0} if {p})'),
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
    Operation("any", ("Check whether {a0} contains {noun}.",), "return any({p} for w in {a0})"),
)
