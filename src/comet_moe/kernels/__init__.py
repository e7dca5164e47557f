"""Compiled inner loops (numba), each with a torch version of the same function.

The torch version is the definition: tests compare the compiled one with it, and it runs wherever numba cannot
(other devices, graphs, no numba).
"""
