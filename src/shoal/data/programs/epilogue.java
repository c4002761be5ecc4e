class Epilogue {
    public static void main(String[] arguments) throws Throwable {
        requireTests();
        Main.main(arguments);
        System.out.println("FIRST" + "SECOND");
    }

    /** The tests' class is Main, or Problem, which Main calls, and no other of that name. */
    static void requireTests() throws ClassNotFoundException {
        new end_TESTS();
        try { Class.forName("TESTS"); }
        catch (ClassNotFoundException none) { Class.forName("Problem$TESTS"); }
    }
}
