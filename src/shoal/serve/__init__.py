"""`shoal serve` and `shoal batch`: OpenAI's API for many samples at once. Needs the extra
`shoal[serve]`.

A body or a batch line becomes a `BaseRequest` (request_models), a `ParsedRequest` (parsed_request)
and a `Submission` (submissions); the engine's thread returns `RowUpdate`s, which an `ApiFormat`
(api_formats) writes as JSON.

handler.py           `ApiHandler.handle`: the one path for HTTP and files; responses.py: its answer, whole or as events
request_models.py    fields of requests; message_models.py: of messages and tools; request_fields.py: their types;
                     bodies.py: reading them; response_models.py: answers
vllm_fields.py       fields of vLLM's API; given_grammars.py: the one grammar of a request, by whichever field
tools.py             fields of tools; tool_calls.py: calls in texts; reasoning.py: what stands before an answer
request_parser.py    requests -> engine requests; infill.py: those of /infill, and answers; request_builder.py: within the limits of
                     settings.py; prompts.py and sampling_params.py: their parts
item_models.py       requests of /v1/responses as chat requests; item_response.py, item_answers.py: answers;
                     item_format.py: items and typed events
worker.py            admission and updates; engine_thread.py: the thread that owns the models; scoring.py: prompts for `echo`
grammars.py          compiles grammars under limits; grammar_probe.py: the process that tries them first
api_paths.py         paths; api_errors.py: errors as OpenAI writes them; absent_routes.py: what is said of paths that do not exist
app.py               the application; ops.py, page.py, openapi.py, hosts.py, keys.py: its parts
loading.py           what is answered until a model is loaded; freed_memory.py: what is freed goes back to the system
exchanges.py         requests and their answers, for logs.py: a line for each, and metrics.py; timeline.py: when rows got tokens
run.py               uvicorn, signals, draining; protocol.py: limits of connections; tls.py: certificates
offline.py           batch files; batch_lines.py: their lines; output_file.py: their answers; model_identity.py
serve_config.py      what a process needs to serve; cluster.py: replicas on Ray; relay.py: what they log; replica_metrics.py
pool.py              batches in several processes on Ray; answerer.py: one of them; blocks.py: the lines dealt out
"""
