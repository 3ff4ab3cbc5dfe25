"""For the V2 model runner on CPU, in tests: its Triton kernels run in Triton's own interpreter."""

import os

if os.environ.get("SHIM_TRITON_INTERPRETER"):
    os.environ["TRITON_INTERPRET"] = "1"
    import types

    import numpy as np
    import triton.backends
    import triton.runtime.interpreter as interpreter

    class _Driver:
        @staticmethod
        def is_active():
            return True

    def _with_bool_mask(original, place):
        """The interpreter hands NumPy masks of integers, which newer NumPy refuses."""

        def call(self, *args, **kwargs):
            given = list(args)
            mask = given[place]
            if mask is not None and mask.data.dtype != np.bool_:
                given[place] = interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)
            return original(self, *given, **kwargs)

        return call

    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = _with_bool_mask(builder.create_masked_load, 1)
    builder.create_masked_store = _with_bool_mask(builder.create_masked_store, 2)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)
