"""Runs lowered graphs: fabrics and layout in, a training step out.

In: stage graphs, a plan, a packed batch. Out: losses and gradients on the original parameters.
"""

if __name__ != "spec_compile.runtime":
    raise ImportError("import this package as spec_compile.runtime, not as runtime")
