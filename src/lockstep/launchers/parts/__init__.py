"""What launchers are made of: the files they write, the clouds they speak to."""
