"""Kernels, grouped by the language they are written in; files and functions are named as in octavo.reference."""
