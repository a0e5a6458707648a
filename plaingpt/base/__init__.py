"""What every program needs, without torch: errors, flags, files, the terminal, source code."""
