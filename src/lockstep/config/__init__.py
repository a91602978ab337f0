"""What a run is: its file, its sections, its plug-ins, and how mistakes in it are told."""
