"""The real SGLang on a CPU without a GPU and without AMX: kernels are replaced, little else.

The scheduler, the EAGLE worker and the pipeline ring are SGLang's own, in real processes with gloo.

- ``tree``, ``kv_slots``, ``attention``, ``layers``: the kernels, in plain torch, without SGLang.
- ``operators`` and ``shim/sgl_kernel``: the names under which SGLang finds them.
- ``hooks``: four small corrections of the host, registered by the plugin entry.
- ``environment``: what a launcher sets before SGLang is imported.
"""
