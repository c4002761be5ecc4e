"""`shoal serve`: an OpenAI-compatible server for many samples at once (docs/how-to/serve.md). Needs the extra `shoal[serve]`.

settings.py     what a server allows
schema.py       what clients may ask, field by field; answers.py: what they get
translate.py    what they ask -> requests of the engine
worker.py       the one thread that owns the models; tickets.py: what of a request crosses threads
forms.py        rows -> choices of the two APIs, their tokens by spelling.py; replies.py: whole or as a stream
scoring.py      log-probabilities of prompts, for echo
faults.py       every error in OpenAI's shape
keys.py  bodies.py  metrics.py      who may ask, how much, and what is counted
page.py         the playground at /, whose files lie in playground/
app.py          the routes; run.py: uvicorn, signals, draining
offline.py      the same without HTTP, for files (lines.py)
recipe.py       what another process needs to do either; cluster.py: such processes, on Ray
"""
