"""The supported languages: those whose programs are compiled, and all of them together."""

from __future__ import annotations

import re

from shoal.evaluation.language import (
    INTERPRETED,
    MANAGED,
    STATEMENT,
    Language,
    Library,
    epilogue_of,
)

_JAVA_MEMORY = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_JAVAC_OPTIONS = (*(f"-J{option}" for option in _JAVA_MEMORY), "-proc:none", "-nowarn")

_JAVATUPLES = "/usr/share/java/javatuples.jar"
_CLASSES = f".:{_JAVATUPLES}"
_TUPLES = Library(
    "org.javatuples",
    ("java", "-p", _JAVATUPLES, "--describe-module", "javatuples"),
    "javatuples (package libjavatuples-java)",
)
_GO = "Go (package golang-go, or https://go.dev)"
_GO_ENVIRONMENT = {"GO111MODULE": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
_CSHARP_EPILOGUE = epilogue_of("epilogue.cs")
_D_EPILOGUE = epilogue_of("epilogue.d")

_DEFINE = re.compile(r"\bdefine(?:\s|/\*.*?\*/)+(?!defined\b)([^\W\d]\w*)", re.DOTALL)


def _without_macros(completion: str, _tests: str, _name: str) -> tuple[str, str]:
    """Returns the directives that end a C++ completion's macros, and bring `assert` back.

    Comments and continued lines may stand within a directive, or before it; to end a macro that
    there is not does nothing.
    """
    names = _DEFINE.findall(completion.replace("\\\r\n", "").replace("\\\n", ""))
    ended = "".join(f"#undef {name}\n" for name in names)
    return f"\n{ended}#undef NDEBUG\n#include <cassert>\n", ""


def _in_a_class(_completion: str, _tests: str, name: str) -> tuple[str, str]:
    """Returns a class within that of the tests, and one behind them, which ends no file sooner."""
    return f"\nclass {name} {{ }}\n", f"\nclass end_{name} {{ }}"


_OWN_MACROS = "\n" + "".join(
    f"macro_rules! {name} {{ ($($part:tt)*) => {{ ::core::{name}!($($part)*) }} }}\n"
    for name in ("assert", "assert_eq", "assert_ne", "panic")
)
"""Rust's own macros, by their names for the tests."""

COMPILED = {
    "java": Language(
        title="Java",
        file="Main.java",
        compile=("javac", *_JAVAC_OPTIONS, "-cp", _CLASSES, "Main.java", "Epilogue.java"),
        run=("java", *_JAVA_MEMORY, "-cp", _CLASSES, "Epilogue"),
        install="a Java development kit (package default-jdk-headless)",
        trial="class Main { public static void main(String[] arguments) {} }",
        around=_in_a_class,
        epilogue=epilogue_of("epilogue.java"),
        epilogue_file="Epilogue.java",
        memory=("java.lang.OutOfMemoryError",),
        libraries=(_TUPLES,),
        bounds=MANAGED,
    ),
    "cpp": Language(
        title="C++",
        file="main.cpp",
        compile=(
            *("g++", "-std=c++17", "-w", "-Wl,--wrap=main", "-include", "cassert"),
            *("-o", "main", "main.cpp", "last.cpp"),
        ),
        run=("./main",),
        install="g++ (package g++)",
        trial="int main() {}",
        around=_without_macros,
        epilogue=epilogue_of("epilogue.cpp"),
        epilogue_file="last.cpp",
        memory=("std::bad_alloc", "std::bad_array_new_length"),
    ),
    "go": Language(
        title="Go",
        file="main.go",
        compile=("go", "build", "-o", "main", "main.go", "words.go"),
        run=("./main",),
        install=_GO,
        epilogue="""package main
import "os"
func testsPanic() int {{ panic(0) }}
func init() {{ main(); os.Stdout.WriteString("{}" + "{}"); os.Exit(0) }}""",
        epilogue_file="words.go",  # after main.go, so that its init comes last
        trial="package main\nfunc main() {}",
        memory=("out of memory", "cannot allocate memory"),
        environment=_GO_ENVIRONMENT,
        bounds=MANAGED,
    ),
    "go_test": Language(
        title="Go's tests",
        file="main_test.go",
        compile=("go", "test", "-c", "-o", "main", "main_test.go", "words_test.go"),
        run=("./main",),
        install=_GO,
        around=lambda *_: ("", "\nvar _ = fmt.Sprint"),
        # A package without tests would pass, and so would one whose arguments leave them out.
        epilogue="""package PACKAGE
import ("os"; "testing")
func TestMain(m *testing.M) {{
    os.Args = os.Args[:1]
    if m.Run() == 0 {{ os.Stdout.WriteString("{}" + "{}") }}
}}""",
        epilogue_file="words_test.go",
        trial="""package main_test
import (
    "fmt"
    "testing"
)
func TestTrial(t *testing.T) {}""",
        memory=("out of memory", "cannot allocate memory"),
        environment=_GO_ENVIRONMENT,
        bounds=MANAGED,
    ),
    "kotlin": Language(
        title="Kotlin",
        file="main.kt",
        compile=(
            "kotlinc",
            *("-nowarn", "-include-runtime", "-d", "main.jar", "main.kt", "epilogue.kt"),
        ),
        run=("java", *_JAVA_MEMORY, "-cp", "main.jar", "Epilogue"),
        install="Kotlin (package kotlin)",
        trial="fun main() {}",
        epilogue=epilogue_of("epilogue.kt"),
        epilogue_file="epilogue.kt",
        memory=("java.lang.OutOfMemoryError",),
        environment={"JAVA_OPTS": " ".join(_JAVA_MEMORY)},
        bounds=MANAGED,
    ),
    "scala": Language(
        title="Scala",
        file="main.scala",
        compile=("scalac", "-nowarn", "-d", ".", "main.scala", "epilogue.scala"),
        run=("scala", "-nocompdaemon", "-cp", ".", "Epilogue"),
        install="Scala (package scala)",
        trial="object Main extends App {}",
        separator="\n()\n",  # the body of an `if (false)` at the end of a completion
        epilogue="""object Epilogue {{
    def main(arguments: Array[String]): Unit = {{ Main.main(arguments); println("{}" + "{}") }}
}}""",
        epilogue_file="epilogue.scala",
        memory=("java.lang.OutOfMemoryError",),
        environment={"JAVA_OPTS": " ".join(_JAVA_MEMORY)},
        bounds=MANAGED,
    ),
    "csharp": Language(
        title="C#",
        file="main.cs",
        compile=(
            *("mcs", "-nologo", "-warn:0", "-d:DEBUG", "-r:System.Numerics.dll"),
            *("-main:Epilogue", "-out:main.exe", "main.cs", "epilogue.cs"),
        ),
        run=("mono", "main.exe"),
        install="Mono (packages mono-mcs, mono-runtime and libmono-system-numerics4.0-cil)",
        trial="class Program { public static void Main(string[] arguments) {} }",
        around=_in_a_class,
        epilogue=_CSHARP_EPILOGUE,
        epilogue_file="epilogue.cs",
        memory=("System.OutOfMemoryException",),
        bounds=MANAGED,
    ),
    "swift": Language(
        title="Swift",
        file="main.swift",
        compile=("swiftc", "-suppress-warnings", "-o", "main", "main.swift"),
        run=("./main",),
        install="Swift (packages swiftlang, libc6-dev and libstdc++-14-dev of Debian 13, or "
        "https://swift.org)",
        separator="\n_ = ()\n",  # the operand of a `true ? () :` at the end of a completion
        epilogue='print("{}" + "{}")',
        environment={"SWIFT_BACKTRACE": "enable=no"},
        bounds=MANAGED,
    ),
    "rust": Language(
        title="Rust",
        file="main.rs",
        compile=("rustc", "--edition", "2021", "-A", "warnings", "-o", "main", "epilogue.rs"),
        run=("./main",),
        install="Rust (package rustc; rustup's runs with the directory bin of "
        "`rustc --print sysroot` first on PATH)",
        trial="fn main() {}",
        around=lambda *_: (_OWN_MACROS, ""),
        epilogue=epilogue_of("epilogue.rs"),
        epilogue_file="epilogue.rs",
        memory=("memory allocation of",),
    ),
    "d": Language(
        title="D",
        file="main.d",
        compile=("gdc", "-funittest", "-Wl,--wrap=main", "-o", "main", "main.d", "epilogue.d"),
        run=("./main",),
        install="the D compiler of GCC (package gdc)",
        trial="unittest {}\nvoid main() {}",
        separator=STATEMENT,  # the body of a `version (none)` at the end of a completion
        around=lambda _, __, name: ("", f"\nextern (C) __gshared int {name};"),
        epilogue=_D_EPILOGUE,
        epilogue_file="epilogue.d",
        memory=("core.exception.OutOfMemoryError",),
    ),
}

LANGUAGES = {**INTERPRETED, **COMPILED}
"""The languages by the names that MBXP gives them, and some that only MultiPL-E has."""
