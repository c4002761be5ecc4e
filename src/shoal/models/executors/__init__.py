"""The executors: each computes passes of one model.

`executor.py` is the seam; `transformers_models.py` has the executors: C decoder, C layers, Triton
layers, modules. A runner asks its executors in order, and the first that does not refuse a batch
computes it; `Modules`, the last, computes every batch. Captured rounds are whole rounds of an
engine, and come before all of them (`shoal.drafting.captured`). `Runner.explain` returns the
executor of a batch and the reasons of those that refuse it; `Stats.executors` counts passes by
executor.

An executor for another kind of model needs nothing from the others, and may stand beside its
models, as llama.cpp's does (`shoal.models.gguf.gguf_runner`).
"""
