// A run as one JSON object: what was asked, what came, round by round, and of which models.

const FIGURES = ["mean_logprob", "committed", "drafted", "accepted", "rounds"];

/** `result`: a run that is shown, with its `path`, `body`, `run`, `columns`, and `plain`, the run without drafts, if there was one;
 *  `model`: as the server describes it. Log-probabilities are natural, of the target's own distribution. */
export function record({ path, body, run, columns, plain }, model) {
  const { names = null, loaded = null } = model.shoal;
  return {
    format: "shoal playground run",
    version: 1,
    saved: new Date().toISOString(),
    page: new URL(".", location.href).href,
    model: { id: model.id, names, loaded },
    request: { path, body },
    samples: columns.all.map((column, index) => sample(run, index, column.place)),
    usage: run.usage,
    ...speed(run),
    plain: plain ? { ...speed(plain), same_texts: run.agreeing(plain) } : null,
  };
}

function sample(run, index, rank) {
  const { text = "", tokens = [], by_round = [], ...rest } = run.choices.get(index) ?? {};
  const { ended_by = null, error = null } = run.usage?.choices.find((took) => took.index === index) ?? {};
  const figures = FIGURES.map((name) => [name, rest[name] ?? null]);
  return { index, rank, text, ended_by, error, ...Object.fromEntries(figures), tokens, by_round };
}

/** By the clock of this browser, prompt and network included. */
const speed = (run) => ({ seconds: run.seconds, tokens_per_second: run.rate });
