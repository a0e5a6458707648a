"""Processes, their devices and memory, and models that are split over processes.

PyTorch's parallel modules take two seconds to import, so only the functions that need them do so.
"""
