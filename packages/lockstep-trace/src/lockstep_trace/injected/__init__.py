"""What is put on the PYTHONPATH of traced processes: `sitecustomize.py` is copied into the trace's folder, beside a
copy of `tracer/`."""
