"""Plain target and draft modules in, one FX graph out."""
