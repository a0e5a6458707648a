"""Processes, their devices and their memory, and models that are split over processes.

To import PyTorch's parallel modules takes two seconds. So functions import what they need of them.
"""
