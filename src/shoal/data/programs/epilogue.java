class Epilogue {
    public static void main(String[] arguments) throws Throwable {
        Main.main(arguments);
        System.out.println("FIRST" + "SECOND");
    }
}
