using System;
using System.Collections;
using System.Diagnostics;
using System.Linq;
using System.Reflection;

class Epilogue {
    class Failing : TraceListener {
        public override void Write(string text) { }
        public override void WriteLine(string text) { }
        public override void Fail(string text) { throw new Exception("Debug.Assert " + text); }
        public override void Fail(string text, string more) { Fail(text + " " + more); }
    }

    static void Main(string[] arguments) {
        Debug.Listeners.Clear();
        Debug.Listeners.Add(new Failing());
        var found = BindingFlags.Static | BindingFlags.Public | BindingFlags.NonPublic;
        var types = Assembly.GetExecutingAssembly().GetTypes();
        var tests = types.First(type => type.Name == "TESTS").DeclaringType;
        var main = types.Where(type => tests == null ? type != typeof(Epilogue) : type == tests)
            .Select(type => type.GetMethod("Main", found)).First(method => method != null);
        var given = main.GetParameters().Length == 0 ? new object[0] : new object[] { arguments };
        try { main.Invoke(null, given); }
        catch (TargetInvocationException error) {
            Console.Error.WriteLine(error.InnerException);
            Environment.Exit(1);
        }
        Console.WriteLine("FIRST" + "SECOND");
    }
}

// The one call of Compare-Net-Objects that MBXP's tests make.
namespace KellermanSoftware.CompareNetObjects {
    public class ComparisonResult { public bool AreEqual { get; set; } }

    public class CompareLogic {
        public ComparisonResult Compare(object one, object other) {
            return new ComparisonResult { AreEqual = Equal(one, other) };
        }

        static bool Equal(object one, object other) {
            if (one == null || other == null) return one == other;
            if (one.GetType() != other.GetType()) return false;
            if (one is string || !(one is IEnumerable)) return one.Equals(other);
            var ones = ((IEnumerable) one).Cast<object>().ToList();
            var others = ((IEnumerable) other).Cast<object>().ToList();
            if (ones.Count != others.Count) return false;
            if (!(one is IDictionary)) return ones.Zip(others, Equal).All(same => same);
            IDictionary here = (IDictionary) one, there = (IDictionary) other;
            return here.Keys.Cast<object>()
                .All(key => there.Contains(key) && Equal(here[key], there[key]));
        }
    }
}
