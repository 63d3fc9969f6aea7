"""Rewrites of the captured graph, one a file; `pipeline` holds their order.

In: one FX graph of target and draft with facts on its nodes. Out: one graph a pipeline stage.
"""

if __name__ != "spec_compile.passes":
    raise ImportError("import this package as spec_compile.passes, not as passes")
