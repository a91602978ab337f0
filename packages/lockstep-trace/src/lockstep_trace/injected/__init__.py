"""Files for the PYTHONPATH of traced processes: `sitecustomize.py` is copied into the trace's folder, next to a copy of
`tracer/`."""
