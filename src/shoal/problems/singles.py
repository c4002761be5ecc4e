"""Templates of their own kind on strings, dicts and numbers; all such templates."""

from __future__ import annotations

from shoal.problems.single_lists import LISTS
from shoal.problems.templates import MARKS, NONE, SMALL, WIDE, Single

_STRINGS: tuple[Single, ...] = (
    ("repeat_word_{k}_times", "Repeat {a0} {k} times.", ("word",), SMALL, "return {a0} * {k}"),
    (
        "rotate_word_by_{k}",
        "Rotate {a0} to the left by {k}.",
        ("word",),
        SMALL,
        "shift = {k} % len({a0})\nreturn {a0}[shift:] + {a0}[:shift]",
    ),
    ("truncate_to_{k}", "Cut {a0} to at most {k} characters.", ("text",), WIDE, "return {a0}[:{k}]"),
    ("pad_to_{k}", "Pad {a0} with spaces to {k} characters.", ("word",), WIDE, "return {a0}.ljust({k})"),
    (
        "shift_by_{k}",
        "Shift each letter of {a0} by {k} places.",
        ("word",),
        SMALL,
        'return "".join(chr((ord(c) - 97 + {k}) % 26 + 97) for c in {a0})',
    ),
    ("every_{k}_characters", "Return every character of {a0} at a multiple of {k}.", ("text",), SMALL, "return {a0}[::{k}]"),
    ("join_with_mark", "Join {a0} with {k!r}.", ("words",), MARKS, 'return "{k}".join({a0})'),
    ("replace_spaces", "Replace the spaces in {a0} by {k!r}.", ("text",), MARKS, 'return {a0}.replace(" ", "{k}")'),
    ("surround", "Put {k!r} before and after {a0}.", ("word",), MARKS, 'return "{k}" + {a0} + "{k}"'),
    ("is_palindrome", "Check whether {a0} reads the same backwards.", ("text",), NONE, "return {a0} == {a0}[::-1]"),
    ("reverse_words", "Reverse the order of the words in {a0}.", ("text",), NONE, 'return " ".join({a0}.split()[::-1])'),
    ("reverse_text", "Return {a0} reversed.", ("text",), NONE, "return {a0}[::-1]"),
    ("count_words", "Count the words in {a0}.", ("text",), NONE, "return len({a0}.split())"),
    (
        "capitalize_words",
        "Capitalize each word in {a0}.",
        ("text",),
        NONE,
        'return " ".join(w.capitalize() for w in {a0}.split())',
    ),
    (
        "initials",
        "Return the first letters of the words in {a0}.",
        ("text",),
        NONE,
        'return "".join(w[0] for w in {a0}.split())',
    ),
    ("word_lengths", "Map each word in {a0} to its length.", ("words",), NONE, "return {{w: len(w) for w in {a0}}}"),
    ("longest_word", "Return the longest word in {a0}.", ("words",), NONE, "return max({a0}, key=len)"),
    ("sort_by_length", "Sort {a0} by length.", ("words",), NONE, "return sorted({a0}, key=len)"),
    (
        "unique_letters",
        "Return the distinct letters of {a0}, sorted.",
        ("word",),
        NONE,
        'return "".join(sorted(set({a0})))',
    ),
    ("swap_case", "Swap the case of {a0}.", ("text",), NONE, "return {a0}.swapcase()"),
    (
        "compress",
        "Encode the runs of {a0} as letters and lengths.",
        ("word",),
        NONE,
        'result = ""\ni = 0\nwhile i < len({a0}):\n    j = i\n'
        "    while j < len({a0}) and {a0}[j] == {a0}[i]:\n        j += 1\n"
        "    result += {a0}[i] + str(j - i)\n    i = j\nreturn result",
    ),
    (
        "is_anagram",
        "Check whether {a0} and {a1} have the same letters.",
        ("word", "text"),
        NONE,
        "return sorted({a0}) == sorted({a1})",
    ),
)


_DICTS: tuple[Single, ...] = (
    (
        "letter_counts",
        "Count how often each letter occurs in {a0}.",
        ("word",),
        NONE,
        "counts = {{}}\nfor c in {a0}:\n    counts[c] = counts.get(c, 0) + 1\nreturn counts",
    ),
    (
        "number_counts",
        "Count how often each number occurs in {a0}.",
        ("ints",),
        NONE,
        "counts = {{}}\nfor x in {a0}:\n    counts[x] = counts.get(x, 0) + 1\nreturn counts",
    ),
    ("invert", "Swap the keys and values of {a0}.", ("dict",), NONE, "return {{v: k for k, v in {a0}.items()}}"),
    ("best_key", "Return the key of {a0} with the largest value.", ("dict",), NONE, "return max({a0}, key={a0}.get)"),
    (
        "group_by_length",
        "Group {a0} by length.",
        ("words",),
        NONE,
        "groups = {{}}\nfor w in {a0}:\n    groups.setdefault(len(w), []).append(w)\nreturn groups",
    ),
    (
        "group_by_first_letter",
        "Group {a0} by first letter.",
        ("words",),
        NONE,
        "groups = {{}}\nfor w in {a0}:\n    groups.setdefault(w[0], []).append(w)\nreturn groups",
    ),
    (
        "sorted_items",
        "Return the items of {a0}, sorted by value.",
        ("dict",),
        NONE,
        "return sorted({a0}.items(), key=lambda item: item[1])",
    ),
    (
        "with_default_{k}",
        "Return the value of {a1} in {a0}, or {k}.",
        ("dict", "letter"),
        WIDE,
        "return {a0}.get({a1}, {k})",
    ),
    (
        "add_key",
        "Return {a0} with the key {k!r} set to zero.",
        ("dict",),
        {"k": "ghijklmnpqrst"},
        'return {{**{a0}, "{k}": 0}}',
    ),
    ("positions", "Map each word in {a0} to its position.", ("words",), NONE, "return {{w: i for i, w in enumerate({a0})}}"),
)


_NUMBERS: tuple[Single, ...] = (
    (
        "sum_multiples_of_{k}",
        "Return the sum of the multiples of {k} up to {a0}.",
        ("big",),
        WIDE,
        "return sum(range({k}, {a0} + 1, {k}))",
    ),
    ("count_multiples_of_{k}", "Count the multiples of {k} from 1 to {a0}.", ("big",), WIDE, "return {a0} // {k}"),
    ("power_{k}", "Return {a0} to the power of {k}.", ("n",), SMALL, "return {a0} ** {k}"),
    (
        "to_base_{k}",
        "Return the digits of {a0} in base {k}.",
        ("big",),
        SMALL,
        "digits = []\nwhile {a0} > 0:\n    digits.append({a0} % {k})\n    {a0} //= {k}\nreturn digits[::-1]",
    ),
    (
        "arithmetic_series_{k}",
        "Return {a0} terms that start at 1 and grow by {k}.",
        ("n",),
        WIDE,
        "return [1 + {k} * i for i in range({a0})]",
    ),
    (
        "geometric_series_{k}",
        "Return {a0} powers of {k}, from 1.",
        ("count",),
        SMALL,
        "return [{k} ** i for i in range({a0})]",
    ),
    ("round_up_to_{k}", "Round {a0} up to a multiple of {k}.", ("big",), WIDE, "return -(-{a0} // {k}) * {k}"),
    ("divisible_by_{k}", "Check whether {a0} is divisible by {k}.", ("big",), WIDE, "return {a0} % {k} == 0"),
    ("clamp_to_{k}", "Limit {a0} to the range from 0 to {k}.", ("int",), WIDE, "return max(0, min({a0}, {k}))"),
    ("distance_to_{k}", "Return the distance from {a0} to {k}.", ("int",), WIDE, "return abs({a0} - {k})"),
    ("count_digit_{k}", "Count the digit {k} in {a0}.", ("big",), SMALL, 'return str({a0}).count("{k}")'),
    (
        "factorial",
        "Return the factorial of {a0}.",
        ("n",),
        NONE,
        "result = 1\nfor i in range(2, {a0} + 1):\n    result *= i\nreturn result",
    ),
    (
        "fibonacci",
        "Return Fibonacci number {a0}.",
        ("n",),
        NONE,
        "a, b = 0, 1\nfor _ in range({a0}):\n    a, b = b, a + b\nreturn a",
    ),
    (
        "gcd",
        "Return the greatest common divisor of {a0} and {a1}.",
        ("n", "int2"),
        NONE,
        "while {a1}:\n    {a0}, {a1} = {a1}, {a0} % {a1}\nreturn {a0}",
    ),
    (
        "is_prime",
        "Check whether {a0} is a prime number.",
        ("n",),
        NONE,
        "if {a0} < 2:\n    return False\nfor d in range(2, {a0}):\n    if {a0} % d == 0:\n        return False\nreturn True",
    ),
    (
        "primes_up_to",
        "Return the prime numbers up to {a0}.",
        ("n",),
        NONE,
        "return [p for p in range(2, {a0} + 1) if all(p % d for d in range(2, p))]",
    ),
    ("divisors", "Return the divisors of {a0}.", ("n",), NONE, "return [d for d in range(1, {a0} + 1) if {a0} % d == 0]"),
    ("digit_sum", "Return the sum of the digits of {a0}.", ("big",), NONE, "return sum(int(d) for d in str({a0}))"),
    ("reverse_digits", "Reverse the digits of {a0}.", ("big",), NONE, "return int(str({a0})[::-1])"),
    (
        "collatz_steps",
        "Count the Collatz steps from {a0} to 1.",
        ("n",),
        NONE,
        "steps = 0\nwhile {a0} != 1:\n    {a0} = {a0} // 2 if {a0} % 2 == 0 else 3 * {a0} + 1\n    steps += 1\nreturn steps",
    ),
    ("triangle_number", "Return the sum of the numbers from 1 to {a0}.", ("n",), NONE, "return {a0} * ({a0} + 1) // 2"),
    (
        "sum_of_squares",
        "Return the sum of the squares from 1 to {a0}.",
        ("n",),
        NONE,
        "return sum(i * i for i in range(1, {a0} + 1))",
    ),
    ("is_perfect_square", "Check whether {a0} is a perfect square.", ("big",), NONE, "return int({a0} ** 0.5) ** 2 == {a0}"),
    ("larger", "Return the larger of {a0} and {a1}.", ("int", "int2"), NONE, "return {a0} if {a0} > {a1} else {a1}"),
    ("mean", "Return the average of {a0} and {a1}.", ("int", "int2"), NONE, "return ({a0} + {a1}) / 2"),
    (
        "sum_range",
        "Return the sum of the numbers from {a0} to {a1}.",
        ("int", "int2"),
        NONE,
        "return sum(range({a0}, {a1} + 1))",
    ),
)


SINGLES: tuple[Single, ...] = (*LISTS, *_STRINGS, *_DICTS, *_NUMBERS)
