"""The languages whose programs can be judged: how one is compiled and run, and what that takes.

A program ends with a statement that prints a word of ours; where statements stand in functions only, a second file calls the
tests' `main` and then prints it. A completion that ends the process early, exit code 0, has not passed its tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.evaluation.sandbox import MIB, Bounds


@dataclass(frozen=True)
class Library:
    """Something that tests load. `loaded_by`: how a test names it; `probe`: a command that loads it."""

    loaded_by: str
    probe: tuple[str, ...]
    install: str


@dataclass(frozen=True)
class Language:
    """How a program in this language is run.

    Attributes:
        title: its name in prose.
        file: what the source file is called.
        run, compile: commands, run in the program's directory; programs are found on PATH. A compiler that refuses a program
            ends with an exit code other than 0.
        install: what provides them.
        probe: arguments with which each of these programs says that it is there.
        last_words: what prints the word put in for {}, after the tests: at the end of the program, or in `last_file`.
        last_file: "", or a second source file, which calls the program's `main` and is started in its place.
        syntax: what the interpreter writes to standard error when it cannot read a program; any of these.
        memory: what it writes when it gets no more memory; any of these.
        libraries: what tests may load beside the standard library.
        environment: variables that its programs need.
        bounds: what a program may use while it runs.
    """

    title: str
    file: str
    run: tuple[str, ...]
    install: str
    compile: tuple[str, ...] = ()
    probe: tuple[str, ...] = ("--version",)
    last_words: str = ""
    last_file: str = ""
    syntax: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    libraries: tuple[Library, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def programs(self) -> list[str]:
        """The programs that must be on PATH."""
        return sorted({command[0] for command in (self.run, self.compile) if command and "/" not in command[0]})


COMPILING = Bounds(cpu_seconds=60, wall_seconds=300.0, memory_bytes=2048 * MIB)
_MANAGED = Bounds(memory_bytes=2048 * MIB)  # for runtimes that set memory aside for themselves
_NODE = "Node.js (package nodejs, or https://nodejs.org)"
_LODASH = Library("lodash", ("node", "-e", "require('lodash')"), "lodash (npm install --global lodash)")
_COMPARE = Library("Data::Compare", ("perl", "-MData::Compare", "-e", "1"), "Data::Compare (package libdata-compare-perl)")
_JAVA_MEMORY = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_JAVAC_OPTIONS = (*(f"-J{option}" for option in _JAVA_MEMORY), "-proc:none", "-nowarn")

LANGUAGES = {
    "python": Language(
        title="Python",
        file="main.py",
        run=("python3", "main.py"),
        install="Python 3 (package python3)",
        last_words="print({!r})",
        syntax=("\nSyntaxError:", "\nIndentationError:", "\nTabError:"),
        memory=("MemoryError",),
        environment={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
    ),
    "javascript": Language(
        title="JavaScript",
        file="main.js",
        run=("node", "main.js"),
        install=_NODE,
        last_words="console.log({!r});",
        syntax=("\nSyntaxError:",),
        memory=("heap out of memory", "Array buffer allocation failed"),
        libraries=(_LODASH,),
        bounds=_MANAGED,
    ),
    "typescript": Language(
        title="TypeScript",
        file="main.ts",
        # Types are not judged, as in MBXP's own harness: its programs load modules whose types nobody installed.
        compile=("tsc", "--noCheck", "--target", "es2020", "--module", "commonjs", "main.ts"),
        run=("node", "main.js"),
        install=f"TypeScript 5.6 or newer (npm install --global typescript) and {_NODE}",
        last_words="console.log({!r});",
        memory=("heap out of memory", "Array buffer allocation failed"),
        libraries=(_LODASH,),
        bounds=_MANAGED,
    ),
    "java": Language(
        title="Java",
        file="Main.java",
        compile=("javac", *_JAVAC_OPTIONS, "Main.java", "LastWords.java"),
        run=("java", *_JAVA_MEMORY, "-cp", ".", "LastWords"),
        install="a Java development kit (package default-jdk-headless)",
        last_words="""class LastWords {{
    public static void main(String[] arguments) throws Throwable {{ Main.main(arguments); System.out.println("{}"); }}
}}""",
        last_file="LastWords.java",
        memory=("java.lang.OutOfMemoryError",),
        bounds=_MANAGED,
    ),
    "cpp": Language(
        title="C++",
        file="main.cpp",
        compile=("g++", "-std=c++17", "-w", "-Wl,--wrap=main", "-o", "main", "main.cpp", "last.cpp"),
        run=("./main",),
        install="g++ (package g++)",
        last_words="""extern "C" int __real_main(int, char **);
extern "C" int __wrap_main(int count, char **arguments) {{
    int code = __real_main(count, arguments);
    __builtin_puts("{}");
    return code;
}}""",
        last_file="last.cpp",
        memory=("std::bad_alloc", "std::bad_array_new_length"),
    ),
    "perl": Language(
        title="Perl",
        file="main.pl",
        run=("perl", "main.pl"),
        install="Perl (package perl)",
        last_words="print {!r};",
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
        last_words="""package main
import "os"
func init() {{ main(); os.Stdout.WriteString("{}"); os.Exit(0) }}""",
        last_file="words.go",  # after main.go, so that its init comes last
        probe=("version",),
        memory=("out of memory", "cannot allocate memory"),
        environment={"GO111MODULE": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"},
        bounds=_MANAGED,
    ),
    "ruby": Language(
        title="Ruby",
        file="main.rb",
        run=("ruby", "main.rb"),
        install="Ruby (package ruby)",
        last_words="puts {!r}",
        syntax=("syntax error", "(SyntaxError)"),
        memory=("NoMemoryError",),
    ),
    "php": Language(
        title="PHP",
        file="main.php",
        run=("php", "-d", "display_errors=stderr", "main.php"),
        install="PHP's command line (package php-cli)",
        last_words="echo {!r};",
        syntax=("PHP Parse error:", "Parse error:"),
        memory=("Allowed memory size",),
    ),
}
