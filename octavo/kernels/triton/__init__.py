"""Portable Triton kernels: any NVIDIA GPU since sm_80, every layout; on a CPU under TRITON_INTERPRET=1."""
