"""A language of programs: the commands that compile and run one, and the packages they need.

An epilogue after the tests prints a random marker, which it puts together of two halves: the marker
stands in no file, so that only code that ran can print it. In languages that allow statements only
in functions, and in Python, a second file runs the tests and then prints it. A completion that
exits early with code 0 prints no marker, so it has not passed its tests.

A command is a step of a sandbox, with its bounds and its result.

The languages that an interpreter runs are here, TypeScript among them, whose compiler only removes
types; `shoal.evaluation.languages` adds the compiled ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Bounds:
    """The bounds of a program.

    Processor time and file size are bounded per process, everything else in total.

    Attributes:
        cpu_seconds: the processor time of one process.
        wall_seconds: the seconds from start to end.
        memory_bytes: the private memory, of one process and in total.
        file_bytes: the size of one file.
        workdir_bytes: the total size of the files in its directory.
        workdir_files: the number of files in its directory.
        processes: the number of processes and threads at the same time.
        output_bytes: the bytes that are kept of standard output, and of standard error: half from
            the beginning, half from the end. A program that writes 64 times as many is ended.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 120.0
    memory_bytes: int = 1024 * MIB
    file_bytes: int = 64 * MIB
    workdir_bytes: int = 256 * MIB
    workdir_files: int = 10_000
    processes: int = 128
    output_bytes: int = MIB


@dataclass(frozen=True)
class Step:
    """A command to run in the working directory.

    Its program is an absolute path, or "./name" in that directory.

    Attributes:
        environment: variables besides PATH, HOME, TMPDIR and LANG.
        readable: paths that it may read besides the system's and the installation of its program.
    """

    command: Sequence[str]
    bounds: Bounds = field(default_factory=Bounds)
    environment: Mapping[str, str] = field(default_factory=dict)
    readable: Sequence[str] = ()


@dataclass(frozen=True)
class StepResult:
    """The end of the last step.

    Attributes:
        step: the step's number, from 0; a step is started only if the one before ended with exit
            code 0.
        reason: "exit", or the exceeded bound: "time", "memory", "output", "processes", "files";
            "setup": the command could not be started; "stopped": the sandbox was closed.
        returncode: the exit code, or minus the signal that ended it; None if it was killed.
        stdout: its standard output, cut to the bound, without the path of the working directory.
        stderr: its standard error, likewise.
        seconds: the wall time.
        earlier_stderr: the standard error of the steps before it.
    """

    step: int
    reason: str
    returncode: int | None
    stdout: str
    stderr: str
    seconds: float
    earlier_stderr: str = ""

    @property
    def succeeded(self) -> bool:
        """True if it exited with code 0."""
        return self.reason == "exit" and self.returncode == 0


@dataclass(frozen=True)
class Library:
    """A library that tests load.

    Attributes:
        loaded_by: its name in a test.
        probe: a command that loads it.
        install: the package that provides it.
    """

    loaded_by: str
    probe: tuple[str, ...]
    install: str


@dataclass(frozen=True)
class Language:
    """The way that a program in this language is run.

    Attributes:
        title: the language's name in prose.
        file: the name of the source file.
        run: the command that runs the program in its directory; its program is found on PATH.
        compile: the command that compiles it there; it ends with an exit code other than 0 for a
            program that it refuses.
        install: the packages that provide these commands.
        trial: the smallest program. It must run here. If a runtime writes to standard error beside
            it, it writes the same beside every program.
        separator: stands between a completion and its tests, and ends a statement that the
            completion has begun.
        around: completion, tests, a random name -> the texts before and behind the tests. They take
            from the tests the names that the completion has given another meaning, or define the
            name, by which the epilogue sees that the tests stand where they should.
        guard: "", or a file that is loaded before the program, and keeps from it the functions that
            tests compare with.
        epilogue: a format string of the two halves of the marker; prints it after the tests, at the
            end of the program or in `epilogue_file`.
        epilogue_file: "", or a second source file, which runs the program and is started in its
            place.
        syntax: texts of which the interpreter writes one to standard error when it cannot parse a
            program.
        memory: texts of which it writes one when an allocation fails.
        libraries: the libraries that tests may load beside the standard library.
        environment: variables that its programs need.
        bounds: the bounds of a program while it runs.
    """

    title: str
    file: str
    run: tuple[str, ...]
    install: str
    compile: tuple[str, ...] = ()
    trial: str = ""
    separator: str = "\n"
    around: Callable[[str, str, str], tuple[str, str]] = lambda *_: ("", "")
    guard: str = ""
    epilogue: str = ""
    epilogue_file: str = ""
    syntax: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    libraries: tuple[Library, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)

    def files(self, program: str, marker: str) -> dict[str, str]:
        """Names and texts of the source files of a program that prints a marker at its end."""
        half = len(marker) // 2
        epilogue = self.epilogue.format(marker[:half], marker[half:])
        epilogue = epilogue.replace("TESTS", name_of(marker))
        if package := re.search(r"^package (\w+)", program, re.MULTILINE):
            epilogue = epilogue.replace("PACKAGE", package[1])
        files = {self.file: f"{program}\n{epilogue}\n"}
        if self.epilogue_file:
            files = {self.file: program, self.epilogue_file: epilogue}
        if self.guard:
            files[self.guard] = text_of(self.guard)
        return files

    @property
    def programs(self) -> list[str]:
        """The programs that must be on PATH."""
        return sorted(
            {
                command[0]
                for command in (self.run, self.compile)
                if command and "/" not in command[0]
            }
        )


def name_of(marker: str) -> str:
    """Returns the random name that stands around the tests of a program with a marker."""
    return "tests_" + re.sub(r"\W", "", marker)[::2]


def epilogue_of(name: str) -> str:
    """Returns the `epilogue` in a file, which writes FIRST and SECOND for the marker's halves."""
    text = text_of(name).rstrip("\n").replace("{", "{{").replace("}", "}}")
    return text.replace("FIRST", "{}").replace("SECOND", "{}")


def text_of(name: str) -> str:
    """Returns the text of a file that is not Python."""
    return (Path(__file__).parents[1] / "data" / "programs" / name).read_text("utf-8")


STATEMENT = "\n;\n"
"""A `separator` that leaves nothing for an `if (false)` at the end of a completion but itself."""
COMPILING = Bounds(cpu_seconds=60, wall_seconds=300.0, memory_bytes=2048 * MIB)
MANAGED = Bounds(memory_bytes=2048 * MIB)
"""The bounds of runtimes that reserve memory."""


_NODE = "Node.js (package nodejs, or https://nodejs.org)"
_LODASH = Library(
    "lodash", ("node", "-e", "require('lodash')"), "lodash (npm install --global lodash)"
)
_COMPARE = Library(
    "Data::Compare",
    ("perl", "-MData::Compare", "-e", "1"),
    "Data::Compare (package libdata-compare-perl)",
)

_LUAUNIT = Library("luaunit", ("lua5.4", "-l", "luaunit"), "LuaUnit (package lua-unit)")
_DEEP = Library(
    "Test::Deep", ("perl", "-MTest::Deep", "-e", "1"), "Test::Deep (package libtest-deep-perl)"
)
_TEST_UNIT = Library(
    "test/unit",
    ("ruby", "-e", "require 'test/unit'; Test::Unit::AutoRunner.need_auto_run = false"),
    "test-unit (package ruby-test-unit)",
)

_OWN_NAMES = "\n" + text_of("tests.js"), "\n}}"
"""JavaScript's own objects, by their names for the tests, which stand in two blocks."""
_IMPORTS = re.compile(r"^[ \t]*(?:import|export)\b", re.MULTILINE)
_OWN_BUILTINS = "\n" + text_of("tests.sh")
"""Bash's builtins: functions have no name of a special one in POSIX mode, nor does an alias."""
_OWN_FUNCTIONS = """
base::rm(list = base::intersect(base::ls(), base::c("identical", "quit", "q", "stop", "stopifnot",
    "all.equal", "isTRUE")))
"""
"""R's functions that tests compare and end with."""

_ITS_TESTS = '\n__name__ = "__main__"\n'
"""The line behind a completion in Python: it is a module of another name, so that its
`if __name__ == "__main__":` does not run; tests have that name."""
_MAIN = f"""\
if __name__ == '__main__':
    import runpy
    runpy.run_path('solution.py', run_name='solution')
    print({{!r}} + {{!r}})
else:  # in a process that the completion spawns, which imports it without its tests
    import sys, types
    sys.modules['solution'] = solution = types.ModuleType('solution')
    with open('solution.py', encoding='utf-8') as file:
        source = file.read().partition({_ITS_TESTS!r})[0]
    exec(compile(source, 'solution.py', 'exec'), solution.__dict__)
"""

_PHP_ASSERTS = tuple(
    part
    for name in ("zend.assertions", "assert.active", "assert.exception")
    for part in ("-d", f"{name}=1")
)

INTERPRETED = {
    "python": Language(
        title="Python",
        file="solution.py",
        run=("python3", "main.py"),
        install="Python 3 (package python3)",
        separator=_ITS_TESTS,
        epilogue=_MAIN,
        epilogue_file="main.py",
        syntax=("\nSyntaxError:", "\nIndentationError:", "\nTabError:"),
        memory=("MemoryError",),
        environment={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
    ),
    "javascript": Language(
        title="JavaScript",
        file="main.js",
        run=("node", "-r", "./guard.js", "main.js"),
        install=_NODE,
        separator=STATEMENT,
        around=lambda *_: _OWN_NAMES,
        guard="guard.js",
        epilogue="console.log({!r} + {!r});",
        syntax=("\nSyntaxError:",),
        memory=("heap out of memory", "Array buffer allocation failed"),
        libraries=(_LODASH,),
        bounds=MANAGED,
    ),
    "typescript": Language(
        title="TypeScript",
        file="main.ts",
        # Types are not checked, as in MBXP's own harness: its programs import modules without
        # installed types.
        compile=("tsc", "--noCheck", "--target", "es2020", "--module", "commonjs", "main.ts"),
        run=("node", "-r", "./guard.js", "main.js"),
        guard="guard.js",
        install=f"TypeScript 5.6 or newer (npm install --global typescript) and {_NODE}",
        separator=STATEMENT,
        # A block cannot import.
        around=lambda _, tests, __: ("", "") if _IMPORTS.search(tests) else _OWN_NAMES,
        epilogue="console.log({!r} + {!r});",
        memory=("heap out of memory", "Array buffer allocation failed"),
        libraries=(_LODASH,),
        bounds=MANAGED,
    ),
    "perl": Language(
        title="Perl",
        file="main.pl",
        run=("perl", "-I.", "-Mguard", "main.pl"),
        install="Perl (package perl)",
        separator=STATEMENT,
        around=lambda *_: ("\npackage main;\nBEGIN { guard::tests() }\n", ""),
        guard="guard.pm",
        epilogue="guard::check();\nprint {!r} . {!r};",
        syntax=("syntax error at", "aborted due to compilation errors"),
        memory=("Out of memory",),
        libraries=(_COMPARE, _DEEP),
    ),
    "ruby": Language(
        title="Ruby",
        file="main.rb",
        run=("ruby", "-r", "./guard.rb", "main.rb"),
        install="Ruby (package ruby)",
        separator=STATEMENT,
        guard="guard.rb",
        epilogue=epilogue_of("epilogue.rb"),
        syntax=("syntax error", "(SyntaxError)"),
        memory=("NoMemoryError",),
        libraries=(_TEST_UNIT,),
    ),
    "php": Language(
        title="PHP",
        file="main.php",
        run=("php", "-d", "display_errors=stderr", *_PHP_ASSERTS, "main.php"),
        install="PHP's command line (package php-cli)",
        trial="<?php",
        separator=STATEMENT,
        epilogue=epilogue_of("epilogue.php"),
        syntax=("PHP Parse error:", "Parse error:"),
        memory=("Allowed memory size",),
    ),
    "lua": Language(
        title="Lua",
        file="main.lua",
        run=("lua5.4", "-l", "guard", "main.lua"),
        install="Lua 5.4 (package lua5.4)",
        around=lambda *_: ("\nlocal assert, error, require, os = held_for_tests()\n", ""),
        guard="guard.lua",
        epilogue="print({!r} .. {!r})",
        syntax=(" expected ", " expected)", "unexpected symbol", "syntax error", "unfinished "),
        memory=("not enough memory",),
        libraries=(_LUAUNIT,),
    ),
    "bash": Language(
        title="Bash",
        file="main.sh",
        run=("bash", "main.sh"),
        install="Bash (package bash)",
        around=lambda *_: (_OWN_BUILTINS, ""),
        epilogue="printf '%s%s\\n' {!r} {!r}",
        syntax=(": syntax error", ": unexpected EOF"),
        memory=("cannot allocate", "Cannot allocate memory"),
    ),
    "r": Language(
        title="R",
        file="main.R",
        run=("Rscript", "--vanilla", "main.R"),
        install="R (package r-base-core)",
        # What an `if (FALSE)` at the end of a completion has for itself.
        separator="\ninvisible(NULL)\n",
        around=lambda *_: (_OWN_FUNCTIONS, ""),
        epilogue='cat({!r}, {!r}, "\\n", sep = "")',
        syntax=("Error: unexpected ",),
        memory=("cannot allocate",),
    ),
    "racket": Language(
        title="Racket",
        file="main.rkt",
        run=("racket", "main.rkt"),
        install="Racket (package racket)",
        trial="#lang racket\n(require rackunit)\n(check-equal? 1 1)",
        # A check that fails only says so. The log has the numbers of failed checks and of all.
        epilogue="""(require (only-in rackunit/log test-log))
(let ((checks (test-log)))
  (unless (and (zero? (car checks)) (positive? (cdr checks))) (exit 1))
  (displayln (string-append "{}" "{}")))""",
        syntax=("read-syntax:", "unbound identifier", ": bad syntax"),
        memory=("out of memory",),
        bounds=MANAGED,
    ),
}
