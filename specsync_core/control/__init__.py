"""Live control: sites are narrowed or widened between steps, on all ranks at the same step.

Group rank 0 listens on a unix socket (`listener`, `protocol`); ``specsync ctl`` is its `client`. What a request means
under the plan in force is `change`; how the ranks settle on a step is `pledges`; `live` ties it to a `SpecTpSync`.
Nothing of this is imported while ``SPECSYNC_CONTROL`` is not set.
"""
