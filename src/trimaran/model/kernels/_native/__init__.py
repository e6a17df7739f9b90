"""Where setup.py puts the compiled kernels: one library per instruction set, and no Python."""
