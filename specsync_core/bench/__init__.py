"""``specsync bench``: what a sync costs on this machine, every row of one run."""
