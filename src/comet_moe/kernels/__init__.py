"""Compiled inner loops (numba), each beside a plain torch version of the same function.

The torch version is the definition: tests hold the compiled one to it, and it runs wherever numba cannot
(other devices, a tracer, no numba).
"""
