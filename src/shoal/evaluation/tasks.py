"""The tasks for a model and the grading of its answers.

A task has a prompt, the stop strings, and the graded part of an answer. Programs are executed,
summaries are compared with reference summaries.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.constraints.fim import fill_in_middle
from shoal.errors import RequestError
from shoal.evaluation.endings import FENCE, before_stop, cut_answer, ending
from shoal.evaluation.execution import execute_all
from shoal.evaluation.problems import Problem, records, text_field
from shoal.evaluation.sandbox import Sandbox, require
from shoal.stored_problems import Draw, stored_problems
from shoal.types.arguments import chat_template_of

CHAT = (
    "Complete the following {language} code. Answer with the whole code and nothing "
    "else.\n\n```{language}\n{code}\n```"
)
CHAT_SUMMARY = "Summarize the following text in one sentence.\n\n{document}"
SUMMARY = "{document}\n\nTL;DR:"
SPLITS: tuple[Draw, ...] = ("templates", "constants")
FUNCTIONS = 200
"""The default number of the held-out problems."""
INDENTED = "    x"
"""The beginning of a line that a tokenizer may join with the line break before it."""


@dataclass(frozen=True)
class Task:
    """A prompt with the processing of its samples.

    Attributes:
        prompt: the text for the report.
        stops: strings that end a sample.
        read: tokenizer -> the model's input, text or ids.
        complete: (generated text, whether a stop string ended it) -> the completion that is graded.
    """

    task_id: str
    prompt: str
    stops: tuple[str, ...]
    read: Callable[[Any], str | list[int]]
    complete: Callable[[str, bool], str]


def code_tasks(problems: Iterable[Problem], *, chat: bool = False) -> list[Task]:
    """Makes tasks of programs to complete.

    They are continued, or asked in a chat in which the answer already begins with the prompt and
    ends at its fence.
    """
    return [_code_task(problem, chat) for problem in problems]


def _code_task(problem: Problem, chat: bool) -> Task:
    if chat:
        language = problem.language.removesuffix("_test")  # Go's tests are Go
        question = CHAT.format(language=language, code=problem.prompt)
        answer = f"```{language}\n{problem.prompt}"
        return Task(
            problem.task_id,
            problem.prompt,
            stops=(FENCE,),
            read=partial(chat_ids, question=question, answer=answer),
            complete=lambda text, _: cut_answer(problem, text),
        )
    if problem.stops:
        return Task(
            problem.task_id,
            problem.prompt,
            stops=problem.stops,
            read=partial(open_ended, text=problem.prompt),
            complete=lambda text, _: before_stop(text, problem.stops),
        )
    end = ending(problem.language)
    return Task(
        problem.task_id,
        problem.prompt,
        stops=end.stops,
        read=partial(open_ended, text=problem.prompt),
        complete=lambda text, stopped: end.cut(problem.prompt, text, stopped),
    )


def open_ended(tokenizer: Any, text: str) -> str:
    """Returns a text up to its last token that the next line leaves as it is.

    Many tokenizers write a line break and the indent behind it as one token. A line break alone
    tells their models that no indented line follows, so it is left to the model, as other harnesses
    do. The graded program may have an empty line there.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    alone = ids(text)
    return text if ids(text + INDENTED)[: len(alone)] == alone else text.rstrip()


def infilling_tasks(problems: Sequence[Problem]) -> list[Task]:
    """Makes tasks of middles to fill in between prompt and suffix; the model's EOS ends them.

    Raises:
        RequestError: a problem has no suffix.
    """
    for problem in problems:
        if not problem.suffix:
            raise RequestError(
                f"problem {problem.task_id!r} has no suffix: it is not an infilling problem"
            )
    return [
        Task(
            problem.task_id,
            f"{problem.prompt}⟨…⟩{problem.suffix}",
            (),
            partial(fill_in_middle, prefix=problem.prompt, suffix=problem.suffix),
            lambda text, _: text,
        )
        for problem in problems
    ]


def chat_ids(tokenizer: Any, question: str, answer: str = "") -> list[int]:
    """Returns the ids of a conversation.

    It is a user's question, and the beginning of the model's answer.

    Raises:
        RequestError: the tokenizer has no chat template.
    """
    template = chat_template_of(tokenizer)
    if template is None:
        raise RequestError("this tokenizer has no chat template: leave out --chat")
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    text = open_ended(tokenizer, text + answer) if answer else text
    return list(tokenizer.encode(text, add_special_tokens=False))


def function_problems(count: int = FUNCTIONS) -> list[Problem]:
    """Returns distinct problems held out of the bundled pair's training.

    Templates and constants alternate.

    Raises:
        RequestError: there are fewer.
    """
    templates, constants = (
        {problem.prompt: (split, problem) for problem in stored_problems(split)}.values()
        for split in SPLITS
    )
    alternating = [each for both in zip(templates, constants, strict=False) for each in both]
    if count > len(alternating):
        raise RequestError(
            f"the set functions has {len(alternating)} problems, and {count} were asked for"
        )
    return [
        Problem(
            task_id=f"{split}/{place:04}/{problem.name}",
            language="python",
            prompt=problem.prompt,
            tests="\n".join(problem.tests) + "\n",
            entry_point=problem.name,
            canonical=problem.solution,
        )
        for place, (split, problem) in enumerate(alternating[:count])
    ]


@dataclass(frozen=True)
class Document:
    """A text and its reference summary."""

    task_id: str
    text: str
    summary: str


def read_documents(path: Path) -> list[Document]:
    """Reads the records of a summarisation set such as XSum.

    A record has "document" or "article", "summary" or "highlights", and maybe an "id".

    Raises:
        RequestError: with file and line, as `shoal.evaluation.problems.records`; for a repeated id,
            and for an empty set.
    """
    documents: dict[str, Document] = {}
    for place, (where, record) in enumerate(records(path)):
        text = text_field(record, "article" if "article" in record else "document", where)
        summary = text_field(record, "highlights" if "highlights" in record else "summary", where)
        name = str(record.get("id", place))
        if name in documents:
            raise RequestError(f"{where}: the id {name!r} was used before")
        documents[name] = Document(name, text, summary)
    if not documents:
        raise RequestError(f"{path} holds no documents")
    return list(documents.values())


def summary_tasks(documents: Iterable[Document], *, chat: bool = False) -> list[Task]:
    """Makes tasks of summaries to write in one line."""
    return [
        Task(
            document.task_id,
            document.text,
            stops=() if chat else ("\n",),
            read=partial(_read_document, document=document, chat=chat),
            complete=lambda text, _: text.strip(),
        )
        for document in documents
    ]


def _read_document(tokenizer: Any, document: Document, chat: bool) -> str | list[int]:
    if chat:
        return chat_ids(tokenizer, CHAT_SUMMARY.format(document=document.text))
    return SUMMARY.format(document=document.text)


PASSED = "passed"
ROUGE = ("rouge2", "rougeL", "rouge1")

Completions = Iterable[tuple[str, str]]
"""The task ids and completions."""


@dataclass(frozen=True)
class Grade:
    """The grade of a completion.

    Attributes:
        scores: the scores by name, 0..1 each.
        outcome: one word, "syntax" for a syntax error.
        detail: a text for the report, such as the error.
    """

    scores: dict[str, float]
    outcome: str
    detail: str = ""


Grader = Callable[[Completions], Iterator[Grade]]
"""A function that grades completions in their order."""


def code_grader(
    problems: Sequence[Problem], sandbox: Sandbox, workers: int | None = None
) -> Grader:
    """Makes a grader that executes each completion's program, `workers` at a time.

    Raises:
        RequestError: at once, if a language cannot be run here; the message names the packages to
            install.
    """
    require(problems, sandbox)
    known = {problem.task_id: problem for problem in problems}

    def grade(completions: Completions) -> Iterator[Grade]:
        for result in execute_all(
            ((known[task_id], text) for task_id, text in completions), sandbox, workers
        ):
            yield Grade({PASSED: float(result.passed)}, result.outcome, result.detail)

    return grade


def rouge_grader(documents: Sequence[Document]) -> Grader:
    """Makes a grader that computes F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004).

    Words are stemmed and compared with the documents' summaries.

    Raises:
        RequestError: without the rouge-score package.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise RequestError(
            "summaries are compared by the rouge-score package: pip install '.[eval]'"
        ) from None
    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    references = {d.task_id: d.summary for d in documents}

    def grade(completions: Completions) -> Iterator[Grade]:
        for task_id, text in completions:
            scores = scorer.score(references[task_id], text)
            yield Grade({name: float(scores[name].fmeasure) for name in ROUGE}, "compared")

    return grade


def grade_entries(
    entries: Sequence[Mapping[str, Any]], grader: Grader
) -> Generator[dict[str, Any], None, None]:
    """Yields an entry for the journal of grades per entry of samples, in order.

    Unfinished samples get no grade; equal completions of a problem are graded once, whichever
    methods wrote them.
    """
    wanted = [(entry["task_id"], text) for entry in entries for text in _completions(entry)]
    grades = iter(grader(wanted))
    for entry in entries:
        grades_by_text = {text: asdict(next(grades)) for text in _completions(entry)}
        yield {
            "task_id": entry["task_id"],
            "grades": {
                method: [
                    grades_by_text[sample["completion"]] if sample["finished"] else None
                    for sample in attempt["samples"]
                ]
                for method, attempt in entry["attempts"].items()
            },
        }


def _completions(entry: Mapping[str, Any]) -> list[str]:
    """Returns the different completions of a problem that finished, in order."""
    samples = [sample for attempt in entry["attempts"].values() for sample in attempt["samples"]]
    return list(dict.fromkeys(sample["completion"] for sample in samples if sample["finished"]))
