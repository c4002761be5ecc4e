"""The languages whose programs an interpreter reads.

Of TypeScript too, whose compiler only takes the types away.
"""

from __future__ import annotations

from shoal.evaluation.language import MANAGED, STATEMENT, Language, Library

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

INTERPRETED = {
    "python": Language(
        title="Python",
        file="solution.py",
        run=("python3", "main.py"),
        install="Python 3 (package python3)",
        # A completion is a module of another name, so that its `if __name__ == "__main__":` does
        # not run; tests have that name.
        separator='\n__name__ = "__main__"\n',
        epilogue="import runpy\nif __name__ == '__main__':\n    runpy.run_path('solution.py', "
        "run_name='solution')\n    print({!r} + {!r})",
        epilogue_file="main.py",
        syntax=("\nSyntaxError:", "\nIndentationError:", "\nTabError:"),
        memory=("MemoryError",),
        environment={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
    ),
    "javascript": Language(
        title="JavaScript",
        file="main.js",
        run=("node", "main.js"),
        install=_NODE,
        separator=STATEMENT,
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
        run=("node", "main.js"),
        install=f"TypeScript 5.6 or newer (npm install --global typescript) and {_NODE}",
        separator=STATEMENT,
        epilogue="console.log({!r} + {!r});",
        memory=("heap out of memory", "Array buffer allocation failed"),
        libraries=(_LODASH,),
        bounds=MANAGED,
    ),
    "perl": Language(
        title="Perl",
        file="main.pl",
        run=("perl", "main.pl"),
        install="Perl (package perl)",
        separator=STATEMENT,
        epilogue="print {!r} . {!r};",
        syntax=("syntax error at", "aborted due to compilation errors"),
        memory=("Out of memory",),
        libraries=(_COMPARE, _DEEP),
    ),
    "ruby": Language(
        title="Ruby",
        file="main.rb",
        run=("ruby", "main.rb"),
        install="Ruby (package ruby)",
        separator=STATEMENT,
        epilogue="puts {!r} + {!r}",
        syntax=("syntax error", "(SyntaxError)"),
        memory=("NoMemoryError",),
        libraries=(_TEST_UNIT,),
    ),
    "php": Language(
        title="PHP",
        file="main.php",
        run=("php", "-d", "display_errors=stderr", "main.php"),
        install="PHP's command line (package php-cli)",
        trial="<?php",
        separator=STATEMENT,
        epilogue="echo {!r} . {!r};",
        syntax=("PHP Parse error:", "Parse error:"),
        memory=("Allowed memory size",),
    ),
    "lua": Language(
        title="Lua",
        file="main.lua",
        run=("lua5.4", "main.lua"),
        install="Lua 5.4 (package lua5.4)",
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
