"""Convert configurations of other systems into run files: a key table per system, and the code that reads, converts and
writes.
"""
