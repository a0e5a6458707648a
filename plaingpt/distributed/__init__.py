"""Processes, their devices and memory.

PyTorch's modules for parallelism take two seconds to import, so only the functions that need these
modules import them.
"""
