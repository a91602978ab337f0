"""Rules that find a fault in one trace: a file for what each looks at."""
