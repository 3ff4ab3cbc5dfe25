"""Finds the smallest sets of sites that matter, with a command that may fail only now and then as its oracle.

`chances`, `hitting`, `trials`, `knowledge`, `order`, `search` and `core` decide, and touch nothing outside; `evidence`,
`judge` and `processes` run the command and see how it ended; `report` and `words` tell; `run` ties them together for
``specsync bisect``. No torch.
"""
