"""torch elastic and srun: forming and re-forming the process group."""
