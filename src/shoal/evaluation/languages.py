"""The supported languages: the commands that compile and run a program, and the packages they need.

An epilogue after the tests prints a random marker, which it puts together of two halves: the marker
stands in no file, so that only code that ran can print it. In languages that allow statements only
in functions, and in Python, a second file runs the tests and then prints it. A completion that
exits early with code 0 prints no marker, so it has not passed its tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.evaluation.steps import MIB, Bounds


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
        if self.epilogue_file:
            return {self.file: program, self.epilogue_file: epilogue}
        return {self.file: f"{program}\n{epilogue}\n"}

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


STATEMENT = "\n;\n"
"""A `separator` that leaves nothing for an `if (false)` at the end of a completion but itself."""
COMPILING = Bounds(cpu_seconds=60, wall_seconds=300.0, memory_bytes=2048 * MIB)
_MANAGED = Bounds(memory_bytes=2048 * MIB)  # for runtimes that reserve memory
_NODE = "Node.js (package nodejs, or https://nodejs.org)"
_LODASH = Library(
    "lodash", ("node", "-e", "require('lodash')"), "lodash (npm install --global lodash)"
)
_COMPARE = Library(
    "Data::Compare",
    ("perl", "-MData::Compare", "-e", "1"),
    "Data::Compare (package libdata-compare-perl)",
)
_JAVA_MEMORY = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_JAVAC_OPTIONS = (*(f"-J{option}" for option in _JAVA_MEMORY), "-proc:none", "-nowarn")

LANGUAGES = {
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
        bounds=_MANAGED,
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
        bounds=_MANAGED,
    ),
    "java": Language(
        title="Java",
        file="Main.java",
        compile=("javac", *_JAVAC_OPTIONS, "Main.java", "Epilogue.java"),
        run=("java", *_JAVA_MEMORY, "-cp", ".", "Epilogue"),
        install="a Java development kit (package default-jdk-headless)",
        trial="class Main { public static void main(String[] arguments) {} }",
        epilogue="""class Epilogue {{
    public static void main(String[] arguments) throws Throwable {{ Main.main(arguments); System.out.println("{}" + "{}"); }}
}}""",
        epilogue_file="Epilogue.java",
        memory=("java.lang.OutOfMemoryError",),
        bounds=_MANAGED,
    ),
    "cpp": Language(
        title="C++",
        file="main.cpp",
        compile=(
            "g++",
            "-std=c++17",
            "-w",
            "-Wl,--wrap=main",
            "-o",
            "main",
            "main.cpp",
            "last.cpp",
        ),
        run=("./main",),
        install="g++ (package g++)",
        trial="int main() {}",
        epilogue="""extern "C" int __real_main(int, char **);
extern "C" int __wrap_main(int count, char **arguments) {{
    int code = __real_main(count, arguments);
    __builtin_puts("{}" "{}");
    return code;
}}""",
        epilogue_file="last.cpp",
        memory=("std::bad_alloc", "std::bad_array_new_length"),
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
        libraries=(_COMPARE,),
    ),
    "go": Language(
        title="Go",
        file="main.go",
        compile=("go", "build", "-o", "main", "main.go", "words.go"),
        run=("./main",),
        install="Go (package golang-go, or https://go.dev)",
        epilogue="""package main
import "os"
func init() {{ main(); os.Stdout.WriteString("{}" + "{}"); os.Exit(0) }}""",
        epilogue_file="words.go",  # after main.go, so that its init comes last
        trial="package main\nfunc main() {}",
        memory=("out of memory", "cannot allocate memory"),
        environment={"GO111MODULE": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"},
        bounds=_MANAGED,
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
}
