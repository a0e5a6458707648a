"""Processes, their devices and memory."""
