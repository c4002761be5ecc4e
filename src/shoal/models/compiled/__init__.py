"""Forward passes of fixed shape: functions of static buffers that can be captured into CUDA graphs.

The ordinary path (`Runner.feed`) makes each pass as long as its rows are. On a GPU, launching the kernels of a small pass one by
one takes longer than running them. A static pass is the same computation over a *bucket* of (rows, columns, keys), padded up,
whose every input lies in a buffer of fixed address.

    buckets     the sizes there are
    block       the buffers of one: tokens, positions, cells
    view        the cache that a model meets inside
    executors   eager (to test), graphed (CUDA)
    capturable  which models' passes cannot be captured
    passes      builds, checks and runs them, and falls back to ordinary passes
    drafting    a drafter's step with its draw
"""

from shoal.models.compiled.buckets import reservation
from shoal.models.compiled.capturable import obstacle
from shoal.models.compiled.executors import executor_for
from shoal.models.compiled.passes import ATTENTION, Passes

__all__ = ["ATTENTION", "Passes", "executor_for", "obstacle", "reservation"]
