"""Hopper kernels in Gluon: what is fast on sm_90. A missing file is a cell without a kernel."""
