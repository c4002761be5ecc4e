// Examples for a first run by one click: messages for a model with a chat template, else functions to go on with.

import { fill } from "./form.js";

const definition = (head, says, call, result) => `def ${head}:\n    """${says}\n\n    >>> ${call}\n    ${result}\n    """\n`;

const FUNCTIONS = {
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

const RECIPE = {
  type: "object", required: ["dish", "ingredients"], additionalProperties: false,
  properties: { dish: { type: "string" }, ingredients: { type: "array", items: { type: "string" }, maxItems: 8 } },
};

const MESSAGES = {
  "A short story": { prompt: "Tell a story about a lighthouse keeper and a whale, in five sentences." },
  "A function": { prompt: "Write a Python function that counts the vowels of a text." },
  "JSON, by a schema": {
    prompt: "Name a dish and its ingredients, as JSON.", kind: "json_schema", grammar: JSON.stringify(RECIPE, null, 1),
  },
  "One word, by a regex": {
    prompt: "Is a tomato a fruit or a vegetable? Answer with one word.", kind: "regex", grammar: "fruit|vegetable|neither",
  },
};

/** Offers examples in a container; a click puts one into the form and runs it. `chat`: whether the model has a chat template. */
export function offerExamples(container, form, chat) {
  for (const button of container.querySelectorAll("button")) button.remove();
  for (const [name, fields] of Object.entries(chat ? MESSAGES : FUNCTIONS)) {
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
