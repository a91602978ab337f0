"""Bitwise reproducibility at any number of processes: the reduction tree, one update, one state."""
