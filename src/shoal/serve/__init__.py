"""`shoal serve` and `shoal batch`: OpenAI's API for many samples at once. Needs the extra `serve`.

A body or a batch line becomes a `BaseRequest` (request_models), a `ParsedRequest` (request_builder)
and a `Submission` (submissions); the engine's thread returns `RowUpdate`s, which an `ApiFormat`
(api_formats) writes as JSON.
"""
