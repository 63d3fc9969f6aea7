"""Kernel templates in, content-addressed Triton files and launchers out."""
