// Examples: prompts that a small model of Python functions goes on with, for a first run by one click.

import { fill } from "./form.js";

const definition = (head, says, call, result) => `def ${head}:\n    """${says}\n\n    >>> ${call}\n    ${result}\n    """\n`;

const EXAMPLES = {
  "Count vowels": {
    prompt: definition("count_vowels(text)", "Return how many vowels text has.", 'count_vowels("banana")', "3"),
  },
  "Longest word": {
    prompt: definition("longest_word(words)", "Return the longest of words.", 'longest_word(["a", "abc", "ab"])', "'abc'"),
  },
  "Largest even": {
    prompt: definition("largest_even(numbers)", "Return the largest even number of numbers, or None.", "largest_even([3, 8, 5, 2])", "8"),
  },
  "One line, by a regex": {
    prompt: definition("sum_of_squares(values)", "Return the sum of the squares of values.", "sum_of_squares([1, 2, 3])", "14"),
    kind: "regex",
    grammar: "    return [^\\n]+\\n",
  },
};

/** Offers the examples in a container; a click puts one into the form and runs it. */
export function offerExamples(container, form) {
  for (const [name, fields] of Object.entries(EXAMPLES)) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => {
      fill(form, fields);
      form.requestSubmit();
    });
    container.append(button);
  }
}
