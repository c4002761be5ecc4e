"""What `benchmarks/peers.py` measures: rows of the table, their models, and one module per engine.

`worker.py` runs an engine in a process, and a Python, of its own. The engines' modules (but `shoal_engine.py`), `tasks.py` and
`worker.py` import nothing of shoal, so that they run where shoal is not installed.
"""
