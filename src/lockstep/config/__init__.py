"""The run file: sections, plug-ins, validation and error messages."""
