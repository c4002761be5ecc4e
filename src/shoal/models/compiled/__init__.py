"""Captured rounds: functions of buffers of fixed address and shape, recorded into CUDA graphs.

Ordinary passes (`Runner.feed`) are as long as their rows are, and launch their kernels one by one.
On a GPU, launching the kernels of a small pass takes longer than running them. A captured round is
the same computation, drafter and verdict included, padded up to few sizes and replayed; the values
that change from round to round lie in buffers.

    block            the sizes, the buffers of one pass, the cache that a model meets inside
    executors        eager (to test), graphed (CUDA); models that cannot be captured
    captures         the captured rounds of a model, by cache
    failures         rounds that are left to their stages
    draft_functions  a drafter's step with its draw
    round_functions  the functions of a round, and of the inputs of the next one
    transfer         the uploads of a round, and its results
    captured_round   builds and runs the functions, and compares their first replays
"""

from shoal.models.compiled.block import reservation
from shoal.models.compiled.captures import Captures
from shoal.models.compiled.executors import attention_obstacle, executor_for, obstacle

__all__ = ["Captures", "attention_obstacle", "executor_for", "obstacle", "reservation"]
