"""What every program needs: errors, flags, files, the terminal, source code. Imports no torch."""
