"""`shoal serve` and `shoal batch`: OpenAI's API for many samples at once. Needs the extra `serve`.

A body or a batch line becomes a `BaseRequest` (request_models), a `ParsedRequest` (request_builder)
and a `Submission` (submissions); the engine's thread returns `RowUpdate`s, which an `ApiFormat`
(api_formats) writes as JSON.

handler.py           `ApiHandler.handle`: the one path for HTTP and batch files
responses.py         the answer of a request, whole or as events
request_models.py    the fields of requests
message_models.py    the fields of messages and tools
request_fields.py    the types of fields, and the fields of vLLM's API
response_models.py   the fields of answers
tools.py             the fields of tools
tool_calls.py        calls in texts
reasoning.py         the reasoning before an answer
request_parser.py    requests -> engine requests
request_builder.py   requests within the limits of settings.py, and the parsed request
prompts.py           the prompts of requests
settings.py          limits and defaults of a server, and the sampling fields of requests
infill.py            requests and answers of /infill
item_models.py       requests of /v1/responses as chat requests
item_response.py     answers of /v1/responses
item_format.py       items and typed events
worker.py            admission and updates
submissions.py       the data between the event loop and the engine's thread
engine_thread.py     the thread that owns the models
token_details.py     the details of tokens, those of prompts for `echo` included
compiled_grammars.py compiles grammars under limits
grammar_probe.py     the process that tries grammars first
api_errors.py        errors as OpenAI writes them; the paths of the API
app.py               the application; routes.py: its routes
access.py            names of hosts, keys, TLS, and the bodies of requests
logs.py              a line per request, and its record
prometheus_metrics.py the metrics, and those of replicas
run.py               uvicorn, signals, draining, the limits of connections, and the answers until a
                     model is loaded
batch_lines.py       the lines of batch files, and blocks of them for several processes
output_file.py       the answers to these lines
serve_config.py      the configuration of a process that serves
cluster.py           replicas on Ray
relay.py             the logs of replicas
pool.py              batches in several processes on Ray
"""
