"""Report of a machine with a GPU: tests, numbers, memory, training, prediction and speed.

`report.py` holds checks and tables, `parts.py` runs each part in a process of its own, and each
other module is a part. `python -m benchmarks.gpu` runs all of them, see `__main__.py`.
"""
