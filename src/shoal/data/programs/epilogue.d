module epilogue;
import core.runtime;
import core.stdc.stdio : puts;

__gshared bool tested;

shared static this() {
    Runtime.extendedModuleUnitTester = () {
        foreach (info; ModuleInfo) {
            if (!info || info.name != "main" || !info.unitTest) continue;
            info.unitTest()();
            tested = true;
        }
        return UnitTestResult(1, 1, true, false);
    };
}

extern (C) extern __gshared int TESTS; // behind the tests, where no __EOF__ has ended the file
extern (C) int __real_main(int count, char** arguments);
extern (C) int __wrap_main(int count, char** arguments) {
    auto code = __real_main(count, arguments);
    if (tested && TESTS == 0) puts("FIRST" ~ "SECOND");
    return code;
}
