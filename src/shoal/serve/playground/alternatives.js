// The alternatives of tokens, as both APIs tell them.

/** The tokens of a chunk's choice; those that came with alternatives have them in `top`, as [text, log-probability], best first. */
export function withAlternatives({ shoal: { tokens = [] } = {}, logprobs }) {
  const lists = logprobs?.content?.map(({ top_logprobs: top }) => top.map(({ token, logprob }) => [token, logprob]))
    ?? logprobs?.top_logprobs?.map((top) => Object.entries(top ?? {})) ?? [];
  return tokens.map((token, place) => (lists[place]?.length ? { ...token, top: lists[place].sort((a, b) => b[1] - a[1]) } : token));
}
