extern "C" int __real_main(int, char **);
extern "C" int __wrap_main(int count, char **arguments) {
    int code = __real_main(count, arguments);
    __builtin_puts("FIRST" "SECOND");
    return code;
}
