"""The demo: a small tensor-parallel engine over real processes, and a story that is told with it.

Reading order: `model`, `cache` and `tensor_parallel` are the decoder, `network` its draft, `scheduler` and `engine`
the loop, `worker` one rank; `process`, `ranks` and `runner` are the processes and what becomes of them; `options`
and `story` are the command's.
"""
