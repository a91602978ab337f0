"""Rules that find a fault in one trace; one file per kind of evidence."""
