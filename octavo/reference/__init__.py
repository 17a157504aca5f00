"""The definition of every operation, in torch, on any device; imports no kernel and no kernel imports it."""
