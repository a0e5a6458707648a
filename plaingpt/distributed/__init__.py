"""Processes, their devices and their memory, and models that are split over processes."""
