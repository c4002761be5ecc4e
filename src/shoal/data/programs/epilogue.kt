object Epilogue {
    @JvmStatic fun main(arguments: Array<String>) {
        val tested = Class.forName("MainKt").getMethod("main", Array<String>::class.java)
        try { tested.invoke(null, arguments) }
        catch (error: java.lang.reflect.InvocationTargetException) { throw error.targetException }
        println("FIRST" + "SECOND")
    }
}
